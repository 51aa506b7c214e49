"""What one head looks at: its score grid over a text, and the last row of it computed by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from model.config import GPTConfig
from model.gpt import GPT
from model.step import Inspection, MatrixShape

MEANINGS = {
    "Q": "what each token asks for",
    "K": "what each token can be asked for",
    "V": "what each token has to give",
    "S": "softmax(Q Kᵀ / √d), causal",
    "H": "S V",
    "Y": "all heads side by side, times W_O",
}


@torch.inference_mode()
def inspect(model: GPT, tokens: Sequence[int], layer: int, head: int) -> Inspection:
    """Two passes, neither of which touches the pool: all rows, as without a cache, and the last row
    over the keys and values of the others, as with one.
    """
    device = model.wpe.weight.device
    ids, positions = torch.tensor(tokens, device=device), torch.arange(len(tokens), device=device)
    whole = Recorder(model.config, layer, head)
    hidden = model(ids, positions, whole)
    last = Recorder(model.config, layer, head, {n: (k[:-1], v[:-1]) for n, (k, v) in whole.kept()})
    hidden_last = model(ids[-1:], positions[-1:], last)
    grid, row = whole.seen, last.seen
    # What leaves the attention is as wide as what leaves the network.
    uncached = {**grid.shapes(), "Y": tuple(hidden.shape)}
    cached = {**row.shapes(), "Y": tuple(hidden_last.shape)}
    return Inspection(
        scores=grid.scores.cpu().numpy(),
        weights=grid.weights.cpu().numpy(),
        row=row.weights[0].cpu().numpy(),
        shapes=[
            MatrixShape(name, meaning, uncached[name], cached[name])
            for name, meaning in MEANINGS.items()
        ],
    )


class Head(NamedTuple):
    """One head of one layer, without the axis of heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor
    weights: Tensor
    out: Tensor

    def shapes(self) -> dict[str, tuple[int, ...]]:
        named = zip("QKVSH", (self.q, self.k, self.v, self.weights, self.out), strict=True)
        return {name: tuple(x.shape) for name, x in named}


class Recorder:
    """Attention within one text, every product made as such: `model.gpt.Attention` for a reader.

    `before` are the keys and values, by layer, of the rows that were computed earlier.
    """

    seen: Head  # once the network has run

    def __init__(
        self,
        config: GPTConfig,
        layer: int,
        head: int,
        before: Mapping[int, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.sharing = config.n_head // config.n_kv_head
        self.layer, self.head = layer, head
        self._rows = dict(before or {})

    def kept(self) -> list[tuple[int, tuple[Tensor, Tensor]]]:
        """Keys and values of all rows so far, layer by layer."""
        return list(self._rows.items())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self._rows:
            k, v = (torch.cat(pair) for pair in zip(self._rows[layer], (k, v), strict=True))
        self._rows[layer] = k, v
        n, keys = len(q), len(k)
        queries = q.transpose(0, 1).float()
        seen_k, seen_v = (
            x.transpose(0, 1).repeat_interleave(self.sharing, dim=0).float() for x in (k, v)
        )
        scores = queries @ seen_k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(n, keys, dtype=torch.bool, device=q.device).tril(keys - n)
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        out = weights @ seen_v
        if layer == self.layer:
            parts = (queries, seen_k, seen_v, scores, weights, out)
            self.seen = Head(*(part[self.head] for part in parts))
        return out.transpose(0, 1).to(q.dtype)
