"""Runs against a server whose every delay is known."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from server.loadtest import figures
from server.loadtest.client import Client
from server.loadtest.measurement import NO_IDS, NOT_ASKED, Measurement, Record, measure, play
from server.loadtest.workload import Arm, Load, Run, Workload, talks
from tests.server.loadtest.fake import DONE, FakeServer, answer, event

BOTH = (Arm.CACHED, Arm.UNCACHED)


def play_once(url: str, load: Load, seed: int = 0) -> Record:
    record = Record(Run(load, Arm.CACHED, 1, talks(load, Arm.CACHED, 1, seed)))

    async def once() -> None:
        async with Client(url, "fake") as client:
            await play(client, record)

    asyncio.run(once())
    return record


def measure_all(url: str, load: Load, repeats: int = 2, seconds: float = 1e9) -> Measurement:
    work = Workload({"context": [load]}, repeats, seconds)
    return measure(lambda: Client(url, "fake"), work, BOTH, seed=0)


def answer_once_there_are(
    n: int, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, patience: float = 10.0
) -> None:
    """The first answers come when `n` requests have, or when the others are not to be expected."""
    complete, come = fake.complete, asyncio.Event()

    async def held(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        if len(fake.bodies) == n:
            come.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(come.wait(), patience)
        await complete(writer, body)

    monkeypatch.setattr(fake, "complete", held)


class TestLoops:
    def test_b114_waiting_inside_the_load_generator_is_counted(self, fake: FakeServer) -> None:
        """500 ms of service, 10 arrivals a second, one place: what a queue at a counter takes."""
        fake.script = partial(answer, first=0.5)
        record = play_once(fake.url, Load(4, tokens=1, rate=10.0, concurrency=1, talks=5))
        assert fake.most_at_once == 1
        assert [s.due for s in record.samples] == [t.due for t in record.run.talks]
        free, idle = 0.0, []  # when the place is free, and how long nobody takes it then
        for sample in record.samples:
            idle.append(sample.sent - max(free, sample.due))
            free = sample.end
        assert min(idle) > -0.01
        assert np.median(idle) < 0.25  # the median, for the machine may have other things to do
        assert all(s.service >= 0.49 for s in record.samples)
        assert record.samples[-1].e2e > 2 * np.median([s.service for s in record.samples])
        [cell] = figures.cells(Measurement([record]))
        assert cell.as_json()["mode"] == "open loop"

    def test_an_open_loop_does_not_wait_for_answers(
        self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer_once_there_are(10, fake, monkeypatch)
        record = play_once(fake.url, Load(4, tokens=1, rate=50.0, concurrency=None, talks=10))
        assert fake.most_at_once == 10
        assert {s.due for s in record.samples} == {t.due for t in record.run.talks}

    def test_a_closed_loop_keeps_so_many_busy(
        self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer_once_there_are(3, fake, monkeypatch)
        fake.script = partial(answer, first=0.1)
        record = play_once(fake.url, Load(4, tokens=1, concurrency=3, talks=9))
        assert fake.most_at_once == 3
        assert record.wall >= 0.3
        # Each is due when it has a place: none of its time is another's.
        assert np.median([s.lateness for s in record.samples]) < 0.05
        assert all(s.service >= 0.1 for s in record.samples)

    def test_a_further_turn_holds_all_that_was_said(self, fake: FakeServer) -> None:
        record = play_once(fake.url, Load(7, tokens=2, turns=3, talks=1))
        a, b, c = record.run.talks[0].parts
        said = [*a], [*a, 201, 202, *b], [*a, 201, 202, *b, 201, 202, *c]
        assert tuple(body["prompt"] for body in fake.bodies) == said
        assert [s.error for s in record.samples] == [None] * 3

    def test_turns_need_ids(self, fake: FakeServer) -> None:
        fake.script = lambda _: [event(2), DONE]
        record = play_once(fake.url, Load(6, tokens=2, turns=3, talks=1))
        assert [s.error for s in record.samples] == [NO_IDS, NOT_ASKED, NOT_ASKED]


class TestMeasure:
    def test_warm_up_is_left_out(self, fake: FakeServer) -> None:
        measurement = measure_all(fake.url, Load(4, tokens=3))
        assert [(r.run.repeat, r.run.arm) for r in measurement.records] == [
            (1, Arm.CACHED), (1, Arm.UNCACHED), (2, Arm.UNCACHED), (2, Arm.CACHED),
        ]  # fmt: skip
        assert len(fake.bodies) == 2 + 4 * 2
        assert not measurement.failures
        assert not measurement.interrupted

    def test_b119_token_totals_are_equal(self, fake: FakeServer) -> None:
        cells = figures.cells(measure_all(fake.url, Load(4, tokens=3, turns=2)))
        assert [cell.arm for cell in cells] == [*BOTH]
        assert cells[0].tokens == cells[1].tokens == 2 * 2 * 2 * 3
        assert cells[0].prompt_tokens == cells[1].prompt_tokens

    def test_errors_never_vanish(self, fake: FakeServer) -> None:
        fake.status = 500
        measurement = measure_all(fake.url, Load(4, tokens=3))
        assert measurement.failures == len(measurement.samples) == 2 + 4 * 2  # warm-up, too
        for cell in figures.cells(measurement):
            assert cell.failed == cell.requests == sum(cell.errors.values())
            assert cell.ttft is None
            assert cell.tokens_per_second is not None
            assert cell.tokens_per_second.median == 0

    def test_no_repeat_that_would_end_too_late(
        self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a clock by which each of the four requests of a repeat takes a second."""
        clock = SimpleNamespace(
            perf_counter=lambda: float(len(fake.bodies)), process_time=time.process_time
        )
        monkeypatch.setattr("server.loadtest.measurement.time", clock)
        measurement = measure_all(fake.url, Load(4, tokens=1), repeats=50, seconds=15.0)
        assert measurement.repeats == 3  # and 2 s of warm-up
        assert {r.run.repeat for r in measurement.records} == {*range(1, measurement.repeats + 1)}

    def test_one_repeat_there_is_in_any_case(self, fake: FakeServer) -> None:
        assert measure_all(fake.url, Load(4, tokens=1), repeats=5, seconds=0.0).repeats == 1

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_an_interrupt_keeps_what_is_known(self, fake: FakeServer, number: int) -> None:
        """In the middle of a run: what had ended stays."""

        def slow_from_the_fifth(body: dict[str, object]) -> list[str | float]:
            if len(fake.bodies) == 5:
                threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
            return answer(body, first=30.0 if len(fake.bodies) >= 5 else 0.0)

        fake.script = slow_from_the_fifth
        before = signal.signal(number, signal.default_int_handler)
        try:
            measurement = measure_all(fake.url, Load(4, tokens=1, talks=1), repeats=9)
        finally:
            signal.signal(number, before)
        assert measurement.interrupted
        assert len(measurement.samples) == 2
        assert not measurement.failures


class TestClientItself:
    def test_b117_overhead_against_an_instant_server(self, fake: FakeServer) -> None:
        """64 at once, each from a new connection: the client adds little, and says how much."""
        record = play_once(fake.url, Load(32, tokens=8, concurrency=64, talks=128))
        [cell] = figures.cells(Measurement([record]))
        assert not cell.errors
        assert record.events == 128 * 8
        assert cell.ms_per_event is not None
        assert cell.cpu_share is not None
        # Milliseconds of CPU; the share of the server, in this process, included.
        assert 0 < cell.ms_per_event < 10
        assert 0 < cell.cpu_share < 2  # two threads: the server's is one
        assert cell.lag is not None

    def test_a_busy_client_says_so(self, fake: FakeServer) -> None:
        record = play_once(fake.url, Load(4, tokens=1))
        record.cpu, record.wall, record.lags = 0.95, 1.0, [0.05] * 9
        [cell] = figures.cells(Measurement([record]))
        assert len(cell.warnings) == 2
        assert "95% of a CPU" in " ".join(cell.warnings)

    def test_its_schedule_is_kept(self, fake: FakeServer) -> None:
        """Nobody waits for the answers, which take longer than the pauses, and delays do not add
        up: among the last ten some are sent on time, though the machine may pause now and then.
        """
        fake.script = partial(answer, first=0.5)
        record = play_once(fake.url, Load(4, tokens=1, rate=10.0, concurrency=None, talks=20))
        by_due = sorted(record.samples, key=lambda s: s.due)
        assert min(s.lateness for s in by_due[10:]) < 0.05
        assert all(s.lateness >= 0 for s in by_due)
