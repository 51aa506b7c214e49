"""Equal shares for all, and a pool that is too small costs time only."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from model.rows import RowPool
from server.engine.scheduler import Scheduler, deal
from server.engine.sequence import Request, Sequence
from server.engine.sessions import Sessions
from server.settings import Settings
from tests.server.engine.helpers import (
    TALKS,
    Client,
    alone,
    copies,
    fake_engine,
    ids,
    request,
    session_tokens,
)


@given(st.integers(0, 300), st.lists(st.integers(0, 100), max_size=12), st.integers(0, 50))
@settings(deadline=None, max_examples=300)
def test_a_budget_is_dealt_whole_and_in_equal_slices(
    budget: int, needs: list[int], first: int
) -> None:
    slices = deal(budget, needs, first)
    assert sum(slices) == min(budget, sum(needs))
    assert all(0 <= n <= need for n, need in zip(slices, needs, strict=True))
    for n, need in zip(slices, needs, strict=True):
        if n < need:  # whoever did not get all has as much as anybody, but for an odd token
            assert n >= max(slices) - 1


def test_odd_tokens_go_round() -> None:
    totals = [
        sum(column) for column in zip(*(deal(7, [50, 90, 99], i) for i in range(3)), strict=True)
    ]
    assert totals == [7, 7, 7]


def test_a_pool_or_a_step_that_is_too_small_is_refused() -> None:
    pool = RowPool(16, 8)
    with pytest.raises(ValueError, match="window of 17"):
        Scheduler(pool, Sessions(pool, 1), n_ctx=17, max_running=2, step_tokens=4)
    with pytest.raises(ValueError, match="twice"):
        Scheduler(pool, Sessions(pool, 1), n_ctx=16, max_running=2, step_tokens=3)


def test_running_streams_get_a_token_in_every_step_beside_long_prompts() -> None:
    """B101: the gap is one step, and a step is at most `step_tokens` tokens."""
    engine, model = fake_engine(n_ctx=128, step_tokens=32, says=TALKS)
    client = Client(engine)
    streams = [client.submit(request(f"stream {i}", 100))[0] for i in range(5)]
    client.step()
    for i in range(4):
        client.submit(request(f"{i}" * 120, 4))
        client.submit(request(f"{i}x" * 50, 4, use_cache=False))
    for _ in range(30):
        before = [len(stream.tokens) for stream in streams]
        client.step()
        assert [len(stream.tokens) for stream in streams] == [n + 1 for n in before]
        assert sum(model.spans[-1]) <= 32


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_short_prompt_does_not_wait_for_long_ones(use_cache: bool) -> None:
    engine, _ = fake_engine(n_ctx=128, step_tokens=40, says=TALKS)
    client = Client(engine)
    long = [client.submit(request(f"{i}" * 120, 8, use_cache=use_cache))[0] for i in range(4)]
    client.step()
    (short,) = client.submit(request("short", 3))
    client.step()
    assert len(short.tokens) == 1
    assert not any(answer.tokens for answer in long)
    client.step()
    client.step()
    assert short.finish
    client.run()


@pytest.mark.parametrize(("n", "steps"), [(1, 1), (40, 1), (100, 2)])
def test_a_short_prompt_is_answered_within_two_steps(n: int, steps: int) -> None:
    """Of the budget that is the default, beside four prompts of 1,000 tokens in work."""
    budget = Settings.model_fields["step_tokens"].default
    engine, model = fake_engine(n_rows=5_000, n_ctx=1_024, step_tokens=budget, says=TALKS)
    client = Client(engine)
    long = [client.submit(request(f"{i}" * 1_000, 8))[0] for i in range(4)]
    client.step()
    (short,) = client.submit(request("s" * n, 3))
    for _ in range(steps):
        assert not short.tokens
        client.step()
    assert len(short.tokens) == 1
    assert not any(answer.tokens for answer in long)
    assert max(map(sum, model.spans)) <= budget


def test_long_prompts_of_one_length_advance_together() -> None:
    engine, model = fake_engine(n_ctx=128, max_running=8, step_tokens=50)
    client = Client(engine)
    client.submit(*(request(f"{i}" * 100, 1, index=i) for i in range(4)))
    for _ in range(8):
        client.step()
        done = [sequence.computed for sequence in engine.scheduler.running]
        if done:
            assert max(done) - min(done) <= 2
    assert not engine.has_work
    assert [sum(spans) for spans in model.spans] == 8 * [50]


PRESSURE: dict[str, Callable[[int], Request]] = {
    "growing answers": lambda i: request(f"{i}" * (3 + i), 24),
    "prompts longer than a step": lambda i: request(f"{i}" * (20 + i), 10),
    "uncached, longer than a step": lambda i: request(f"{i}" * 20, 6, use_cache=False),
    "both, in turns": lambda i: request(f"{i}" * (9 + i), 20 - i, use_cache=i % 2 == 0),
    "scored prompts": lambda i: request(f"{i}" * 16, 20, score_prompt=True, echo=True),
    "one prefix": lambda i: request("a common prefix " + f"{i}" * i, 14),
}


@pytest.mark.parametrize("case", PRESSURE)
def test_a_tiny_pool_changes_no_answer(case: str) -> None:
    """Eviction and preemption cost time only (B019), and somebody always proceeds."""
    requests = [PRESSURE[case](i) for i in range(8)]
    requests = [r if i % 2 else request_without_end(r) for i, r in enumerate(requests)]
    engine, model = fake_engine(n_rows=40, n_ctx=40, max_running=4, step_tokens=8)
    client = Client(engine)
    answers = [client.submit(r)[0] for r in requests]
    scheduler = engine.scheduler
    while engine.has_work:
        before, preemptions = list(scheduler.running), scheduler.preemptions
        again = [sequence for sequence in before if sequence.preempted]
        computed = sum(map(sum, model.spans))
        client.step()
        assert sum(map(sum, model.spans)) > computed
        assert not before or before[0] not in scheduler.waiting
        assert not any(sequence in scheduler.waiting for sequence in again)
        if scheduler.preemptions > preemptions:
            assert set(scheduler.running) <= set(before)
    assert scheduler.preemptions or engine.sessions.rows_evicted
    for asked, answer in zip(requests, answers, strict=True):
        assert answer.said == alone(asked)[0].said


def request_without_end(asked: Request) -> Request:
    """The same request, which only its limit ends."""
    return request(
        asked.prompt,
        asked.max_tokens,
        use_cache=asked.use_cache,
        echo=asked.echo,
        score_prompt=asked.score_prompt,
        stop_ids=frozenset(),
    )


def test_growth_preempts_the_newest_and_it_comes_back_once() -> None:
    engine, _ = fake_engine(n_rows=40, n_ctx=40, max_running=3, step_tokens=20, says=TALKS)
    client = Client(engine)
    for i in range(3):
        client.submit(request(f"{i}" * 5, 30))
    client.step()
    old, middle, new = engine.scheduler.running
    while not engine.scheduler.preemptions:
        client.step()
    assert list(engine.scheduler.running) == [old, middle]
    assert list(engine.scheduler.waiting) == [new]
    client.run()
    # All three could not run to their limits side by side, the first two neither.
    assert (old.preempted, middle.preempted, new.preempted) == (False, True, True)
    assert engine.scheduler.preemptions == 2
    snapshot = engine.snapshot()
    assert snapshot.preemptions_total == 2
    assert snapshot.rows_recomputed_total > 0
    assert snapshot.rows_computed_total - snapshot.rows_recomputed_total == 3 * (5 + 30 - 1)


def test_a_preempted_request_is_before_those_that_came_later() -> None:
    engine, _ = fake_engine(n_rows=40, n_ctx=40, max_running=2, step_tokens=20, says=TALKS)
    client = Client(engine)
    first, second, late = (client.submit(request(f"{i}" * 5, 30))[0] for i in range(3))
    finished = []
    while engine.has_work:
        client.step()
        finished += [a for a in (first, second, late) if a.finish and a not in finished]
    assert finished == [first, second, late]


def test_rows_that_come_back_from_a_cache_are_no_new_hit() -> None:
    """Two share a prompt; the newer is preempted and gets the same rows again."""
    engine, _ = fake_engine(n_rows=40, n_ctx=40, max_running=2, step_tokens=40, says=TALKS)
    client = Client(engine)
    answers = client.ask(*copies(2, request("one prompt", 28)))
    assert engine.scheduler.preemptions == 1
    assert [answer.cached_tokens for answer in answers] == [0, 9]
    s = engine.snapshot()
    assert s.rows_reused_total == 9
    assert s.rows_computed_total - s.rows_recomputed_total + s.rows_reused_total == 2 * (10 + 27)


def test_a_request_that_comes_back_computes_in_the_step_that_starts_it() -> None:
    """Others kept all rows of its prompt: it misses one row, like a request that never stopped."""
    engine, model = fake_engine(n_rows=24, n_ctx=24, max_running=4, step_tokens=8)
    client = Client(engine)
    client.submit(*copies(4, request("a" * 16, 5, stop_ids=frozenset())))
    steps = client.run()
    assert engine.scheduler.preemptions == 2
    assert len(model.spans) == steps


def test_idle_sessions_never_block_new_work() -> None:
    """B020: they are evicted, least recently used first, and keep their tokens."""
    engine, _ = fake_engine(n_rows=40, n_ctx=40, says=TALKS)
    client = Client(engine)
    for i in range(9):
        client.ask(request(f"{i}" * 10, 6, session=f"{i}"))
    client.ask(request("x" * 30, 10))
    records = {name: record for (_, name), record in engine.snapshot().sessions.items()}
    assert [records[f"{i}"].tokens for i in range(9)] == 9 * [16]
    assert [records[f"{i}"].rows for i in range(9)] == 8 * [0] + [1]
    assert client.ask(request("0" * 10 + "a" * 6, 6))[0].text == 6 * "a"


def test_five_sessions_in_room_for_two_answer_as_with_room_for_all() -> None:
    """B019, three turns each, round robin."""
    small, _ = fake_engine(n_rows=64, n_ctx=64)
    large, _ = fake_engine()
    clients = Client(small), Client(large)
    texts = [f"session {i}: " for i in range(5)]
    for turn in range(3):
        for i in range(5):
            asked = request(texts[i].encode(), 10, session=f"{i}", stop_ids=frozenset())
            one, other = (client.ask(asked)[0] for client in clients)
            assert one.said == other.said == alone(asked)[0].said
            texts[i] = texts[i] + f"turn {turn} "
    assert small.sessions.rows_evicted
    assert not large.sessions.rows_evicted


def test_the_turns_of_a_session_run_one_after_the_other() -> None:
    """B018. Others are not held up by them."""
    engine, _ = fake_engine(says=TALKS)
    client = Client(engine)
    first, second, third = (client.submit(request(f"{i}", 6, session="s"))[0] for i in range(3))
    (other,) = client.submit(request("other", 2, session="t"))
    (foreign,) = client.submit(request("foreign", 2, session="s", tenant="another"))
    for _ in range(2):
        client.step()
    assert other.finish
    assert foreign.finish
    assert first.tokens
    assert not second.tokens
    while not second.finish:
        assert not third.tokens
        client.step()
    assert first.finish
    client.run()
    assert session_tokens(engine, "s") == ids("2aaaaaa")
    assert engine.snapshot().sessions["", "s"].turns == 3


def test_a_preempted_turn_stays_before_the_next_turn() -> None:
    engine, _ = fake_engine(n_rows=40, n_ctx=40, step_tokens=32, says=TALKS)
    client = Client(engine)
    client.submit(request("the oldest", 28))
    (turn,) = client.submit(request("a turn", 30, session="s"))
    (next_turn,) = client.submit(request("next", 2, session="s"))
    while not engine.scheduler.preemptions:
        client.step()
    preempted = engine.scheduler.waiting[0]
    assert isinstance(preempted, Sequence)
    assert preempted.request.max_tokens == 30
    while not next_turn.tokens:
        client.step()
    assert turn.finish
    client.run()
