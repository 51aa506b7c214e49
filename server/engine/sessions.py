"""Sequences that are not running: named sessions, and the anonymous remains of other requests.

Both are a cache of rows. Any of them may lend the rows of a common prefix to a new request of its
tenant, and any may lose rows, from its tail, when the pool runs out. A named session also keeps its
tokens: what it lost is computed again, and costs nothing but time.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from model.rows import RowPool
from model.step import Ids
from server.engine.snapshot import Records, SessionKey, SessionRecord
from server.engine.store import Saved, Store

GLANCE = 128  # sessions whose shared rows are counted at a time, in well below a millisecond


@dataclass(frozen=True, slots=True)
class Reset:
    """What emptying the cache has dropped."""

    rows_freed: int
    sequences_forgotten: int
    sessions_kept: int  # with their tokens, without their rows


class Kept:
    """An idle sequence: its tokens, and the rows of the first of them. Owns a reference to each."""

    def __init__(self, tenant: str, name: str | None, tokens: Ids, rows: Ids) -> None:
        self.tenant, self.name = tenant, name
        self.tokens, self.rows = tokens, rows
        self.shared_rows = 0
        self.n_turns = 0
        self.turn_ends: list[int] = []  # tokens after each turn of those that it holds
        self.reused = 0
        self.created = self.last_used = time.time()

    @property
    def path(self) -> bytes:
        """The tokens that have rows, as bytes that sort like the tokens."""
        return as_path(self.tokens[: len(self.rows)])


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session as its owner sees it: the record, the tokens, and where each turn ended."""

    record: SessionRecord
    tokens: tuple[int, ...]
    turn_ends: tuple[int, ...]


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

    def __init__(
        self,
        pool: RowPool,
        max_sessions: int,
        ttl: float | None = None,
        store: Store | None = None,
    ) -> None:
        self.pool, self.store = pool, store
        self.max_sessions, self.ttl = max_sessions, ttl
        self.rows_evicted = self.expired = self.evicted = 0
        # Longest unused first. Rows are lent without their session being used: the order in which
        # sessions give up rows is another one, and no eviction walks past those without rows.
        self._named: OrderedDict[SessionKey, Kept] = OrderedDict()
        self._named_with_rows: OrderedDict[int, Kept] = OrderedDict()  # by id()
        self._anonymous: OrderedDict[int, Kept] = OrderedDict()  # by id(); all have rows
        self._index: dict[str, PrefixIndex] = {}  # by tenant; never looked up across tenants
        self._records = Records()
        self._changed: set[SessionKey] = set()  # sessions whose record is out of date
        self._sharing = 0  # the pool's count of changes to sharing when the last count began
        self._uncounted: list[Kept] = []  # those that are still to be counted
        for saved in store.sessions() if store else ():
            self._restore(saved)

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

    def get(self, tenant: str, name: str) -> Kept | None:
        return self._named.get((tenant, name))

    def view(self, tenant: str, name: str) -> SessionView | None:
        kept = self.get(tenant, name)
        if kept is None:
            return None
        return SessionView(self._record(kept), tuple(kept.tokens.tolist()), tuple(kept.turn_ends))

    def create(self, tenant: str, name: str) -> None:
        """A session that holds nothing yet."""
        self._use(self._create(tenant, name))

    def turn(self, tenant: str, name: str, tokens: Ids, rows: Ids, reused: int = 0) -> None:
        """A session's turn has ended: from now on it holds these tokens and rows, and no others."""
        kept = self._named.get((tenant, name)) or self._create(tenant, name)
        self._trim(kept, 0)
        same = common_prefix(kept.tokens, tokens)
        kept.n_turns += 1
        kept.turn_ends = [*(end for end in kept.turn_ends if end <= same), len(tokens)]
        kept.tokens, kept.rows = tokens.copy(), rows.copy()
        kept.reused += reused
        if len(kept.rows):
            self._hold(kept)
        self._use(kept)

    def fork(self, kept: Kept, new: str) -> None:
        """A new session with the tokens and the very rows of another."""
        fork = self._create(kept.tenant, new)
        fork.tokens, fork.rows = kept.tokens, kept.rows.copy()
        fork.n_turns, fork.turn_ends = kept.n_turns, kept.turn_ends.copy()
        self.pool.share(fork.rows)
        if len(fork.rows):
            self._hold(fork)
        self._use(fork)

    def rewind(self, kept: Kept, n: int) -> None:
        """Cut a session's tokens to the first `n`, and its rows with them."""
        self._trim(kept, min(n, len(kept.rows)))
        kept.tokens = kept.tokens[:n]
        kept.turn_ends = [end for end in kept.turn_ends if end < n] + ([n] if n else [])
        self._use(kept)

    def forget(self, tenant: str, name: str) -> bool:
        """Drop a named session and give back its rows; False if there is none."""
        kept = self._named.get((tenant, name))
        if kept is None:
            return False
        self._trim(kept, 0)
        del self._named[tenant, name]
        self._changed.add((tenant, name))
        if self.store:
            self.store.forget(tenant, name)
        return True

    @property
    def patience(self) -> float | None:
        """Seconds until the next session expires; None if none will."""
        if self.ttl is None or not self._named:
            return None
        return max(0.0, next(iter(self._named.values())).last_used + self.ttl - time.time())

    def expire(self) -> None:
        """Forget the sessions that have not been used for their time to live."""
        while self.patience == 0:
            self.forget(*next(iter(self._named)))
            self.expired += 1

    def reset(self, tenant: str | None) -> Reset:
        """Give up all idle rows of a tenant, or of all: anonymous sequences are forgotten, named
        ones keep their tokens.
        """
        anonymous = [k for k in self._anonymous.values() if tenant in (None, k.tenant)]
        named = [k for k in self._named_with_rows.values() if tenant in (None, k.tenant)]
        freed = sum(self._trim(kept, 0) for kept in [*anonymous, *named])
        return Reset(rows_freed=freed, sequences_forgotten=len(anonymous), sessions_kept=len(named))

    def give_rows(self, kept: Kept, rows: Ids) -> None:
        """Rows of a session that has none have been filled anew, from what was saved."""
        kept.rows = rows
        self.pool.unpin(rows)
        self._hold(kept)
        self._changed.add((kept.tenant, kept.name or ""))

    def evict(self, n: int) -> int:
        """Free `n` rows if idle sequences have them; returns how many were freed."""
        freed = 0
        for group in (self._anonymous, self._named_with_rows):
            while group and freed < n:
                freed += self._shorten(next(iter(group.values())), n - freed)
        self.rows_evicted += freed
        return freed

    def records(self) -> Records:
        """A record per named session. One is replaced, not changed, when its session changes. The
        numbers of shared rows may be old, until there has been time to count them.
        """
        if self._changed:
            named = self._named
            changes = {
                key: self._record(named[key]) if key in named else None for key in self._changed
            }
            self._records = self._records.changed(changes)
            self._changed.clear()
        return self._records

    @property
    def counted(self) -> bool:
        """Whether the numbers of shared rows are those of now."""
        return not self._uncounted and self._sharing == self.pool.sharing_changes

    def count_shared(self) -> None:
        """Count the shared rows of some sessions: what others do changes them, too."""
        if self._sharing != self.pool.sharing_changes:
            self._sharing = self.pool.sharing_changes
            self._uncounted = list(self._named_with_rows.values())
        for kept in self._uncounted[-GLANCE:]:
            if kept.shared_rows != self.pool.shared_among(kept.rows):
                self._changed.add((kept.tenant, kept.name or ""))
        del self._uncounted[-GLANCE:]

    def _record(self, kept: Kept) -> SessionRecord:
        kept.shared_rows = self.pool.shared_among(kept.rows)
        return SessionRecord(
            name=kept.name or "",
            tokens=len(kept.tokens),
            rows=len(kept.rows),
            shared_rows=kept.shared_rows,
            bytes=len(kept.rows) * self.pool.row_bytes,
            turns=kept.n_turns,
            reused=kept.reused,
            created=kept.created,
            last_used=kept.last_used,
            expires=None if self.ttl is None else kept.last_used + self.ttl,
        )

    def with_rows(self) -> list[Kept]:
        """All idle sequences that have rows, the next to give them up first."""
        return [*self._anonymous.values(), *self._named_with_rows.values()]

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
            self._changed.add((kept.tenant, kept.name))
        return self.pool.give_back(dropped)

    def _create(self, tenant: str, name: str) -> Kept:
        """A new session, empty, in place of one that had the name or was unused for longest."""
        self.forget(tenant, name)
        if len(self._named) >= self.max_sessions:
            self.forget(*next(iter(self._named)))
            self.evicted += 1
        none = np.empty(0, np.int32)
        kept = self._named[tenant, name] = Kept(tenant, name, none, none)
        return kept

    def _restore(self, saved: Saved) -> None:
        kept = self._create(saved.tenant, saved.name)
        kept.tokens, kept.turn_ends = saved.tokens, list(saved.turn_ends)
        kept.n_turns, kept.reused = saved.n_turns, saved.reused
        kept.created, kept.last_used = saved.created, saved.last_used
        self._changed.add((saved.tenant, saved.name))

    def _use(self, kept: Kept) -> None:
        """A session has been used and changed by its owner."""
        key = (kept.tenant, kept.name or "")
        kept.last_used = time.time()
        self._named.move_to_end(key)
        self._changed.add(key)
        self._touch(kept)
        if self.store:
            self.store.save(
                Saved(
                    *key,
                    kept.tokens,
                    tuple(kept.turn_ends),
                    kept.n_turns,
                    kept.reused,
                    kept.created,
                    kept.last_used,
                )
            )

    def _touch(self, kept: Kept) -> None:
        """Rows have been used: they are given up later."""
        for group in (self._anonymous, self._named_with_rows):
            if id(kept) in group:
                group.move_to_end(id(kept))


def as_path(tokens: Ids) -> bytes:
    """Big-endian bytes: they compare as the token ids do."""
    return tokens.astype(">u4").tobytes()


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differing = np.flatnonzero(a[:n] != b[:n])
    return int(differing[0]) if len(differing) else n
