"""Plays the runs, and stops early without losing what is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, repeat

from uvicorn.loops.auto import auto_loop_factory

from server.loadtest.client import Client, Sample
from server.loadtest.workload import Arm, Run, Talk, Workload

# Seconds until the watch's clock strikes, at first and then: rarely, for each time it takes the
# processor from the server.
FIRST, TICK = 0.01, 0.1
NO_IDS = "the server did not tell the ids of its tokens, which the next turn is made of"
NOT_ASKED = "not asked: the turn before it failed"


@dataclass(slots=True)
class Record:
    """What one run measured, and how busy the client itself was."""

    run: Run
    samples: list[Sample] = field(default_factory=list)
    wall: float = 0.0  # seconds
    cpu: float = 0.0  # seconds of this process
    events: int = 0
    lags: list[float] = field(default_factory=list)  # how late the event loop noticed a clock

    @property
    def errors(self) -> list[str]:
        return [sample.error for sample in self.samples if sample.error is not None]


@dataclass(slots=True)
class Measurement:
    """The records of all runs, warm-up left out unless it failed."""

    records: list[Record] = field(default_factory=list)
    interrupted: bool = False
    repeats: int = 0  # that were begun

    @property
    def samples(self) -> list[Sample]:
        return [sample for record in self.records for sample in record.samples]

    @property
    def failures(self) -> int:
        return sum(len(record.errors) for record in self.records)


def measure(
    connect: Callable[[], Client],
    workload: Workload,
    arms: Sequence[Arm],
    seed: int,
    advance: Callable[[Run], None] = lambda run: None,
) -> Measurement:
    """One run after another. Ctrl-C ends them, not the measurement: it holds what was known."""
    measurement = Measurement()

    async def all_runs() -> None:
        begin = round_begin = time.perf_counter()
        async with connect() as client:
            for run in workload.runs(arms, seed):
                if run.repeat > measurement.repeats:
                    now = time.perf_counter()
                    longest, round_begin = now - round_begin, now
                    if run.repeat > 1 and now - begin + longest > workload.seconds:
                        return
                    measurement.repeats = run.repeat
                record = Record(run)
                try:
                    await play(client, record)
                finally:
                    if record.samples and (run.repeat or record.errors):
                        measurement.records.append(record)
                advance(run)

    try:
        with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:  # the server's own kind
            runner.run(all_runs())
    except KeyboardInterrupt:
        measurement.interrupted = True
    return measurement


async def play(client: Client, record: Record) -> None:
    """One run. Its record grows as answers end."""
    load = record.run.load
    start, cpu, events = time.perf_counter(), time.process_time(), client.events
    gate = asyncio.Semaphore(load.concurrency or len(record.run.talks))
    watch = asyncio.create_task(_watch(record.lags))
    try:
        async with asyncio.TaskGroup() as group:
            for talk in record.run.talks:
                group.create_task(_play_talk(client, record, talk, gate, start))
    finally:
        watch.cancel()
        record.wall = time.perf_counter() - start
        record.cpu = time.process_time() - cpu
        record.events = client.events - events


async def _play_talk(
    client: Client, record: Record, talk: Talk, gate: asyncio.Semaphore, start: float
) -> None:
    """The turns of one conversation: each is due when the one before it has ended."""
    if talk.due is not None:
        while (early := start + talk.due - time.perf_counter()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(early)  # uvloop wakes up to a millisecond too soon
    async with gate:
        due = talk.due if talk.due is not None else time.perf_counter() - start
        text: list[int] = []
        for turn, part in enumerate(talk.parts, 1):
            text += part
            tokens = record.run.tokens
            sample, ids = await client.measure(text, tokens, record.run.arm, start, due)
            if turn < len(talk.parts) and len(ids) != tokens and sample.error is None:
                sample.error = NO_IDS
            record.samples.append(sample)
            if sample.error is not None:
                lost = (Sample(sample.end, error=NOT_ASKED) for _ in talk.parts[turn:])
                record.samples.extend(lost)
                return
            text += ids
            due = sample.end


async def _watch(lags: list[float]) -> None:
    """A clock: what it strikes late, an answer may be noticed late."""
    with suppress(asyncio.CancelledError):
        for pause in chain((FIRST,), repeat(TICK)):
            before = time.perf_counter()
            await asyncio.sleep(pause)
            lags.append(max(0.0, time.perf_counter() - before - pause))
