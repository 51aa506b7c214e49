"""The pool against a model of it that cannot be wrong: a list of holders for every row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from model.rows import OutOfRows, RowPool
from model.step import Ids

N_ROWS = 12


class Pool(RuleBasedStateMachine):
    """Sequences that run or rest take rows, share prefixes, give tails back, wake and rest."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = RowPool(N_ROWS, row_bytes=64)
        self.running: list[Ids] = []
        self.resting: list[Ids] = []
        self.last_sharing: tuple[int, list[bool]] = (0, [False] * N_ROWS)

    def free(self) -> set[int]:
        held = {int(row) for rows in self.running + self.resting for row in rows}
        return set(range(N_ROWS)) - held

    @rule(n=st.integers(0, N_ROWS + 2))
    def take(self, n: int) -> None:
        free = self.free()
        if n > len(free):
            before = self.pool.free_rows()
            with pytest.raises(OutOfRows, match=f"{n} rows asked for, {len(free)} free"):
                self.pool.take(n)
            np.testing.assert_array_equal(self.pool.free_rows(), before)
            return
        rows = self.pool.take(n)
        assert rows.dtype == np.int32
        assert len(set(rows.tolist())) == n, "one row twice"
        assert set(rows.tolist()) <= free, "a row that somebody holds"
        self.running.append(rows)

    @precondition(lambda self: self.running or self.resting)
    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        source = data.draw(st.sampled_from(self.running + self.resting))
        prefix = source[: data.draw(st.integers(0, len(source)))].copy()
        self.pool.share(prefix)
        self.pool.pin(prefix)
        self.running.append(prefix)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def rest(self, data: st.DataObject) -> None:
        rows = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.pool.unpin(rows)
        self.resting.append(rows)

    @precondition(lambda self: self.resting)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        rows = self.resting.pop(data.draw(st.integers(0, len(self.resting) - 1)))
        self.pool.pin(rows)
        self.running.append(rows)

    @precondition(lambda self: self.running or self.resting)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        i = data.draw(st.integers(0, len(self.running + self.resting) - 1))
        runs = i < len(self.running)
        place, i = (self.running, i) if runs else (self.resting, i - len(self.running))
        kept = data.draw(st.integers(0, len(place[i])))
        before = len(self.free())
        tail, place[i] = place[i][kept:], place[i][:kept]
        if runs:
            self.pool.unpin(tail)
        assert self.pool.give_back(tail) == len(self.free()) - before

    @invariant()
    def counts_are_those_of_the_lists(self) -> None:
        pool, everyone = self.pool, self.running + self.resting
        holders = [sum(row in rows for rows in everyone) for row in range(N_ROWS)]
        pins = [sum(row in rows for rows in self.running) for row in range(N_ROWS)]
        assert pool.references.tolist() == holders
        assert pool.pins.tolist() == pins
        assert pool.free == holders.count(0)
        assert pool.running == N_ROWS - pins.count(0)
        assert pool.idle == sum(h > 0 and not p for h, p in zip(holders, pins, strict=True))
        assert pool.free + pool.running + pool.idle == N_ROWS
        assert pool.shared == sum(h > 1 for h in holders)
        sharing = (pool.sharing_changes, [h > 1 for h in holders])
        if sharing[0] == self.last_sharing[0]:
            assert sharing == self.last_sharing
        self.last_sharing = sharing
        assert sorted(pool.free_rows().tolist()) == sorted(self.free())
        for rows in everyone:
            assert pool.shared_among(rows) == sum(holders[row] > 1 for row in rows)

    def teardown(self) -> None:
        for rows in self.running:
            self.pool.unpin(rows)
        for rows in self.running + self.resting:
            self.pool.give_back(rows)
        assert (self.pool.free, self.pool.shared, self.pool.running) == (N_ROWS, 0, 0)


TestPool = Pool.TestCase
TestPool.settings = settings(deadline=None, max_examples=30, stateful_step_count=30)


def test_rows_that_are_taken_together_lie_together() -> None:
    pool = RowPool(8, row_bytes=1)
    assert pool.scratch == 8
    first, second = pool.take(3), pool.take(5)
    assert first.tolist() == [0, 1, 2]
    assert second.tolist() == [3, 4, 5, 6, 7]
    pool.unpin(first)
    pool.give_back(first)
    assert pool.take(3).tolist() == [0, 1, 2]
