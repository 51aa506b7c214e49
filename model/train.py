"""Trains the embedded model: a vocabulary, then a GPT, from plain text files of stories.

Every number that the run depends on is in `Recipe`; a checkpoint holds all the state there is, so
a run that was stopped goes on exactly where it was.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional as F

from model import checkpoint
from model.config import GPTConfig
from model.corpus import Shelf, learn_vocabulary, split_held_out
from model.gpt import GPT
from model.tokenizer import Tokenizer

HELD_OUT_CHARACTERS = 1200
SAVE_EVERY = 200  # steps
MEASURE_EVERY = 1000  # steps


@dataclass(frozen=True)
class Recipe:
    """Every number of a training run. Learning rates are peaks; `tokens` sets the length."""

    tokens: int = 23_300_000
    rows_per_step: int = 8
    muon_lr: float = 5e-3
    adam_lr: float = 5e-3
    weight_decay: float = 0.1
    warm_up: float = 0.02
    decay: float = 0.5
    seed: int = 0
    other_files_every: int = 10

    def steps(self, n_ctx: int) -> int:
        return max(1, self.tokens // (self.rows_per_step * n_ctx))

    def pace(self, step: int, steps: int) -> float:
        """The share of the peak learning rate at a step: up, flat, then down to zero."""
        done = (step + 1) / (steps + 1)
        return min(1.0, done / self.warm_up, (1 - done) / self.decay)


class CausalRows:
    """Attention of training: `n_rows` packed sequences of one length, each causal by itself."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.n_rows, -1)).transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)


def next_token_loss(model: GPT, rows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of rows `(B, L + 1)`: L predictions each."""
    n_rows, length = rows.shape[0], rows.shape[1] - 1
    positions = torch.arange(length, device=rows.device).repeat(n_rows)
    hidden = model(rows[:, :-1].flatten(), positions, CausalRows(n_rows))
    return F.cross_entropy(model.logits(hidden).float(), rows[:, 1:].flatten())


@torch.inference_mode()
def bits_per_byte(model: GPT, tokenizer: Tokenizer, stories: Sequence[str]) -> float:
    """-log2 p of every token but the first, over the bytes of those tokens.

    Each story's first 1,200 characters (no more than fit the window) stand alone, with no end of
    text in front; computed in float32, whatever the model was trained in.
    """
    bits, n_bytes = 0.0, 0
    for story in stories:
        tokens = tokenizer.encode(story[:HELD_OUT_CHARACTERS])[: model.config.n_ctx + 1]
        if len(tokens) < 2:
            continue
        loss = next_token_loss(model, torch.tensor([tokens], device=model.wte.weight.device))
        bits += loss.item() * (len(tokens) - 1) / math.log(2)
        n_bytes += len(tokenizer.bytes_of(tokens[1:]))
    return bits / n_bytes


class Trainer:
    """A model, its optimisers and its place in the data: all that a checkpoint holds."""

    def __init__(
        self,
        config: GPTConfig,
        recipe: Recipe,
        tokenizer: Tokenizer,
        stories: Sequence[str],
        device: torch.device,
    ) -> None:
        self.config, self.recipe, self.device = config, recipe, device
        self.model = GPT(config)
        self.model.initialise(torch.Generator().manual_seed(recipe.seed))
        self.model.to(device)
        end = [tokenizer.end_of_text]
        encoded = [np.array(tokenizer.encode(story) + end, dtype=np.uint16) for story in stories]
        self.shelf = Shelf(encoded, config.n_ctx + 1, recipe.seed)
        self.optimizers = self._optimizers()
        self.step = 0
        self.steps = recipe.steps(config.n_ctx)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the matrices inside the blocks; AdamW for embeddings, norms and biases."""
        hidden = [p for p in self.model.h.parameters() if p.dim() == 2]
        chosen = {id(p) for p in hidden}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        r = self.recipe
        muon = torch.optim.Muon(
            hidden, lr=r.muon_lr, weight_decay=r.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        adam = torch.optim.AdamW(others, lr=r.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["peak_lr"] = group["lr"]
        return [muon, adam]

    def train_step(self) -> float:
        """One update; its loss in nats per token."""
        rows = np.stack([self.shelf.row() for _ in range(self.recipe.rows_per_step)])
        batch = torch.from_numpy(rows).to(self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = next_token_loss(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        pace = self.recipe.pace(self.step, self.steps)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * pace
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return loss.item()

    @property
    def tokens_seen(self) -> int:
        return self.step * self.recipe.rows_per_step * self.config.n_ctx

    def save(self, path: Path) -> None:
        """Write a checkpoint; the old one is there until the new one is whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "shelf": (self.shelf.epoch, self.shelf.taken),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.shelf.seek(*state["shelf"])


def train(
    files: Sequence[Path],
    run: Path,
    out: Path,
    config: GPTConfig,
    recipe: Recipe,
    device: torch.device,
    *,
    compiled: bool,
) -> float:
    """Train to the end of the recipe, from the checkpoint in `run` if there is one.

    `run` holds the checkpoint, the vocabulary and the log; `out` gets the finished model folder and
    its loss curve. Returns the bits per byte of the held-out stories. A run may be given another
    length (`Recipe.tokens`) while it goes on; any other change is refused with ValueError.
    """
    run.mkdir(parents=True, exist_ok=True)
    stories, held_out = split_held_out(files, recipe.other_files_every)
    saved, log = run / "checkpoint.pt", Log(run / "log.jsonl")
    vocabulary = run / "tokenizer.tiktoken"
    if not vocabulary.exists():
        learn_vocabulary(stories, config.n_vocab).save(vocabulary)
    _check_unchanged(run, config, recipe)
    tokenizer = Tokenizer.load(vocabulary)
    trainer = Trainer(config, recipe, tokenizer, stories, device)
    if saved.exists():
        trainer.load(saved)
    log.cut(trainer.step)
    if compiled:
        trainer.model.compile()
    columns = (*Progress.get_default_columns()[:3], TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}")) as progress:
        bar = progress.add_task("training", total=trainer.steps, completed=trainer.step, note="")
        while trainer.step < trainer.steps:
            entry = {"step": trainer.step + 1, "loss": trainer.train_step()}
            last = trainer.step == trainer.steps
            if trainer.step % MEASURE_EVERY == 0 or last:
                entry["bits_per_byte"] = bits_per_byte(trainer.model, tokenizer, held_out)
            log.add(entry)
            progress.update(bar, completed=trainer.step, note=f"loss {entry['loss']:.3f}")
            if trainer.step % SAVE_EVERY == 0 or last:
                trainer.save(saved)
    checkpoint.save(out, trainer.model, tokenizer)
    log.plot(out / "training.png", recipe.rows_per_step * config.n_ctx)
    return bits_per_byte(trainer.model, tokenizer, held_out)


def _check_unchanged(run: Path, config: GPTConfig, recipe: Recipe) -> None:
    shape, numbers = run / "config.json", run / "recipe.json"
    if shape.exists() and GPTConfig.load(shape) != config:
        raise ValueError(f"{shape}: the run there was begun with another shape")
    if numbers.exists():
        before = Recipe(**json.loads(numbers.read_text()))
        if replace(before, tokens=recipe.tokens) != recipe:
            raise ValueError(f"{numbers}: the run there was begun with another recipe: {before}")
    config.save(shape)
    numbers.write_text(json.dumps(asdict(recipe), indent=2) + "\n")


class Log:
    """Losses by step, a JSON object a line, and the curve drawn from them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> list[dict[str, float]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def cut(self, step: int) -> None:
        """Forget what came after `step`: a resumed run will say it again."""
        kept = [entry for entry in self.entries() if entry["step"] <= step]
        self.path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def add(self, entry: dict[str, float]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def plot(self, path: Path, tokens_per_step: int) -> None:
        """Training loss (a running mean) and held-out bits per byte against tokens seen."""
        from matplotlib.figure import Figure  # slow to import, and only needed here

        entries = self.entries()
        seen = np.array([entry["step"] for entry in entries]) * tokens_per_step / 1e6
        loss = np.array([entry["loss"] for entry in entries])
        width = max(1, min(100, len(loss) // 4))
        smooth = np.convolve(loss, np.ones(width) / width, mode="valid")
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot(seen[width - 1 :], smooth, color="tab:blue", label="training loss")
        axes.set(xlabel="tokens seen (millions)", ylabel="training loss (nats per token)")
        axes.grid(alpha=0.3)
        measured = [i for i, entry in enumerate(entries) if "bits_per_byte" in entry]
        if measured:
            right = axes.twinx()
            held_out = [entries[i]["bits_per_byte"] for i in measured]
            right.plot(seen[measured], held_out, "o-", color="tab:orange", label="held-out stories")
            right.set_ylabel("bits per byte")
            right.legend(loc="upper right", bbox_to_anchor=(1, 0.9))
        axes.legend(loc="upper right")
        figure.savefig(path, dpi=120)
