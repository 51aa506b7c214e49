"""Attention over the pool of rows: one signature, several backends.

`attend` writes the step's new keys and values into their rows and lets each query look at the rows
of its own sequence, up to its own position. This file holds the plan that a step makes once for
all layers and the reference backend, gather + scaled dot-product attention, which runs everywhere;
faster backends stand behind the same signature and are proven against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose queries are attended in one call: B sequences of Q queries over L keys.

    `rows` (B, L) names the row of every key; `mask` (B, 1, Q, L) says which of them a query sees,
    None that each sees all. A shorter sequence's row list is padded with a row of its own.
    """

    queries: slice  # of the packed tokens: B x Q of them
    rows: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a step's T packed tokens write their rows, and which rows they read."""

    write: Tensor  # (T,) row of each packed token
    groups: tuple[Group, ...]


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
