"""The compiled kernels against torch, and the choice among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model import attention, kernel
from model.batch import pack
from model.packed import PackedEmbedding, PackedLinear
from model.quantise import Int8Linear
from model.step import Work

pytestmark = pytest.mark.skipif(
    kernel.library() is None, reason="the compiled kernels are not there"
)
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
# Outputs that end within a panel and within a group of panels; inputs of more than one block.
SHAPES = [(16, 4), (1, 8), (97, 48), (64, 256), (130, 260), (50, 600)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(n: int, k: int, dtype: torch.dtype, bias: Tensor | None) -> tuple[PackedLinear, Tensor]:
    """A packed layer, and its weight as it is after rounding, in float64."""
    weight = numbers(n, k)
    if dtype is torch.int8:
        rounded = Int8Linear(weight, bias)
        whole = rounded.weight.double() * rounded.scale.double()[:, None]
        return PackedLinear(rounded.weight, rounded.scale, bias), whole
    weight = weight.to(dtype)
    return PackedLinear(weight, None, bias), weight.double()


class TestLinear:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(("n", "k"), SHAPES)
    @pytest.mark.parametrize("biased", [True, False])
    def test_is_the_product(self, n: int, k: int, dtype: torch.dtype, biased: bool) -> None:
        """For every number of tokens that a tile may have, for more than one tile, and for more
        than share a reading of the weights.
        """
        bias = numbers(n, seed=1) if biased else None
        made, weight = layer(n, k, dtype, bias)
        for n_tokens in (*range(1, 15), 40, 300):
            x = numbers(n_tokens, k, seed=n_tokens)
            expected = x.double() @ weight.T + (bias.double() if bias is not None else 0.0)
            torch.testing.assert_close(made(x).double(), expected, rtol=1e-5, atol=2e-5 * k**0.5)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_token_does_not_see_its_neighbours(self, dtype: torch.dtype) -> None:
        """Bit by bit the same alone, and in a batch of any size, NaN among them."""
        made, _ = layer(130, 260, dtype, None)
        x = numbers(300, 260)
        alone = torch.cat([made(row[None]) for row in x])
        for n_tokens in (*range(1, 41), 258, 259, 300):
            assert torch.equal(made(x[:n_tokens]), alone[:n_tokens])
        x[7] = torch.nan
        assert torch.equal(made(x)[8:], alone[8:])
        assert made(x)[7].isnan().all()

    def test_threads_do_not_matter(self) -> None:
        made, _ = layer(500, 64, torch.float32, None)
        x = numbers(9, 64)
        expected = made(x)
        try:
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                assert torch.equal(made(x), expected)
        finally:
            torch.set_num_threads(1)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_rows_come_back(self, dtype: torch.dtype) -> None:
        made, weight = layer(97, 48, dtype, None)
        tokens = torch.tensor([0, 96, 15, 16, 3])
        torch.testing.assert_close(PackedEmbedding(made)(tokens).double(), weight[tokens])


@st.composite
def steps(draw: st.DrawFn) -> list[Work]:
    """Sequences over rows of one pool, some of them shared, each with its new rows of its own."""
    rows = draw(st.permutations(range(400)))
    shared, works = rows[:100], []
    free = 100
    for _ in range(draw(st.integers(1, 5))):
        start, n = draw(st.integers(0, 100)), draw(st.integers(1, 60))
        held = [*shared[:start], *rows[free : free + n]]
        free += n
        works.append(Work(np.zeros(start + n, np.int32), start, np.array(held, np.int32), 1))
    return works


@settings(deadline=None, max_examples=60)
@given(steps(), st.sampled_from([(4, 4), (4, 2), (6, 1), (1, 1)]), st.integers(1, 70))
def test_attention_is_the_references(work: list[Work], heads: tuple[int, int], d_head: int) -> None:
    """Any width of a head, heads that share keys, one query and many, behind rows of others."""
    n_head, n_kv_head = heads
    plan = pack(work, CPU).plan
    n_tokens = len(plan.write)
    q, k, v = (
        numbers(n_tokens, n, d_head, seed=i) for i, n in enumerate((n_head, *[n_kv_head] * 2))
    )
    pool = torch.full((2, 400, n_kv_head, d_head), torch.nan)
    pool[:, plan.rows] = numbers(2, 400, n_kv_head, d_head)[:, plan.rows]
    expected_pool = pool.clone()
    expected = attention.attend(q, k, v, expected_pool, plan)
    out = kernel.attend(q, k, v, pool, plan)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(pool.view(torch.int32), expected_pool.view(torch.int32))


def test_very_unequal_scores_do_not_overflow() -> None:
    """A softmax whose largest score is far above the others, and far below zero."""
    rows = np.arange(200, dtype=np.int32)
    for start in (0, 199):
        plan = pack([Work(np.zeros(200, np.int32), start, rows, 1)], CPU).plan
        n = 200 - start
        q, pool = numbers(n, 1, 8) * 100, numbers(2, 200, 1, 8, seed=1) * 100
        k, v = pool[0, start:].clone(), pool[1, start:].clone()
        expected = attention.attend(q, k, v, pool.clone(), plan)
        torch.testing.assert_close(
            kernel.attend(q, k, v, pool, plan), expected, rtol=1e-4, atol=1e-3
        )


class TestChoice:
    def test_every_instruction_set_gives_these_answers(self) -> None:
        """What this CPU would run with fewer abilities, each in a process of its own."""
        best = kernel.LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ("_kernel",))
        named = {"_kernel_avx512": "avx512", "_kernel_avx2": "avx2", "_kernel": "default"}
        with ThreadPoolExecutor() as pool:
            made = pool.map(lambda n: _sums(os.environ | {"ATEN_CPU_CAPABILITY": named[n]}), best)
        found, answers = zip(*made, strict=True)
        assert found == tuple(best)
        for sums in answers[1:]:
            np.testing.assert_allclose(sums, answers[0], rtol=1e-4)

    def test_a_library_of_another_version_is_not_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = _path()
        assert kernel._load(path) is not None
        monkeypatch.setattr(kernel, "VERSION", kernel.VERSION + 1)
        assert kernel._load(path) is None
        broken = tmp_path / "_kernel.so"
        broken.write_bytes(b"no library")
        assert kernel._load(broken) is None

    def test_it_was_compiled_from_this_source(self) -> None:
        """After a change of kernel.c the package must be installed anew, or old code is tested."""
        source = Path(kernel.__file__).with_suffix(".c")
        assert _path().stat().st_mtime >= source.stat().st_mtime


def _path() -> Path:
    library = kernel.library()
    assert library is not None
    return Path(library._name)


SCRIPT = """
import json, torch
from pathlib import Path
from model import kernel
from model.batch import pack
from tests.model.test_kernel import DTYPES, layer, numbers, sequences
torch.set_num_threads(1)
sums = []
for dtype in DTYPES:
    made = layer(130, 260, dtype, None)[0]
    for n in (9, 40, 300):
        sums += made(numbers(n, 260)).abs().sum(dim=1).tolist()
plan, q, k, v, pool = sequences()
for rows in (pool, pool.bfloat16()):
    sums += kernel.attend(q, k, v, rows, plan).abs().sum(dim=(1, 2)).tolist()
print(json.dumps({"library": Path(kernel.library()._name).name.split(".")[0], "sums": sums}))
"""


def sequences() -> tuple[attention.Plan, Tensor, Tensor, Tensor, Tensor]:
    """Six sequences that decode and one of several queries, with all that attention takes."""
    rows = np.arange(300, dtype=np.int32)
    work = [
        *(
            Work(np.zeros(n, np.int32), n - 1, rows[40 * i :][:n], 1)
            for i, n in enumerate(range(30, 36))
        ),
        Work(np.zeros(40, np.int32), 9, rows[250:290], 1),
    ]
    plan = pack(work, CPU).plan
    n_tokens = len(plan.write)
    q, k, v = (numbers(n_tokens, n, 24, seed=i) for i, n in enumerate((4, 2, 2)))
    return plan, q, k, v, numbers(2, 300, 2, 24, seed=9)


def _sums(environment: dict[str, str]) -> tuple[str, list[list[float]]]:
    home = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT]
    made = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    return found["library"], found["sums"]
