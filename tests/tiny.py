"""Small random models, and a hand that drives a runner: what the tests of the model share."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from model import checkpoint, packed
from model.config import GPTConfig
from model.gpt import GPT
from model.packed import PackedRunner
from model.rows import RowPool
from model.runner import Runner
from model.step import Draw, Ids, Sampling, Work
from model.tokenizer import Tokenizer
from model.train import CausalRows
from tests.oracle import Array

GREEDY = Sampling(temperature=0.0)
# Tests share two cores with whatever else runs there, and two threads that wait for each other
# on busy cores are ten times slower than one.
torch.set_num_threads(1)

TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # Conv1D in transformers


def config(**changes: object) -> GPTConfig:
    """Three layers of four heads; every width is different from every other."""
    shape = {"n_layer": 3, "n_head": 4, "d_model": 48, "n_ctx": 256, "n_vocab": 97, "d_ff": 80}
    return GPTConfig.model_validate({**shape, **changes})


def randomise(module: torch.nn.Module, std: float, seed: int = 0) -> None:
    """Matrices N(0, std); biases and norms a little off 0 and 1, so that each of them counts.

    `std` is far above that of fresh weights, whose greedy texts repeat one token for ever.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            mean = 1.0 if "ln_" in name and name.endswith("weight") else 0.0
            parameter.normal_(mean, std if parameter.dim() == 2 else 0.05, generator=generator)
    module.eval().requires_grad_(False)


def gpt(shape: GPTConfig, std: float = 0.3, seed: int = 0) -> GPT:
    model = GPT(shape)
    randomise(model, std, seed)
    return model


def save_quick(folder: Path) -> str:
    """A model of random weights in a folder, as quick as one can be."""
    tokenizer = Tokenizer.load(checkpoint.resolve("stories") / "tokenizer.tiktoken")
    config = GPTConfig(n_layer=1, n_head=2, d_model=16, n_ctx=64, n_vocab=tokenizer.n_vocab)
    model = GPT(config)
    model.initialise(torch.Generator().manual_seed(0))
    checkpoint.save(folder, model, tokenizer)
    return str(folder)


def arrays(model: GPT) -> dict[str, Array]:
    """The weights as the oracle reads them."""
    return {name: p.double().numpy() for name, p in model.named_parameters()}


def hugging_face(std: float, seed: int = 0, **shape: int) -> tuple[GPT2LMHeadModel, GPT]:
    """The same random weights in transformers' GPT-2 and in ours."""
    theirs = GPT2LMHeadModel(GPT2Config.from_dict(shape))
    randomise(theirs, std, seed)
    hf = theirs.config
    ours = GPT(
        GPTConfig(
            n_layer=hf.n_layer,
            n_head=hf.n_head,
            d_model=hf.n_embd,
            n_ctx=hf.n_positions,
            n_vocab=hf.vocab_size,
        )
    )
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            source = theirs.get_parameter(f"transformer.{name}")
            parameter.copy_(source.T if name.endswith(TRANSPOSED) else source)
    return theirs, ours.eval().requires_grad_(False)


def prompt(n: int, n_vocab: int, seed: int = 0) -> list[int]:
    """`n` random token ids."""
    return [int(token) for token in np.random.default_rng((n, seed)).integers(n_vocab, size=n)]


@dataclass
class Text:
    """One sequence: its tokens, its rows, and how it is to be computed."""

    tokens: list[int]
    sampling: Sampling | None = GREEDY
    cached: bool = True  # False: give every row back once a token was drawn
    chunk: int = 1 << 30  # rows computed in a step at most
    score: int | None = None
    n_prompt: int = field(init=False)
    rows: Ids = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)  # our own: they grow
        self.n_prompt = len(self.tokens)

    @property
    def made(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    def work(self, new_rows: Ids) -> Work:
        """Compute `new_rows`; draw if they are the last ones."""
        start, end = len(self.rows), len(self.rows) + len(new_rows)
        self.rows = np.concatenate([self.rows, new_rows])
        return Work(
            tokens=np.array(self.tokens[:end], np.int32),
            start=start,
            rows=self.rows,
            n_prompt=self.n_prompt,
            sampling=self.sampling if end == len(self.tokens) else None,
            score=self.score,
            targets=np.array(self.tokens[start + 1 : end + 1], np.int32),
        )


def packed_copy(model: GPT) -> GPT:
    """The same network for the compiled kernels; skips the test where there are none."""
    if not packed.available(model.config):
        pytest.skip("the compiled kernels are not there")
    copy = deepcopy(model)
    packed.pack(copy)
    return copy


def runner(model: GPT, n_rows: int, kv_dtype: torch.dtype = torch.float32) -> Runner:
    """The runner that is made for the model."""
    made = PackedRunner if packed.is_packed(model) else Runner
    return made(model, n_rows, kv_dtype)


class Driver:
    """Steps texts through a runner as an engine would, in DESIGN's two verbs.

    Before every step, each row without a reference and the scratch row are set to `poison`.
    """

    def __init__(
        self,
        model: GPT,
        n_rows: int = 2048,
        poison: float = np.nan,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.runner = runner(model, n_rows, kv_dtype)
        self.pool = RowPool(n_rows, model.config.row_bytes(kv_dtype.itemsize))
        self.poison = poison

    def step(self, texts: Sequence[Text]) -> list[Draw]:
        self.runner.kv[:, :, self.pool.free_rows()] = self.poison
        self.runner.kv[:, :, self.pool.scratch] = self.poison
        work = [
            text.work(self.pool.take(min(text.chunk, len(text.tokens) - len(text.rows))))
            for text in texts
        ]
        draws = self.runner.run(work)
        for text, draw in zip(texts, draws, strict=True):
            if draw.token is not None:
                text.tokens.append(draw.token)
                if not text.cached:
                    self.trim(text)
        return draws

    def trim(self, text: Text) -> None:
        self.pool.unpin(text.rows)
        self.pool.give_back(text.rows)
        text.rows = text.rows[:0]

    def generate(self, texts: Sequence[Text], n: int) -> list[list[int]]:
        """Step all texts together until each has `n` new tokens."""
        while unfinished := [text for text in texts if len(text.made) < n]:
            self.step(unfinished)
        for text in texts:
            if text.cached:
                self.trim(text)
        return [text.made for text in texts]


def full_pass(model: GPT, tokens: Sequence[int]) -> Tensor:
    """Logits of every position from one pass without a pool."""
    with torch.inference_mode():
        positions = torch.arange(len(tokens), device=model.wpe.weight.device)
        ids = torch.tensor(tokens, device=positions.device)
        return model.logits(model(ids, positions, CausalRows(1)))
