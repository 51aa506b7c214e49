"""The oracle of the tests of numbers: the reference, in NumPy and float64, which shares no line
with the network that serves and keeps nothing from one call to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from model.config import GPTConfig
from model.reference import Array, gpt, softmax

__all__ = ["Array", "log_softmax", "logits", "softmax"]


def logits(weights: Mapping[str, Array], config: GPTConfig, tokens: ArrayLike) -> Array:
    """Logits `(n, n_vocab)` of `tokens` (n,): row i is what is said after tokens[: i + 1]."""
    return gpt(np.asarray(tokens).tolist(), weights, config)


def log_softmax(x: Array) -> Array:
    shifted = x - x.max(axis=-1, keepdims=True)
    logarithms: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logarithms
