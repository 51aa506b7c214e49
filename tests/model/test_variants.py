"""Every variant of the network is the same network to all that serves it, and to other hands.

Variants share key heads (multi-query, grouped-query), normalise as the first GPT did, or both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from model import attention, checkpoint, reference
from model.config import Activation, GPTConfig
from model.gpt import GPT
from model.runner import Runner
from model.step import Sampling, Work
from model.tokenizer import Tokenizer
from model.train import CausalRows, next_token_loss
from tests import tiny

VARIANTS: dict[str, dict[str, object]] = {
    "GPT-2": {},
    "grouped-query": {"n_kv_head": 2},
    "multi-query": {"n_kv_head": 1},
    "first GPT": {"norm_first": False},
    "first GPT, multi-query": {"norm_first": False, "n_kv_head": 1},
}
TOKENS = tiny.prompt(20, 97)


@pytest.fixture(params=list(VARIANTS.values()), ids=list(VARIANTS))
def config(request: pytest.FixtureRequest) -> GPTConfig:
    return tiny.config(**request.param)


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0, atol=1e-4)


def is_the_reference(config: GPTConfig) -> bool:
    model = tiny.gpt(config).double()
    expected = reference.gpt(TOKENS, tiny.arrays(model), config)
    return np.allclose(tiny.full_pass(model, TOKENS), expected, rtol=0, atol=1e-12)


def test_the_reference(config: GPTConfig) -> None:
    assert is_the_reference(config)


@pytest.mark.parametrize("activation", get_args(Activation))
def test_the_reference_with_every_bend(activation: str) -> None:
    config = tiny.config(activation=activation, tied_head=False, n_vocab_padded=128)
    assert is_the_reference(config)


class TestOtherHands:
    """The same random weights in transformers."""

    SHAPE: ClassVar[dict[str, Any]] = {
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 48,
        "n_positions": 32,
        "vocab_size": 97,
    }

    def agree(
        self,
        theirs: nn.Module,
        names: dict[str, str],
        turned: tuple[str, ...],
        **variant: object,
    ) -> bool:
        """Whether our network with their numbers says the same: `turned` are kept transposed."""
        tiny.randomise(theirs, std=0.15)
        ours = GPT(tiny.config(n_ctx=32, d_ff=None, **variant))
        with torch.no_grad():
            for name, parameter in ours.named_parameters():
                source = theirs.get_parameter(f"transformer.{names.get(name, name)}")
                parameter.copy_(source.T if name.endswith(turned) else source)
        return close(tiny.full_pass(ours, TOKENS), theirs(torch.tensor([TOKENS])).logits[0])

    def test_the_first_gpt(self) -> None:
        theirs = OpenAIGPTLMHeadModel(OpenAIGPTConfig(**self.SHAPE))
        names = {"wte.weight": "tokens_embed.weight", "wpe.weight": "positions_embed.weight"}
        assert self.agree(theirs, names, turned=tiny.TRANSPOSED, norm_first=False)

    def test_multi_query(self) -> None:
        theirs = GPTBigCodeForCausalLM(GPTBigCodeConfig(**self.SHAPE, multi_query=True))
        assert self.agree(theirs, {}, turned=(), n_kv_head=1)


class TestRows:
    """Row N comes from rows 1..N, so it may be computed when it is needed and kept."""

    @settings(max_examples=20, deadline=None)
    @given(cuts=st.sets(st.integers(1, len(TOKENS) - 2)), data=st.data())
    @pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
    def test_any_split_scores_alike(
        self, changes: dict[str, object], cuts: set[int], data: st.DataObject
    ) -> None:
        """One chunk is the uncached way, all ones the cached; rows lie anywhere in the pool."""
        model = tiny.gpt(tiny.config(**changes))
        runner = Runner(model, n_rows=40)
        runner.kv.fill_(torch.nan)
        rows = np.array(data.draw(st.permutations(range(40)))[: len(TOKENS)], np.int32)
        tokens, last = np.array(TOKENS, np.int32), len(TOKENS) - 1
        ends = [*sorted(cuts), last]
        scores = []
        for start, end in zip([0, *ends], ends, strict=False):
            targets = tokens[start + 1 : end + 1]
            work = Work(tokens[:end], start, rows[:end], last, score=0, targets=targets)
            (draw,) = runner.run([work])
            scores += [score.logprob for score in draw.prompt_scores]
        expected = tiny.full_pass(model, TOKENS)[:-1].log_softmax(-1)
        chosen = expected.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
        assert close(torch.tensor(scores), chosen)

    def test_cached_and_uncached_texts_are_equal(self, config: GPTConfig) -> None:
        """Side by side in one batch, in chunks of their own, among rows full of NaN."""
        driver = tiny.Driver(tiny.gpt(config))
        texts = [
            tiny.Text(list(TOKENS), Sampling(seed=1), cached=cached, chunk=chunk)
            for cached, chunk in ((True, 100), (True, 7), (True, 1), (False, 100), (False, 6))
        ]
        made = driver.generate(texts, 12)
        assert made == [made[0]] * len(texts)
        assert len(set(made[0])) > 6  # a text that repeats itself would prove little
        assert driver.pool.free == driver.pool.n_rows

    def test_no_row_acts_on_an_earlier_one(self, config: GPTConfig) -> None:
        """Through all layers, the Jacobian of row n by row m > n is zero, and not merely small."""
        model, n = tiny.gpt(config), 5
        x = torch.randn(n, config.d_model, generator=torch.Generator().manual_seed(0))

        def stream(x: Tensor) -> Tensor:
            for layer, block in enumerate(model.h):
                x = block(x, layer, CausalRows(1))
            return x.sum(dim=1) + x[:, 0]  # the sum alone is constant behind a norm

        jacobian = torch.autograd.functional.jacobian(stream, x)
        acts = (jacobian != 0).any(dim=-1)
        assert acts.equal(torch.ones(n, n, dtype=torch.bool).tril())

    def test_queries_are_dropped(self, config: GPTConfig) -> None:
        """After a step nothing holds the memory of its queries; only the pool has grown."""
        queries: list[StorageWeakRef] = []

        def spy(
            q: Tensor, k: Tensor, v: Tensor, pool_layer: Tensor, plan: attention.Plan
        ) -> Tensor:
            queries.append(StorageWeakRef(q.untyped_storage()))
            return attention.attend(q, k, v, pool_layer, plan)

        driver = tiny.Driver(tiny.gpt(config), n_rows=40)
        driver.runner = Runner(driver.runner.model, 40, backend=spy)
        driver.step([tiny.Text(list(TOKENS))])
        assert len(queries) == config.n_layer
        assert all(query.expired() for query in queries)
        assert driver.runner.kv.nbytes == 41 * config.row_bytes(4)  # one of them is scratch


def test_fewer_key_heads_make_smaller_rows() -> None:
    sizes = [Runner(GPT(tiny.config(n_kv_head=n)), n_rows=9).kv.nbytes for n in (4, 2, 1)]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4]


def test_it_learns(config: GPTConfig) -> None:
    """A repeated batch is learned by heart, from the initial weights of its kind."""
    model = GPT(config)
    model.initialise(torch.Generator().manual_seed(0))
    rows = torch.tensor([tiny.prompt(17, 97, seed) for seed in range(4)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = next_token_loss(model, rows)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(np.log(97), abs=0.3)  # it begins by guessing
    assert losses[-1] < 0.5 * losses[0]


def test_a_folder_keeps_it(config: GPTConfig, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_ranks({bytes([byte]): byte for byte in range(256)}, "bytes")
    model = tiny.gpt(config.model_copy(update={"n_vocab": 257, "n_vocab_padded": 257}))
    checkpoint.save(tmp_path, model, tokenizer, torch.float32)
    loaded = checkpoint.load(tmp_path)
    assert loaded.config == model.config
    assert tiny.full_pass(loaded.model, TOKENS).equal(tiny.full_pass(model, TOKENS))
