"""GPT written from its definition, in NumPy and float64: the oracle of every test of numbers.

No line of it is shared with the code under test. One sequence goes in, its logits come out; heads
are separate loops, the causal mask is a slice, and nothing is kept from one call to the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.config import GPTConfig

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def logits(weights: Weights, config: GPTConfig, tokens: ArrayLike) -> Array:
    """Logits `(n, n_vocab)` of `tokens` (n,): row i is what is said after tokens[: i + 1]."""
    ids = np.asarray(tokens)
    x = weights["wte.weight"][ids] + weights["wpe.weight"][: len(ids)]
    for layer in range(config.n_layer):
        block = {
            name.removeprefix(f"h.{layer}."): array
            for name, array in weights.items()
            if name.startswith(f"h.{layer}.")
        }
        for layer_norm, half in (("ln_1", self_attention), ("ln_2", feed_forward)):
            if config.norm_first:
                x = x + half(block, config, norm(block, layer_norm, x, config.norm_epsilon))
            else:
                x = norm(block, layer_norm, x + half(block, config, x), config.norm_epsilon)
    if config.norm_first:
        x = norm(weights, "ln_f", x, config.norm_epsilon)
    head = weights["wte.weight" if config.tied_head else "lm_head.weight"]
    return x @ head[: config.n_vocab].T


def norm(weights: Weights, name: str, x: Array, epsilon: float) -> Array:
    mean = x.mean(axis=1, keepdims=True)
    variance = ((x - mean) ** 2).mean(axis=1, keepdims=True)
    scaled: Array = (x - mean) / np.sqrt(variance + epsilon)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def self_attention(weights: Weights, config: GPTConfig, x: Array) -> Array:
    """Head by head and query by query; query head h reads key head h // (heads per key head)."""
    d, width = config.d_head, config.d_model
    kv_width = config.n_kv_head * d
    joined = linear(weights, "attn.c_attn", x)
    heads = np.zeros((len(x), width))
    for head in range(config.n_head):
        kv_head = head // (config.n_head // config.n_kv_head)
        query = joined[:, head * d :][:, :d]
        key = joined[:, width + kv_head * d :][:, :d]
        value = joined[:, width + kv_width + kv_head * d :][:, :d]
        for i in range(len(x)):
            weight = softmax(query[i] @ key[: i + 1].T / math.sqrt(d))
            heads[i, head * d : (head + 1) * d] = weight @ value[: i + 1]
    return linear(weights, "attn.c_proj", heads)


def feed_forward(weights: Weights, config: GPTConfig, x: Array) -> Array:
    wide = linear(weights, "mlp.c_fc", x)
    return linear(weights, "mlp.c_proj", ACTIVATIONS[config.activation](wide))


def gelu_tanh(x: Array) -> Array:
    bent: Array = 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return bent


def gelu(x: Array) -> Array:
    bent: Array = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return bent


def relu(x: Array) -> Array:
    return np.maximum(x, 0.0)


ACTIVATIONS = {"gelu_tanh": gelu_tanh, "gelu": gelu, "relu": relu}


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: Array = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    logarithms: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logarithms
