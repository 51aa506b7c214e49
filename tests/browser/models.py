"""Fake models with something to see."""

from __future__ import annotations

import time
from dataclasses import dataclass

from model.step import Draw, Work
from tests.fakes import END, FakeModel, logits_after, score


@dataclass
class Says(FakeModel):
    """Continues every prompt with the same words, then ends."""

    words: str = ""

    def run(self, work: list[Work]) -> list[Draw]:
        draws = super().run(work)
        for w, draw in zip(work, draws, strict=True):
            if draw.token is not None and w.sampling is not None:
                said = [*self.words.encode(), END]
                draw.token = said[min(w.position - w.n_prompt, len(said) - 1)]
                if draw.score is not None:
                    raw = logits_after(int(w.tokens[-1]))
                    draw.score = score(raw, draw.token, w.sampling.logprobs or 0)
        return draws


@dataclass
class Works(FakeModel):
    """Takes its time for every row."""

    row: float = 0.001

    def run(self, work: list[Work]) -> list[Draw]:
        time.sleep(self.row * sum(w.end - w.start for w in work))
        return super().run(work)
