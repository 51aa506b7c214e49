"""The engine's totals as they stood after a step: frozen, so that any thread may read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

SessionKey = tuple[str, str]  # tenant, name

PARTS = 256


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One named session. Its bytes count shared rows in full; times are Unix seconds."""

    name: str
    tokens: int
    rows: int
    shared_rows: int  # of its rows, those that another sequence holds, too
    bytes: int
    turns: int
    reused: int  # prompt tokens of its turns that were not computed
    created: float
    last_used: float
    expires: float | None


class Records(Mapping[SessionKey, SessionRecord]):
    """A record per named session, frozen. The next one shares with it all parts in which nothing
    has changed: what a change costs hardly depends on how many sessions there are.
    """

    def __init__(self, parts: tuple[dict[SessionKey, SessionRecord], ...] = ({},) * PARTS) -> None:
        self._parts = parts

    def changed(self, changes: Mapping[SessionKey, SessionRecord | None]) -> Records:
        """These records with some in place of others; None for those that are no more."""
        parts = list(self._parts)
        for i in {hash(key) % PARTS for key in changes}:
            parts[i] = parts[i].copy()
        for key, record in changes.items():
            part = parts[hash(key) % PARTS]
            if record is None:
                part.pop(key, None)
            else:
                part[key] = record
        return Records(tuple(parts))

    def __getitem__(self, key: SessionKey) -> SessionRecord:
        return self._parts[hash(key) % PARTS][key]

    def __iter__(self) -> Iterator[SessionKey]:
        return chain.from_iterable(self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def of(self, tenant: str) -> list[SessionRecord]:
        """The tenant's own, the oldest first."""
        own = (record for (owner, _), record in self.items() if owner == tenant)
        return sorted(own, key=lambda record: (record.created, record.name))


class Snapshot(NamedTuple):
    """Gauges are as of the step; everything named `*_total` has counted since the start."""

    # rows: total = free + running + idle; shared (held by two sequences or more) is an overlay
    rows: int = 0
    rows_free: int = 0
    rows_running: int = 0
    rows_idle: int = 0
    rows_shared: int = 0
    row_bytes: int = 0

    running: int = 0  # requests that hold rows or compute in this step
    waiting: int = 0  # requests that have not begun, or were preempted

    steps_total: int = 0
    rows_computed_total: int = 0  # tokens that went through the network
    rows_recomputed_total: int = 0  # of those, whose row was lost to preemption or for no cache
    rows_reused_total: int = 0  # prompt tokens that were not computed (hits)
    rows_evicted_total: int = 0  # rows of idle sequences that were really freed
    preemptions_total: int = 0
    sessions_expired_total: int = 0
    sessions_evicted_total: int = 0  # forgotten because there were too many
    prompt_tokens_total: int = 0  # of requests that began, hits among them
    generated_tokens_total: int = 0

    sessions: Records = Records()
