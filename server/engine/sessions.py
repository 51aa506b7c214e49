"""Sequences that are not running: named sessions, and the anonymous remains of other requests.

Both are a cache of rows. Any of them may lend the rows of a common prefix to a new request of its
tenant, and any may lose rows, from its tail, when the pool runs out. A named session also keeps its
tokens: what it lost is computed again, and costs nothing but time.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable
from types import MappingProxyType

import numpy as np

from model.rows import RowPool
from model.step import Ids
from server.engine.snapshot import SessionRecord

SessionKey = tuple[str, str]  # tenant, name


class Kept:
    """An idle sequence: its tokens, and the rows of the first of them. Owns a reference to each."""

    def __init__(self, tenant: str, name: str | None, tokens: Ids, rows: Ids) -> None:
        self.tenant, self.name = tenant, name
        self.tokens, self.rows = tokens, rows
        self.turns = 0
        self.created = self.last_used = time.time()

    @property
    def path(self) -> bytes:
        """The tokens that have rows, as bytes that sort like the tokens."""
        return as_path(self.tokens[: len(self.rows)])

    def record(self, row_bytes: int) -> SessionRecord:
        return SessionRecord(
            name=self.name or "",
            tokens=len(self.tokens),
            rows=len(self.rows),
            bytes=len(self.rows) * row_bytes,
            turns=self.turns,
            created=self.created,
            last_used=self.last_used,
        )


class PrefixIndex:
    """Idle sequences in the order of their tokens: the longest common prefix with any of them
    stands at one of the two neighbours of the place where the tokens would stand.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[bytes, int, Kept]] = []  # id() breaks ties before Kept compares

    def add(self, kept: Kept) -> None:
        insort(self._entries, (kept.path, id(kept), kept))

    def remove(self, kept: Kept) -> None:
        del self._entries[bisect_left(self._entries, (kept.path, id(kept), kept))]

    def neighbours(self, path: bytes) -> list[Kept]:
        at = bisect_left(self._entries, (path,))
        return [entry[2] for entry in self._entries[max(0, at - 1) : at + 1]]

    def __len__(self) -> int:
        return len(self._entries)


class Sessions:
    """All idle sequences of all tenants, and the order in which they give up rows."""

    def __init__(self, pool: RowPool, max_sessions: int) -> None:
        self.pool = pool
        self.max_sessions = max_sessions
        self.rows_evicted = 0
        # Least recently used first. Those without rows stand apart: eviction never walks past them.
        self._named: OrderedDict[SessionKey, Kept] = OrderedDict()
        self._named_with_rows: OrderedDict[int, Kept] = OrderedDict()  # by id()
        self._anonymous: OrderedDict[int, Kept] = OrderedDict()  # by id(); all have rows
        self._index: dict[str, PrefixIndex] = {}  # by tenant; never looked up across tenants
        self._records: MappingProxyType[SessionKey, SessionRecord] = MappingProxyType({})
        self._changed: dict[SessionKey, None] = {}  # sessions whose record is out of date, in order

    def match(self, tenant: str, tokens: Ids) -> Ids:
        """Rows of the longest prefix of `tokens` that an idle sequence of the tenant has."""
        index = self._index.get(tenant)
        if index is None:
            return tokens[:0]
        path = as_path(tokens)
        near = index.neighbours(path)
        found = [(common_prefix(tokens, kept.tokens[: len(kept.rows)]), kept) for kept in near]
        length, kept = max(found, key=lambda pair: pair[0], default=(0, None))
        if kept is None or length == 0:
            return tokens[:0]
        self._touch(kept)
        return kept.rows[:length]

    def keep(self, tenant: str, tokens: Ids, rows: Ids) -> None:
        """Take over the rows of an anonymous sequence, unless another holds all of them anyway."""
        kept = Kept(tenant, None, tokens[: len(rows)].copy(), rows.copy())
        index = self._index.get(tenant) or PrefixIndex()
        path = kept.path
        for other in index.neighbours(path):
            if other.path.startswith(path):
                self.pool.give_back(kept.rows)
                self._touch(other)
                return
        before = [k for k in index.neighbours(path) if k.name is None and path.startswith(k.path)]
        self._hold(kept)
        for other in before:  # it has become a part of this one
            self._trim(other, 0)

    def turn(self, tenant: str, name: str, tokens: Ids, rows: Ids) -> None:
        """A session's turn has ended: from now on it holds these tokens and rows, and no others."""
        kept = self._named.get((tenant, name))
        if kept is None:
            kept = self._named[tenant, name] = Kept(tenant, name, tokens[:0], tokens[:0])
        self._trim(kept, 0)
        kept.tokens, kept.rows = tokens.copy(), rows.copy()
        kept.turns += 1
        if len(kept.rows):
            self._hold(kept)
        self._touch(kept)
        while len(self._named) > self.max_sessions:
            self.forget(*next(iter(self._named)))

    def forget(self, tenant: str, name: str) -> bool:
        """Drop a named session and give back its rows; False if there is none."""
        kept = self._named.get((tenant, name))
        if kept is None:
            return False
        self._trim(kept, 0)
        del self._named[tenant, name]
        self._changed[tenant, name] = None
        return True

    def evict(self, n: int) -> int:
        """Free `n` rows if idle sequences have them; returns how many were freed."""
        freed = 0
        for group in (self._anonymous, self._named_with_rows):
            while group and freed < n:
                freed += self._shorten(next(iter(group.values())), n - freed)
        self.rows_evicted += freed
        return freed

    def records(self) -> MappingProxyType[SessionKey, SessionRecord]:
        """A record per named session, frozen: it is replaced, not changed, when one changes."""
        if self._changed:
            records = self._records.copy()
            for key in self._changed:
                if key in self._named:
                    records[key] = self._named[key].record(self.pool.row_bytes)
                else:
                    records.pop(key, None)
            self._records = MappingProxyType(records)
            self._changed.clear()
        return self._records

    def held(self) -> Iterable[Ids]:
        """The row arrays of all idle sequences, for checks that they add up."""
        return [
            kept.rows
            for group in (self._anonymous, self._named_with_rows)
            for kept in group.values()
        ]

    def _shorten(self, kept: Kept, n: int) -> int:
        """Free up to `n` rows from the tail. Rows are shared by prefix, so those that nobody else
        holds are a tail. A sequence that has too few lets go of all: the rest stays with its other
        holders, and no eviction walks past it again.
        """
        alone = int(np.count_nonzero(self.pool.references[kept.rows] == 1))
        return self._trim(kept, len(kept.rows) - n if alone >= n else 0)

    def _hold(self, kept: Kept) -> None:
        """Enter a sequence that has got rows."""
        self._index.setdefault(kept.tenant, PrefixIndex()).add(kept)
        group = self._anonymous if kept.name is None else self._named_with_rows
        group[id(kept)] = kept

    def _trim(self, kept: Kept, k: int) -> int:
        """Give back rows[k:]; an anonymous sequence without rows is forgotten."""
        if len(kept.rows) == k:
            return 0
        index = self._index[kept.tenant]
        index.remove(kept)
        dropped, kept.rows = kept.rows[k:], kept.rows[:k]
        if k:
            index.add(kept)
        elif kept.name is None:
            del self._anonymous[id(kept)]
        else:
            del self._named_with_rows[id(kept)]
        if not len(index):
            del self._index[kept.tenant]
        if kept.name is not None:
            self._changed[kept.tenant, kept.name] = None
        return self.pool.give_back(dropped)

    def _touch(self, kept: Kept) -> None:
        kept.last_used = time.time()
        if kept.name is None:
            self._anonymous.move_to_end(id(kept))
            return
        key = (kept.tenant, kept.name)
        self._changed[key] = None
        self._named.move_to_end(key)
        if id(kept) in self._named_with_rows:
            self._named_with_rows.move_to_end(id(kept))


def as_path(tokens: Ids) -> bytes:
    """Big-endian bytes: they compare as the token ids do."""
    return tokens.astype(">u4").tobytes()


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
