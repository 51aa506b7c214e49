"""A packed network is the same network, in every variant and every type of numbers."""

from __future__ import annotations

from copy import deepcopy
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from model import checkpoint, kernel, packed
from model.config import GPTConfig
from model.gpt import GPT
from model.packed import PackedRunner
from model.quantise import Int8Linear, quantise
from model.runner import Runner
from model.step import Sampling, TokenScore, Work
from tests import tiny
from tests.model.test_variants import VARIANTS

pytestmark = pytest.mark.skipif(
    kernel.library() is None, reason="the compiled kernels are not there"
)
SHAPES: dict[str, dict[str, object]] = {
    **VARIANTS,
    "exact GELU": {"activation": "gelu"},
    "ReLU": {"activation": "relu"},
    "untied, padded vocabulary": {"tied_head": False, "n_vocab_padded": 128},
    "one head": {"n_head": 1},
}
# How far hidden states of magnitude 4 may lie from those of the same weights in float32: rows in
# bfloat16 are rounded to 8 bits, and so may a layer's inputs be.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "bfloat16, inputs too": 0.2, "int8": 3e-2}
ROWS = {name: torch.float32 if name == "float32" else torch.bfloat16 for name in TOLERANCE}
TOKENS = tiny.prompt(200, 97)


def network(config: GPTConfig, dtype: str) -> GPT:
    """As it is loaded in a type."""
    model = tiny.gpt(config)
    if dtype.startswith("bfloat16"):
        model = model.bfloat16()
    if dtype == "int8":
        quantise(model)
    return model


def pack(model: GPT, dtype: str) -> None:
    """As on a CPU that multiplies bfloat16, or on one that does not."""
    with patch.object(kernel, "multiplies_bfloat16", lambda: dtype == "bfloat16, inputs too"):
        packed.pack(model)


def hidden_states(runner: Runner, cuts: list[int]) -> Tensor:
    """Of all of TOKENS, computed in chunks that end at the cuts."""
    seen: list[Tensor] = []
    original = runner.hidden
    runner.hidden = lambda batch: seen.append(original(batch)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    tokens, rows = np.array(TOKENS, np.int32), np.arange(len(TOKENS), dtype=np.int32)
    for start, end in zip([0, *cuts], [*cuts, len(TOKENS)], strict=True):
        runner.run([Work(tokens[:end], start, rows[:end], 1)])
    return torch.cat(seen)


@pytest.mark.parametrize("dtype", list(ROWS))
@pytest.mark.parametrize("changes", list(SHAPES.values()), ids=list(SHAPES))
def test_it_is_the_same_network(changes: dict[str, object], dtype: str) -> None:
    """One chunk, chunks, and single tokens, against torch in float32 with the rounded weights."""
    config = tiny.config(**changes)
    model = network(config, dtype)
    expected = hidden_states(Runner(deepcopy(model).float(), 200, ROWS[dtype]), [])
    pack(model, dtype)
    for cuts in ([], [64, 130], [190, *range(191, 200)]):
        found = hidden_states(PackedRunner(model, 200, ROWS[dtype]), cuts)
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("n_kv_head", [1, 2, 4])
@pytest.mark.parametrize("dtype", list(ROWS))
def test_threads_do_not_matter(dtype: str, n_kv_head: int) -> None:
    """Bit by bit, with more threads than there are key heads or chunks to share."""
    model = network(tiny.config(n_kv_head=n_kv_head), dtype)
    pack(model, dtype)
    cuts = [40, 41, *range(190, 200)]
    alone = hidden_states(PackedRunner(model, 200, ROWS[dtype]), cuts)
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(hidden_states(PackedRunner(model, 200, ROWS[dtype]), cuts), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", list(ROWS))
def test_alone_and_together(dtype: str) -> None:
    """Requests of all kinds among rows full of NaN: the log-probability of every token bit by bit
    what it is alone, and the cached text the uncached one.
    """
    kinds = (
        *((1, 0.0, True, 9), (30, 0.0, True, 7), (30, 0.0, False, 100)),
        *((90, 1.0, True, 100), (90, 1.0, False, 40)),
    )
    model = network(tiny.config(n_kv_head=2), dtype)
    pack(model, dtype)

    def texts() -> list[tiny.Text]:
        return [
            tiny.Text(TOKENS[:n], Sampling(temperature=t, seed=n, logprobs=1), cached, chunk)
            for n, t, cached, chunk in kinds
        ]

    def scores(texts: list[tiny.Text]) -> list[list[TokenScore]]:
        driver = tiny.Driver(model, kv_dtype=ROWS[dtype])
        seen: list[list[TokenScore]] = [[] for _ in texts]
        while any(len(made) < 20 for made in seen):
            for made, draw in zip(seen, driver.step(texts), strict=True):
                if draw.score is not None:
                    made.append(draw.score)
        return [made[:20] for made in seen]

    together = scores(texts())
    assert together == [scores([text])[0] for text in texts()]
    tokens = [[score.token for score in made] for made in together]
    assert tokens[1] == tokens[2]
    assert tokens[3] == tokens[4]


def test_an_unknown_token_fails_alone() -> None:
    """Its sender should have known; it reads nobody's memory."""
    driver = tiny.Driver(tiny.packed_copy(tiny.gpt(tiny.config())))
    texts = [tiny.Text(tokens) for tokens in ([5, 6], [5, 97], [5, 6], [-1])]
    draws = driver.step(texts)
    assert [draw.failed for draw in draws] == [False, True, False, True]
    assert draws[0] == draws[2]


def test_other_shapes_are_left_to_torch() -> None:
    assert packed.available(tiny.config())
    assert not packed.available(tiny.config(d_model=50, n_head=2))
    assert not packed.available(tiny.config(d_ff=81))


@pytest.mark.parametrize("dtype", list(ROWS))
def test_the_unpacked_weights_are_let_go(dtype: str) -> None:
    """What a packed network holds is its panels and vectors, as large as the type says."""
    config = tiny.config(d_model=128, n_vocab=200)
    model = network(config, dtype)
    pack(model, dtype)
    assert all(
        parameter.dim() < 2 for name, parameter in model.named_parameters() if "wpe" not in name
    )
    panels = {
        m.panels.data_ptr(): m.panels.nbytes
        for m in model.modules()
        if isinstance(m, packed.PackedLinear)
    }
    matrices = config.n_layer * (128 * 3 * 128 + 128 * 128 + 2 * 128 * config.d_ff) + 208 * 128
    assert sum(panels.values()) == matrices * {"float32": 4, "int8": 1}.get(dtype, 2)


def test_what_was_bfloat16_once_is_read_as_such() -> None:
    """A network in float32 whose weights are exact in bfloat16 takes half the memory, and computes
    the very same numbers; one weight that is not keeps its matrix as it is.
    """
    model = tiny.gpt(tiny.config()).bfloat16().float()
    narrow, wide = deepcopy(model), deepcopy(model)
    with torch.no_grad():
        narrow.get_parameter("h.0.mlp.c_fc.weight")[5, 7] = 1 + 2**-8
    wide.load_state_dict(narrow.state_dict())
    packed.pack(narrow)
    with patch.object(packed, "_narrowed", lambda weight: weight):
        packed.pack(wide)
    types = {
        name: m.panels.dtype
        for name, m in narrow.named_modules()
        if isinstance(m, packed.PackedLinear)
    }
    assert types.pop("h.0.mlp.c_fc") is torch.float32
    assert set(types.values()) == {torch.bfloat16}
    for cuts in ([], [64, 130], [190, *range(191, 200)]):
        found, expected = (
            hidden_states(PackedRunner(network, 200), cuts) for network in (narrow, wide)
        )
        assert torch.equal(found, expected)


def test_what_a_head_looks_at_is_the_same() -> None:
    plain = tiny.gpt(tiny.config())
    model = tiny.packed_copy(plain)
    ours, theirs = PackedRunner(model, 9), Runner(plain, 9)
    for layer, head in ((0, 0), (2, 3)):
        found, expected = (
            ours.inspect(TOKENS[:40], layer, head),
            theirs.inspect(TOKENS[:40], layer, head),
        )
        np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
        np.testing.assert_allclose(found.row, expected.row, atol=1e-5)
        assert found.shapes == expected.shapes


@pytest.fixture(scope="module")
def told() -> tuple[GPT, list[int]]:
    """The embedded model and a text that it tells."""
    loaded = checkpoint.load(checkpoint.resolve("stories"))
    text = tiny.Text([loaded.tokenizer.end_of_text], Sampling(seed=1))
    tiny.Driver(tiny.packed_copy(loaded.model), 400).generate([text], 399)
    return loaded.model, text.tokens


class TestInt8:
    def test_an_output_is_at_most_half_a_step_off(self) -> None:
        weight = torch.randn(50, 64, generator=torch.Generator().manual_seed(0))
        weight[7] = 0
        made = Int8Linear(weight, None)
        error = (made.weight.double() * made.scale.double()[:, None] - weight.double()).abs()
        assert (error <= made.scale[:, None] * 0.5001).all()
        assert made.weight.abs().amax(dim=1)[:7].eq(127).all()
        assert made.weight[7].eq(0).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "bfloat16, inputs too", "int8", "int8 in torch"])
def test_the_embedded_model_keeps_its_quality(told: tuple[GPT, list[int]], dtype: str) -> None:
    """Bits per token of its text in float32 and in fewer bits; the bound for held-out stories is
    1 %.
    """
    model, tokens = deepcopy(told[0]), told[1]
    exact = tiny.full_pass(model, tokens)
    if dtype.startswith("bfloat16"):
        model.bfloat16()
    else:
        quantise(model)
    if dtype != "int8 in torch":
        pack(model, dtype)
    rounded = tiny.full_pass(model, tokens)
    targets = torch.tensor(tokens[1:])
    losses = [torch.nn.functional.cross_entropy(x[:-1], targets).item() for x in (exact, rounded)]
    assert 1 < losses[0] < 3
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert (rounded - exact).abs().mean() < 0.1
