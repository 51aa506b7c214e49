"""Attention over the pool of rows: one signature, several backends.

`attend` writes the step's new keys and values into their rows and lets each query look at the rows
of its own sequence, up to its own position. This file holds the plan that a step makes once for
all layers and the reference backend, gather + scaled dot-product attention, which runs everywhere;
faster backends stand behind the same signature and are proven against it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from model.step import Ids

# The reference attends decoding sequences in groups of similar length: a group is padded to its
# longest member, and padding beyond this share of a group costs more than another call.
PADDING = 0.25


@dataclass(frozen=True)
class Plan:
    """Where a step's T packed tokens write their rows, and which rows they read.

    The S sequences lie one after another: the packed tokens of sequence i are
    `queries[i]:queries[i + 1]`, and the rows of all its tokens, those of the step last, are
    `rows[keys[i]:keys[i + 1]]`. A query sees the rows up to its own.
    """

    write: Tensor  # (T,) row of each packed token
    queries: Ids  # (S + 1,)
    keys: Ids  # (S + 1,)
    rows: Tensor

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The same as rectangles, for the reference. Sequences with a single query, shortest first,
        are attended together.
        """
        spans, lengths = np.diff(self.queries).tolist(), np.diff(self.keys).tolist()
        several = [i for i, span in enumerate(spans) if span > 1]
        single = sorted((i for i, span in enumerate(spans) if span == 1), key=lengths.__getitem__)
        cuts = _cuts([lengths[i] for i in single])
        return (
            *(self._decoding(single[first:end]) for first, end in cuts),
            *(self._chunk(i) for i in several),
        )

    def _decoding(self, sequences: list[int]) -> Group:
        """One query each, over all rows of its sequence."""
        lengths = torch.from_numpy(np.diff(self.keys)[sequences])
        at = torch.arange(int(lengths.max()))
        places = torch.from_numpy(self.keys[sequences])[:, None] + at.clamp(
            max=lengths[:, None] - 1
        )
        mask = at < lengths[:, None]
        device = self.rows.device
        return Group(
            queries=torch.from_numpy(self.queries[sequences]).to(device),
            rows=self.rows[places.to(device)],
            mask=None if mask.all() else mask[:, None, None].to(device),
        )

    def _chunk(self, i: int) -> Group:
        """Several queries of one sequence: each sees the rows before the chunk and one more than
        the one before it.
        """
        queries = torch.arange(self.queries[i], self.queries[i + 1], device=self.rows.device)
        rows = self.rows[self.keys[i] : self.keys[i + 1]]
        mask = rows.new_ones(len(queries), len(rows), dtype=torch.bool)
        return Group(queries, rows[None], mask.tril(len(rows) - len(queries))[None, None])


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose queries are attended in one call: B sequences of Q queries over L keys.

    `rows` (B, L) names the row of every key; `mask` (B, 1, Q, L) says which of them a query sees,
    None that each sees all. A shorter sequence's row list is padded with a row of its own.
    """

    queries: Tensor  # (B x Q,) which of the packed tokens
    rows: Tensor
    mask: Tensor | None


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


Backend = Callable[[Tensor, Tensor, Tensor, Tensor, Plan], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, pool_layer: Tensor, plan: Plan) -> Tensor:
    """The reference: gather the rows, then scaled dot-product attention.

    q `(T, n_head, d_head)`; k, v `(T, n_kv_head, d_head)`; pool_layer `(key|value, row, n_kv_head,
    d_head)`, written here; returns `(T, n_head, d_head)`. A query at position p sees keys 0..p:
    with rows from earlier steps the queries are fewer than the keys, and the causal mask is aligned
    to the bottom right.
    """
    keys, values = pool_layer
    keys[plan.write] = k.to(keys.dtype)
    values[plan.write] = v.to(values.dtype)
    out = torch.empty_like(q)
    grouped = q.shape[1] != k.shape[1]
    for group in plan.groups:
        n_sequences = group.rows.shape[0]
        queries = q[group.queries].unflatten(0, (n_sequences, -1)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(
            queries,
            keys[group.rows].transpose(1, 2).to(q.dtype),
            values[group.rows].transpose(1, 2).to(q.dtype),
            attn_mask=group.mask,
            enable_gqa=grouped,
        )
        out[group.queries] = heads.transpose(1, 2).flatten(0, 1)
    return out


class PooledAttention:
    """The attention of one step for `GPT.forward`: a backend, the pool's tensor and the plan."""

    def __init__(self, backend: Backend, kv: Tensor, plan: Plan) -> None:
        self.backend, self.kv, self.plan = backend, kv, plan

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.backend(q, k, v, self.kv[layer], self.plan)
