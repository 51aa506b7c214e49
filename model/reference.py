"""The mathematics written plainly, in NumPy and float64: the oracle of the fast code.

It reads from top to bottom: one dot product, the grid of all of them, attention, many heads, the
cache, and at last the whole network. `model/gradients.py` walks the way back. Every step keeps
what it made, so that the way back and a curious reader find it. Nothing that serves imports this.

B counts sequences, H heads, T queries and S keys; d_model is the width of a token, d_k that of a
query or key, d_v that of a value. Brackets name the source documents, 000, 001 and 004, and the
equations of 004. A mask is True where a query may look at a key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.config import Activation, GPTConfig

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


# Scores: how much every query has in common with every key.


def scores_by_loops(q: Array, k: Array) -> Array:
    """One multiplication at a time [001]. q `(T, d_k)`, k `(S, d_k)` -> `(T, S)`."""
    grid = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        for j in range(len(k)):
            for c in range(q.shape[1]):
                grid[i, j] += q[i, c] * k[j, c]
    return grid


def scores(q: Array, k: Array) -> Array:
    """The same grid as one product, Q K^T [001].

    q `(..., T, d_k)`, k `(..., S, d_k)` -> `(..., T, S)`. What stands before the last two axes
    (sentences, heads) is kept apart: no sentence is compared with another, no head with another.
    """
    return q @ k.swapaxes(-1, -2)


# Masks: which keys a query may look at. They know nothing of heads, so all heads share them.


def causal_mask(n_queries: int, n_keys: int) -> Mask:
    """Each query sees its own position and what is before it [000, 004 §20.2]. -> `(T, S)`.

    The queries are the last of the keys' positions: aligned to the bottom right.
    """
    return np.tri(n_queries, n_keys, n_keys - n_queries, dtype=np.bool_)


def padding_mask(lengths: list[int], n_keys: int) -> Mask:
    """Each sequence sees its own keys and not its padding [004 §20.2]. -> `(B, 1, 1, S)`."""
    return (np.arange(n_keys) < np.array(lengths)[:, None])[:, None, None, :]


# One head: a soft look-up.


def softmax(x: Array) -> Array:
    """Positive weights that sum to 1 along the last axis [000]; `(..., S)` -> `(..., S)`.

    The largest entry is taken off first, so that nothing overflows. Where every entry is -inf,
    every weight is 0.
    """
    largest = x.max(axis=-1, keepdims=True)
    raised = np.exp(x - np.where(np.isneginf(largest), 0.0, largest))
    total = raised.sum(axis=-1, keepdims=True)
    return raised / np.where(total == 0.0, 1.0, total)


def attention_by_loops(q: Array, k: Array, v: Array, mask: Mask) -> Array:
    """Each query by itself: weigh the keys it may see, add up their values so weighed.

    q `(T, d_k)`, k `(S, d_k)`, v `(S, d_v)`, mask `(T, S)` -> `(T, d_v)`.
    """
    grid = scores_by_loops(q, k) / math.sqrt(q.shape[1])
    out = np.zeros((len(q), v.shape[1]))
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if mask[i, j]]
        total = sum(math.exp(grid[i, j]) for j in seen)
        for j in seen:
            out[i] += math.exp(grid[i, j]) / total * v[j]
    return out


class Attended(NamedTuple):
    """What an attention was made of, and what it made."""

    q: Array  # (..., T, d_k)
    k: Array  # (..., S, d_k)
    v: Array  # (..., S, d_v)
    weights: Array  # (..., T, S), zero where the mask is False
    out: Array  # (..., T, d_v)


def attention(q: Array, k: Array, v: Array, mask: Mask | None = None) -> Attended:
    """softmax(Q K^T / sqrt(d_k)) V, for all queries and heads at once [000; 004, key equations].

    q `(..., T, d_k)`, k `(..., S, d_k)`, v `(..., S, d_v)`, mask broadcast to `(..., T, S)`.
    A query that may look at nothing gets zeros.
    """
    grid = scores(q, k) / math.sqrt(q.shape[-1])
    weights = softmax(grid if mask is None else np.where(mask, grid, -np.inf))
    return Attended(q, k, v, weights, weights @ v)


# Many heads: several look-ups side by side, and a product that mixes what they found.


def split_heads(x: Array, n_head: int) -> Array:
    """`(B, T, n_head * d)` -> `(B, n_head, T, d)`: a rearrangement, nothing learned [004 §20.1]."""
    batch, length, width = x.shape
    if width % n_head:
        raise ValueError(f"width {width} is not divisible by {n_head} heads")
    return x.reshape(batch, length, n_head, width // n_head).transpose(0, 2, 1, 3)


def combine_heads(x: Array) -> Array:
    """`(B, n_head, T, d)` -> `(B, T, n_head * d)`: what `split_heads` did, undone [004 §20.1]."""
    batch, n_head, length, width = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, n_head * width)


def share_heads(x: Array, n_head: int) -> Array:
    """`(B, n_kv_head, S, d)` -> `(B, n_head, S, d)`: neighbouring query heads share a key head.

    One key head for all is multi-query attention, a few are grouped-query attention [004 §20.4].
    """
    return np.repeat(x, n_head // x.shape[1], axis=1)


@dataclass(frozen=True, slots=True)
class Projections:
    """The learned matrices [004 (20.1)]: head 1 has the first columns, head 2 the next, and so on.

    The widths need not agree as they do in a GPT: queries may come from one sequence and keys from
    another, and a value may be wider than a key.
    """

    q: Array  # (d_model, n_head * d_k)
    k: Array  # (d_model, n_kv_head * d_k)
    v: Array  # (d_model, n_kv_head * d_v)
    o: Array  # (n_head * d_v, d_model)
    n_head: int
    n_kv_head: int

    @classmethod
    def random(
        cls, rng: np.random.Generator, d_model: int, d_k: int, d_v: int, n_head: int, n_kv_head: int
    ) -> Projections:
        """Weights from a normal distribution, scaled so that each product keeps the variance."""
        shapes = (
            (d_model, n_head * d_k),
            (d_model, n_kv_head * d_k),
            (d_model, n_kv_head * d_v),
            (n_head * d_v, d_model),
        )
        q, k, v, o = (rng.normal(size=shape) / math.sqrt(shape[0]) for shape in shapes)
        return cls(q, k, v, o, n_head, n_kv_head)


def heads_one_by_one(x: Array, w: Projections, mask: Mask) -> Array:
    """Self-attention as 000 tells it: H_h = softmax(X W_Qh (X W_Kh)^T / sqrt(d_k)) X W_Vh,
    then Y = Concat(H_1, ..., H_n) W_O. x `(T, d_model)`, mask `(T, T)` -> `(T, d_model)`.
    """
    w_q = np.split(w.q, w.n_head, axis=1)
    w_k, w_v = np.split(w.k, w.n_kv_head, axis=1), np.split(w.v, w.n_kv_head, axis=1)
    found = []
    for head in range(w.n_head):
        shared = head * w.n_kv_head // w.n_head
        q, k, v = x @ w_q[head], x @ w_k[shared], x @ w_v[shared]
        found.append(attention_by_loops(q, k, v, mask))
    return np.concatenate(found, axis=1) @ w.o


class MultiHead(NamedTuple):
    """A multi-head attention: what went in, what was made on the way, what came out."""

    x_q: Array  # (B, T, d_model)
    x_k: Array  # (B, S, d_model)
    x_v: Array  # (B, S, d_model)
    w: Projections
    heads: Attended  # over (B, n_head)
    joined: Array  # (B, T, n_head * d_v)
    y: Array  # (B, T, d_model)


def multi_head(
    x_q: Array, x_k: Array, x_v: Array, w: Projections, mask: Mask | None = None
) -> MultiHead:
    """All heads of all sequences in one product each [004 (20.1), §20.2].

    x_q `(B, T, d_model)`, x_k and x_v `(B, S, d_model)`, mask broadcast to `(B, n_head, T, S)`.
    Self-attention gives one input three times; cross-attention takes queries from one sequence,
    keys and values from another.
    """
    q = split_heads(x_q @ w.q, w.n_head)
    k, v = split_heads(x_k @ w.k, w.n_kv_head), split_heads(x_v @ w.v, w.n_kv_head)
    heads = attention(q, share_heads(k, w.n_head), share_heads(v, w.n_head), mask)
    joined = combine_heads(heads.out)
    return MultiHead(x_q, x_k, x_v, w, heads, joined, joined @ w.o)


# The cache: row N of the output needs rows 1..N of the input, so what is there stays as it is.


class Cache(NamedTuple):
    """What later rows need of the rows so far. No query looks back at a query, so none is kept."""

    k: Array  # (B, n_kv_head, rows, d_k)
    v: Array  # (B, n_kv_head, rows, d_v)

    @classmethod
    def empty(cls, batch: int, w: Projections) -> Cache:
        d_k, d_v = w.k.shape[1] // w.n_kv_head, w.v.shape[1] // w.n_kv_head
        return cls(np.zeros((batch, w.n_kv_head, 0, d_k)), np.zeros((batch, w.n_kv_head, 0, d_v)))


def append_rows(x: Array, w: Projections, cache: Cache) -> tuple[MultiHead, Cache]:
    """Causal self-attention of new rows only [000, KV Cache].

    x `(B, n, d_model)` comes after the rows of the cache. Everything that is computed has n rows;
    keys and values are put behind those that are there.
    """
    q = split_heads(x @ w.q, w.n_head)
    k = np.concatenate([cache.k, split_heads(x @ w.k, w.n_kv_head)], axis=2)
    v = np.concatenate([cache.v, split_heads(x @ w.v, w.n_kv_head)], axis=2)
    mask = causal_mask(q.shape[2], k.shape[2])
    heads = attention(q, share_heads(k, w.n_head), share_heads(v, w.n_head), mask)
    joined = combine_heads(heads.out)
    return MultiHead(x, x, x, w, heads, joined, joined @ w.o), Cache(k, v)


# The whole network: what 000 leaves to its diagram of the first GPT, and GPT-2's order of it.

Weights = Mapping[str, Array]


def linear(x: Array, weights: Weights, name: str) -> Array:
    """`(T, inputs)` -> `(T, outputs)`; the matrix is stored `(outputs, inputs)`."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x: Array, weights: Weights, name: str, epsilon: float) -> Array:
    """Each row to mean 0 and variance 1, then to a learned scale. `(T, d_model)` -> the same."""
    centred: Array = x - x.mean(axis=-1, keepdims=True)
    deviation: Array = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    return centred / deviation * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def activate(x: Array, activation: Activation) -> Array:
    """The bend in the FFN: x where x is large, 0 where it is very negative. Any shape."""
    if activation == "relu":
        return np.maximum(x, 0.0)
    if activation == "gelu_tanh":
        share = np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
    else:
        share = np.vectorize(math.erf)(x / math.sqrt(2))
    bent: Array = x / 2 * (1 + share)
    return bent


def self_attention(x: Array, weights: Weights, name: str, config: GPTConfig) -> Array:
    """Causal attention of one sequence; one product makes Q, K and V. `(T, d_model)` -> same."""
    c = config
    columns = np.cumsum([c.d_model, c.d_kv])
    q, k, v = np.split(linear(x, weights, f"{name}.c_attn")[None], columns, axis=-1)
    heads = attention(
        split_heads(q, c.n_head),
        share_heads(split_heads(k, c.n_kv_head), c.n_head),
        share_heads(split_heads(v, c.n_kv_head), c.n_head),
        causal_mask(len(x), len(x)),
    )
    return linear(combine_heads(heads.out)[0], weights, f"{name}.c_proj")


def feed_forward(x: Array, weights: Weights, name: str, config: GPTConfig) -> Array:
    """Widen, bend, narrow: each row by itself. `(T, d_model)` -> `(T, d_model)`."""
    bent = activate(linear(x, weights, f"{name}.c_fc"), config.activation)
    return linear(bent, weights, f"{name}.c_proj")


def block(x: Array, weights: Weights, name: str, config: GPTConfig) -> Array:
    """Attention, then FFN, each added to the stream. `(T, d_model)` -> `(T, d_model)`.

    GPT-2 normalises what each half reads; the first GPT [000, diagram] normalises each sum.
    """

    def norm(x: Array, half: int) -> Array:
        return layer_norm(x, weights, f"{name}.ln_{half}", config.norm_epsilon)

    if config.norm_first:
        x = x + self_attention(norm(x, 1), weights, f"{name}.attn", config)
        return x + feed_forward(norm(x, 2), weights, f"{name}.mlp", config)
    x = norm(x + self_attention(x, weights, f"{name}.attn", config), 1)
    return norm(x + feed_forward(x, weights, f"{name}.mlp", config), 2)


def gpt(tokens: list[int], weights: Weights, config: GPTConfig) -> Array:
    """Logits of every position. tokens `(T,)` -> `(T, n_vocab)`; weights as `GPT` names them."""
    x = weights["wte.weight"][tokens] + weights["wpe.weight"][: len(tokens)]
    for layer in range(config.n_layer):
        x = block(x, weights, f"h.{layer}", config)
    if config.norm_first:
        x = layer_norm(x, weights, "ln_f", config.norm_epsilon)
    head = weights["wte.weight" if config.tied_head else "lm_head.weight"]
    return x @ head[: config.n_vocab].T
