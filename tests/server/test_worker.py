"""The worker: admission, one wake-up per step, mailboxes, aborts, the ways it can end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from model.rows import RowPool
from model.step import Sampling
from server.engine.engine import Engine
from server.engine.sequence import Delta, Event, Failure, Request
from server.engine.worker import (
    SLOW,
    CallFailed,
    Mailbox,
    QueueFull,
    State,
    Unavailable,
    Worker,
    joined,
)
from tests.fakes import BYTES, FakeModel


def engine_of(model: FakeModel) -> Engine:
    return Engine(model, BYTES, RowPool(512, 8), max_running=4, step_tokens=16, name="fake")


def call(name: str, choices: int = 1, max_tokens: int = 3, prompt: str = "ab") -> list[Request]:
    ids = tuple(prompt.encode())
    greedy = Sampling(temperature=0.0)
    return [Request(name, i, ids, max_tokens, sampling=greedy) for i in range(choices)]


async def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110  # what it waits for happens in a thread
            await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    load: Callable[[], Engine], max_open: int = 8, *, wait: bool = True
) -> AsyncIterator[Worker]:
    worker = Worker(load, max_open)
    worker.start()
    if wait:
        await until(lambda: worker.state is not State.LOADING)
    yield worker
    assert await asyncio.to_thread(worker.stop, 60)


async def read(mailbox: Mailbox) -> list[Delta]:
    deltas = []
    while not mailbox.ended or mailbox.waiting:
        deltas += await mailbox.take()
    return deltas


def test_b133_ready_after_a_test_generation_that_leaves_no_trace() -> None:
    model = FakeModel()

    async def main() -> None:
        async with running(lambda: engine_of(model)) as worker:
            assert worker.state is State.READY
            assert model.runs == 1
            await until(lambda: worker.snapshot.rows)
            now = worker.snapshot
            assert (now.rows_free, now.rows_idle, now.running) == (now.rows, 0, 0)
            totals = {n: getattr(now, n) for n in now._fields if n.endswith("_total")}
            assert set(totals.values()) == {0}
            await read(worker.submit(call("a")))
            assert worker.snapshot.prompt_tokens_total == 2
            assert worker.snapshot.generated_tokens_total == 3

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["load", "trial", "exit"])
def test_b133_a_failed_load_is_one_line_and_final(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    def load() -> Engine:
        if fault == "load":
            raise ValueError("weights.bin: not found")
        if fault == "exit":
            raise SystemExit("no GPU")
        return engine_of(FakeModel(raises_at=1))

    async def main() -> None:
        with caplog.at_level(logging.INFO, "onerow"):
            async with running(load) as worker:
                assert worker.state is State.FAILED
                with pytest.raises(Unavailable):
                    worker.submit(call("a"))

    asyncio.run(main())
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.CRITICAL]
    words = {"load": "weights.bin: not found", "trial": "test generation", "exit": "no GPU"}
    assert line.startswith("cannot start: ")
    assert words[fault] in line
    assert "\n" not in line


def test_work_is_refused_while_loading_and_draining() -> None:
    model = FakeModel()
    model.may_run.clear()

    async def main() -> None:
        async with running(lambda: engine_of(model), wait=False) as worker:
            await asyncio.to_thread(model.running.wait)
            assert worker.state is State.LOADING
            with pytest.raises(Unavailable):
                worker.submit(call("a"))
            model.may_run.set()
            await until(lambda: worker.state is State.READY)
            mailbox = worker.submit(call("a"))
            worker.drain()
            with pytest.raises(Unavailable):
                worker.submit(call("b"))
            assert not worker.idle
            assert sum(len(d.text) for d in await read(mailbox)) == 3
            assert worker.idle

    asyncio.run(main())


def test_a_signal_while_loading_is_not_forgotten_by_the_load() -> None:
    model = FakeModel()
    model.may_run.clear()

    async def main() -> None:
        async with running(lambda: engine_of(model), wait=False) as worker:
            worker.drain()
            model.may_run.set()
            await until(lambda: worker.served)
            assert worker.state is State.DRAINING

    asyncio.run(main())


def test_b102_admission_is_exact() -> None:
    model = FakeModel()

    async def main() -> None:
        async with running(lambda: engine_of(model), max_open=5) as worker:
            model.may_run.clear()
            worker.submit(call("a", 3))
            with pytest.raises(QueueFull):
                worker.submit(call("b", 3))
            second = worker.submit(call("c", 2))
            assert worker.open == 5
            with pytest.raises(QueueFull):
                worker.submit(call("d"))
            assert worker.abort("a")
            assert worker.open == 2
            third = worker.submit(call("e", 3))
            assert not worker.abort("a"), "an abort is counted once"
            assert not worker.abort("b"), "a refused call was never there"
            model.may_run.set()
            assert {d.index for d in await read(second)} == {0, 1}
            assert {d.index for d in await read(third)} == {0, 1, 2}
            assert worker.open == 0
            assert worker.idle

    asyncio.run(main())


def test_choices_that_end_make_room_before_their_call_ends() -> None:
    async def main() -> None:
        async with running(lambda: engine_of(FakeModel()), max_open=2) as worker:
            greedy = Sampling(temperature=0.0)
            short = Request("a", 0, (97,), 1, sampling=greedy)
            long = Request("a", 1, (97,), 40, sampling=greedy)
            mailbox = worker.submit([short, long])
            await until(lambda: worker.open == 1)
            assert not worker.idle
            await read(worker.submit(call("b")))
            await read(mailbox)
            assert worker.open == 0

    asyncio.run(main())


def test_b052_an_abort_takes_effect_within_one_step() -> None:
    model = FakeModel()

    async def main() -> None:
        async with running(lambda: engine_of(model)) as worker:
            mailbox = worker.submit(call("a", max_tokens=50))
            await mailbox.take()
            model.may_run.clear()
            await asyncio.to_thread(model.running.wait)
            runs = model.runs
            assert worker.abort("a")
            model.may_run.set()
            await until(lambda: worker.snapshot.running == 0)
            await until(lambda: worker.snapshot.rows_running == 0)
            await asyncio.sleep(0.02)
            assert model.runs == runs

    asyncio.run(main())


def test_an_abort_of_the_only_call_is_seen_in_the_snapshot_without_a_step() -> None:
    async def main() -> None:
        model = FakeModel()
        async with running(lambda: engine_of(model)) as worker:
            model.delay = 0.05
            worker.submit(call("a", max_tokens=50))
            await until(lambda: worker.snapshot.running == 1)
            worker.abort("a")
            await until(lambda: worker.snapshot.running + worker.snapshot.waiting == 0)

    asyncio.run(main())


def test_one_wake_up_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        model = FakeModel()
        async with running(lambda: engine_of(model)) as worker:
            loop = asyncio.get_running_loop()
            real, wakes = loop.call_soon_threadsafe, 0

            def counted(*args: object, **keywords: object) -> asyncio.Handle:
                nonlocal wakes
                wakes += 1
                return real(*args, **keywords)  # type: ignore[arg-type]

            monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
            runs = model.runs
            mailboxes = [worker.submit(call(str(i), max_tokens=8)) for i in range(4)]
            for mailbox in mailboxes:
                await read(mailbox)
            assert wakes <= model.runs - runs
            monkeypatch.undo()

    asyncio.run(main())


class Broken(Engine):
    def step(self) -> list[Event]:
        if self.model.runs:  # type: ignore[attr-defined]  # the trial was the first
            raise RuntimeError("a fault in the engine itself")
        return super().step()


def test_b028_a_fault_of_the_engine_ends_every_call_and_is_final() -> None:
    async def main() -> None:
        def load() -> Engine:
            pool = RowPool(512, 8)
            return Broken(FakeModel(), BYTES, pool, max_running=4, step_tokens=16)

        async with running(load) as worker:
            mailboxes = [worker.submit(call(name)) for name in "ab"]
            for mailbox in mailboxes:
                with pytest.raises(CallFailed) as caught:
                    await mailbox.take()
                assert caught.value.code == "engine_error"
            assert worker.state is State.FAILED
            assert worker.idle
            worker.drain()
            assert worker.state is State.FAILED

    asyncio.run(main())


def test_end_all_fails_what_is_open_after_what_has_come() -> None:
    async def main() -> None:
        model = FakeModel(holds_at=4)
        async with running(lambda: engine_of(model)) as worker:
            mailbox = worker.submit(call("a", max_tokens=50))
            await until(lambda: mailbox.waiting)
            worker.end_all("shutting_down", "bye")
            assert mailbox.ended
            assert "".join(d.text for d in await mailbox.take())
            with pytest.raises(CallFailed, match="bye"):
                await mailbox.take()
            with pytest.raises(CallFailed, match="bye"):
                await mailbox.take()
            model.may_run.set()
            await until(lambda: worker.snapshot.running == 0)

    asyncio.run(main())


def delta(index: int, text: str, n: int) -> Delta:
    return Delta("a", index, text, (), prompt_tokens=1, completion_tokens=n, cached_tokens=0)


def test_b038_deltas_of_a_slow_reader_are_joined() -> None:
    async def main() -> None:
        mailbox = Mailbox(2, patient=False)
        for n in range(SLOW):
            mailbox.put(delta(0, "x", n + 1))
            mailbox.put(delta(1, "y", n + 1))
        assert len(await mailbox.take()) == 2 * SLOW, "one event per token while it can keep up"
        for n in range(2 * SLOW):
            mailbox.put(delta(0, "x", n + 1))
            mailbox.put(delta(1, "y", n + 1))
        assert [(d.index, d.text, d.completion_tokens) for d in await mailbox.take()] == [
            (0, "x" * 2 * SLOW, 2 * SLOW),
            (1, "y" * 2 * SLOW, 2 * SLOW),
        ]

    asyncio.run(main())


def test_a_reader_waits_for_so_long_and_no_longer() -> None:
    async def main() -> None:
        mailbox = Mailbox(1, patient=False)
        start = time.perf_counter()
        assert await mailbox.take(start) == []
        assert await mailbox.take(start + 0.05) == []
        assert time.perf_counter() >= start + 0.05
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, mailbox.put, delta(0, "x", 1))
        (found,) = await mailbox.take(start + 20)
        assert found.text == "x"
        assert time.perf_counter() < start + 10

    asyncio.run(main())


def test_one_alarm_is_set_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        mailbox = Mailbox(1, patient=False)
        loop = asyncio.get_running_loop()
        real, alarms = loop.call_later, 0

        def counted(*args: object, **keywords: object) -> asyncio.TimerHandle:
            nonlocal alarms
            alarms += 1
            return real(*args, **keywords)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_later", counted)
        for n in range(100):
            loop.call_soon(mailbox.put, delta(0, "x", n + 1))
            assert await mailbox.take(time.perf_counter() + 20)
        assert alarms == 1
        monkeypatch.undo()

    asyncio.run(main())


def test_a_patient_reader_is_woken_once() -> None:
    async def main() -> None:
        async with running(lambda: engine_of(FakeModel())) as worker:
            mailbox = worker.submit(call("a", 2, max_tokens=5), patient=True)
            one, two = await mailbox.take()
            assert one.text == two.text
            assert len(one.text) == one.completion_tokens == 5
            assert mailbox.ended

    asyncio.run(main())


def test_joined_keeps_order_tokens_and_the_end() -> None:
    parts = [delta(1, "a", 1), delta(0, "b", 1), delta(1, "c", 2)]
    assert [(d.index, d.text, d.completion_tokens) for d in joined(parts)] == [
        (1, "ac", 2),
        (0, "b", 1),
    ]


def test_b044_a_patient_reader_gets_no_half_of_an_answer() -> None:
    async def main() -> None:
        mailbox = Mailbox(1, patient=True)
        mailbox.put(delta(0, "x", 1))
        mailbox.put(Failure("a", "engine_error", "no"))
        for _ in range(2):
            with pytest.raises(CallFailed, match="no"):
                await mailbox.take()

    asyncio.run(main())


def test_a_failure_before_anything_came() -> None:
    async def main() -> None:
        mailbox = Mailbox(1, patient=True)
        mailbox.put(Failure("a", "engine_error", "no"))
        with pytest.raises(CallFailed, match="no"):
            await mailbox.take()

    asyncio.run(main())
