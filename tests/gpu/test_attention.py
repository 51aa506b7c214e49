"""The Triton kernel against the reference: on a GPU, or number by number in Triton's interpreter,
which has to be chosen before Triton is imported, and so in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from model import attention
from model.batch import pack
from model.lanes import Lanes, Staging
from model.step import Sampling, Work
from tests import lanes
from tests.lanes import decoded
from tests.tiny import Driver, Text, config, gpt, prompt

GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if GPU else "cpu")

kernel = pytest.mark.skipif(not GPU and not INTERPRETED, reason="no CUDA device here")


@pytest.fixture(autouse=True)
def _small_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a program takes 10 ms: a few parts of a few rows show all there is."""
    if INTERPRETED:
        from model import triton_attention

        monkeypatch.setattr(triton_attention, "TILE", 512)
        monkeypatch.setattr(triton_attention, "MAX_PARTS", 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(GPU or INTERPRETED, reason="the kernels are tested in this very process")
def test_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", "3.7.1")  # older interpreters do not run with NumPy 2.4
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--noconftest", __file__],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.mark.skipif(INTERPRETED, reason="there is no compiler in the interpreter")
@pytest.mark.parametrize(("n_parts", "capability"), [(1, 80), (16, 90)])
def test_compiles_for_a_gpu_that_is_not_here(
    n_parts: int, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the machine code of the A100 and of the H100, for GPT-2's heads in bfloat16."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from model import triton_attention

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    sizes = {"D_HEAD": 64, "WIDTH": 64, "PARTS": n_parts}
    sums = {"best": "*fp32", "total": "*fp32"}
    row = dict.fromkeys(("q", "k", "v", "pool_keys", "pool_values"), "*bf16")
    lists = {"rows": "*i32", **dict.fromkeys(("starts", "positions", "write"), "*i64")}
    strides = dict.fromkeys(("q_stride", "k_stride", "v_stride", "row_stride"), "i32")
    out = "*bf16" if n_parts == 1 else "*fp32"
    attended = {**row, **lists, "out": out, **sums, "scale": "fp32", **strides}
    joined = {"partial": "*fp32", **sums, "out": "*bf16"}
    for function, types, constants in (
        (triton_attention._attend_part, attended, {**sizes, "BLOCK": 64, "GROUP": 1}),
        (triton_attention._join, joined, sizes),
    ):
        signature = types | dict.fromkeys(constants, "constexpr")
        compiled = compile(
            ASTSource(function, signature, constants),
            target=GPUTarget("cuda", capability, 32),
            options={"enable_fp_fusion": True},
        )
        assert compiled.asm["cubin"]


def case(lengths: list[int], n_rows: int) -> list[Work]:
    """Sequences of so many tokens, the last of them new; their rows lie anywhere."""
    order = np.random.default_rng(len(lengths)).permutation(n_rows).astype(np.int32)
    ends = np.cumsum(lengths)
    return [
        Work(order[end - n : end], n - 1, order[end - n : end], 1)
        for n, end in zip(lengths, ends, strict=True)
    ]


def compare(
    work: list[Work],
    n_lanes: int,
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
) -> None:
    """Outputs and pool after the kernel are those after the reference, among rows full of NaN."""
    from model import triton_attention  # after the interpreter was chosen

    n_head, n_kv_head, d_head = heads
    generator = torch.Generator().manual_seed(0)
    scratch = 1 + max(int(w.rows.max()) for w in work)
    pool = torch.full((2, scratch + 1, n_kv_head, d_head), torch.nan)
    for w in work:
        pool[:, w.rows[:-1]] = torch.randn((2, w.start, n_kv_head, d_head), generator=generator)
    pool = pool.to(DEVICE, pool_dtype)
    width = (n_head + 2 * n_kv_head) * d_head
    qkv = torch.randn((n_lanes, width), generator=generator).to(DEVICE, dtype)
    q, k, v = (
        part.unflatten(-1, (-1, d_head))
        for part in qkv.split((n_head * d_head, n_kv_head * d_head, n_kv_head * d_head), dim=-1)
    )

    batch = pack(work, DEVICE)
    at = torch.tensor([span.start for span in batch.spans], device=DEVICE)
    packed_q, packed_k, packed_v = (torch.empty_like(part[: len(work)]) for part in (q, k, v))
    for packed, part in ((packed_q, q), (packed_k, k), (packed_v, v)):
        packed[at] = part[: len(work)]
    expected_pool = pool.clone()
    expected = attention.attend(packed_q, packed_k, packed_v, expected_pool, batch.plan)[at]

    found = triton_attention.attend(q, k, v, pool, staged(work, n_lanes, scratch))
    bound = 1e-4 if dtype == pool_dtype == torch.float32 else 0.05
    torch.testing.assert_close(found[: len(work)].float(), expected.float(), rtol=0, atol=bound)
    assert found.isfinite().all()
    rounding = 0 if dtype == pool_dtype else 2**-7  # the interpreter cuts off what it rounds
    torch.testing.assert_close(
        pool[:, :scratch], expected_pool[:, :scratch], rtol=rounding, atol=0, equal_nan=True
    )


def staged(work: list[Work], n_lanes: int, scratch: int) -> Lanes:
    staging = Staging(n_lanes, max(w.end for w in work), scratch, DEVICE)
    staging.send(staging.write(staging.block(), work, n_lanes))
    return staging.lanes(n_lanes)


@kernel
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((2, 2, 16), torch.float32),
        ((3, 1, 20), torch.float32),
        ((4, 2, 12), torch.bfloat16),
    ],
)
def test_mixed_lengths(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of one token, of less than a block, of several parts; one lane pads the bucket."""
    compare(case([1, 150, 40], 200), 4, heads, dtype, dtype)


@kernel
def test_rows_of_another_type() -> None:
    compare(case([1, 30], 40), 2, (2, 1, 16), torch.float32, torch.bfloat16)
    compare(case([1, 30], 40), 2, (2, 1, 16), torch.bfloat16, torch.float32)


@kernel
@pytest.mark.parametrize("n", [1, 2, 16, 17, 18, 32, 33, 34, 64, 65, 66, 128, 129, 130])
def test_ends_of_blocks_and_parts(n: int) -> None:
    """One lane is divided most: some of its parts have no row at all."""
    compare(case([n], 200), 1, (1, 1, 64), torch.float32, torch.float32)


@kernel
def test_many_lanes_are_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    from model import triton_attention

    monkeypatch.setattr(triton_attention, "PROGRAMS", 4)
    assert triton_attention.parts(3 * 2) == 1
    compare(case([1, 70, 33], 200), 3, (2, 2, 64), torch.float32, torch.float32)


@kernel
def test_parts_are_a_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    from model import triton_attention

    monkeypatch.setattr(triton_attention, "MAX_PARTS", 16)
    assert [triton_attention.parts(n) for n in (1, 12, 24, 48, 192, 768)] == [16, 16, 16, 8, 2, 1]
    assert [triton_attention.parts(n) for n in (13 * 12, 300, 512)] == [2, 1, 1]


@kernel
def test_texts_of_captured_steps_are_those_of_eager_ones() -> None:
    """The whole step: network, this kernel, the choice of tokens. Lanes leave and move up."""
    model = gpt(config(n_layer=2, n_head=2, n_kv_head=1)).to(DEVICE)

    def steps(driver: Driver) -> list[list[int]]:
        texts = [Text(prompt(20, 97)), Text(prompt(40, 97), Sampling(seed=2))]
        for among in (texts, texts, texts[1:], texts[::-1]):
            driver.step(among)
        return [text.made for text in texts]

    from model import triton_attention

    driver = lanes.driver(model, 2, 200, triton_attention.attend)
    assert steps(driver) == steps(Driver(model, 200))
    assert decoded(driver) == 3


@kernel
def test_a_poisoned_lane_fails_and_no_other() -> None:
    from model import triton_attention

    work = case([5, 90, 5], 200)
    pool = torch.zeros(2, 201, 2, 8, device=DEVICE)
    pool[0, work[1].rows[70]] = torch.nan
    q = torch.ones(3, 2, 8, device=DEVICE)
    out: Tensor = triton_attention.attend(q, q, q, pool, staged(work, 3, 200))
    assert out.isfinite().all(dim=(1, 2)).tolist() == [True, False, True]
