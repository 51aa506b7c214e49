"""From settings to an engine: which model, on what device, in which numbers, with how many rows."""

from __future__ import annotations

import ctypes
import logging
import math
from importlib.util import find_spec
from typing import NamedTuple

import torch

from model import checkpoint, memory, packed
from model.checkpoint import Checkpoint
from model.config import GPTConfig
from model.gpt import GPT
from model.graphs import GraphRunner
from model.packed import PackedRunner
from model.quantise import quantise
from model.rows import RowPool
from model.runner import Runner
from server.engine.engine import Engine
from server.engine.store import Store
from server.settings import CPU_MEMORY, Settings

log = logging.getLogger("onerow")


class Numbers(NamedTuple):
    """The types of a model's weights, as they are loaded, and of its rows."""

    weights: torch.dtype
    rows: torch.dtype


# Weights in int8 are rounded once they are loaded. Their rows are bfloat16: in float32 they take
# twice the memory, and with 1,000 of them a step of GPT-2 124M takes 7 % longer.
NUMBERS = {
    "float32": Numbers(torch.float32, torch.float32),
    "bfloat16": Numbers(torch.bfloat16, torch.bfloat16),
    "int8": Numbers(torch.float32, torch.bfloat16),
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
    prepare(loaded.model, place, settings.kernels)
    row_size = place.numbers.rows.itemsize
    try:
        budget = settings.kv_cache_memory or default_memory(loaded.model, place, settings)
        n_rows = pool_rows(loaded.config, row_size, budget)
        runner = make_runner(loaded.model, place, n_rows, settings.max_running)
    except (RuntimeError, MemoryError) as error:
        # On a CPU torch has no name for this error; on a GPU others are none of the memory's.
        if place.device.type == "cuda" and not isinstance(error, torch.OutOfMemoryError):
            raise
        raise LoadError(f"kv_cache_memory: {place.device} has not so much") from error
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
        rows_dtype=str(place.numbers.rows).removeprefix("torch."),
    )


def prepare(model: GPT, place: Placement, kernels: bool) -> None:
    """Bring a model to where and what it is to be, in place: for the compiled kernels if they are
    wanted and can be had.
    """
    if place.dtype == "int8":
        quantise(model)
    if kernels and place.device.type == "cpu" and packed.available(model.config):
        packed.pack(model)
    model.to(place.device)


def make_runner(model: GPT, place: Placement, n_rows: int, max_running: int) -> Runner:
    """The runner that fits a prepared model."""
    rows = place.numbers.rows
    if packed.is_packed(model):
        return PackedRunner(model, n_rows, rows)
    if place.device.type == "cuda" and find_spec("triton"):
        from model.triton_attention import attend  # triton comes with torch's CUDA build only

        return GraphRunner(model, n_rows, rows, n_lanes=max_running, lane_backend=attend)
    return Runner(model, n_rows, rows)


def default_memory(model: GPT, place: Placement, settings: Settings) -> int:
    """Bytes for the rows if nobody says how many: on a GPU what a server at work leaves free."""
    if place.device.type == "cpu":
        return CPU_MEMORY
    return memory.for_rows(
        lambda n_rows: make_runner(model, place, n_rows, settings.max_running),
        model.config.n_ctx,
        max_running=settings.max_running,
        step_tokens=settings.step_tokens,
        free=lambda: torch.cuda.mem_get_info(place.device)[0],
    )


def open_store(settings: Settings, loaded: Checkpoint, dtype: str) -> Store | None:
    """The state folder, if there is to be one. Rows are good for the same weights and type only."""
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
