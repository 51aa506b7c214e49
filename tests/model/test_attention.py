"""The backends, the reference first: which rows a query sees, which rows a step writes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from model import attention, kernel
from model.attention import Backend
from model.batch import pack
from model.step import Work
from tests.oracle import softmax

N_ROWS, D_HEAD = 40, 6
CPU = torch.device("cpu")


def work(rows: list[int], start: int) -> Work:
    return Work(np.zeros(len(rows), np.int32), start, np.array(rows, np.int32), n_prompt=1)


# Rows lie anywhere, overlap between sequences, and are computed up to `start`.
DECODES = [work([5], 0), work([7, 2, 30], 2), work([7, 2, 9, 8, 1, 0, 12], 6), work([20, 21], 1)]
CHUNKS = [work([13, 14, 15, 16, 17], 0), work([7, 2, 33, 32, 31], 3), work([39, 38, 37, 36], 1)]


@pytest.fixture(params=[attention.attend, kernel.attend], ids=["reference", "kernel"])
def attend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    if backend is kernel.attend and kernel.library() is None:
        pytest.skip("the compiled kernels are not there")
    return backend


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("batch", [DECODES, CHUNKS, CHUNKS + DECODES], ids=["1", "n", "both"])
def test_a_query_sees_the_rows_of_its_own_sequence_up_to_its_own(
    attend: Backend, batch: list[Work], n_kv_head: int
) -> None:
    """Query by query against softmax(q k / sqrt(d)) v over exactly the rows it may see."""
    q, k, v, pool = random_inputs(batch, n_kv_head)
    packed = pack(batch, CPU)
    before = pool.clone()
    out = attend(q, k, v, pool, packed.plan)
    written = packed.plan.write
    assert torch.equal(pool[0, written], k)
    assert torch.equal(pool[1, written], v)
    pool[:, written] = before[:, written]
    assert torch.equal(pool, before), "a row was written that was not asked for"

    pool[0, written], pool[1, written] = k, v
    keys, values = pool.numpy()
    for work, span in zip(batch, packed.spans, strict=True):
        for place, position in zip(
            range(span.start, span.stop), range(work.start, work.end), strict=True
        ):
            seen = work.rows[: position + 1]
            for head in range(4):
                kv_head = head // (4 // n_kv_head)
                scores = keys[seen, kv_head] @ q[place, head].numpy() / math.sqrt(D_HEAD)
                expected = softmax(scores) @ values[seen, kv_head]
                np.testing.assert_allclose(out[place, head].numpy(), expected, atol=1e-5)


def test_rows_of_another_type_than_the_network_are_rounded_and_read(attend: Backend) -> None:
    q, k, v, pool = random_inputs(CHUNKS + DECODES, n_kv_head=4)
    plan = pack(CHUNKS + DECODES, CPU).plan
    halved = pool.to(torch.bfloat16)
    out = attend(q, k, v, halved, plan)
    assert out.dtype == torch.float32
    rounded_k, rounded_v = (x.to(torch.bfloat16).float() for x in (k, v))
    expected = attend(q, rounded_k, rounded_v, pool.to(torch.bfloat16).float(), plan)
    assert torch.equal(out, expected)


def random_inputs(batch: list[Work], n_kv_head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n_kv_head)
    n_tokens = sum(w.end - w.start for w in batch)
    q = torch.randn(n_tokens, 4, D_HEAD, generator=generator)
    k, v = torch.randn(2, n_tokens, n_kv_head, D_HEAD, generator=generator)
    return q, k, v, torch.randn(2, N_ROWS, n_kv_head, D_HEAD, generator=generator)
