"""Runs steps: packs the work, computes the rows, draws the tokens. Owns the pool's tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model import attention, inspection, pages, sampler
from model.attention import PooledAttention
from model.batch import Batch, pack
from model.gpt import GPT
from model.step import Draw, Ids, Inspection, TokenScore, Work

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
        self.device = model.wpe.weight.device
        self.n_ctx, self.n_vocab = c.n_ctx, c.n_vocab
        self.n_layer, self.n_head = c.n_layer, c.n_head
        shape = (c.n_layer, 2, n_rows + 1, c.n_kv_head, c.d_head)
        self.kv = pages.empty(shape, kv_dtype, self.device)

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> list[Draw]:
        """Compute the rows of every Work and draw where asked; one Draw each, in order. Work whose
        numbers are not finite fails alone, in the step that made them: nobody shares its rows.
        """
        batch = pack(work, self.device)
        hidden, spans = self.hidden(batch), batch.spans
        draws = self._draw(hidden, work, spans)
        self._score(hidden, work, spans, draws)
        if not math.isfinite(hidden.sum()):  # or the sum is too large for its type
            finite = torch.isfinite(hidden).all(dim=-1)
            for draw, span in zip(draws, spans, strict=True):
                draw.failed |= not finite[span].all()
        return draws

    def hidden(self, batch: Batch) -> Tensor:
        """Compute a batch's rows: hidden states (T, d_model), ready for the head."""
        attention = PooledAttention(self.backend, self.kv, batch.plan)
        hidden: Tensor = self.model(batch.tokens, batch.positions, attention)
        return hidden

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

    def inspect(self, tokens: Sequence[int], layer: int, head: int) -> Inspection:
        """What a head looks at. Computed beside the pool, whose rows stay as they are."""
        return inspection.inspect(self.model, tokens, layer, head)

    def _index(self, rows: Ids) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _draw(self, hidden: Tensor, work: Sequence[Work], spans: Sequence[slice]) -> list[Draw]:
        """Next tokens: logits of the last row of each work that asks for one."""
        draws = [Draw() for _ in work]
        asking = [i for i, w in enumerate(work) if w.sampling is not None]
        if asking:
            last = torch.tensor([spans[i].stop - 1 for i in asking], device=self.device)
            drawn = sampler.sample(self.model.logits(hidden[last]), [work[i] for i in asking])
            for i, draw in zip(asking, drawn, strict=True):
                draws[i] = draw
        return draws

    def _score(
        self, hidden: Tensor, work: Sequence[Work], spans: Sequence[slice], draws: Sequence[Draw]
    ) -> None:
        """Log-probabilities of known tokens, for work that wants its prompt scored."""
        for w, span, draw in zip(work, spans, draws, strict=True):
            if w.score is None or w.targets is None:
                continue
            targets = torch.from_numpy(w.targets).long().to(self.device)
            scores = self._score_rows(hidden[span][: len(targets)], targets, w.score)
            draw.prompt_scores = scores
            draw.failed |= not all(math.isfinite(s.logprob) for s in scores)

    def _score_rows(self, hidden: Tensor, targets: Tensor, n: int) -> list[TokenScore]:
        parts = zip(hidden.split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True)
        return [
            token_score
            for part, wanted in parts
            if len(wanted)
            for token_score in sampler.score(self.model.logits(part), wanted, [n] * len(wanted))
        ]
