"""From logits to tokens, for a batch of requests that each want it differently.

Logits are first adjusted (penalties, bias, forbidden ids), then a token is the best one (greedy) or
drawn: temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution in token
order at one uniform number. That number is a function of (seed, copy, position) alone, so a seeded
request gives the same text whatever runs beside it. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from model.step import Draw, Sampling, TokenScore, Work

COLDEST = 1e-5  # temperatures below are raised to it: the logits they divide must stay finite
IN_CACHE = 2**16  # numbers that a CPU's core keeps at hand

Numbers = NDArray[np.float32]
Indices = NDArray[np.int64]
Keys = TypeVar("Keys", Tensor, Indices)


def sample(logits: Tensor, work: Sequence[Work]) -> list[Draw]:
    """Draw one token per row of raw logits `(R, n_vocab)`; row i belongs to `work[i]`.

    A row with a number that is not finite, or with no token left to choose, fails alone.
    """
    wanted = [_sampling(w) for w in work]
    logits = logits.float()
    adjusted = _adjust(logits, work, wanted)
    fine = _finite(logits, adjusted)
    tokens = _argmax(adjusted)
    drawn = [i for i, s in enumerate(wanted) if s.temperature > 0 and fine[i]]
    if drawn:
        noise = [uniform(wanted[i], work[i].position) for i in drawn]
        chosen = _draw(_rows(adjusted, drawn), [wanted[i] for i in drawn], noise)
        for i, token in zip(drawn, chosen, strict=True):
            tokens[i] = token
    draws = [
        Draw(token=token) if ok else Draw(failed=True)
        for token, ok in zip(tokens, fine, strict=True)
    ]
    numbered = [i for i, s in enumerate(wanted) if s.logprobs is not None and fine[i]]
    if numbered:
        counts = [wanted[i].logprobs or 0 for i in numbered]
        chosen_ids = torch.tensor([tokens[i] for i in numbered], device=logits.device)
        scores = score(_rows(logits, numbered), chosen_ids, counts)
        for i, token_score in zip(numbered, scores, strict=True):
            draws[i].score = token_score
    return draws


def score(logits: Tensor, tokens: Tensor, counts: Sequence[int]) -> list[TokenScore]:
    """Raw log-probability of `tokens` (R,) under logits `(R, n_vocab)`, each with its `counts[i]`
    best alternatives. The number of a token is bitwise the same alone and in a list.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    ids = _best(logprobs, max(counts))
    best = logprobs.gather(1, ids)
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
    """Penalties, bias and forbidden ids of all rows; the raw logits stay as they are. Presence and
    frequency count the completion's tokens, repetition the prompt's too (the definitions of the
    OpenAI API and of CTRL, arXiv:1909.05858).
    """
    repeated = [i for i, s in enumerate(wanted) if s.repetition_penalty != 1.0]
    counted = [i for i, s in enumerate(wanted) if s.presence_penalty or s.frequency_penalty]
    biased = [i for i, s in enumerate(wanted) if s.logit_bias]
    banned = [i for i, w in enumerate(work) if w.banned]
    if not (repeated or counted or biased or banned):
        return logits
    adjusted = logits.clone(memory_format=torch.contiguous_format)
    flat, n_vocab = adjusted.view(-1), logits.shape[1]

    def places(ids: Iterable[tuple[int, ArrayLike]]) -> Indices:
        """Where ids of rows lie in `flat`."""
        return np.concatenate([i * n_vocab + np.asarray(row_ids, np.int64) for i, row_ids in ids])

    def on_device(array: Numbers | Indices) -> Tensor:
        return torch.from_numpy(array).to(logits.device)

    if repeated:
        seen = on_device(places((i, work[i].tokens) for i in repeated))  # some of them repeatedly
        rates = np.array([s.repetition_penalty for s in wanted], np.float32)
        rate, values = on_device(rates)[seen // n_vocab], flat[seen]
        flat[seen] = torch.where(values > 0, values / rate, values * rate)
    if counted:
        ids, counts = np.unique(
            places((i, work[i].tokens[work[i].n_prompt :]) for i in counted), return_counts=True
        )
        penalties = np.array([(s.presence_penalty, s.frequency_penalty) for s in wanted])
        presence, frequency = penalties[ids // n_vocab].T
        flat[on_device(ids)] -= on_device((presence + frequency * counts).astype(np.float32))
    if biased:
        biases = [bias for i in biased for _, bias in wanted[i].logit_bias]
        ids = places((i, [token for token, _ in wanted[i].logit_bias]) for i in biased)
        flat.index_add_(0, on_device(ids), on_device(np.array(biases, np.float32)))
    if banned:
        flat[on_device(places((i, work[i].banned) for i in banned))] = -torch.inf
    return adjusted


def _rows(logits: Tensor, chosen: Sequence[int]) -> Tensor:
    """Rows of the logits; without a copy if they are all of them."""
    return logits if len(chosen) == len(logits) else logits[chosen]


def _finite(logits: Tensor, adjusted: Tensor) -> list[bool]:
    """Which rows are finite, and have a token left to choose. Not a number is both the least and
    the greatest of its row.
    """
    least, most = torch.stack(torch.aminmax(logits, dim=-1)).tolist()
    best = most if adjusted is logits else adjusted.amax(dim=-1).tolist()
    return [
        -math.inf < low and high < math.inf and math.isfinite(top)
        for low, high, top in zip(least, most, best, strict=True)
    ]


def _argmax(logits: Tensor) -> list[int]:
    """The best token of each row, of equal ones the lowest id. On a CPU NumPy finds it in a tenth
    of the time.
    """
    best = logits.argmax(dim=-1) if logits.is_cuda else logits.numpy().argmax(axis=-1)
    tokens: list[int] = best.tolist()
    return tokens


def _draw(logits: Tensor, wanted: Sequence[Sampling], noise: Sequence[float]) -> list[int]:
    """Sample rows of logits `(R, n_vocab)` at one uniform number each. On a CPU a few rows at a
    time, so that what one pass writes is still in the cache when the next one reads it.
    """
    size = len(logits) if logits.is_cuda else max(1, IN_CACHE // logits.shape[1])
    tokens = []
    for a in range(0, len(logits), size):
        part = slice(a, a + size)
        heat = torch.tensor([max(s.temperature, COLDEST) for s in wanted[part]])
        weights = logits[part] - logits[part].amax(dim=-1, keepdim=True)
        weights.div_(heat[:, None].to(logits.device)).exp_()
        tokens += _choose(weights, wanted[part], noise[part])
    return tokens


def _choose(weights: Tensor, wanted: Sequence[Sampling], noise: Sequence[float]) -> list[int]:
    """One token for each row of weights `(R, n_vocab)`, of which the largest is 1."""
    whole = [i for i, s in enumerate(wanted) if not (s.top_k or s.top_p < 1 or s.min_p > 0)]
    tokens = dict(
        zip(whole, _invert(_rows(weights, whole), [noise[i] for i in whole]), strict=True)
    )
    if len(tokens) < len(wanted):
        rows = weights.cpu().numpy()
        for i, sampling in enumerate(wanted):
            if i not in tokens:
                tokens[i] = _choose_kept(rows[i], sampling, noise[i])
    return [tokens[i] for i in range(len(wanted))]


def _invert(weights: Tensor, noise: Sequence[float]) -> list[int]:
    """The inverse of each row's cumulative distribution, in token order, at its number."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    target = torch.tensor(noise, dtype=torch.float64, device=weights.device)[:, None] * total
    target = torch.minimum(target, total.nextafter(torch.zeros_like(total)))
    found: list[int] = torch.searchsorted(cumulative, target, right=True)[:, 0].tolist()
    return found


def _choose_kept(weights: Numbers, sampling: Sampling, noise: float) -> int:
    """The same among the tokens that are not cut off."""
    ids = _kept(weights, sampling)
    cumulative = weights[ids].cumsum(dtype=np.float64)
    total = float(cumulative[-1])
    target = min(noise * total, math.nextafter(total, 0))
    return int(ids[cumulative.searchsorted(target, side="right")])


def _kept(weights: Numbers, s: Sampling) -> Indices:
    """Ids that top-k, then top-p, then min-p leave, in order; the best token is always among them.

    `top_p` keeps the smallest set of best tokens whose share of what top-k left reaches it. A token
    that weighs less than an equal part of the rest, 1 - `top_p`, is none of them: all such together
    are less than the rest. What remains to be sorted is a small part of the vocabulary.
    """
    if s.top_k:
        ids = _best_of_row(weights, min(s.top_k, len(weights)))
        total = weights[ids].sum(dtype=np.float64)
    elif s.top_p < 1:
        total = weights.sum(dtype=np.float64)
        ids = _sorted(weights, np.flatnonzero(weights >= (1 - s.top_p) * total / len(weights)))
    else:
        return np.flatnonzero(weights >= s.min_p)
    best = weights[ids].astype(np.float64)
    keep = best >= s.min_p
    if s.top_p < 1:
        keep &= best.cumsum() - best < s.top_p * total
    keep[0] = True
    return np.sort(ids[keep])


def _best(values: Tensor, n: int) -> Tensor:
    """Ids of the `n` largest of each row (of all, if they are fewer), best first; of equal ones
    the lowest id first.
    """
    n = min(n, values.shape[1])
    if values.is_cuda:
        ids = torch.arange(values.shape[1], device=values.device)
        return _keys(values.view(torch.int32).long(), ids).topk(n, dim=-1).indices
    return torch.from_numpy(np.stack([_best_of_row(row, n) for row in values.numpy()]))


def _best_of_row(values: Numbers, n: int) -> Indices:
    if n == 0:
        return np.empty(0, np.int64)
    if n == len(values):
        return _sorted(values, np.arange(n))
    least = np.partition(values, -n)[-n]
    return _sorted(values, np.flatnonzero(values >= least))[:n]


def _sorted(values: Numbers, ids: Indices) -> Indices:
    """The ids in the order of their values, best first; of equal ones the lowest first."""
    keys = _keys(values[ids].view(np.int32).astype(np.int64), ids)
    keys.sort()
    return -keys[::-1] & 0xFFFFFFFF


def _keys(bits: Keys, ids: Keys) -> Keys:
    """Whole numbers that sort like floats of these bits and, where they are equal, against their
    ids. No two are alike: `topk` and most sorts leave open which of equal ones they take, and what
    `topk` takes changes with k, which the neighbours have a say in.
    """
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) << 32) - ids
