"""What a head looks at is what the network computes, and the last row is the same alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model.runner import Runner
from model.step import Inspection
from tests.tiny import config, gpt, hugging_face, prompt

TOKENS = prompt(23, 97)


def test_weights_are_those_of_another_hand() -> None:
    theirs, ours = hugging_face(0.3, n_layer=3, n_head=4, n_embd=48, n_positions=64, vocab_size=97)
    theirs.set_attn_implementation("eager")  # the one that tells its weights
    with torch.inference_mode():
        attentions = theirs(torch.tensor([TOKENS]), output_attentions=True).attentions
    runner = Runner(ours, n_rows=64)
    for layer in range(3):
        for head in range(4):
            seen = runner.inspect(TOKENS, layer, head)
            expected = attentions[layer][0, head].numpy()
            np.testing.assert_allclose(seen.weights, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_row_alone_is_the_last_row(n_kv_head: int, norm_first: bool) -> None:
    model = gpt(config(n_kv_head=n_kv_head, norm_first=norm_first))
    seen = Runner(model, n_rows=300).inspect(TOKENS, layer=2, head=3)
    np.testing.assert_allclose(seen.row, seen.weights[-1], rtol=0, atol=1e-5)
    check(seen, len(TOKENS))


@pytest.mark.parametrize("n", [1, 2])
def test_the_shortest(n: int) -> None:
    seen = Runner(gpt(config()), n_rows=300).inspect(TOKENS[:n], layer=0, head=0)
    check(seen, n)
    assert seen.weights[0, 0] == 1


def test_shapes() -> None:
    """Everything has a row per token; with the cache all but K and V have one."""
    seen = Runner(gpt(config(n_kv_head=2)), n_rows=300).inspect(TOKENS, layer=1, head=0)
    t, d_head, d_model = len(TOKENS), 12, 48
    assert {s.name: (s.uncached, s.cached) for s in seen.shapes} == {
        "Q": ((t, d_head), (1, d_head)),
        "K": ((t, d_head), (t, d_head)),
        "V": ((t, d_head), (t, d_head)),
        "S": ((t, t), (1, t)),
        "H": ((t, d_head), (1, d_head)),
        "Y": ((t, d_model), (1, d_model)),
    }
    assert all(shape.meaning for shape in seen.shapes)


def test_the_pool_is_left_alone() -> None:
    runner = Runner(gpt(config()), n_rows=300)
    runner.kv.fill_(7)
    runner.inspect(TOKENS, 1, 1)
    assert (runner.kv == 7).all()


def test_sixteen_bits() -> None:
    runner = Runner(gpt(config()).bfloat16(), n_rows=300, kv_dtype=torch.bfloat16)
    seen = runner.inspect(TOKENS, 2, 1)
    assert seen.weights.dtype == np.float32
    np.testing.assert_allclose(seen.row, seen.weights[-1], rtol=0, atol=0.05)


def check(seen: Inspection, n: int) -> None:
    """Shares of one, none of what is ahead, made of the scores by softmax."""
    assert seen.scores.shape == seen.weights.shape == (n, n)
    assert seen.row.shape == (n,)
    np.testing.assert_allclose(seen.weights.sum(axis=1), 1, rtol=1e-6)
    assert (np.triu(seen.weights, 1) == 0).all()
    shares = np.tril(np.exp(seen.scores - seen.scores.max(axis=1, keepdims=True)))
    np.testing.assert_allclose(
        seen.weights, shares / shares.sum(axis=1, keepdims=True), rtol=0, atol=1e-5
    )
