"""A step's work becomes packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from model.attention import Plan
from model.step import Ids, Work


@dataclass(frozen=True, slots=True)
class Batch:
    """Packed tokens of a step, in the order of the work; `plan.queries` says where each one's lie.
    All numbers are int32.
    """

    tokens: Tensor  # (T,)
    positions: Tensor  # (T,)
    plan: Plan

    @property
    def spans(self) -> list[slice]:
        """Where the packed tokens of each work lie."""
        return [slice(first, end) for first, end in pairwise(self.plan.queries.tolist())]


def pack(work: Sequence[Work], device: torch.device) -> Batch:
    """Pack the tokens of `work`, at least one each, and plan its attention."""
    queries, keys = _offsets([w.end - w.start for w in work]), _offsets([w.end for w in work])
    numbers = np.concatenate(  # one array goes to the device, and costs one operation
        [
            *(w.tokens[w.start :] for w in work),
            *(np.arange(w.start, w.end, dtype=np.int32) for w in work),
            *(w.rows[w.start :] for w in work),
            *(w.rows for w in work),
        ]
    )
    n_tokens = int(queries[-1])
    there = torch.from_numpy(numbers).to(device, non_blocking=True)
    parts = there.split_with_sizes([n_tokens, n_tokens, n_tokens, int(keys[-1])])
    tokens, positions, write, rows = parts
    return Batch(tokens, positions, Plan(write, queries, keys, rows))


def _offsets(lengths: Sequence[int]) -> Ids:
    """Where each of things that lie one after another begins, and where the last one ends."""
    return np.array([0, *accumulate(lengths)], np.int32)
