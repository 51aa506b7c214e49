"""Proofs and figures for a machine with an NVIDIA GPU, in less than five minutes.

    python -m tests.gpu.figures

First `pytest tests/gpu`: captured steps equal eager ones, the Triton kernel equals the reference,
CUDA equals the CPU in float32, bfloat16 stays within its bound. Then GPT-2 124M with random weights
in bfloat16: tokens per second for several streams and contexts, each beside the least time that
reading the weights and rows takes (the floor), through the engine one step ahead and without that,
without the cache, without graphs, and in transformers with a static cache and torch.compile. The
last line is all of it as JSON.

It needs this folder's checkout, torch, triton, pydantic, tiktoken and safetensors; for the proofs
also pytest, pytest-timeout, hypothesis and transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from model import cost
from model.config import PRESETS, GPTConfig
from model.gpt import GPT
from model.graphs import GraphRunner
from model.lanes import LaneBackend
from model.rows import RowPool
from model.runner import Runner
from model.step import Model, Sampling, Work
from model.tokenizer import Tokenizer
from server.engine.engine import Engine
from server.engine.sequence import Request

STREAMS = (1, 16, 64, 256)
CONTEXTS = (128, 900)
PROOFS = 150  # seconds that the proofs may take
BUDGET = 280  # seconds for everything; what transformers has no time left for is not measured
COMPILING = 45  # seconds that transformers takes for one cell, mostly to compile
STEPS = 100  # of the engine, that are measured
WARM = 5  # steps of the engine before those
AT_ONCE = 16  # texts that are computed together without a cache
GREEDY = Sampling(temperature=0.0)


@dataclass
class Cell:
    """Milliseconds of one step in which each of `streams` texts gets its token at `context`."""

    streams: int
    context: int
    floor: float
    cached: float  # from work to draws: staging, replay, reading
    replay: float  # the replay alone
    served: float  # by the engine, which launches the next step before it reads this one
    in_turn: float  # by an engine that reads first
    eager: float
    uncached: float
    transformers: float | None = None

    def tokens_per_s(self, ms: float | None) -> float | None:
        return None if ms is None else self.streams / ms * 1000

    @property
    def share(self) -> float:
        """Of the floor, in percent: 100 means that nothing takes time but reading."""
        return 100 * self.floor / self.cached


def floor(
    config: GPTConfig, streams: int, context: int, itemsize: int, bytes_per_ms: float
) -> float:
    """Milliseconds to read the weights once and the rows of every stream."""
    rows = streams * context * config.row_bytes(itemsize)
    return (cost.bytes_read(config, 0, itemsize) + rows) / bytes_per_ms


class OneByOne:
    """A model for an engine: a runner, none of whose steps may be launched ahead."""

    def __init__(self, runner: Runner) -> None:
        self.n_ctx, self.n_vocab = runner.n_ctx, runner.n_vocab
        self.n_layer, self.n_head = runner.n_layer, runner.n_head
        self.run, self.inspect = runner.run, runner.inspect
        self.read_rows, self.write_rows = runner.read_rows, runner.write_rows


def milliseconds(
    step: Callable[[], object], device: torch.device, seconds: float, warm: int = 3
) -> float:
    """Of one call, the median of runs of several calls that take `seconds` together."""

    def run(n: int) -> float:
        synchronise(device)
        start = time.perf_counter()
        for _ in range(n):
            step()
        synchronise(device)
        return (time.perf_counter() - start) / n

    for _ in range(warm):
        once = run(1)
    n = max(1, int(seconds / 5 / once))
    return 1000 * median(run(n) for _ in range(5 if once < seconds else 1))


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: torch.device, n_bytes: int, seconds: float) -> float:
    """Bytes per millisecond that a copy within the device reads and writes."""
    source = torch.zeros(n_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return n_bytes / milliseconds(lambda: target.copy_(source), device, seconds)


def work_for(streams: int, context: int, n_vocab: int, start: int) -> list[Work]:
    """The same step for each of `streams` texts of their own, computed from row `start` on."""
    tokens = np.random.default_rng(0).integers(n_vocab, size=(streams, context)).astype(np.int32)
    rows = np.arange(streams * context, dtype=np.int32).reshape(streams, context)
    return [Work(t, start, r, context, GREEDY) for t, r in zip(tokens, rows, strict=True)]


def measure(
    model: GPT,
    backend: LaneBackend,
    streams: Sequence[int],
    contexts: Sequence[int],
    *,
    bytes_per_ms: float,
    seconds: float,
) -> list[Cell]:
    """A cell for each of `streams` and `contexts`, about `seconds` for every number in it."""
    parameter = next(model.parameters())
    n_rows = max(model.config.n_ctx, max(streams) * rows_for(max(contexts)))
    n_lanes = max(streams)
    runner = GraphRunner(model, n_rows, parameter.dtype, n_lanes=n_lanes, lane_backend=backend)
    runner.kv.zero_()
    return [
        measure_cell(runner, n, context, bytes_per_ms, seconds)
        for n in streams
        for context in contexts
    ]


def measure_cell(
    runner: GraphRunner, streams: int, context: int, bytes_per_ms: float, seconds: float
) -> Cell:
    decode = work_for(streams, context, runner.n_vocab, context - 1)
    afresh = work_for(min(streams, AT_ONCE), context, runner.n_vocab, 0)
    bucket = min(n for n in runner.buckets if n >= streams)

    def ms(step: Callable[[], object]) -> float:
        return milliseconds(step, runner.device, seconds)

    return Cell(
        streams=streams,
        context=context,
        floor=floor(runner.model.config, streams, context, runner.kv.itemsize, bytes_per_ms),
        cached=ms(lambda: runner.run(decode)),
        replay=ms(runner._steps[bucket, False]),  # over what was staged last
        served=engine_ms(runner, runner, streams, context),
        in_turn=engine_ms(OneByOne(runner), runner, streams, context),
        eager=ms(lambda: Runner.run(runner, decode)),
        uncached=ms(lambda: Runner.run(runner, afresh)) * streams / len(afresh),
    )


def rows_for(context: int) -> int:
    """How many rows a stream has once the engine has taken all its steps."""
    return context + WARM + STEPS


def engine_ms(model: Model, runner: Runner, streams: int, context: int) -> float:
    """Of one step of an engine, scheduling, texts and events included. The rows of the prompts are
    there already, with nothing in them.
    """
    pool = RowPool(runner.kv.shape[2] - 1, row_bytes=1)
    letters = SimpleNamespace(token_bytes=[b"a"] * model.n_vocab, end_of_text=-1)
    engine = Engine(
        model, cast(Tokenizer, letters), pool, max_running=streams, step_tokens=2 * streams
    )
    for i, work in enumerate(work_for(streams, context, model.n_vocab, 0)):
        rows = pool.take(context - 1)
        pool.unpin(rows)
        engine.sessions.keep("", work.tokens, rows)
        prompt = tuple(work.tokens.tolist())
        engine.submit([Request(f"{i}", 0, prompt, rows_for(0) + 1, GREEDY)])
    for _ in range(WARM):
        engine.step()
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - start) * 1000 / STEPS


def transformers_ms(
    config: GPTConfig, device: torch.device, streams: int, context: int, *, compiled: bool = True
) -> float:
    """Per step of `generate` with a static cache; the prompt's share cancels out."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = GPT2Config(
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.d_model,
        n_positions=config.n_ctx,
        vocab_size=config.n_vocab,
        bos_token_id=0,
        eos_token_id=0,
    )
    theirs: Any = GPT2LMHeadModel(shape)
    theirs = theirs.eval().to(device, torch.bfloat16)
    prompt = torch.ones((streams, context - 32), dtype=torch.long, device=device)

    def seconds(n: int) -> float:
        start = time.perf_counter()
        theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n,
            min_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
            cache_implementation="static",
            disable_compile=not compiled,
        )
        synchronise(device)
        return time.perf_counter() - start

    seconds(64)  # compiles; the cache it makes serves the shorter calls, too
    return 1000 * (seconds(64) - seconds(8)) / 56


def table(cells: Sequence[Cell], bytes_per_ms: float) -> str:
    """Tokens per second, a line per cell."""
    heads = (
        *("streams", "context", "floor ms", "step ms", "replay ms", "% of floor", "served/s"),
        *("in turn/s", "cached/s", "eager/s", "uncached/s", "gain", "transformers/s", "ahead"),
    )
    lines = [f"tokens per second; a copy reads and writes {bytes_per_ms / 1e6:,.0f} GB/s"]
    lines.append("  ".join(heads))
    for cell in cells:
        times = (cell.served, cell.in_turn, cell.cached, cell.eager, cell.uncached)
        rates = [cell.tokens_per_s(ms) for ms in times]
        theirs = cell.tokens_per_s(cell.transformers)
        words = (
            f"{cell.streams}",
            f"{cell.context}",
            f"{cell.floor:.3f}",
            f"{cell.cached:.3f}",
            f"{cell.replay:.3f}",
            f"{cell.share:.0f}",
            *(f"{rate:,.0f}" for rate in rates),
            f"{cell.uncached / cell.cached:.1f}",
            "-" if theirs is None else f"{theirs:,.0f}",
            "-" if cell.transformers is None else f"{cell.transformers / cell.cached:.1f}",
        )
        lines.append("  ".join(f"{w:>{len(h)}}" for w, h in zip(words, heads, strict=True)))
    return "\n".join(lines)


def proofs() -> bool:
    """Whether `tests/gpu` passes. The fixtures of the server's tests are left out: they need all
    that the server needs.
    """
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", str(Path(__file__).parent)]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parents[2], timeout=PROOFS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    start = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--no-proofs", action="store_true", help="figures only")
    parser.add_argument("--no-peer", action="store_true", help="without transformers")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(2, "figures: torch sees no NVIDIA GPU here, so there is nothing to measure\n")
    from model import triton_attention  # Triton may be missing where there is no GPU

    proven = None if asked.no_proofs else proofs()
    device = torch.device("cuda")
    config = PRESETS["gpt2"]
    model = GPT(config)
    model.initialise(torch.Generator().manual_seed(0))
    model = model.eval().requires_grad_(False).to(device, torch.bfloat16)
    free, _ = torch.cuda.mem_get_info()
    room = free // 2 // config.row_bytes(2)
    streams = [n for n in STREAMS if n * rows_for(max(CONTEXTS)) < room]
    bytes_per_ms = bandwidth(device, min(2**33, free // 4), seconds=1.0)
    cells = measure(
        model,
        triton_attention.attend,
        streams,
        CONTEXTS,
        bytes_per_ms=bytes_per_ms,
        seconds=0.5,
    )
    say(table(cells, bytes_per_ms))
    if not asked.no_peer and find_spec("transformers"):
        for cell in cells:
            if time.monotonic() - start + COMPILING > BUDGET:
                break
            cell.transformers = transformers_ms(config, device, cell.streams, cell.context)
        say(table(cells, bytes_per_ms))
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "model": "GPT-2 124M, random weights, bfloat16",
        "proven": proven,
        "copy_gb_per_s": bytes_per_ms / 1e6,
        "seconds": round(time.monotonic() - start),
        "cells": [
            asdict(cell) | {"tokens_per_s": cell.tokens_per_s(cell.cached)} for cell in cells
        ],
    }
    say(json.dumps(result))
    return 1 if proven is False else 0


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
