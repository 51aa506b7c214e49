"""Idle sequences: the longest prefix is found, rows go in order, nobody sees another's."""

from __future__ import annotations

import time
from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from model.rows import RowPool
from model.step import Ids
from server.engine.sessions import Sessions, common_prefix
from tests.server.engine.helpers import ROW_BYTES

NO_ROWS = np.zeros(0, np.int32)


class Shelf:
    """Sessions over a pool, filled as an engine would fill them. Knows what every row means."""

    def __init__(self, n_rows: int = 60, max_sessions: int = 50) -> None:
        self.pool = RowPool(n_rows, ROW_BYTES)
        self.sessions = Sessions(self.pool, max_sessions)
        self.meaning: dict[int, tuple[str, int]] = {}

    def put(self, text: str | Ids, name: str | None = None, tenant: str = "") -> Ids:
        """A request of these tokens runs and ends; what is cached is shared."""
        tokens = as_ids(text)
        shared = self.sessions.match(tenant, tokens).copy()
        self.pool.share(shared)
        self.pool.pin(shared)
        n = len(tokens) - len(shared)
        if n > self.pool.free:
            self.sessions.evict(n - self.pool.free)
        rows = np.concatenate([shared, self.pool.take(n)])
        self.meaning |= {int(r): (tenant, int(t)) for r, t in zip(rows, tokens, strict=True)}
        self.pool.unpin(rows)
        if name is None:
            self.sessions.keep(tenant, tokens, rows)
        else:
            self.sessions.turn(tenant, name, tokens, rows)
        return rows

    def matched(self, text: str, tenant: str = "") -> str:
        return self._text(self.sessions.match(tenant, as_ids(text)))

    def texts(self, tenant: str = "") -> list[str]:
        """What idle sequences of the tenant have rows of."""
        held = [kept.rows for kept in self.sessions.with_rows() if kept.tenant == tenant]
        return [self._text(rows) for rows in held]

    def _text(self, rows: Ids) -> str:
        return "".join(chr(self.meaning[int(row)][1]) for row in rows)


def as_ids(text: str | Ids) -> Ids:
    return np.array([ord(c) for c in text], np.int32) if isinstance(text, str) else text


TEXTS = st.text("ab\u1000", min_size=1, max_size=9)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "keep", "keep", "turn", "turn", "forget", "evict"]),
        TEXTS,
        st.sampled_from("st"),
        st.sampled_from(["one", "other"]),
    ),
    max_size=25,
)


@given(OPERATIONS, TEXTS)
@settings(deadline=None, max_examples=200)
def test_the_longest_prefix_of_the_tenant_is_found(
    operations: list[tuple[str, str, str, str]], wanted: str
) -> None:
    """Against comparing with every idle sequence, after any history."""
    shelf = Shelf(n_rows=30, max_sessions=2)
    for operation, text, name, tenant in operations:
        if operation == "evict":
            n = min(len(text), shelf.pool.idle)
            free = shelf.pool.free
            assert shelf.sessions.evict(n) == n == shelf.pool.free - free
        elif operation == "forget":
            shelf.sessions.forget(tenant, name)
        else:
            shelf.put(text, name if operation == "turn" else None, tenant)
        for each in ("one", "other"):
            lengths = [common_prefix(as_ids(wanted), as_ids(t)) for t in shelf.texts(each)]
            assert shelf.matched(wanted, each) == wanted[: max(lengths, default=0)]
        held = [*(kept.rows for kept in shelf.sessions.with_rows()), NO_ROWS]
        references = np.bincount(np.concatenate(held), minlength=30)
        np.testing.assert_array_equal(shelf.pool.references, references)
        assert len(shelf.sessions.records()) <= 2


def test_tenants_do_not_share() -> None:
    shelf = Shelf()
    shelf.put("secret", tenant="one")
    assert shelf.matched("secret", "one") == "secret"
    assert shelf.matched("secret", "other") == ""
    assert shelf.matched("secret") == ""


def test_token_ids_above_a_byte_sort_as_numbers() -> None:
    shelf = Shelf()
    for tokens in ([255, 1], [256, 1], [65536, 1], [65536, 2]):
        shelf.put(np.array(tokens, np.int32))
    for tokens in ([255, 7], [256, 1, 7], [65536, 2, 7]):
        length = len(tokens) - 1
        assert len(shelf.sessions.match("", np.array(tokens, np.int32))) == length


def test_an_anonymous_sequence_is_absorbed_by_one_that_has_all_of_it() -> None:
    shelf = Shelf()
    shelf.put("abc")
    shelf.put("abc")
    shelf.put("ab")
    assert shelf.texts() == ["abc"]
    shelf.put("abcd")
    assert shelf.texts() == ["abcd"]
    shelf.put("abcde", "named")
    shelf.put("abcde")
    assert shelf.texts() == ["abcd", "abcde"]
    assert shelf.pool.idle == 5
    assert shelf.pool.shared == 4


def test_sequences_computed_side_by_side_leave_their_rows_once() -> None:
    """Nothing was shared while they ran; the second copy of the rows is given back."""
    shelf = Shelf()
    for _ in range(2):
        rows = shelf.pool.take(3)
        shelf.pool.unpin(rows)
        shelf.sessions.keep("", as_ids("abc"), rows)
    assert shelf.pool.idle == 3


def test_rows_are_given_up_anonymous_first_least_recently_used_tail_first() -> None:
    shelf = Shelf()
    for text, name in [("1234", "old"), ("abcd", None), ("ABCD", None), ("5678", "new")]:
        shelf.put(text, name)
    shelf.matched("ab")  # used: later than the others of its kind now
    shelf.matched("12")
    assert shelf.sessions.evict(3) == 3
    assert shelf.texts() == ["A", "abcd", "5678", "1234"]
    assert shelf.sessions.evict(4) == 4
    assert shelf.texts() == ["a", "5678", "1234"]
    assert shelf.sessions.evict(4) == 4
    assert shelf.texts() == ["5", "1234"]
    assert shelf.sessions.rows_evicted == 11
    assert {name: r.tokens for (_, name), r in shelf.sessions.records().items()} == {
        "old": 4,
        "new": 4,
    }


def test_eviction_frees_exactly_what_is_asked_for_though_rows_are_shared() -> None:
    shelf = Shelf()
    shelf.put("common 1")
    shelf.put("common 2", "named")
    assert shelf.pool.idle == 9
    for left in range(8, -1, -1):
        assert shelf.sessions.evict(1) == 1
        assert shelf.pool.idle == left


def test_eviction_leaves_rows_that_are_pinned() -> None:
    shelf = Shelf()
    rows = shelf.put("abcd", "s")[:2]
    shelf.pool.share(rows)
    shelf.pool.pin(rows)
    assert shelf.pool.idle == 2
    assert shelf.sessions.evict(2) == 2
    assert shelf.pool.idle == 0
    assert (shelf.pool.pins[rows] == 1).all()


def test_the_least_recently_used_session_makes_room_for_a_new_one() -> None:
    shelf = Shelf(max_sessions=2)
    shelf.put("1", "first")
    shelf.put("2", "second")
    shelf.put("1", "first")
    shelf.put("3", "third")
    assert [record.name for record in shelf.sessions.records().of("")] == ["first", "third"]
    assert shelf.pool.idle == 2


def test_a_turn_replaces_what_the_session_had() -> None:
    shelf = Shelf()
    for text in ("abcd", "abXY", "zz", "z"):
        shelf.put(text, "s")
        assert shelf.texts() == [text]
        assert shelf.pool.idle == len(text)
    record = shelf.sessions.records()["", "s"]
    assert (record.turns, record.tokens, record.rows, record.bytes) == (4, 1, 1, ROW_BYTES)


def test_published_records_are_frozen() -> None:
    shelf = Shelf()
    shelf.put("ab", "s")
    shelf.put("cd", "t")
    before = shelf.sessions.records()
    assert shelf.sessions.records() is before
    record = before["", "s"]
    shelf.put("abc", "s")
    after = shelf.sessions.records()
    assert before["", "s"] is record
    assert after["", "s"].tokens == 3
    assert after["", "t"] is before["", "t"]
    assert shelf.sessions.forget("", "s")
    assert not shelf.sessions.forget("", "s")
    assert list(shelf.sessions.records()) == [("", "t")]
    assert len(after) == 2


@pytest.fixture(scope="module")
def crowded() -> Shelf:
    """10,000 idle sequences of 256 tokens, half of them named, and 10,000 without rows."""
    shelf = Shelf(n_rows=10_000 * 256 + 64, max_sessions=20_000)
    random = np.random.default_rng(0)
    for i in range(10_000):
        shelf.sessions.turn("", f"empty {i}", np.arange(256, dtype=np.int32), NO_ROWS)
        tokens = random.integers(0, 3, 256).astype(np.int32)
        rows = shelf.pool.take(256)
        shelf.pool.unpin(rows)
        if i % 2:
            shelf.sessions.keep("", tokens, rows)
        else:
            shelf.sessions.turn("", f"{i}", tokens, rows)
    return shelf


def milliseconds(work: Callable[[], object]) -> float:
    """The best of a few tries: other processes run beside this one."""
    times = []
    for _ in range(7):
        start = time.thread_time()
        work()
        times.append(1000 * (time.thread_time() - start))
    return min(times)


def test_a_match_among_10_000_idle_sequences_is_quick(crowded: Shelf) -> None:
    wanted = np.random.default_rng(1).integers(0, 3, 256).astype(np.int32)
    assert 5 <= len(crowded.sessions.match("", wanted)) <= 30
    assert milliseconds(lambda: crowded.sessions.match("", wanted)) < 2


def test_a_row_is_evicted_quickly_among_10_000_idle_sequences(crowded: Shelf) -> None:
    assert milliseconds(lambda: crowded.sessions.evict(1)) < 2


def test_named_sessions_are_evicted_quickly_though_many_have_no_rows(crowded: Shelf) -> None:
    crowded.sessions.evict(5_001 * 256)  # all that is anonymous
    assert milliseconds(lambda: crowded.sessions.evict(1)) < 2
    assert milliseconds(lambda: crowded.sessions.turn("", "s", np.zeros(9, np.int32), NO_ROWS)) < 2
