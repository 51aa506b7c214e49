"""Loads and saves models: every parameter is filled exactly once, or the load is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from model.config import ConfigError, GPTConfig
from model.formats import (
    CONFIG,
    EMBEDDING,
    HEAD,
    NANOGPT,
    WEIGHTS,
    CheckpointError,
    Stored,
    read,
    some,
)
from model.gpt import GPT
from model.tokenizer import FILE_NAME, Tokenizer, TokenizerError

__all__ = ["EMBEDDED", "Checkpoint", "CheckpointError", "load", "resolve", "save"]

EMBEDDED = "stories"


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to run on the CPU, its vocabulary, and what names it.

    `fingerprint` is the same for the same shape, weights and type of numbers, whatever the format
    of the file: rows that were computed by one are valid for the other.
    """

    name: str
    config: GPTConfig
    tokenizer: Tokenizer
    model: GPT
    fingerprint: str


def resolve(name: str) -> Path:
    """The folder of the embedded model, or the path that `name` is. Raises CheckpointError.

    A folder of one's own that is called like the embedded model is `./stories`.
    """
    if name == EMBEDDED:
        return Path(str(files("weights") / EMBEDDED))
    path = Path(name).expanduser()
    if not path.exists():
        raise CheckpointError(
            f"{name}: no such model; give {EMBEDDED} (embedded), a folder with {CONFIG} and "
            f"{WEIGHTS}, or a nanoGPT {NANOGPT}"
        )
    return path


def load(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Read a model folder or a nanoGPT file: on the CPU, in `dtype`, without gradients.

    Raises CheckpointError with one line that names the file, and the tensors where it is them.
    """
    try:
        stored = read(path)
    except (ConfigError, TokenizerError) as error:
        raise CheckpointError(str(error)) from error
    model = _build(stored, dtype)
    return Checkpoint(_name(path), stored.config, stored.tokenizer, model, _fingerprint(model))


def _name(path: Path) -> str:
    """What to call the model: its folder, or its file if that says more than `ckpt.pt`."""
    place = path.absolute()
    return place.parent.name if place.name == NANOGPT else place.name.removesuffix(".pt")


def _build(stored: Stored, dtype: torch.dtype) -> GPT:
    """A network of the stored tensors, each copied once: from the mapped file to its place.

    They are copied even where the type is right, because a file that is replaced under a running
    server must not change (or, cut short, kill) it.
    """
    with torch.device("meta"):
        model = GPT(stored.config)
    shapes = {name: p.shape for name, p in model.named_parameters()}  # a tied head counts once
    zeros = set() if stored.has_biases else {n for n in shapes if n.endswith(".bias")}
    _check(stored, {name: shape for name, shape in shapes.items() if name not in zeros})
    weights: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        value = torch.zeros(()) if name in zeros else stored.tensors[name]
        weights[name] = nn.Parameter(torch.empty(shape, dtype=dtype).copy_(value))
    if stored.config.tied_head:
        weights[HEAD] = weights[EMBEDDING]
    model.load_state_dict(weights, assign=True)
    return model.eval().requires_grad_(False)


def _check(stored: Stored, shapes: dict[str, torch.Size]) -> None:
    """Refuse tensors that are not, one for one, those of the network."""
    tensors = stored.tensors
    if missing := shapes.keys() - tensors.keys():
        raise CheckpointError(f"{stored.file}: missing {some(missing)}")
    if unexpected := tensors.keys() - shapes.keys():
        raise CheckpointError(f"{stored.file}: unexpected {some(unexpected)}")
    for name, shape in shapes.items():
        found = tensors[name]
        if found.shape != shape:
            raise CheckpointError(
                f"{stored.file}: {name} is {tuple(found.shape)}, {CONFIG} asks for {tuple(shape)}"
            )
        if not found.is_floating_point():
            raise CheckpointError(f"{stored.file}: {name} is {found.dtype}, not floating point")


def _fingerprint(model: GPT) -> str:
    """SHA-256 of the shape and of every number: 0.3 s for the 500 MB of GPT-2 in float32.

    Of the network and not of the files: an optimiser's state beside the weights does not count.
    """
    digest = hashlib.sha256(model.config.model_dump_json().encode())
    for parameter in model.parameters():
        digest.update(parameter.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def save(
    folder: Path, model: GPT, tokenizer: Tokenizer, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write our own folder: `config.json`, `model.safetensors`, `tokenizer.tiktoken`."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to("cpu", dtype).contiguous()
        for name, parameter in model.named_parameters()
    }
    # Not save_file: its files can be read by their owner only, wherever they are copied to.
    weights = safetensors.torch.save(tensors)
    _replace(folder / WEIGHTS, lambda path: path.write_bytes(weights))
    _replace(folder / CONFIG, model.config.save)
    _replace(folder / FILE_NAME, tokenizer.save)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whose old content is there until the new one is whole."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.replace(path)
