"""Replayed decode steps, with the Triton kernel, on a GPU: what `tests/model/test_graphs.py` shows
of them on a CPU, and that they are replayed at all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.config import PRESETS, GPTConfig
from model.graphs import GraphRunner
from model.step import Sampling, Work
from tests import lanes, oracle
from tests.lanes import decoded
from tests.tiny import Driver, Text, arrays, config, gpt, prompt

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
