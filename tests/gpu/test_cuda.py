"""On CUDA: the same numbers as on the CPU in float32, and near them in bfloat16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.config import GPTConfig
from model.gpt import GPT
from model.runner import Runner
from model.sampler import sample
from model.step import Sampling, Work
from tests import oracle
from tests.tiny import GREEDY, Driver, Text, arrays, config, full_pass, gpt, prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SHAPES = [
    config(n_kv_head=2),
    GPTConfig(n_layer=4, n_head=12, d_model=768, n_ctx=1024, n_vocab=50257),
]


def on_cuda(shape: GPTConfig, dtype: torch.dtype = torch.float32) -> GPT:
    return gpt(shape, std=0.3 if shape.d_model < 100 else 0.05).to("cuda", dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logits_equal_the_cpus(shape: GPTConfig) -> None:
    """TF32 is off by default; if somebody switched it on, this says so."""
    tokens = prompt(200, shape.n_vocab)
    model = on_cuda(shape)
    found = full_pass(model, tokens).cpu()
    torch.testing.assert_close(found, full_pass(model.cpu(), tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_texts_equal_the_cpus_in_a_poisoned_mixed_batch(shape: GPTConfig) -> None:
    def texts() -> list[Text]:
        v = shape.n_vocab
        return [
            Text(prompt(1, v)),
            Text(prompt(30, v), chunk=7),
            Text(prompt(90, v), cached=False),
            Text(prompt(91, v), Sampling(seed=3, logprobs=2)),
            Text(prompt(40, v), Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)),
        ]

    model = on_cuda(shape)
    together = Driver(model, n_rows=600).generate(texts(), 40)
    alone = [Driver(model, n_rows=200).generate([text], 40)[0] for text in texts()]
    assert together == alone
    assert together == Driver(model.cpu(), n_rows=600).generate(texts(), 40)


def test_bfloat16_stays_near_the_definition() -> None:
    """Weights and rows in bfloat16, row by row: half a nat at worst, far less on average."""
    shape = config()
    tokens = prompt(100, shape.n_vocab)
    model = on_cuda(shape, torch.bfloat16)
    raw = oracle.log_softmax(oracle.logits(arrays(model.float().cpu()), shape, tokens))
    runner = Runner(model.to("cuda", torch.bfloat16), 100, torch.bfloat16)
    ids, rows = np.array(tokens, np.int32), np.arange(100, dtype=np.int32)
    errors = []
    for i in range(99):
        work = Work(ids[: i + 1], i, rows[: i + 1], 1, GREEDY, score=0, targets=ids[i + 1 : i + 2])
        (score,) = runner.run([work])[0].prompt_scores
        errors.append(abs(score.logprob - raw[i, tokens[i + 1]]))
    assert max(errors) < 0.5
    assert np.mean(errors) < 0.1


def test_the_sampler_says_the_same_on_both() -> None:
    logits = torch.tensor(np.random.default_rng(0).normal(0, 3, (60, 50257)).astype(np.float32))
    logits[5, 7] = torch.nan
    kinds = (GREEDY, Sampling(), Sampling(top_k=50), Sampling(top_p=0.9), Sampling(min_p=0.1))
    text = np.arange(20, dtype=np.int32)
    work = [Work(text, 0, text, 10, kinds[i % 5], banned=(i,)) for i in range(60)]
    expected, found = sample(logits, work), sample(logits.cuda(), work)
    assert [d.token for d in found] == [d.token for d in expected]
    assert [d.failed for d in found] == [i == 5 for i in range(60)]
