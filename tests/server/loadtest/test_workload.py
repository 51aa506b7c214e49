"""What is asked of the server: the same work for both arms, and nothing twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from server.loadtest.workload import (
    PRESETS,
    Arm,
    Load,
    Preset,
    Run,
    Workload,
    arrivals,
    plan,
    talks,
)

BOTH = (Arm.CACHED, Arm.UNCACHED)
QUICK = PRESETS["quick"]


def runs(*loads: Load, repeats: int = 2, seed: int = 0) -> list[Run]:
    return list(Workload({"context": list(loads)}, repeats).runs(BOTH, seed))


def prompts(several: list[Run]) -> list[tuple[int, ...]]:
    return [talk.parts[0] for run in several for talk in run.talks]


class TestRuns:
    def test_arms_take_turns(self) -> None:
        every = runs(Load(8), Load(16))
        assert [(r.load.context, r.arm) for r in every if r.repeat == 1] == [
            (8, Arm.CACHED), (8, Arm.UNCACHED), (16, Arm.CACHED), (16, Arm.UNCACHED),
        ]  # fmt: skip
        assert [r.arm for r in every if r.repeat == 2] == 2 * [Arm.UNCACHED, Arm.CACHED]

    def test_b119_arms_get_equal_work(self) -> None:
        shapes: dict[Arm, list[tuple[int, int, int]]] = {arm: [] for arm in BOTH}
        for run in runs(Load(12, turns=3), Load(16, tokens=5)):
            shapes[run.arm] += [
                (run.repeat, len(p), run.tokens) for t in run.talks for p in t.parts
            ]
        assert shapes[Arm.CACHED] == shapes[Arm.UNCACHED]

    def test_b115_every_prompt_is_new(self) -> None:
        every = prompts(runs(Load(8), Load(16), repeats=10))
        assert len(set(every)) == len(every) == 2 * 2 * (10 * 2 + 1)

    def test_a_seed_is_a_workload(self) -> None:
        assert runs(Load(8), seed=1) == runs(Load(8), seed=1)
        assert not set(prompts(runs(Load(8), seed=1))) & set(prompts(runs(Load(8), seed=2)))

    def test_warm_up_is_short(self) -> None:
        first = runs(Load(8, tokens=24, talks=9))[0]
        assert (first.repeat, first.tokens, len(first.talks)) == (0, 4, 1)


class TestTalks:
    def test_a_shared_beginning(self) -> None:
        several = [t.parts[0] for t in talks(Load(100, shared=0.75, talks=5), Arm.CACHED, 1, 0)]
        assert len({prompt[:75] for prompt in several}) == 1
        assert len({prompt[75:] for prompt in several}) == 5
        other = talks(Load(100, shared=0.75, talks=5), Arm.CACHED, 2, 0)
        assert other[0].parts[0][:75] != several[0][:75]

    def test_turns_make_up_the_context(self) -> None:
        load = Load(11, turns=3, tokens=4)
        for talk in talks(load, Arm.CACHED, 1, 0):
            assert [len(part) for part in talk.parts] == [5, 3, 3]
        assert load.longest == 11 + 3 * 4


class TestArrivals:
    def test_a_closed_loop_has_none(self) -> None:
        assert arrivals(Load(8), 3, random.Random(0)) == [None] * 3

    def test_poisson(self) -> None:
        """Pauses of mean 1/rate whose spread is their mean, and that know nothing of each other."""
        times = arrivals(Load(8, rate=4.0), 20_001, random.Random(0))
        gaps = np.diff(np.array(times, dtype=float))
        assert times[0] == 0
        assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
        assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
        assert np.mean(gaps > 1 / 4) == pytest.approx(np.exp(-1), abs=0.01)
        assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03

    def test_arms_meet_the_same_arrivals_and_repeats_do_not(self) -> None:
        load = Load(8, rate=4.0, talks=6)

        def times(arm: Arm, repeat: int) -> list[float | None]:
            return [talk.due for talk in talks(load, arm, repeat, 0)]

        assert times(Arm.CACHED, 1) == times(Arm.UNCACHED, 1) != times(Arm.CACHED, 2)


class TestPlan:
    def test_quick_on_the_embedded_model(self) -> None:
        work = plan(QUICK, {}, 512, None)
        assert [load.context for load in work.sweeps["context"]] == [32, 128, 256, 480]
        assert [load.concurrency for load in work.sweeps["concurrency"]] == [1, 2, 4]
        assert set(work.sweeps) == {"context", "concurrency", "rate", "shared", "turns"}

    @pytest.mark.parametrize("preset", PRESETS.values())
    @pytest.mark.parametrize("window", [512, 1024, None])
    def test_presets_fit(self, preset: Preset, window: int | None) -> None:
        for load in plan(preset, {}, window, None).loads:
            assert load.longest <= (window or 1024)
            assert load.turns <= load.context

    def test_given_several_times_is_swept_and_once_holds_for_all(self) -> None:
        work = plan(QUICK, {"context": [4, 8], "tokens": [3], "concurrency": [5]}, 512, 7)
        assert work.loads == [Load(4, 3, 5, talks=10), Load(8, 3, 5, talks=10)]
        assert work.repeats == 7
        assert work.seconds == float("inf")

    def test_everything_once(self) -> None:
        [load] = plan(QUICK, {"context": [4], "rate": [8.0]}, 512, None).loads
        assert (load.mode, load.concurrency, load.talks) == ("open loop", None, 16)

    def test_a_rate_with_a_limit(self) -> None:
        [load] = plan(QUICK, {"rate": [8.0], "concurrency": [1]}, 512, None).loads
        assert (load.rate, load.concurrency) == (8.0, 1)
        assert load.label == "context 128, 8 tokens, 8/s"

    def test_so_many_conversations_in_each_run(self) -> None:
        work = plan(QUICK, {"concurrency": [1, 8]}, 512, None, talks=5)
        assert [load.talks for load in work.loads] == [5, 8], "or 8 could not be at once"
        assert [len(run.talks) for run in work.runs(BOTH, 0) if run.repeat == 1] == [5, 5, 8, 8]
        [open_loop] = plan(QUICK, {"rate": [1.0], "concurrency": [8]}, 512, None, talks=5).loads
        assert open_loop.talks == 5, "where 8 are only the most"
        swept = plan(QUICK, {}, 512, None, talks=3)
        assert {load.talks for load in swept.loads} == {3, 4}
        assert swept.seconds == float("inf")  # what takes longer than the preset is what was asked
