"""The compiled kernels against torch, and the choice among them."""

from __future__ import annotations

import json
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
KINDS = ["float32", "bfloat16", "int8", "bfloat16, inputs too"]
# Outputs that end within a panel and within a group of panels; inputs of more than one block.
SHAPES = [(16, 4), (1, 8), (97, 48), (64, 256), (130, 260), (50, 600)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layer(n: int, k: int, kind: str, bias: Tensor | None) -> tuple[PackedLinear, Tensor]:
    """A packed layer, and its weight as it is after rounding, in float64."""
    weight = numbers(n, k)
    if kind == "int8":
        rounded = Int8Linear(weight, bias)
        whole = rounded.weight.double() * rounded.scale.double()[:, None]
        return PackedLinear(rounded.weight, rounded.scale, bias), whole
    if kind.startswith("bfloat16"):
        weight = weight.bfloat16()
    made = PackedLinear(weight, None, bias, round_inputs=kind == "bfloat16, inputs too")
    return made, weight.double()


def as_multiplied(x: Tensor, kind: str) -> Tensor:
    """Inputs as a layer rounds them, in float64."""
    if kind == "int8":
        step = x.abs().amax(dim=1, keepdim=True) / 32767
        return (x * (1 / step)).round().double() * step
    return x.bfloat16().double() if kind == "bfloat16, inputs too" else x.double()


class TestLinear:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("n", "k"), SHAPES)
    @pytest.mark.parametrize("biased", [True, False])
    def test_is_the_product(self, n: int, k: int, kind: str, biased: bool) -> None:
        """For every number of tokens that a tile may have, for more than one tile, and for more
        than share a reading of the weights.
        """
        bias = numbers(n, seed=1) if biased else None
        made, weight = layer(n, k, kind, bias)
        for n_tokens in (*range(1, 15), 40, 300):
            x = numbers(n_tokens, k, seed=n_tokens)
            expected = as_multiplied(x, kind) @ weight.T + (0.0 if bias is None else bias.double())
            atol = 2e-5 * k**0.5
            if kind == "int8":  # an input halfway between two steps may become either
                atol += (x.abs().max() / 32767 * weight.abs().max()).item()
            torch.testing.assert_close(made(x).double(), expected, rtol=1e-5, atol=atol)

    @pytest.mark.parametrize("most", [1e-20, 1e20, 1e36])
    def test_int8_takes_inputs_of_any_size(self, most: float) -> None:
        """The step is a token's own: a large neighbour costs a small one nothing, and within a row
        an input is off by half of a 32,767th of the largest.
        """
        made, weight = layer(40, 600, "int8", None)
        x = torch.stack([torch.zeros(600), numbers(600), numbers(600, seed=1)])
        x[1] *= most / x[1].abs().max()
        expected = x.double() @ weight.T
        bound = x.abs().amax(dim=1).double()[:, None] / 65534 * weight.abs().sum(dim=1)
        assert ((made(x) - expected).abs() <= bound + 1e-5 * expected.abs()).all()
        assert made(x)[0].eq(0).all()

    @pytest.mark.parametrize("n_tokens", [1, 3, 40])
    def test_sums_of_whole_numbers_do_not_overflow(self, n_tokens: int) -> None:
        """The largest of all: a thousand products of 32,767 and 127 do not fit 32 bits."""
        made = PackedLinear(torch.full((16, 1024), 127, dtype=torch.int8), torch.ones(16), None)
        found = made(torch.full((n_tokens, 1024), 3.7))
        torch.testing.assert_close(found, torch.full_like(found, 1024 * 127 * 3.7))

    def test_a_scale_is_for_int8(self) -> None:
        for weight, scale in (
            (torch.ones(16, 4, dtype=torch.int8), None),
            (torch.ones(16, 4), torch.ones(16)),
        ):
            with pytest.raises(ValueError, match="int8 weights have a scale, and no others"):
                PackedLinear(weight, scale, None)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_token_does_not_see_its_neighbours(self, kind: str) -> None:
        """Bit by bit the same alone, and in a batch of any size, NaN among them."""
        made, _ = layer(130, 260, kind, None)
        x = numbers(300, 260)
        alone = torch.cat([made(row[None]) for row in x])
        for n_tokens in (*range(1, 41), 258, 259, 300):
            assert torch.equal(made(x[:n_tokens]), alone[:n_tokens])
        x[7] = torch.nan
        assert torch.equal(made(x)[8:], alone[8:])
        assert made(x)[7].isnan().all()
        x[7, 1:] = 0
        x[7, 0] = torch.inf
        assert not made(x)[7].isfinite().any()

    @pytest.mark.parametrize("kind", KINDS)
    def test_threads_do_not_matter(self, kind: str) -> None:
        made, _ = layer(500, 64, kind, None)
        x = numbers(9, 64)
        expected = made(x)
        try:
            for threads in (2, 3, 7):
                torch.set_num_threads(threads)
                assert torch.equal(made(x), expected)
        finally:
            torch.set_num_threads(1)

    @pytest.mark.parametrize("kind", KINDS)
    def test_rows_come_back(self, kind: str) -> None:
        made, weight = layer(97, 48, kind, None)
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
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(_sums, kernel.fitting()))
        for sums in answers[1:]:
            np.testing.assert_allclose(sums, answers[0], rtol=1e-4)

    @pytest.mark.parametrize(
        ("capability", "bfloat16", "best"),
        [
            ("AVX512", True, "_kernel_avx512bf16"),
            ("AVX512", False, "_kernel_avx512"),
            ("AVX2", False, "_kernel_avx2"),
            ("AVX2", True, "_kernel_avx2"),  # asked for less than there is
            ("DEFAULT", False, "_kernel"),
            ("NEON", False, "_kernel"),
        ],
    )
    def test_a_cpu_gets_what_it_can_run(
        self, monkeypatch: pytest.MonkeyPatch, capability: str, bfloat16: bool, best: str
    ) -> None:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bfloat16)
        fitting = kernel.fitting()
        assert fitting[0] == best
        assert fitting[-1] == "_kernel"

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
import json, sys, torch
from model import kernel
kernel.fitting = lambda: (sys.argv[1],)
from tests.model.test_kernel import KINDS, layer, numbers, sequences
torch.set_num_threads(1)
sums = []
for kind in KINDS:
    made = layer(130, 260, kind, None)[0]
    for n in (9, 40, 300):
        sums += made(numbers(n, 260)).abs().sum(dim=1).tolist()
plan, q, k, v, pool = sequences()
for rows in (pool, pool.bfloat16()):
    sums += kernel.attend(q, k, v, rows, plan).abs().sum(dim=(1, 2)).tolist()
print(json.dumps(sums))
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


def _sums(library: str) -> list[float]:
    home = Path(__file__).parents[2]
    command = [sys.executable, "-c", SCRIPT, library]
    made = subprocess.run(command, cwd=home, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)  # type: ignore[no-any-return]
