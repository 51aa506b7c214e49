"""What a step costs beside the model: the same, however many sequences lie idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
import pytest

from model.rows import RowPool
from model.step import Draw, Ids, Work
from server.engine.engine import Engine
from tests.fakes import FakeModel
from tests.server.engine.helpers import BYTES, request

N_IDLE, N_TOKENS, N_STREAMS = 10_000, 1_000, 16
NO_ROWS = np.zeros(0, np.int32)


class Instant(FakeModel):
    """Says the same at once, so that all that takes time is the engine."""

    def run(self, work: list[Work]) -> list[Draw]:
        return [Draw(ord("a")) for _ in work]


def engine_with(idle: int) -> Engine:
    """Streams that decode beside idle sequences, half of them named, all with all their rows."""
    pool = RowPool((idle + N_STREAMS) * N_TOKENS, 8)
    engine = Engine(
        Instant(n_ctx=N_TOKENS),
        BYTES,
        pool,
        max_running=N_STREAMS,
        step_tokens=1024,
        max_sessions=N_IDLE,
    )
    random = np.random.default_rng(0)
    for i in range(idle):
        tokens = random.integers(0, 3, N_TOKENS).astype(np.int32)
        rows = pool.take(N_TOKENS)
        pool.unpin(rows)
        if i % 2:
            engine.sessions.keep("", tokens, rows)
        else:
            engine.sessions.turn("", f"{i}", tokens, rows)
    for i in range(N_STREAMS):
        engine.submit([replace(request(f"stream {i}", 900), id=f"{i}")])
    while not engine.sessions.counted:
        engine.rest()
    engine.step()
    return engine


@pytest.fixture(scope="module")
def empty() -> Engine:
    return engine_with(0)


@pytest.fixture(scope="module")
def crowded() -> Engine:
    """10 million rows in 10,000 idle sequences."""
    return engine_with(N_IDLE)


def seconds(work: Callable[[], object]) -> float:
    """Of this thread's own time: other processes run beside it."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def step(engine: Engine) -> None:
    assert len(engine.step()) == N_STREAMS
    engine.snapshot()


def test_idle_sequences_cost_nothing_in_a_step(empty: Engine, crowded: Engine) -> None:
    times = [(seconds(lambda: step(crowded)), seconds(lambda: step(empty))) for _ in range(300)]
    with_idle, without = (median(column) for column in zip(*times, strict=True))
    assert with_idle < 1.5 * without


def test_what_a_new_turn_costs_does_not_grow_with_the_number_of_sessions(
    empty: Engine, crowded: Engine
) -> None:
    """Nor what it costs to publish its record."""

    def turn(engine: Engine, i: int) -> None:
        engine.sessions.turn("", "a session", np.full(3, i, np.int32), NO_ROWS)
        assert engine.snapshot().sessions["", "a session"].tokens == 3

    times = [
        (seconds(partial(turn, crowded, i)), seconds(partial(turn, empty, i)))
        for i in range(1, 200)
    ]
    with_idle, without = (median(column) for column in zip(*times, strict=True))
    assert with_idle < 2 * without


@pytest.mark.parametrize("shared", [0, 10, 700])
def test_a_prefix_is_found_in_less_than_a_millisecond(crowded: Engine, shared: int) -> None:
    kept = crowded.sessions.with_rows()[N_IDLE // 3]
    wanted: Ids = kept.tokens.copy()
    wanted[shared:] = 7
    found = crowded.sessions.match("", wanted)
    assert len(found) >= shared
    assert min(seconds(lambda: crowded.sessions.match("", wanted)) for _ in range(20)) < 0.001


def test_shared_rows_are_counted_a_few_sessions_at_a_time(crowded: Engine) -> None:
    """It happens when there is nothing else to do, and holds up nobody who comes meanwhile."""
    sessions = crowded.sessions
    kept = sessions.get("", "0")
    assert kept is not None
    while not sessions.counted:
        crowded.rest()
    crowded.fork("", "0", "fork")
    assert not sessions.counted
    assert crowded.patience == 0
    times = []
    while not sessions.counted:
        times.append(seconds(crowded.rest))
    assert len(times) > 10
    assert median(times) < 0.005
    assert sessions.records()["", "0"].shared_rows == N_TOKENS
    assert crowded.patience is None
