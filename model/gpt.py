"""The network: embeddings, blocks, and a head that is the embedding itself.

Linear layers see packed tokens `(T, d_model)`: the tokens of every sequence of a step, one after
another, without padding. Only the attention that the caller passes in knows where one sequence
ends and the next begins, so the same network trains, prefills, decodes and recomputes.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import Activation, GPTConfig


class Attention(Protocol):
    """Attends within sequences of packed tokens, layer by layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `(T, n_head, d_head)`, k and v `(T, n_kv_head, d_head)` -> `(T, n_head, d_head)`."""
        ...


class SelfAttention(nn.Module):
    """Project to queries, keys and values; attend; mix the heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.c_attn = nn.Linear(config.d_model, config.d_model + 2 * config.d_kv)
        self.c_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        c = self.config
        q, k, v = self.c_attn(x).split((c.d_model, c.d_kv, c.d_kv), dim=-1)
        heads = attention(
            layer,
            q.unflatten(-1, (c.n_head, c.d_head)),
            k.unflatten(-1, (c.n_kv_head, c.d_head)),
            v.unflatten(-1, (c.n_kv_head, c.d_head)),
        )
        mixed: Tensor = self.c_proj(heads.flatten(-2))
        return mixed


class FeedForward(nn.Module):
    """Widen, bend, narrow: each token by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.c_fc = nn.Linear(config.d_model, config.d_ff)
        self.c_proj = nn.Linear(config.d_ff, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        narrowed: Tensor = self.c_proj(activate(self.c_fc(x), self.activation))
        return narrowed


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The FFN's bend. GPT-2 was trained with the tanh form of GELU; the exact one drifts."""
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _embedding(n: int, width: int) -> nn.Embedding:
    """An embedding that is not filled yet: to draw its numbers, which a checkpoint replaces, takes
    a second of every start.
    """
    return nn.Embedding(n, width, _weight=torch.empty(n, width))


class Block(nn.Module):
    """Attention, then FFN, each added to the stream.

    GPT-2 normalises what each half reads and leaves the stream alone; the first GPT normalises the
    stream itself after each addition.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.ln_1 = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.attn = SelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        if self.norm_first:
            x = x + self.attn(self.ln_1(x), layer, attention)
            x = x + self.mlp(self.ln_2(x))
        else:
            x = self.ln_1(x + self.attn(x, layer, attention))
            x = self.ln_2(x + self.mlp(x))
        return x


class GPT(nn.Module):
    """A decoder-only transformer with learned positions; the names are GPT-2's own. A new one holds
    no numbers yet: `initialise` it, or load a checkpoint into it.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = _embedding(config.n_vocab_padded, config.d_model)
        self.wpe = _embedding(config.n_ctx, config.d_model)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        # The first GPT's stream leaves its last block normalised.
        self.ln_f = (
            nn.LayerNorm(config.d_model, eps=config.norm_epsilon)
            if config.norm_first
            else nn.Identity()
        )
        self.lm_head = nn.Linear(config.d_model, config.n_vocab_padded, bias=False)
        if config.tied_head:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Tokens and positions `(T,)` -> hidden states `(T, d_model)`, ready for `logits`."""
        x = self.wte(tokens) + self.wpe(positions)
        for layer, block in enumerate(self.h):
            x = block(x, layer, attention)
        normed: Tensor = self.ln_f(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states `(R, d_model)` -> raw logits `(R, n_vocab)`; padded columns are cut off."""
        scores: Tensor = self.lm_head(hidden)
        return scores[:, : self.config.n_vocab]

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Random weights as the first GPT drew them, N(0, 0.02), and as GPT-2 did: there the stream
        only grows, so what is added to it is divided by sqrt(2 n_layer).
        """
        c = self.config
        residual = 0.02 / math.sqrt(2 * c.n_layer) if c.norm_first else 0.02
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                std = residual if name.endswith("c_proj.weight") else 0.02
                parameter.normal_(0.0, std, generator=generator)
            elif ".ln_" in name or name.startswith("ln_"):
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                parameter.zero_()
