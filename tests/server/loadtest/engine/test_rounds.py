"""Who is measured when, and what becomes of runs that others disturb."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from server.loadtest import conditions
from server.loadtest.engine import cores
from server.loadtest.engine.cells import Cell
from server.loadtest.engine.process import AnswerError, Process, ProcessError
from server.loadtest.engine.rounds import Pair, Record, Run, following, measure, prompts

A, B = Cell.read("decode-1x4"), Cell.read("prefill-2x6")


class Fake(Process):
    """Answers at once, and notes what it was asked."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self.name, self.asked, self.seen = name, asked, []  # type: ignore[var-annotated]
        self.trouble: dict[int, Exception] = {}  # by number of the call

    @property
    def cpu_seconds(self) -> float:
        return 0.0

    def generate(
        self, prompts: Sequence[Sequence[int]], new: int, *, use_cache: bool = True
    ) -> tuple[list[float], list[int]]:
        self.asked.append(f"{self.name} {len(prompts)}x{len(prompts[0])}")
        self.seen.append(prompts)
        if trouble := self.trouble.get(len(self.seen)):
            raise trouble
        return [0.5 + 0.25 * i for i in range(new)], [7]


class Table:
    """Two contenders who do two cells each."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.us, self.them = Fake("us", self.asked), Fake("them", self.asked)
        self.pairs: list[Pair] = [(cell, name) for cell in (A, B) for name in ("us", "them")]

    def measure(self, repeats: int = 2) -> Record:
        processes = {"us": self.us, "them": self.them}
        return measure(processes, self.pairs, repeats, n_vocab=90, seed=1, patience=0)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    monkeypatch.setattr(cores, "busy", lambda: None)
    return Table()


class TestOrder:
    def test_they_take_turns(self, table: Table) -> None:
        record = table.measure(repeats=2)
        turn = ["us 1x4", "them 1x4", "us 2x6", "them 2x6"]
        assert table.asked == 3 * turn  # warm-up first
        assert [run.number for run in record.runs] == [1] * 4 + [2] * 4
        assert not record.failures
        assert not record.gone

    def test_prompts_are_fresh_and_the_same_for_all(self, table: Table) -> None:
        table.measure(repeats=3)
        assert table.us.seen == table.them.seen
        texts = [tuple(text) for call in table.us.seen for text in call]
        assert len(set(texts)) == len(texts) == 4 * (1 + 2)
        assert all(0 <= token < 89 for text in texts for token in text)  # the last id ends texts

    def test_of_another_seed_they_are_others(self) -> None:
        assert prompts(A, 1, 90, seed=1) == prompts(A, 1, 90, seed=1)
        assert prompts(A, 1, 90, seed=1) != prompts(A, 1, 90, seed=2)

    def test_disturbed_runs_are_made_up_for(self) -> None:
        """After everyone else's, and not for ever."""
        pairs: list[Pair] = [(A, "us"), (A, "them")]
        record = Record()
        order = []
        while pair := following(pairs, record, repeats=2):
            name = pair[1]
            order.append(name)
            record.runs.append(Run(A, name, 1, [1.0, 2.0], [], 1.0, disturbed=name == "them"))
        assert order == ["us", "them", "us", "them", "them", "them"]


class TestTimes:
    def test_of_a_token(self, table: Table) -> None:
        for run in table.measure().runs:
            assert run.ms == (250 if run.cell is A else 500)

    def test_what_others_use_meanwhile(self, table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = count()
        monkeypatch.setattr(cores, "busy", lambda: 100.0 * next(ticks))
        record = table.measure(repeats=1)
        assert all(run.disturbed and run.other_cores for run in record.runs)
        assert len(record.runs) == 4 * (1 + 2)

    def test_a_tick_of_the_clock_is_noise(
        self, table: Table, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ticks = count()
        monkeypatch.setattr(cores, "busy", lambda: 0.001 * next(ticks))
        assert not any(run.disturbed for run in table.measure().runs)


class TestTrouble:
    def test_with_one_cell(self, table: Table) -> None:
        table.them.trouble[1] = AnswerError("too long")
        record = table.measure()
        assert record.failures == {(A, "them"): "too long"}
        assert not any((run.cell, run.name) == (A, "them") for run in record.runs)
        assert sum(run.name == "them" for run in record.runs) == 2

    def test_with_a_peer(self, table: Table) -> None:
        table.them.trouble[4] = ProcessError("it ended: Killed")
        record = table.measure()
        assert record.gone == {"them": "it ended: Killed"}
        assert table.asked.count("them 1x4") == 2
        assert sum(run.name == "us" for run in record.runs) == 4

    def test_ctrl_c_keeps_what_was_measured(self, table: Table) -> None:
        table.us.trouble[4] = KeyboardInterrupt()  # type: ignore[assignment]
        record = table.measure()
        assert record.interrupted
        assert [run.name for run in record.runs] == ["us", "them"]


class TestCores:
    def test_it_does_not_wait_for_ever(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = count()
        monkeypatch.setattr(cores, "LOOK", 0.01)
        monkeypatch.setattr(cores, "busy", lambda: float(next(ticks)))
        assert cores.wait_until_quiet(0.05) == 0

    def test_nor_at_all_where_it_is_quiet_or_nobody_knows(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for busy in (1.0, None):
            monkeypatch.setattr(cores, "busy", lambda busy=busy: busy)
            assert cores.wait_until_quiet(60) == 60

    def test_without_proc(self, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
        monkeypatch.setattr(cores, "PROC", tmp_path)
        monkeypatch.setattr(conditions, "CPU", tmp_path)
        assert cores.busy() is None
        assert cores.used(1) == 0
        assert cores.resident(1) is None
        assert conditions.processor()
