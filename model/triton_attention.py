"""Attention of a decode step on the GPU: one query per lane, over rows where they lie in the pool.

One program attends one head of one lane over one part of its rows, with the running softmax of
FlashAttention (arXiv:2205.14135). When there are few lanes, their rows are divided among several
programs and a second kernel joins the parts (Flash-Decoding), or most of the GPU would idle.

The lane's own row never comes from the pool: the program of the first part takes it from the step's
keys and values and stores it for the steps to come. So nothing else of the pool is read than the
older rows of the lane itself, and padding, which has none, reads nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from model.lanes import Lanes

TILE = 4096  # numbers of keys, and of values, that a program holds at once
MAX_PARTS = 16
PROGRAMS = 512  # enough to keep the largest GPU busy


def attend(q: Tensor, k: Tensor, v: Tensor, pool_layer: Tensor, lanes: Lanes) -> Tensor:
    """q `(B, n_head, d_head)`; k, v `(B, n_kv_head, d_head)`; pool_layer `(key|value, row,
    n_kv_head, d_head)`, written here; returns `(B, n_head, d_head)`.

    The heads of a token must lie together, as they do in slices of one projection. Sums are made in
    float32. How the work is divided depends on the shapes alone, so it can be captured in a graph.
    """
    n_lanes, n_head, d_head = q.shape
    n_parts = parts(n_lanes * n_head)
    width = triton.next_power_of_2(d_head)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    partial = torch.empty(n_parts, n_lanes, n_head, d_head, dtype=torch.float32, device=q.device)
    best = torch.empty(n_parts, n_lanes, n_head, dtype=torch.float32, device=q.device)
    total = torch.empty_like(best)
    _attend_part[n_head, n_lanes, n_parts](
        q,
        k,
        v,
        pool_layer[0],
        pool_layer[1],
        lanes.rows,
        lanes.starts,
        lanes.positions,
        lanes.write,
        out if n_parts == 1 else partial,
        best,
        total,
        d_head**-0.5,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        pool_layer.stride(1),
        D_HEAD=d_head,
        WIDTH=width,
        BLOCK=max(16, TILE // width),
        GROUP=n_head // k.shape[1],
        PARTS=n_parts,
        enable_fp_fusion=True,
    )
    if n_parts > 1:
        _join[n_head, n_lanes](
            partial,
            best,
            total,
            out,
            D_HEAD=d_head,
            WIDTH=width,
            PARTS=n_parts,
            enable_fp_fusion=True,
        )
    return out


def parts(n_programs: int) -> int:
    """Into how many parts the rows are divided, a power of 2, for so many heads of lanes."""
    return 1 << (min(MAX_PARTS, max(1, PROGRAMS // n_programs)).bit_length() - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _attend_part(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pool_keys: tl.tensor,
    pool_values: tl.tensor,
    rows: tl.tensor,
    starts: tl.tensor,
    positions: tl.tensor,
    write: tl.tensor,
    out: tl.tensor,  # (part, lane, head, d_head): weighted sums, divided if there is one part only
    best: tl.tensor,  # (part, lane, head): the greatest score of the part
    total: tl.tensor,  # (part, lane, head): the sum of exp(score - best)
    scale: float,
    q_stride: int,  # numbers from one token to the next
    k_stride: int,
    v_stride: int,
    row_stride: int,  # numbers from one row of the pool to the next
    D_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,  # D_HEAD, padded to a power of 2
    BLOCK: tl.constexpr,  # rows at once
    GROUP: tl.constexpr,  # query heads that share a key head
    PARTS: tl.constexpr,
) -> None:
    head, lane, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    column = tl.arange(0, WIDTH)
    inside = column < D_HEAD
    in_row = (head // GROUP) * D_HEAD + column
    query = tl.load(q + lane * q_stride + head * D_HEAD + column, mask=inside, other=0.0)
    query = query.to(tl.float32) * scale

    # The own row, rounded as it will be found in the pool.
    key = tl.load(k + lane * k_stride + in_row, mask=inside, other=0.0)
    value = tl.load(v + lane * v_stride + in_row, mask=inside, other=0.0)
    key, value = key.to(pool_keys.dtype.element_ty), value.to(pool_values.dtype.element_ty)
    first = part == 0
    if first & (head % GROUP == 0):
        own = tl.load(write + lane) * row_stride + in_row  # int64: large pools exceed 2^31 numbers
        tl.store(pool_keys + own, key, mask=inside)
        tl.store(pool_values + own, value, mask=inside)
    score = tl.sum(query * key.to(tl.float32), axis=0)
    high = tl.where(first, score, float("-inf"))
    weight = tl.where(first, 1.0, 0.0)
    mixed = tl.where(first, value.to(tl.float32), 0.0)

    # The older rows of this part.
    older = tl.load(positions + lane).to(tl.int32)
    per_part = tl.cdiv(tl.cdiv(older, PARTS), BLOCK) * BLOCK
    begin = part * per_part
    end = tl.minimum(begin + per_part, older)
    listed = rows + tl.load(starts + lane)
    for at in range(begin, end, BLOCK):
        place = at + tl.arange(0, BLOCK)
        seen = place < end
        row = tl.load(listed + place, mask=seen, other=0).to(tl.int64)
        found = row[:, None] * row_stride + in_row[None, :]
        visible = seen[:, None] & inside[None, :]
        keys = tl.load(pool_keys + found, mask=visible, other=0.0).to(tl.float32)
        values = tl.load(pool_values + found, mask=visible, other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(query[None, :] * keys, axis=1), float("-inf"))
        higher = tl.maximum(high, tl.max(scores, axis=0))
        shrink = tl.exp(high - higher)
        weights = tl.exp(scores - higher)
        weight = weight * shrink + tl.sum(weights, axis=0)
        mixed = mixed * shrink + tl.sum(weights[:, None] * values, axis=0)
        high = higher

    place = (part * tl.num_programs(1) + lane) * tl.num_programs(0) + head
    if PARTS == 1:
        mixed = mixed / weight
    else:
        tl.store(best + place, high)
        tl.store(total + place, weight)
    tl.store(out + place * D_HEAD + column, mixed, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _join(
    partial: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    out: tl.tensor,  # (lane, head, d_head)
    D_HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    head, lane = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, WIDTH)
    inside = column < D_HEAD
    place = lane * tl.num_programs(0) + head
    each = tl.arange(0, PARTS) * (tl.num_programs(0) * tl.num_programs(1)) + place
    # A part without rows has sums of 0 and a best of -inf; the first part has a row always.
    high = tl.load(best + each)
    shrink = tl.exp(high - tl.max(high, axis=0))
    weight = tl.sum(tl.load(total + each) * shrink, axis=0)
    found = each[:, None] * D_HEAD + column[None, :]
    mixed = tl.load(partial + found, mask=inside[None, :], other=0.0)
    mixed = tl.sum(mixed * shrink[:, None], axis=0) / weight
    tl.store(out + place * D_HEAD + column, mixed, mask=inside)
