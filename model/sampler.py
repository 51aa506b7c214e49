"""From logits to tokens, for a batch of requests that each want it differently.

Logits are first adjusted (penalties, bias, forbidden ids), then a token is the best one (greedy) or
drawn: temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution in token
order at one uniform number. That number is a function of (seed, copy, position) alone, so a seeded
request gives the same text whatever runs beside it. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model.step import Draw, Sampling, TokenScore, Work

COLDEST = 1e-5  # temperatures below are raised to it: the logits they divide must stay finite


def sample(logits: Tensor, work: Sequence[Work]) -> list[Draw]:
    """Draw one token per row of raw logits `(R, n_vocab)`; row i belongs to `work[i]`.

    A row with a number that is not finite, or with no token left to choose, fails alone.
    """
    wanted = [_sampling(w) for w in work]
    logits = logits.float()
    adjusted = _adjust(logits, work, wanted)
    finite = torch.isfinite(logits).all(dim=-1) & torch.isfinite(adjusted.amax(dim=-1))
    chosen = _choose(torch.where(finite[:, None], adjusted, 0.0), work, wanted)
    numbered = [i for i, s in enumerate(wanted) if s.logprobs is not None]
    scores: list[TokenScore] = []
    if numbered:
        counts = [wanted[i].logprobs or 0 for i in numbered]
        scores = score(logits[numbered], chosen[numbered], counts)
    draws = [
        Draw(token=token) if fine else Draw(failed=True)
        for token, fine in zip(chosen.tolist(), finite.tolist(), strict=True)
    ]
    for i, token_score in zip(numbered, scores, strict=True):
        if not draws[i].failed:
            draws[i].score = token_score
    return draws


def score(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenScore]:
    """Raw log-probability of `tokens` (R,) under logits `(R, n_vocab)`, each with its `counts[i]`
    best alternatives. The number of a token is bitwise the same alone and in a list.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    best, ids = _best(logprobs, max(counts))
    rows = zip(tokens.tolist(), chosen.tolist(), ids.tolist(), best.tolist(), counts, strict=True)
    return [
        TokenScore(token, logprob, tuple(zip(row_ids[:n], row_best[:n], strict=True)))
        for token, logprob, row_ids, row_best, n in rows
    ]


def uniform(sampling: Sampling, position: int) -> float:
    """A number in [0, 1) that depends on the request and the token's position only."""
    key = struct.pack("<QQQ", sampling.seed % 2**64, sampling.copy, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) / 2**53  # as many bits as a float holds: more would round up to 1


def _sampling(work: Work) -> Sampling:
    if work.sampling is None:
        raise ValueError("this work asks for no token")
    return work.sampling


def _adjust(logits: Tensor, work: Sequence[Work], wanted: Sequence[Sampling]) -> Tensor:
    """Penalties, bias and forbidden ids of each row; the raw logits stay as they are."""
    changed = [i for i, s in enumerate(wanted) if _adjusts(s) or work[i].banned]
    if not changed:
        return logits
    logits = logits.clone()
    for i in changed:
        _adjust_row(logits[i], work[i], wanted[i])
    return logits


def _adjusts(s: Sampling) -> bool:
    penalties = (s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
    return bool(s.logit_bias) or penalties != (0.0, 0.0, 1.0)


def _adjust_row(row: Tensor, work: Work, s: Sampling) -> None:
    """In place. Presence and frequency count the completion's tokens, repetition the prompt's too
    (the definitions of the OpenAI API and of CTRL, arXiv:1909.05858).
    """

    def on_device(array: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(row.device)

    if s.repetition_penalty != 1.0:
        seen = on_device(np.unique(work.tokens).astype(np.int64))
        values = row[seen]
        row[seen] = torch.where(
            values > 0, values / s.repetition_penalty, values * s.repetition_penalty
        )
    generated = work.tokens[work.n_prompt :]
    if len(generated) and (s.presence_penalty or s.frequency_penalty):
        ids, counts = np.unique(generated, return_counts=True)
        row[on_device(ids.astype(np.int64))] -= (
            s.presence_penalty + s.frequency_penalty * on_device(counts)
        ).to(row.dtype)
    for token, bias in s.logit_bias:
        row[token] += bias
    if work.banned:
        row[list(work.banned)] = -torch.inf


def _choose(logits: Tensor, work: Sequence[Work], wanted: Sequence[Sampling]) -> Tensor:
    """Token ids (R,): the lowest of the best ones where greedy, drawn elsewhere."""
    chosen = logits.argmax(dim=-1)
    drawn = [i for i, s in enumerate(wanted) if s.temperature > 0]
    if drawn:
        noise = [uniform(wanted[i], work[i].position) for i in drawn]
        chosen[drawn] = _draw(logits[drawn], [wanted[i] for i in drawn], noise)
    return chosen


def _draw(logits: Tensor, wanted: Sequence[Sampling], noise: Sequence[float]) -> Tensor:
    """Sample rows of logits `(R, n_vocab)` at one uniform number each."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    heat = column([max(s.temperature, COLDEST) for s in wanted])
    best = logits.amax(dim=-1, keepdim=True)
    probs = torch.softmax((logits - best) / heat.to(logits.dtype), dim=-1)
    cut = [i for i, s in enumerate(wanted) if s.top_k or s.top_p < 1 or s.min_p > 0]
    if cut:
        probs[cut] = _cut_tail(probs[cut], [wanted[i] for i in cut])
    cumulative = probs.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    target = torch.minimum(column(noise) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(1)


def _cut_tail(probs: Tensor, wanted: Sequence[Sampling]) -> Tensor:
    """Zero what top-k, then top-p, then min-p leave out; the best token always stays.

    `top_p` keeps the smallest set of best tokens whose share of what top-k left reaches it.
    """

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=probs.device)[:, None]

    n_vocab = probs.shape[1]
    ks = [min(s.top_k or n_vocab, n_vocab) for s in wanted]
    best, ids = _best(probs, max(ks))
    best = best * (torch.arange(max(ks), device=probs.device) < column(ks))
    cumulative = F.pad(best.double().cumsum(dim=-1), (1, 0))
    before, total = cumulative[:, :-1], cumulative[:, -1:]
    keep = before < column([s.top_p for s in wanted]) * total
    keep &= best >= column([s.min_p for s in wanted]) * best[:, :1]
    keep[:, 0] = True
    return torch.zeros_like(probs).scatter_(1, ids, best * keep)


def _best(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The `n` largest of each row (all, if they are fewer), best first, and their ids; of equal
    ones the lowest id first.

    `topk` alone leaves open which of equal ones it takes, and its choice changes with `n`, which
    the neighbours have a say in. Here it compares whole numbers of which no two are alike: a
    float32's bits, made to sort as the float does, and below them the id.
    """
    n_vocab = values.shape[1]
    bits = values.view(torch.int32).long()
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = (bits << 32) - torch.arange(n_vocab, device=values.device)
    ids = keys.topk(min(n, n_vocab), dim=-1).indices
    return values.gather(1, ids), ids
