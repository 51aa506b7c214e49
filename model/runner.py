"""Runs steps: packs the work, computes the rows, draws the tokens. Owns the pool's tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model import attention, sampler
from model.attention import PooledAttention
from model.batch import Batch, pack
from model.gpt import GPT
from model.step import Draw, Ids, TokenScore, Work

# Scoring a prompt needs logits of every row; they are made a few at a time, because those of a
# thousand rows of GPT-2's vocabulary are 200 MB.
SCORED_ROWS = 64


class Runner:
    """A network and `kv[layer, key|value, row, kv_head, d_head]`, the rows of all sequences.

    The tensor has one row more than the pool hands out: the scratch row, which padded lanes write.
    """

    def __init__(
        self,
        model: GPT,
        n_rows: int,
        kv_dtype: torch.dtype = torch.float32,
        backend: attention.Backend = attention.attend,
    ) -> None:
        c = model.config
        self.model = model
        self.backend = backend
        self.device = model.wte.weight.device
        self.n_ctx, self.n_vocab = c.n_ctx, c.n_vocab
        shape = (c.n_layer, 2, n_rows + 1, c.n_kv_head, c.d_head)
        self.kv = torch.empty(shape, dtype=kv_dtype, device=self.device)

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[Draw]:
        """Compute the rows of every Work and draw where asked; one Draw each, in order."""
        batch = pack(work, self.device)
        attend = PooledAttention(self.backend, self.kv, batch.plan)
        hidden = self.model(batch.tokens, batch.positions, attend)
        draws = [Draw() for _ in work]
        self._draw(hidden, work, batch, draws)
        self._score(hidden, work, batch, draws)
        return draws

    @torch.inference_mode()
    def read_rows(self, rows: Ids) -> NDArray[np.uint8]:
        """The bytes of rows that are computed: (n, row_bytes), a row's layers one after another."""
        picked = self.kv[:, :, self._index(rows)].movedim(2, 0).contiguous().cpu()
        data: NDArray[np.uint8] = picked.view(torch.uint8).flatten(1).numpy()
        return data

    @torch.inference_mode()
    def write_rows(self, rows: Ids, data: NDArray[np.uint8]) -> None:
        """Put back what `read_rows` gave."""
        n_layer, two, _, n_kv_head, d_head = self.kv.shape
        picked = torch.from_numpy(data).to(self.device).view(self.kv.dtype)
        picked = picked.view(len(rows), n_layer, two, n_kv_head, d_head).movedim(0, 2)
        self.kv[:, :, self._index(rows)] = picked

    def _index(self, rows: Ids) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _draw(self, hidden: Tensor, work: Sequence[Work], batch: Batch, draws: list[Draw]) -> None:
        """Next tokens: logits of the last row of each work that asks for one."""
        asked = [
            (i, end - 1) for i, end in zip(batch.order, batch.ends, strict=True) if _asks(work[i])
        ]
        if not asked:
            return
        last = torch.tensor([row for _, row in asked], device=self.device)
        logits = self.model.logits(hidden[last])
        for (i, _), draw in zip(
            asked, sampler.sample(logits, [work[i] for i, _ in asked]), strict=True
        ):
            draws[i] = draw

    def _score(self, hidden: Tensor, work: Sequence[Work], batch: Batch, draws: list[Draw]) -> None:
        """Log-probabilities of known tokens, for work that wants its prompt scored."""
        for i, end in zip(batch.order, batch.ends, strict=True):
            w = work[i]
            if w.score is None or w.targets is None:
                continue
            first = end - (w.end - w.start)
            targets = torch.from_numpy(w.targets).long().to(self.device)
            scores = self._score_rows(hidden[first : first + len(targets)], targets, w.score)
            draws[i].prompt_scores = scores
            draws[i].failed |= not all(math.isfinite(s.logprob) for s in scores)

    def _score_rows(self, hidden: Tensor, targets: Tensor, n: int) -> list[TokenScore]:
        parts = zip(hidden.split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True)
        return [
            token_score
            for part, wanted in parts
            if len(wanted)
            for token_score in sampler.score(self.model.logits(part), wanted, [n] * len(wanted))
        ]


def _asks(work: Work) -> bool:
    return work.sampling is not None
