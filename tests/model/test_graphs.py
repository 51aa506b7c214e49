"""A captured decode step says what an eager one says. On a CPU it is called, not replayed; what
only a GPU can show is in `tests/gpu`."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.profiler import profile

from model.gpt import GPT
from model.graphs import buckets, choose, is_plain
from model.lanes import Staging
from model.rows import RowPool
from model.runner import Runner
from model.sampler import sample
from model.step import RunsAhead, Sampling, Work
from tests import lanes
from tests.lanes import Counted, Late, decoded
from tests.tiny import GREEDY, Driver, Text, config, gpt, prompt

N_VOCAB = 97
CPU = torch.device("cpu")
KINDS = (GREEDY, Sampling(seed=7), Sampling(seed=7, copy=1), Sampling(temperature=0.6, seed=3))
# What a graph leaves to the sampler: one setting each that is not neutral.
MORE: dict[str, Any] = {
    "top_k": 5,
    "top_p": 0.8,
    "min_p": 0.1,
    "logit_bias": ((3, 9.0),),
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.3,
    "logprobs": 2,
}


@pytest.fixture(scope="module")
def model() -> GPT:
    return gpt(config(n_kv_head=2))


def runner_of(model: GPT) -> Counted:
    """Four lanes on a small pool."""
    return Counted(model, 20, torch.float32, n_lanes=4, lane_backend=lanes.attend)


def texts() -> list[Text]:
    """Different lengths and kinds, and lanes that change their sequence whenever one ends."""
    return [Text(prompt(n, N_VOCAB), KINDS[i % 4]) for i, n in enumerate((1, 2, 30, 60, 3, 90))]


def test_texts_are_those_of_eager_steps(model: GPT) -> None:
    """Free rows and scratch are full of NaN; the prompts go the eager way, all else the other."""
    driver = lanes.driver(model, n_lanes=6)
    together = driver.generate(texts(), 30)
    assert decoded(driver) == 29
    assert together == Driver(model).generate(texts(), 30)
    assert together == [lanes.driver(model, 1).generate([text], 30)[0] for text in texts()]


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.permutations(range(6)).flatmap(lambda p: st.integers(1, 6).map(lambda n: p[:n])))
)
def test_any_sequence_may_take_any_lane_at_any_time(model: GPT, steps: list[list[int]]) -> None:
    """Every step has its own sequences in its own order; buckets are padded."""
    one, other = lanes.driver(model, n_lanes=6), Driver(model)
    mine, theirs = texts(), texts()
    for order in [list(range(6)), *steps]:
        assert one.step([mine[i] for i in order]) == other.step([theirs[i] for i in order])
    assert decoded(one) == len(steps)


@pytest.mark.parametrize("field", MORE)
def test_settings_beyond_temperature_are_the_samplers(model: GPT, field: str) -> None:
    """Beside plain ones, in the same captured step."""

    def wanted() -> list[Text]:
        plain = texts()[:4]
        return [*plain, Text(prompt(9, N_VOCAB), replace(KINDS[3], **{field: MORE[field]}))]

    driver = lanes.driver(model, n_lanes=8)
    assert driver.generate(wanted(), 12) == Driver(model).generate(wanted(), 12)
    assert decoded(driver) == 11


def test_every_setting_is_either_in_the_graph_or_left_to_the_sampler() -> None:
    text = np.arange(3, dtype=np.int32)
    for field in fields(Sampling):
        if field.name in ("temperature", "seed", "copy"):
            continue
        sampling = replace(GREEDY, **{field.name: MORE[field.name]})
        assert not is_plain(Work(text, 2, text, 1, sampling))
    assert not is_plain(Work(text, 2, text, 1, GREEDY, banned=(1,)))
    assert is_plain(Work(text, 2, text, 1, GREEDY))
    assert is_plain(Work(text, 2, text, 1))


def test_a_token_may_be_banned_or_not_asked_for(model: GPT) -> None:
    tokens, rows = np.array(prompt(9, N_VOCAB), np.int32), np.arange(9, dtype=np.int32)
    runner, eager = runner_of(model), Runner(model, 20)
    for kind in (runner, eager):
        kind.run([Work(tokens[:8], 0, rows[:8], 8)])
    (best,) = eager.run([Work(tokens, 8, rows, 8, GREEDY)])
    assert best.token is not None
    work = [
        Work(tokens, 8, rows, 8, None),
        Work(tokens, 8, rows, 8, GREEDY, banned=(best.token,)),
        Work(tokens, 8, rows, 8, GREEDY),
    ]
    draws = runner.run(work)
    assert runner.decoded == 1
    assert draws == eager.run(work)
    assert draws[0].token is None
    assert draws[1].token != draws[2].token == best.token


def test_what_is_no_decode_step_is_left_to_eager_steps(model: GPT) -> None:
    tokens = np.array(prompt(9, N_VOCAB), np.int32)
    one = Work(tokens, 8, np.arange(9, dtype=np.int32), 8, GREEDY)
    runner = runner_of(model)
    assert runner.decodes([one] * 4)
    assert not runner.decodes([one] * 5)
    assert not runner.decodes([one, replace(one, start=7)])
    assert not runner.decodes([replace(one, score=0, targets=tokens[:1])])


def test_not_a_number_fails_one_lane_alone(model: GPT) -> None:
    for kind in KINDS:
        one, other = lanes.driver(model, n_lanes=4), Driver(model)
        mine, theirs = ([Text(prompt(n, N_VOCAB), kind) for n in (20, 21, 22)] for _ in range(2))
        for driver, among in ((one, mine), (other, theirs)):
            driver.step(among)
            driver.runner.kv[1, 1, among[1].rows[3]] = np.nan
        draws = one.step(mine)
        assert [draw.failed for draw in draws] == [False, True, False]
        assert draws == other.step(theirs)
        assert decoded(one) == 1


def test_infinite_logits_fail() -> None:
    """A single one of them, whose hidden state is as it should be."""
    broken = gpt(config(tied_head=False))
    broken.lm_head.weight[50, 0] = torch.inf
    for sampling in KINDS[:2]:
        draws = [
            driver.step([Text([5], sampling)])
            for driver in (lanes.driver(broken, n_lanes=1), Driver(broken))
        ]
        assert draws[0] == draws[1]
        assert draws[0][0].failed


def test_a_token_may_come_from_the_last_draw_of_another_lane(model: GPT) -> None:
    """Nobody need have read it: -1 - i stands for what lane i drew last, whatever the bucket."""
    reference, driver = Driver(model), lanes.driver(model, n_lanes=4)
    both = [texts()[2:5], texts()[2:5]]
    for one, among in zip((reference, driver), both, strict=True):
        one.step(among)
        one.step(among)
    expected = reference.step([both[0][2], both[0][0]])
    work = [both[1][i].work(driver.pool.take(1)) for i in (2, 0)]
    for w, lane in zip(work, (2, 0), strict=True):
        w.tokens[-1] = -1 - lane
    assert driver.runner.run(work) == expected


def test_a_lane_that_failed_has_a_successor_all_the_same(model: GPT) -> None:
    """The step after it is launched before anyone knows; what it makes is thrown away."""
    driver = lanes.driver(model, n_lanes=1)
    driver.runner.kv.fill_(torch.nan)
    tokens, rows = np.array([5, 6, -1], np.int32), np.arange(3, dtype=np.int32)
    first = Work(tokens[:2], 1, rows[:2], 1, GREEDY)
    assert driver.runner.run([first])[0].failed
    assert driver.runner.run([Work(tokens, 2, rows, 1, GREEDY)])[0].failed


@pytest.mark.parametrize("hurries", [False, True])
def test_steps_are_launched_ahead_of_those_that_are_not_read(model: GPT, hurries: bool) -> None:
    """Whether the device is behind or has done all; lanes leave, change places and buckets."""
    reference, driver = Driver(model), Driver(model)
    driver.runner = Late(model, driver.pool, 6, lambda: hurries)
    orders = [[0, 1, 2, 3, 4, 5], [5, 3, 1], [1, 3, 5], [5, 1], [1]]
    theirs, mine = texts(), texts()
    assert driver.step(mine) == reference.step(theirs)
    expected = [reference.step([theirs[i] for i in order]) for order in orders]
    assert lanes.steps_ahead(driver, mine, orders) == expected


def test_memory_is_not_written_anew_while_an_unread_step_is_sent_from_it(model: GPT) -> None:
    pool = RowPool(20, 8)
    runner = Late(model, pool, 2, lambda: False)
    rows = pool.take(4)
    steps = [Work(np.array([5], np.int32), 0, rows[i : i + 1], 1, GREEDY) for i in range(4)]
    for step in steps:  # of a call that fails, nothing is ever read
        last = runner.launch([step])
    last.read()
    assert runner.kv[:, :, rows].isfinite().all()


def test_a_reader_waits_for_its_own_step_and_no_other(model: GPT) -> None:
    """By an event in the stream, behind the copies of the step."""
    seen: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self) -> None:
            seen.append(f"record {self.name}")

        def synchronize(self) -> None:
            seen.append(f"wait for {self.name}")

    runner = runner_of(model)
    for slot, name in zip(runner._slots, "ab", strict=True):
        vars(slot)["done"] = Event(name)
    tokens, rows = np.array(prompt(2, N_VOCAB), np.int32), np.arange(2, dtype=np.int32)
    first, second = (runner.launch([Work(tokens, 1, rows, 1, GREEDY)]) for _ in range(2))
    assert seen == ["wait for a", "record a", "wait for b", "record b"]
    first.read()
    second.read()
    assert seen[4:] == ["wait for a", "wait for b"]


def test_who_may_be_followed(model: GPT) -> None:
    """A step whose tokens are drawn on the device. Plain runners have no such steps."""
    tokens, rows = np.array(prompt(9, N_VOCAB), np.int32), np.arange(9, dtype=np.int32)
    runner = runner_of(model)
    one = Work(tokens, 8, rows, 8, GREEDY)
    assert runner.launch([one, replace(one, sampling=None)]).leads
    assert not runner.launch([one, replace(one, start=0)]).leads
    assert not runner.launch([one, replace(one, banned=(1,))]).leads
    assert not runner.launch([one, replace(one, sampling=Sampling(logprobs=0))]).leads
    assert isinstance(runner, RunsAhead)
    assert not isinstance(Runner(model, 20), RunsAhead)


def test_the_lowest_of_the_best_tokens_wins() -> None:
    """From 30 on, and from 60 on, tokens have the same logit to the last bit; one is the best."""
    even = gpt(config(tied_head=False))
    even.lm_head.weight[:] = 0
    even.lm_head.weight[30:60, 0] = 1
    even.lm_head.weight[60:, 0] = -1
    text = Text([5])
    lanes.driver(even, n_lanes=2).generate([text], 9)
    assert set(text.made) <= {30, 60}


def test_noise_draws_what_the_sampler_draws() -> None:
    """Also at temperatures near zero, and between two tokens that have no chance."""
    logits = torch.tensor(np.random.default_rng(0).normal(0, 3, (60, 999)).astype(np.float32))
    text = np.arange(20, dtype=np.int32)
    heats = (0.0, 1e-60, 0.1, 1.0, 2.0)
    work = [
        Work(text[: 5 + i % 7], 4 + i % 7, text[: 5 + i % 7], 1, Sampling(heats[i % 5], seed=i))
        for i in range(60)
    ]
    staging = Staging(64, 30, 999, CPU)
    staging.send(staging.write(staging.block(), work, 64, drawing=True))
    padded = torch.cat([logits, torch.zeros(4, 999)])
    tokens = choose(padded, staging.lanes(64))[:60].tolist()
    assert tokens == [draw.token for draw in sample(logits, work)]


def test_the_ends_of_noise_draw_tokens_that_have_a_chance() -> None:
    noise = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    lanes = Staging(2, 1, 0, CPU).lanes(2)._replace(noise=noise, heat=torch.ones_like(noise))
    for chances in ([1.0], [1.0, 1.0, 1.0], [0.3] * 7):
        logits = torch.tensor([0.0, *chances, 0.0]).log().expand(2, -1)
        assert choose(logits, lanes).tolist() == [1, len(chances)]


def test_lanes_are_told_what_the_work_says() -> None:
    staging = Staging(4, 5, scratch=77, device=CPU)
    block = staging.block()
    a, b = np.array([4, 5, 6], np.int32), np.array([9], np.int32)
    for _ in range(2):  # the second time over what the first one left
        both = [Work(a, 2, a * 10, 1, Sampling(0.5, seed=1)), Work(b, 0, b * 2, 1)]
        staging.send(staging.write(block, both, 4, True))
    told = staging.lanes(4)
    assert told.tokens.tolist() == [6, 9, 0, 0]
    assert told.positions.tolist() == [2, 0, 0, 0]
    assert told.write.tolist() == [60, 18, 77, 77]
    assert told.heat.tolist() == [0.5, 0, 0, 0]
    assert told.rows[told.starts[0] :][:2].tolist() == [40, 50]
    assert told.rows[told.starts[1]] == 18
    full = np.arange(5, dtype=np.int32)
    staging.send(staging.write(block, [Work(full, 4, full + i, 1) for i in range(4)], 4))
    told = staging.lanes(4)
    assert [told.rows[s : s + 4].tolist() for s in told.starts] == [
        list(range(i, i + 4)) for i in range(4)
    ]
    assert told.heat.tolist() == [0] * 4


@pytest.mark.parametrize("drawing", [False, True])
def test_a_step_neither_waits_for_the_device_nor_sends_to_it(model: GPT, drawing: bool) -> None:
    """No number is read, no size depends on one, no constant becomes a tensor on the way."""
    runner = runner_of(model)
    runner.lane_backend = lambda q, k, v, pool_layer, lanes: q
    with torch.inference_mode(), profile() as profiled:
        runner._steps[4, drawing]()
    seen = {event.name for event in profiled.function_events}
    assert "aten::embedding" in seen
    assert ("aten::searchsorted" in seen) == drawing
    assert not seen & {"aten::item", "aten::nonzero", "aten::scalar_tensor", "aten::lift_fresh"}


def test_buckets_double() -> None:
    assert buckets(1) == [1]
    assert buckets(6) == [1, 2, 4, 6]
    assert buckets(64) == [1, 2, 4, 8, 16, 32, 64]
