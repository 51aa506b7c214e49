"""Weights in eight bits: one scale per output.

    W[n, :] ~ scale[n] * q[n, :],  q = round(W / scale), scale[n] = max |W[n, :]| / 127

Activations stay as they are, or are rounded token by token (`PackedLinear`), never by a scale that
tokens share: no token's numbers depend on another's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.gpt import GPT


class Int8Linear(nn.Module):
    """A linear layer whose weight is int8 `(n, k)` with a float32 scale `(n,)` per output."""

    weight: Tensor
    scale: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        whole = weight.detach().float()
        scale = whole.abs().amax(dim=1) / 127
        scale[scale == 0] = 1  # an output of zeros
        self.register_buffer("weight", (whole / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias


class Int8Embedding(nn.Module):
    """The rows of an `Int8Linear`, in float32."""

    def __init__(self, linear: Int8Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, tokens: Tensor) -> Tensor:
        return self.linear.weight[tokens].float() * self.linear.scale[tokens, None]


def quantise(model: GPT) -> None:
    """Make every matrix of the network but the positions int8, in place."""
    for block in model.h:
        for part, name in ((block.attn, "c_attn"), (block.attn, "c_proj")):
            setattr(part, name, _quantised(getattr(part, name)))
        for name in ("c_fc", "c_proj"):
            setattr(block.mlp, name, _quantised(getattr(block.mlp, name)))
    head = _quantised(model.lm_head)
    embedding = head if model.config.tied_head else Int8Linear(model.wte.weight, None)
    model.lm_head, model.wte = head, Int8Embedding(embedding)  # type: ignore[assignment]


def _quantised(linear: nn.Linear) -> Int8Linear:
    return Int8Linear(linear.weight, linear.bias)
