"""A step's work becomes packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.attention import Group, Plan
from model.step import Work

# Decoding sequences are attended in groups of similar length: a group is padded to its longest
# member, and padding beyond this share of a group costs more than another call.
PADDING = 0.25


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed tokens of a step. Work of one token comes first, shortest first; `spans[i]` is where
    the tokens of work i lie.
    """

    tokens: Tensor  # (T,)
    positions: Tensor  # (T,)
    plan: Plan
    spans: list[slice]


def pack(work: Sequence[Work], device: torch.device) -> Batch:
    """Pack the tokens of `work`, at least one each, and plan its attention."""
    order = sorted(range(len(work)), key=lambda i: (_span(work[i]) > 1, work[i].end))
    packed = [work[i] for i in order]
    ends = np.cumsum([_span(w) for w in packed]).tolist()
    singles = sum(_span(w) == 1 for w in packed)
    cuts = _cuts([w.end for w in packed[:singles]])
    groups = [_decode_group(packed[a:b], a, device) for a, b in cuts]
    groups += [
        _chunk_group(w, end, device)
        for w, end in zip(packed[singles:], ends[singles:], strict=True)
    ]
    spans = {i: slice(end - _span(work[i]), end) for i, end in zip(order, ends, strict=True)}
    return Batch(
        tokens=_tensor(np.concatenate([w.tokens[w.start :] for w in packed]), device),
        positions=_tensor(np.concatenate([np.arange(w.start, w.end) for w in packed]), device),
        plan=Plan(
            write=_tensor(np.concatenate([w.rows[w.start :] for w in packed]), device),
            groups=tuple(groups),
        ),
        spans=[spans[i] for i in range(len(work))],
    )


def _span(work: Work) -> int:
    return work.end - work.start


def _tensor(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)


def _cuts(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut ascending lengths into runs (first, end) whose padding stays below PADDING."""
    runs, first, real = [], 0, 0
    for i, length in enumerate(lengths):
        padded = length * (i - first + 1)
        if padded - (real + length) > PADDING * padded:
            runs.append((first, i))
            first, real = i, 0
        real += length
    return [*runs, (first, len(lengths))] if lengths else []


def _decode_group(work: Sequence[Work], first: int, device: torch.device) -> Group:
    """One query each, over all rows of its sequence."""
    lengths = np.array([w.end for w in work])
    longest = int(lengths.max())
    rows = np.stack([np.pad(w.rows, (0, longest - w.end), mode="edge") for w in work])
    mask = None
    if lengths.min() < longest:
        seen = np.arange(longest) < lengths[:, None]
        mask = torch.from_numpy(seen[:, None, None, :]).to(device)
    return Group(slice(first, first + len(work)), _tensor(rows, device), mask)


def _chunk_group(work: Work, end: int, device: torch.device) -> Group:
    """Several queries of one sequence: query i sees the rows before the chunk and i + 1 more."""
    n, keys = _span(work), work.end
    mask = torch.ones(n, keys, dtype=torch.bool, device=device).tril(keys - n)
    return Group(slice(end - n, end), _tensor(work.rows[None], device), mask[None, None])
