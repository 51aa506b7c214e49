"""A step's work becomes packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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

    def on_device(arrays: Sequence[Ids]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(device, non_blocking=True)

    return Batch(
        tokens=on_device([w.tokens[w.start :] for w in work]),
        positions=on_device([np.arange(w.start, w.end, dtype=np.int32) for w in work]),
        plan=Plan(
            write=on_device([w.rows[w.start :] for w in work]),
            queries=_offsets([w.end - w.start for w in work]),
            keys=_offsets([w.end for w in work]),
            rows=on_device([w.rows for w in work]),
        ),
    )


def _offsets(lengths: Sequence[int]) -> Ids:
    """Where each of things that lie one after another begins, and where the last one ends."""
    return np.array([0, *lengths], np.int32).cumsum(dtype=np.int32)
