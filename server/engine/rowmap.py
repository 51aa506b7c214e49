"""The whole pool at a glance: the state and owner of every row, run-length coded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from model.rows import RowPool
from server.engine.sequence import Sequence
from server.engine.sessions import Kept


@dataclass(frozen=True, slots=True)
class RowRun:
    """`n` rows from `start` on that are alike.

    `state` is free, running or idle. `owner` is a session, the call that runs, or None: anonymous
    rows, and free ones. `holders` counts the sequences that hold each of the rows.
    """

    start: int
    n: int
    state: str
    owner: str | None
    holders: int


def row_runs(
    pool: RowPool, running: Iterable[Sequence], idle: Iterable[Kept], tenant: str | None
) -> list[RowRun]:
    """The runs of all rows, in order, as `tenant` may see them: what belongs to others looks free.
    None sees everything.
    """
    owners: list[tuple[str, str | None]] = [("free", None), ("idle", None)]
    kind = np.zeros(pool.n_rows, np.int64)
    for kept in idle:
        if tenant in (None, kept.tenant):
            if kept.name is not None:
                owners.append(("idle", kept.name))
            kind[kept.rows] = 1 if kept.name is None else len(owners) - 1
    for sequence in running:  # last: what runs is running, whoever else holds it
        if tenant in (None, sequence.request.tenant):
            owners.append(("running", sequence.request.session or sequence.request.id))
            kind[sequence.rows] = len(owners) - 1
    holders = np.where(kind == 0, 0, pool.references)
    edges = np.flatnonzero((np.diff(kind) != 0) | (np.diff(holders) != 0)) + 1
    starts = [0, *edges.tolist()]
    ends = [*edges.tolist(), pool.n_rows]
    runs = []
    for start, end in zip(starts, ends, strict=True):
        state, owner = owners[kind[start]]
        runs.append(RowRun(start, end - start, state, owner, int(holders[start])))
    return runs
