"""What a model is said to cost, counted in its modules, its products and its bytes."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from model import cost, reference
from model.config import PRESETS, GPTConfig
from model.gpt import GPT
from model.runner import Runner
from model.trace import attend_plainly
from tests import tiny

SHAPES: list[dict[str, object]] = [
    {},
    {"n_kv_head": 2},
    {"n_kv_head": 1},
    {"norm_first": False},
    {"tied_head": False},
    {"n_vocab_padded": 128},
    {"norm_first": False, "n_kv_head": 1, "tied_head": False, "n_vocab_padded": 128},
]


@pytest.fixture(params=SHAPES, ids=str)
def config(request: pytest.FixtureRequest) -> GPTConfig:
    return tiny.config(**request.param)


def ignore(name: str, x: Tensor) -> None:
    """Nobody looks at the shapes here."""


EXPLICIT = partial(attend_plainly, note=ignore)


class TestParameters:
    def test_of_every_variant(self, config: GPTConfig) -> None:
        assert config.parameters == sum(p.numel() for p in GPT(config).parameters())

    @pytest.mark.parametrize("preset", PRESETS)
    def test_of_every_preset(self, preset: str) -> None:
        with torch.device("meta"):
            model = GPT(PRESETS[preset])
        assert PRESETS[preset].parameters == sum(p.numel() for p in model.parameters())

    @pytest.mark.parametrize("n_head", [1, 2, 4, 8])
    def test_of_attention_whatever_the_heads(self, n_head: int) -> None:
        """4 d^2 (20.4), and the biases beside them."""
        attention = GPT(tiny.config(n_head=n_head)).get_submodule("h.0.attn")
        matrices = [p.numel() for p in attention.parameters() if p.dim() == 2]
        assert sum(matrices) == 4 * 48**2


class TestOperations:
    @pytest.mark.parametrize(("batch", "length", "n_head"), list(product((1, 3), (1, 7), (1, 4))))
    def test_of_attention(self, batch: int, length: int, n_head: int) -> None:
        """4BTd^2 + 2BT^2d (20.5), from a layer whose products are made one by one."""
        d = 48
        w = [torch.randn(d, d) for _ in range(4)]
        x = torch.randn(batch, length, d)
        with FlopCounterMode(display=False) as counter:
            q, k, v = ((x @ m).unflatten(-1, (n_head, -1)).transpose(1, 2) for m in w[:3])
            heads = (q @ k.transpose(-1, -2)).softmax(-1) @ v
            heads.transpose(1, 2).flatten(2) @ w[3]
        formula = 4 * batch * length * d**2 + 2 * batch * length**2 * d
        assert counter.get_total_flops() == 2 * formula
        config = tiny.config(n_head=n_head)
        assert batch * length * config.attention_multiply_adds(length) == formula

    @pytest.mark.parametrize(("prompt", "new"), [(1, 6), (13, 1), (13, 6)])
    def test_of_a_completion(self, config: GPTConfig, prompt: int, new: int) -> None:
        """Everything that the runner multiplies, with the cache and without."""
        for cached, work in ((True, cost.cached), (False, cost.uncached)):
            driver = tiny.Driver(tiny.gpt(config), n_rows=40)
            driver.runner = Runner(driver.runner.model, 40, backend=EXPLICIT)
            text = tiny.Text(tiny.prompt(prompt, 97), cached=cached)
            with FlopCounterMode(display=False) as counter:
                driver.generate([text], new)
            assert counter.get_total_flops() == work(prompt, new).flops(config)

    def test_of_one_row(self, config: GPTConfig) -> None:
        """The difference that one more token makes."""
        more, less = cost.cached(5, 8), cost.cached(5, 7)
        assert more.flops(config) - less.flops(config) == config.flops(context=12)


@pytest.mark.parametrize(("prompt", "new"), list(product((1, 2, 17), (1, 2, 5, 64))))
def test_closed_forms_are_the_sums(prompt: int, new: int) -> None:
    contexts = range(prompt, prompt + new)
    assert cost.uncached(prompt, new) == (
        sum(contexts),
        sum(t * t for t in contexts),
        new,
    )
    assert cost.cached(prompt, new) == (
        prompt + new - 1,
        prompt * prompt + sum(contexts[1:]),
        new,
    )


class TestMemory:
    def test_of_attention_weights(self) -> None:
        config, rng = tiny.config(), np.random.default_rng(0)
        d = config.d_head
        w = reference.Projections.random(rng, config.d_model, d, d, config.n_head, config.n_head)
        x = rng.normal(size=(3, 7, config.d_model))
        weights = reference.multi_head(x, x, x, w).heads.weights
        assert weights.shape == (3, config.n_head, 7, 7)
        assert cost.attention_weights(config, batch=3, length=7) == weights.size

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_of_rows(self, config: GPTConfig, dtype: torch.dtype) -> None:
        kv = Runner(GPT(config), n_rows=10, kv_dtype=dtype).kv
        assert kv.nbytes == 11 * config.row_bytes(dtype.itemsize)

    def test_row_of_gpt2(self) -> None:
        assert PRESETS["gpt2"].row_bytes(2) == 36_864

    def test_read_for_a_token(self, config: GPTConfig) -> None:
        """Every weight once; of the tables that are only looked up, one row."""
        looked_up = {"wpe.weight"} if config.tied_head else {"wpe.weight", "wte.weight"}
        weights = sum(
            p[:1].numel() if name in looked_up else p.numel()
            for name, p in GPT(config).named_parameters()
        )
        expected = 2 * weights + 30 * config.row_bytes(2)
        assert cost.bytes_read(config, context=30, itemsize=2) == expected


class TestWhereCachingPays:
    """In operations from the second token on; in time where reading the weights hides no more."""

    def test_in_operations(self, config: GPTConfig) -> None:
        assert cost.cached(9, 1) == cost.uncached(9, 1)
        assert cost.cached(9, 2).flops(config) < cost.uncached(9, 2).flops(config)

    def test_in_time(self) -> None:
        gpt2 = PRESETS["gpt2"]
        slow, fast = (cost.pays_from(gpt2, 4, balance) for balance in (10, 50))
        assert slow is not None
        assert fast is not None
        # Two operations and four bytes per weight: the reading hides about balance x 4 / 2 rows.
        assert 20 < slow < 35 < 100 < fast < 160

    def test_never_within_a_short_window(self) -> None:
        assert cost.pays_from(tiny.config(n_ctx=16), itemsize=4, balance=1000) is None

    def test_at_once_where_computing_is_slow(self) -> None:
        assert cost.pays_from(tiny.config(), itemsize=4, balance=0.01) == 2
