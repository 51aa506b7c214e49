"""Training: it learns, and a run that was stopped is, bit by bit, the run that was not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model import checkpoint, train
from model.config import GPTConfig
from model.corpus import learn_vocabulary
from model.train import Recipe, Trainer, bits_per_byte, next_token_loss
from tests import oracle
from tests.tiny import arrays, config, gpt, prompt

SHAPE = config(n_layer=2, n_head=2, n_ctx=24, n_vocab=280, d_model=32)
RECIPE = Recipe(tokens=20 * 4 * 24, rows_per_step=4)  # 20 steps
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = ["the", "cat", "dog", "sat", "ran", "on", "a", "mat", "big", "red", "and", "then"]
    stories = [" ".join(rng.choice(words, size=rng.integers(5, 30))) + "." for _ in range(150)]
    path = tmp_path_factory.mktemp("corpus") / "stories.txt"
    path.write_text("".join(f"{story}\n<|endoftext|>\n" for story in stories))
    return path


def run(corpus: Path, folder: Path, recipe: Recipe = RECIPE, shape: GPTConfig = SHAPE) -> float:
    return train.train([corpus], folder, folder / "out", shape, recipe, CPU, compiled=False)


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run of 20 steps without a break, and its bits per byte."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run(corpus, folder)


def test_twenty_steps_lower_the_loss(straight: tuple[Path, float]) -> None:
    folder, _ = straight
    loss = losses(folder)
    assert len(loss) == 20
    assert loss[0] == pytest.approx(math.log(280), abs=0.3)
    assert np.mean(loss[-3:]) < loss[0] - 1


def test_what_is_left_is_a_model_folder_and_its_curve(straight: tuple[Path, float]) -> None:
    folder, bits = straight
    assert (folder / "out" / "training.png").read_bytes().startswith(b"\x89PNG")
    loaded = checkpoint.load(folder / "out")
    assert loaded.config == SHAPE
    held_out = ["the cat sat on a mat and then the dog ran."]
    assert bits_per_byte(loaded.model, loaded.tokenizer, held_out) < 8
    assert 0 < bits < 8
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    assert last["bits_per_byte"] == bits


def test_stopped_and_resumed_is_bit_by_bit_the_straight_run(
    straight: tuple[Path, float], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in step 14, three steps after a checkpoint: they are computed, and logged, again."""
    monkeypatch.setattr(train, "SAVE_EVERY", 10)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", stop_after(13, Trainer.train_step))
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path)
    assert len(losses(tmp_path)) == 13
    folder, bits = straight
    assert run(corpus, tmp_path) == bits
    assert (tmp_path / "log.jsonl").read_text() == (folder / "log.jsonl").read_text()
    states = [torch.load(f / "checkpoint.pt", weights_only=True) for f in (folder, tmp_path)]
    assert_same(*states)
    weights = [(f / "out" / "model.safetensors").read_bytes() for f in (folder, tmp_path)]
    assert weights[0] == weights[1]


def stop_after(n: int, step: Callable[[Trainer], float]) -> Callable[[Trainer], float]:
    def stopping(trainer: Trainer) -> float:
        if trainer.step == n:
            raise KeyboardInterrupt
        return step(trainer)

    return stopping


def assert_same(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor)
        assert torch.equal(a, b)
    elif isinstance(a, dict) and isinstance(b, dict):
        assert_same(list(a.items()), list(b.items()))
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    else:
        assert a == b


def test_a_finished_run_is_not_trained_again(
    straight: tuple[Path, float], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, bits = straight
    monkeypatch.setattr(Trainer, "train_step", stop_after(20, Trainer.train_step))
    assert run(corpus, folder) == bits
    assert len(losses(folder)) == 20


@pytest.mark.parametrize("change", [{"muon_lr": 1e-3}, {"seed": 1}, {"rows_per_step": 8}])
def test_another_recipe_is_refused(
    straight: tuple[Path, float], corpus: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"recipe\.json: .* another recipe"):
        run(corpus, straight[0], replace(RECIPE, **change))


@pytest.mark.parametrize("change", [{"n_head": 4, "n_kv_head": 4}, {"activation": "relu"}])
def test_another_shape_is_refused_though_its_tensors_would_fit(
    straight: tuple[Path, float], corpus: Path, change: dict[str, Any]
) -> None:
    shape = GPTConfig(**{**SHAPE.model_dump(), **change})
    with pytest.raises(ValueError, match=r"config\.json: .* another shape"):
        run(corpus, straight[0], shape=shape)


def test_a_run_may_be_made_longer(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, replace(RECIPE, tokens=2 * 4 * 24))
    run(corpus, tmp_path, replace(RECIPE, tokens=3 * 4 * 24))
    assert len(losses(tmp_path)) == 3


def test_a_checkpoint_is_replaced_only_by_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = learn_vocabulary(["a cat sat"] * 3, 257)
    shape = config(n_layer=1, n_ctx=4, n_vocab=257)
    trainer = Trainer(shape, Recipe(rows_per_step=1), tokenizer, ["a cat sat"] * 3, CPU)
    trainer.save(tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full_disk(state: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", full_disk)
    trainer.train_step()
    with pytest.raises(OSError, match="no space"):
        trainer.save(tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    trainer.load(tmp_path / "checkpoint.pt")
    assert trainer.step == 0


def test_every_parameter_has_one_optimizer() -> None:
    tokenizer = learn_vocabulary(["a cat"], 257)
    trainer = Trainer(config(n_vocab=257), Recipe(), tokenizer, ["a cat"], CPU)
    muon, adam = (
        [id(p) for group in optimizer.param_groups for p in group["params"]]
        for optimizer in trainer.optimizers
    )
    assert sorted(muon + adam) == sorted(id(p) for p in trainer.model.parameters())
    blocks = trainer.model.h.parameters()
    assert sorted(muon) == sorted(id(p) for p in blocks if p.dim() == 2)


@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
def test_the_pace_goes_up_stays_and_comes_down(steps: int) -> None:
    recipe = Recipe(warm_up=0.1, decay=0.5)
    pace = [recipe.pace(step, steps) for step in range(steps)]
    assert all(0 < share <= 1 for share in pace)
    peak = pace.index(max(pace))
    assert pace[: peak + 1] == sorted(pace[: peak + 1])
    assert pace[peak:] == sorted(pace[peak:], reverse=True)
    if steps == 1000:
        assert pace[0] < 0.02
        assert pace[100:500] == [1.0] * 400
        assert pace[-1] < 0.01


@pytest.mark.parametrize("shape", [config(), config(n_kv_head=2, n_vocab_padded=128)])
def test_loss_is_the_mean_surprise_of_each_row_by_itself(shape: GPTConfig) -> None:
    model = gpt(shape)
    rows = [prompt(31, 97, seed) for seed in range(3)]
    surprise = [
        -oracle.log_softmax(oracle.logits(arrays(model), shape, row[:-1]))[range(30), row[1:]]
        for row in rows
    ]
    loss = next_token_loss(model, torch.tensor(rows)).item()
    assert loss == pytest.approx(np.mean(surprise), abs=1e-5)


def test_bits_per_byte_by_hand() -> None:
    """Every token but the first of the first 1,200 characters, over the bytes of those tokens.

    Stories of one token have nothing to predict; characters are not bytes.
    """
    stories = ["the cat sat on the mat. " * 100, "é\U0001f408 the cat", "t", ""]
    tokenizer = learn_vocabulary(stories, 265)
    model = gpt(config(n_layer=1, n_ctx=1300, n_vocab=265), std=0.1)
    bits, n_bytes = 0.0, 0
    for story in (stories[0][:1200], stories[1]):
        ids = tokenizer.encode(story)
        logprobs = oracle.log_softmax(oracle.logits(arrays(model), model.config, ids[:-1]))
        bits -= sum(logprobs[i, token] for i, token in enumerate(ids[1:])) / math.log(2)
        n_bytes += len(story.encode()) - len(tokenizer.token_bytes[ids[0]])
    assert bits_per_byte(model, tokenizer, stories) == pytest.approx(bits / n_bytes, rel=1e-5)
