"""The way back, checked twice: by trying each number a little up and down, and by PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.gradients import (
    MultiHeadGradients,
    attention_backward,
    finite_differences,
    multi_head_backward,
    softmax_backward,
)
from model.reference import (
    Array,
    Mask,
    Projections,
    attention,
    causal_mask,
    multi_head,
    padding_mask,
    softmax,
)

B, T, S, D_MODEL, D_K, D_V, N_HEAD = 2, 3, 4, 5, 7, 11, 2
MATRICES = ("q", "k", "v", "o")
INPUTS = ("x_q", "x_k", "x_v")
MASKS = {
    "none": None,
    "causal": causal_mask(T, S),
    "causal and padding": causal_mask(T, S) & padding_mask([4, 2], S),
}

Rng = np.random.Generator


def relative_error(a: Array | Tensor, b: Array | Tensor) -> float:
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(b).max())


@pytest.fixture
def rng() -> Rng:
    return np.random.default_rng(1)


@pytest.fixture(params=[1, 2, 4])
def w(request: pytest.FixtureRequest, rng: Rng) -> Projections:
    """Four heads that share one, two or four key heads."""
    return Projections.random(rng, D_MODEL, D_K, D_V, 4, request.param)


def test_softmax(rng: Rng) -> None:
    x, grad = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    tried = finite_differences(lambda x: (softmax(x) * grad).sum(), x)
    assert relative_error(softmax_backward(grad, softmax(x)), tried) < 1e-6


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
class TestAttention:
    def inputs(self, rng: Rng) -> tuple[Array, Array, Array, Array]:
        q, k = rng.normal(size=(B, N_HEAD, T, D_K)), rng.normal(size=(B, N_HEAD, S, D_K))
        return q, k, rng.normal(size=(B, N_HEAD, S, D_V)), rng.normal(size=(B, N_HEAD, T, D_V))

    def test_by_trying(self, rng: Rng, mask: Mask | None) -> None:
        q, k, v, grad = self.inputs(rng)

        def loss(q: Array, k: Array, v: Array) -> float:
            return float((attention(q, k, v, mask).out * grad).sum())

        tried = (
            finite_differences(lambda part: loss(part, k, v), q),
            finite_differences(lambda part: loss(q, part, v), k),
            finite_differences(lambda part: loss(q, k, part), v),
        )
        by_hand = attention_backward(grad, attention(q, k, v, mask))
        for ours, theirs in zip(by_hand, tried, strict=True):
            assert relative_error(ours, theirs) < 1e-6

    def test_by_pytorch(self, rng: Rng, mask: Mask | None) -> None:
        q, k, v, grad = self.inputs(rng)
        tensors = [torch.from_numpy(part).requires_grad_() for part in (q, k, v)]
        attn_mask = None if mask is None else torch.from_numpy(mask)
        out = F.scaled_dot_product_attention(tensors[0], tensors[1], tensors[2], attn_mask)
        expected = torch.autograd.grad(out, tensors, torch.from_numpy(grad))
        by_hand = attention_backward(grad, attention(q, k, v, mask))
        for ours, theirs in zip(by_hand, expected, strict=True):
            assert relative_error(ours, theirs) < 1e-12


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
class TestMultiHead:
    """Three different inputs: queries from one sequence, keys and values from two others."""

    def inputs(self, rng: Rng) -> tuple[dict[str, Array], Array]:
        lengths = dict(zip(INPUTS, (T, S, S), strict=True))
        x = {name: rng.normal(size=(B, n, D_MODEL)) for name, n in lengths.items()}
        return x, rng.normal(size=(B, T, D_MODEL))

    def by_hand(
        self, x: dict[str, Array], w: Projections, mask: Mask | None, grad: Array
    ) -> dict[str, Array]:
        return named(multi_head_backward(grad, multi_head(**x, w=w, mask=mask)))

    def test_by_trying(self, rng: Rng, w: Projections, mask: Mask | None) -> None:
        x, grad = self.inputs(rng)
        by_hand = self.by_hand(x, w, mask, grad)

        def loss(name: str, part: Array) -> float:
            inputs = {**x, name: part} if name in INPUTS else x
            changes: dict[str, Any] = {} if name in INPUTS else {name: part}
            return float((multi_head(**inputs, w=replace(w, **changes), mask=mask).y * grad).sum())

        for name, part in (x | {name: getattr(w, name) for name in MATRICES}).items():
            tried = finite_differences(partial(loss, name), part)
            assert relative_error(by_hand[name], tried) < 1e-6, name

    def test_by_pytorch(self, rng: Rng, w: Projections, mask: Mask | None) -> None:
        x, grad = self.inputs(rng)
        arrays = x | {name: getattr(w, name) for name in MATRICES}
        t = {name: torch.from_numpy(part).requires_grad_() for name, part in arrays.items()}
        y = torch_multi_head(t, w, mask)
        expected = torch.autograd.grad(y, list(t.values()), torch.from_numpy(grad))
        by_hand = self.by_hand(x, w, mask, grad)
        for name, gradient in zip(t, expected, strict=True):
            assert relative_error(by_hand[name], gradient) < 1e-12, name


def named(gradients: MultiHeadGradients) -> dict[str, Array]:
    inputs = {name: getattr(gradients, name) for name in INPUTS}
    return inputs | {name: getattr(gradients.w, name) for name in MATRICES}


def torch_multi_head(t: dict[str, Tensor], w: Projections, mask: Mask | None) -> Tensor:
    q, k, v = (
        (t[f"x_{name}"] @ t[name]).unflatten(-1, (n, -1)).transpose(1, 2)
        for name, n in (("q", w.n_head), ("k", w.n_kv_head), ("v", w.n_kv_head))
    )
    attn_mask = None if mask is None else torch.from_numpy(mask)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(2) @ t["o"]


class TestSharedInput:
    """Self-attention: one input in three places, so its gradient is the sum of three."""

    @pytest.fixture
    def loss(self, rng: Rng, w: Projections) -> tuple[Array, Array, Callable[[Array], float]]:
        x, grad = rng.normal(size=(B, T, D_MODEL)), rng.normal(size=(B, T, D_MODEL))

        def of(x: Array) -> float:
            return float((multi_head(x, x, x, w, causal_mask(T, T)).y * grad).sum())

        return x, grad, of

    def test_by_trying(
        self, w: Projections, loss: tuple[Array, Array, Callable[[Array], float]]
    ) -> None:
        x, grad, of = loss
        gradients = multi_head_backward(grad, multi_head(x, x, x, w, causal_mask(T, T)))
        assert relative_error(gradients.x, finite_differences(of, x)) < 1e-6
        assert relative_error(gradients.x_q, gradients.x) > 0.01  # no single one would do

    def test_no_row_acts_on_an_earlier_one(self, rng: Rng, w: Projections) -> None:
        """The Jacobian of output row n by input row m > n is zero, and not merely small."""
        x = rng.normal(size=(1, T, D_MODEL))
        made = multi_head(x, x, x, w, causal_mask(T, T))
        for n, column in np.ndindex(T, D_MODEL):
            grad = np.zeros_like(x)
            grad[0, n, column] = 1.0
            jacobian_row = multi_head_backward(grad, made).x[0]
            assert (jacobian_row[n + 1 :] == 0.0).all()
            assert (jacobian_row[: n + 1] != 0.0).all()


def test_a_gradient_has_its_inputs_shape(rng: Rng) -> None:
    w = Projections.random(rng, D_MODEL, D_K, D_V, N_HEAD, N_HEAD)
    x = rng.normal(size=(B, T, D_MODEL))
    gradients = multi_head_backward(x, multi_head(x, x, x, w))
    for field in fields(Projections):
        assert np.shape(getattr(gradients.w, field.name)) == np.shape(getattr(w, field.name))
