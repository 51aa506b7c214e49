"""Named sessions on disk, so that they survive a restart.

Tokens are in SQLite: a turn is committed before its end is told, so whoever heard of a turn finds
it again, whenever the process dies. Rows are only a cache; they are written at a clean end, as far
as a budget goes, and read when their session is first used.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from model.step import Ids

log = logging.getLogger("onerow")

SCHEMA = 1
TABLE = """
create table if not exists sessions (
    tenant text not null, name text not null, tokenizer text not null, tokens blob not null,
    turn_ends text not null, n_turns integer not null, reused integer not null,
    created real not null, last_used real not null,
    primary key (tenant, name)
) without rowid
"""


class StoreError(Exception):
    """A state folder that cannot be used: one line that says which and why."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A session as it is on disk."""

    tenant: str
    name: str
    tokens: Ids
    turn_ends: tuple[int, ...]  # tokens after each turn of those that it holds
    n_turns: int
    reused: int
    created: float
    last_used: float


@dataclass(frozen=True, slots=True)
class SavedRows:
    """Rows (n, row_bytes) as bytes, and the tokens (n,) that they belong to: the session may have
    gone on since they were written.
    """

    tokens: Ids
    rows: NDArray[np.uint8]


class Store:
    """The state folder of one server. `model` and `tokenizer` are fingerprints: rows of another
    model are dropped, sessions of another tokenizer are left where they are and not shown.
    """

    def __init__(
        self, folder: Path, *, model: str, tokenizer: str, rows_budget: int = 2**30
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.rows_budget = rows_budget  # bytes
        self._rows_file = folder / "rows.safetensors"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = sqlite3.connect(
                folder / "sessions.sqlite3", timeout=0.0, isolation_level=None
            )
            # One server per folder: the lock is taken here and kept.
            self._db.execute("pragma locking_mode = exclusive")
            self._db.execute("pragma journal_mode = wal")
            self._db.execute("pragma synchronous = full")
            version = self._db.execute("pragma user_version").fetchone()[0]
            if version not in (0, SCHEMA):
                self._db.close()
                raise StoreError(f"state_dir {folder}: written by another version ({version})")
            self._db.execute("begin immediate")
            self._db.execute(TABLE)
            self._db.execute(f"pragma user_version = {SCHEMA}")
            self._db.execute("commit")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"state_dir {folder}: {error}") from error
        self._rows = self._open_rows()

    def sessions(self) -> Iterator[Saved]:
        """All sessions of this tokenizer, least recently used first."""
        columns = "tenant, name, tokens, turn_ends, n_turns, reused, created, last_used"
        found = self._db.execute(
            f"select {columns} from sessions where tokenizer = ? order by last_used",
            (self.tokenizer,),
        )
        for tenant, name, tokens, turn_ends, *numbers in found:
            ids = np.frombuffer(tokens, "<i4").astype(np.int32)
            yield Saved(tenant, name, ids, tuple(json.loads(turn_ends)), *numbers)
        strange = self._db.execute(
            "select count(*) from sessions where tokenizer != ?", (self.tokenizer,)
        ).fetchone()[0]
        if strange:
            log.warning("%d saved sessions belong to another tokenizer: set aside", strange)

    def save(self, session: Saved) -> None:
        """Write a session; it is on disk after the next `commit`."""
        self._begin()
        self._db.execute(
            "insert or replace into sessions values (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                session.tenant,
                session.name,
                self.tokenizer,
                session.tokens.astype("<i4").tobytes(),
                json.dumps(session.turn_ends),
                session.n_turns,
                session.reused,
                session.created,
                session.last_used,
            ),
        )

    def forget(self, tenant: str, name: str) -> None:
        self._begin()
        self._db.execute(
            "delete from sessions where tenant = ? and name = ? and tokenizer = ?",
            (tenant, name, self.tokenizer),
        )

    def commit(self) -> None:
        """Have everything so far on disk, whatever happens to the process next."""
        if self._db.in_transaction:
            self._db.execute("commit")

    def _begin(self) -> None:
        if not self._db.in_transaction:
            self._db.execute("begin")

    def rows(self, tenant: str, name: str) -> SavedRows | None:
        """Saved rows of a session, once: whoever takes them holds them from then on."""
        key = _key(tenant, name)
        if key not in self._rows:
            return None
        self._rows.discard(key)
        try:
            with safe_open(self._rows_file, "np") as file:
                return SavedRows(file.get_tensor(f"tokens {key}"), file.get_tensor(f"rows {key}"))
        except (OSError, SafetensorError) as error:
            log.warning("%s: rows cannot be read: %s", self._rows_file, error)
            return None

    def save_rows(self, sessions: Mapping[tuple[str, str], SavedRows]) -> None:
        """Write the rows of sessions in place of those of before, which stay until the new file is
        whole. A failure is logged: rows are only a cache.
        """
        tensors: dict[str, NDArray[np.generic]] = {}
        for (tenant, name), saved in sessions.items():
            tensors[f"tokens {_key(tenant, name)}"] = saved.tokens
            tensors[f"rows {_key(tenant, name)}"] = saved.rows
        partial = self._rows_file.with_suffix(".partial")
        try:
            save_file(tensors, partial, metadata={"model": self.model})
            partial.replace(self._rows_file)
        except OSError as error:
            log.warning("%s: rows are not saved: %s", self._rows_file, error)

    def close(self) -> None:
        self.commit()
        self._db.close()

    def _open_rows(self) -> set[str]:
        """Which sessions have saved rows that this model can use."""
        if not self._rows_file.exists():
            return set()
        try:
            with safe_open(self._rows_file, "np") as file:
                if (file.metadata() or {}).get("model") == self.model:
                    names = (name.partition(" ") for name in list(file.keys()))
                    return {key for kind, _, key in names if kind == "rows"}
            log.warning("%s: rows of another model, not used", self._rows_file)
        except (OSError, SafetensorError) as error:
            log.warning("%s: not used: %s", self._rows_file, error)
        return set()


def _key(tenant: str, name: str) -> str:
    return json.dumps([tenant, name])
