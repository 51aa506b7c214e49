"""Replayed decode steps, with the Triton kernel, on a GPU: what `tests/model/test_graphs.py` shows
of them on a CPU, and that they are replayed at all."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from model.config import PRESETS, GPTConfig
from model.graphs import GraphRunner
from model.rows import RowPool
from model.step import Model, Sampling, Work
from server.engine.engine import Engine
from tests import lanes, oracle
from tests.gpu.figures import OneByOne
from tests.lanes import decoded
from tests.server.engine.helpers import BYTES, Client, request
from tests.tiny import GREEDY, Driver, Text, arrays, config, gpt, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SHAPES = [config(n_kv_head=2), PRESETS["gpt2"]]
KINDS = (Sampling(temperature=0.0), Sampling(seed=3), Sampling(temperature=0.8, top_k=20, seed=4))


def texts(shape: GPTConfig) -> list[Text]:
    lengths = (1, 2, 30, 64, 65, 90, 150)
    return [Text(prompt(n, shape.n_vocab), KINDS[i % 3]) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_texts_equal_eager_ones_in_a_poisoned_mixed_batch(shape: GPTConfig) -> None:
    from model import triton_attention

    model = gpt(shape, std=0.3 if shape.d_model < 100 else 0.05).to("cuda")
    driver = lanes.driver(model, 7, backend=triton_attention.attend)
    together = driver.generate(texts(shape), 40)
    assert decoded(driver) == 39
    assert together == Driver(model).generate(texts(shape), 40)
    alone = lanes.driver(model, 1, backend=triton_attention.attend)
    assert together == [alone.generate([text], 40)[0] for text in texts(shape)]


def test_bfloat16_stays_near_the_definition() -> None:
    """Row by row, weights and rows in bfloat16: the bound that eager steps keep."""
    from model import triton_attention

    shape = config(n_kv_head=2)
    tokens = prompt(100, shape.n_vocab)
    model = gpt(shape).to("cuda", torch.bfloat16)
    raw = oracle.log_softmax(oracle.logits(arrays(model.float().cpu()), shape, tokens))
    runner = GraphRunner(
        model.to("cuda", torch.bfloat16),
        100,
        torch.bfloat16,
        n_lanes=4,
        lane_backend=triton_attention.attend,
    )
    ids, rows = np.array(tokens, np.int32), np.arange(100, dtype=np.int32)
    errors = []
    for i in range(100):
        work = Work(ids[: i + 1], i, rows[: i + 1], 1, Sampling(temperature=0.0, logprobs=0))
        assert runner.decodes([work])
        (draw,) = runner.run([work])
        assert draw.score is not None
        errors.append(abs(draw.score.logprob - raw[i, draw.score.token]))
    assert max(errors) < 0.5
    assert np.mean(errors) < 0.1


def test_a_replayed_step_allocates_nothing_and_calls_no_python() -> None:
    from model import triton_attention

    model = gpt(config()).to("cuda")
    driver = lanes.driver(model, 4, backend=triton_attention.attend)
    three = [Text(prompt(n, 97)) for n in (3, 30, 90)]
    driver.step(three)

    def called(*_: object) -> None:
        raise AssertionError("the network was called")

    hook = model.register_forward_pre_hook(called)
    driver.step(three)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    work = [text.work(driver.pool.take(1)) for text in three]
    draws = driver.runner.run(work)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    hook.remove()
    assert not any(draw.failed for draw in draws)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_that_are_launched_ahead_draw_what_eager_ones_draw(shape: GPTConfig) -> None:
    """Lanes leave, change places and buckets; none asks for more than a temperature."""
    from model import triton_attention

    model = gpt(shape, std=0.3 if shape.d_model < 100 else 0.05).to("cuda")
    reference = Driver(model)
    driver = lanes.driver(model, 7, backend=triton_attention.attend)
    mine, theirs = (
        [Text(text.tokens, KINDS[i % 2]) for i, text in enumerate(texts(shape))] for _ in range(2)
    )
    orders = [[0, 1, 2, 3, 4, 5, 6], *([[6, 5, 3, 1], [1, 3, 5, 6], [3, 6]] * 10)]
    orders = [*orders[:1], *sorted(orders[1:], key=len, reverse=True)]
    assert driver.step(mine) == reference.step(theirs)
    expected = [reference.step([theirs[i] for i in order]) for order in orders]
    assert lanes.steps_ahead(driver, mine, orders) == expected


def test_an_engine_says_the_same_one_step_ahead() -> None:
    from model import triton_attention

    model = gpt(config(n_layer=2, n_ctx=128, n_vocab=BYTES.n_vocab)).to("cuda")

    def tokens(ahead: bool) -> list[list[int]]:
        pool = RowPool(2000, 8)
        runner = GraphRunner(
            model, 2000, torch.float32, n_lanes=8, lane_backend=triton_attention.attend
        )
        served: Model = runner if ahead else OneByOne(runner)
        client = Client(Engine(served, BYTES, pool, max_running=8, step_tokens=64))
        answers = [
            client.submit(
                request(
                    f"{i} text" * i,
                    60 - i,
                    sampling=KINDS[i % 2],
                    stop_ids=frozenset(range(5 * (i % 3))),
                )
            )[0]
            for i in range(1, 13)
        ]
        client.run()
        return [answer.tokens for answer in answers]

    assert tokens(ahead=True) == tokens(ahead=False)


def test_nobody_waits_for_a_step_but_its_reader() -> None:
    """Launches return while the device is busy, and a step is read while the device is busy with
    what is behind it.
    """
    from model import triton_attention

    model = gpt(config()).to("cuda")
    runner = GraphRunner(model, 9, torch.float32, n_lanes=1, lane_backend=triton_attention.attend)
    runner.kv.zero_()
    rows = np.arange(3, dtype=np.int32)
    steps = [
        Work(np.array([5, 6, last][:n], np.int32), n - 1, rows[:n], 1, GREEDY)
        for n, last in ((2, 0), (3, -1))
    ]
    torch.cuda.synchronize()
    second = 2 * 10**9  # clock ticks: about that, or more
    start = time.perf_counter()
    torch.cuda._sleep(second)
    first, behind = (runner.launch([step]) for step in steps)
    torch.cuda._sleep(second)
    assert time.perf_counter() - start < 0.3
    first.read()
    assert not torch.cuda.current_stream().query()  # the device is still at it
    behind.read()
