"""From settings to an engine: which model, on what device, in which numbers, with how many rows."""

from __future__ import annotations

import ctypes
import logging
import math
from typing import NamedTuple

import torch

from model import checkpoint, packed
from model.checkpoint import Checkpoint
from model.config import GPTConfig
from model.gpt import GPT
from model.packed import PackedRunner
from model.quantise import quantise
from model.rows import RowPool
from model.runner import Runner
from server.engine.engine import Engine
from server.engine.store import Store
from server.settings import Settings

log = logging.getLogger("onerow")


class Numbers(NamedTuple):
    """The types of a model's weights, as they are loaded, and of its rows."""

    weights: torch.dtype
    rows: torch.dtype


# Weights in int8 are rounded once they are loaded. Their rows are not: one scale for the 64 numbers
# of a head costs more accuracy than the weights do.
NUMBERS = {
    "float32": Numbers(torch.float32, torch.float32),
    "bfloat16": Numbers(torch.bfloat16, torch.bfloat16),
    "int8": Numbers(torch.float32, torch.float32),
}


class LoadError(Exception):
    """What the settings ask for is not to be had here: one line that says what and why."""


class Placement(NamedTuple):
    """Where the numbers live and what they are."""

    device: torch.device
    dtype: str

    @property
    def numbers(self) -> Numbers:
        return NUMBERS[self.dtype]


def load_engine(settings: Settings) -> Engine:
    """Load the model and allocate its rows. Raises LoadError or CheckpointError."""
    place = placement(settings.device, settings.dtype)
    torch.set_num_threads(settings.threads)
    path = checkpoint.resolve(settings.model)
    loaded = checkpoint.load(path, place.numbers.weights)
    row_size = place.numbers.rows.itemsize
    n_rows = pool_rows(loaded.config, row_size, settings.kv_cache_memory)
    try:
        runner = make_runner(loaded.model, place, n_rows, settings.kernels)
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        raise LoadError(f"kv_cache_memory: {place.device} cannot hold {n_rows:,} rows") from error
    _return_memory()
    name = settings.served_model_name or loaded.name
    by = "compiled kernels" if isinstance(runner, PackedRunner) else "torch"
    words = (name, place.device, place.dtype, by, settings.threads, n_rows)
    log.info("%s on %s in %s by %s, %d threads, %d rows", *words)
    return Engine(
        runner,
        loaded.tokenizer,
        RowPool(n_rows, loaded.config.row_bytes(row_size)),
        max_running=settings.max_running,
        step_tokens=settings.step_tokens,
        max_sessions=settings.max_sessions,
        session_ttl=settings.session_ttl,
        store=open_store(settings, loaded, place.dtype),
        name=name,
        root=str(path),
        device=str(place.device),
        dtype=place.dtype,
    )


def make_runner(model: GPT, place: Placement, n_rows: int, kernels: bool) -> Runner:
    """Run the model where and in what it is to run: with the compiled kernels if they are wanted
    and can be had. The model's weights are used up.
    """
    if place.dtype == "int8":
        quantise(model)
    if kernels and place.device.type == "cpu" and packed.available(model.config):
        packed.pack(model)
        return PackedRunner(model, n_rows, place.numbers.rows)
    return Runner(model.to(place.device), n_rows, place.numbers.rows)


def open_store(settings: Settings, loaded: Checkpoint, dtype: str) -> Store | None:
    """The state folder, if there is to be one. Rows are good for the very same numbers only."""
    if settings.state_dir is None:
        return None
    return Store(
        settings.state_dir,
        model=f"{loaded.fingerprint} {dtype}",
        tokenizer=loaded.tokenizer.fingerprint,
        rows_budget=settings.state_rows,
    )


def _return_memory() -> None:
    """Give what the load has freed back to the system, which glibc would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


def placement(device: str, dtype: str) -> Placement:
    """`auto` prefers a GPU, and there 16 bits. What is asked for by name must be there."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise LoadError("device cuda: torch sees no usable NVIDIA GPU here")
    on_gpu = has_gpu if device == "auto" else device == "cuda"
    if dtype == "auto":
        dtype = "bfloat16" if on_gpu else "float32"
    return Placement(torch.device("cuda" if on_gpu else "cpu"), dtype)


def pool_rows(config: GPTConfig, itemsize: int, memory: int) -> int:
    """How many rows fit into `memory` bytes beside the scratch row. One window is the least."""
    row_bytes = config.row_bytes(itemsize)
    rows = memory // row_bytes - 1
    if rows < config.n_ctx:
        least = math.ceil((config.n_ctx + 1) * row_bytes / 2**20)
        raise LoadError(
            f"kv_cache_memory: room for {max(rows, 0)} rows, but one window is {config.n_ctx}; "
            f"this model needs {least}MiB at least"
        )
    return rows
