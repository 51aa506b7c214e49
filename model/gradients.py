"""The way back through `model/reference.py`, by hand: what each number did to the result.

Each function takes the gradient of some scalar with respect to an output, and what the forward pass
kept; it returns the gradients with respect to the inputs, each of its input's shape. An entry that
the mask hid has weight 0, and its gradient is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from model.reference import Array, Attended, MultiHead, Projections, combine_heads, split_heads


def softmax_backward(grad: Array, weights: Array) -> Array:
    """grad, weights `(..., S)` -> `(..., S)`: a weight can only grow at the cost of the others."""
    shared: Array = (grad * weights).sum(axis=-1, keepdims=True)
    return weights * (grad - shared)


def attention_backward(grad: Array, made: Attended) -> tuple[Array, Array, Array]:
    """grad `(..., T, d_v)` -> those of q `(..., T, d_k)`, k `(..., S, d_k)`, v `(..., S, d_v)`.

    This is the single-head backward pass that 004 §20.3 calls for each head.
    """
    grad_v = made.weights.swapaxes(-1, -2) @ grad
    grad_weights = grad @ made.v.swapaxes(-1, -2)
    grad_scores = softmax_backward(grad_weights, made.weights) / math.sqrt(made.q.shape[-1])
    return grad_scores @ made.k, grad_scores.swapaxes(-1, -2) @ made.q, grad_v


class MultiHeadGradients(NamedTuple):
    """One for every input, because three different inputs may have come in, and one per matrix."""

    x_q: Array  # (B, T, d_model)
    x_k: Array  # (B, S, d_model)
    x_v: Array  # (B, S, d_model)
    w: Projections

    @property
    def x(self) -> Array:
        """Of one input that was used three times: it acted on three ways, and they add up.

        `(B, T, d_model)` [004 §20.3; the last of its key equations].
        """
        return self.x_q + self.x_k + self.x_v


def multi_head_backward(grad: Array, made: MultiHead) -> MultiHeadGradients:
    """grad of Y `(B, T, d_model)` -> those of the inputs and matrices [004 (20.2), (20.3)].

    Rearranging has no parameters, and its gradient is the rearrangement back.
    """
    w = made.w
    grad_joined = grad @ w.o.T  # (20.2)
    grad_q, grad_k, grad_v = attention_backward(split_heads(grad_joined, w.n_head), made.heads)
    grad_q = combine_heads(grad_q)
    grad_k = combine_heads(_unshare(grad_k, w.n_kv_head))
    grad_v = combine_heads(_unshare(grad_v, w.n_kv_head))
    return MultiHeadGradients(
        x_q=grad_q @ w.q.T,
        x_k=grad_k @ w.k.T,
        x_v=grad_v @ w.v.T,
        w=Projections(
            q=_of_matrix(made.x_q, grad_q),  # (20.3)
            k=_of_matrix(made.x_k, grad_k),
            v=_of_matrix(made.x_v, grad_v),
            o=_of_matrix(made.joined, grad),  # (20.2)
            n_head=w.n_head,
            n_kv_head=w.n_kv_head,
        ),
    )


def _unshare(grad: Array, n_kv_head: int) -> Array:
    """`(B, n_head, S, d)` -> `(B, n_kv_head, S, d)`: the sum over the heads that shared one."""
    batch, n_head, length, width = grad.shape
    grouped = grad.reshape(batch, n_kv_head, n_head // n_kv_head, length, width)
    total: Array = grouped.sum(axis=2)
    return total


def _of_matrix(x: Array, grad: Array) -> Array:
    """Of W in x W, over all rows of all sequences: `(B, T, m)`, `(B, T, n)` -> `(m, n)`."""
    total: Array = np.einsum("btm,btn->mn", x, grad)
    return total


def finite_differences(f: Callable[[Array], float], x: Array, step: float = 1e-5) -> Array:
    """The gradient of f at x by trying: each number a little up, a little down. Of x's shape."""
    gradient = np.empty_like(x)
    for index in np.ndindex(x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (f(up) - f(down)) / (2 * step)
    return gradient
