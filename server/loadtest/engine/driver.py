"""The bare engine as a process of the benchmark: `python -m server.loadtest.engine.driver JSON`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from model import checkpoint, formats
from model.checkpoint import CheckpointError
from model.config import GPTConfig
from model.packed import weight_bytes
from model.runner import Runner
from model.step import Sampling
from model.tokenizer import FILE_NAME, Tokenizer
from server.engine.engine import Engine
from server.engine.sequence import Failure, Request
from server.loading import load_engine
from server.settings import Settings
from server.version import VERSION

GREEDY = Sampling(temperature=0.0)
SHOWN = 24  # tokens of the first answer
IDLE = 128  # rows of each idle sequence


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints must not look like an answer
    options = json.loads(sys.argv[1])
    full = options.pop("full", False)
    began = time.perf_counter()
    try:
        with vocabulary_beside(options.pop("model")) as model:
            engine = load_engine(Settings.load(model=model, **options))
            config = formats.read(checkpoint.resolve(model)).config
    except Exception as error:
        sys.exit(str(error))
    if full:
        fill(engine)
    print(json.dumps(ready(engine, config, time.perf_counter() - began)), file=answers)
    serve(engine, sys.stdin, answers)


def serve(engine: Engine, commands: TextIO, answers: TextIO) -> None:
    for line in commands:
        command = json.loads(line)
        try:
            times, tokens = generate(
                engine, command["prompts"], command["new"], command.get("use_cache", True)
            )
            answer: dict[str, Any] = {"ts": times, "toks": tokens[:SHOWN]}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def ready(engine: Engine, config: GPTConfig, seconds: float) -> dict[str, Any]:
    """What the benchmark wants to know of us beside what it asks of everyone."""
    assert isinstance(engine.model, Runner)
    return {
        "ready": f"onerow {VERSION}",
        "load_s": seconds,
        "uncached": True,
        "shape": config.model_dump(),
        "device": engine.device,
        "dtype": engine.dtype,
        "weight_bytes": weight_bytes(engine.model.model),
        "rows": engine.pool.n_rows,
        "row_bytes": engine.pool.row_bytes,
        "streams": engine.scheduler.max_running,
    }


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], new: int, use_cache: bool = True
) -> tuple[list[float], list[int]]:
    """Seconds after which all prompts had their first, second, ... token; the first one's tokens.

    A step may end with a token whose text is held back, so that there is no event: the engine's
    sequences are asked how far they are.
    """
    requests = [
        Request(str(i), 0, tuple(prompt), new, sampling=GREEDY, use_cache=use_cache)
        for i, prompt in enumerate(prompts)
    ]
    times: list[float] = []
    tokens: list[int] = []
    began = time.perf_counter()
    for request in requests:
        engine.submit([request])
    try:
        while engine.has_work:
            events = engine.step()
            seconds = time.perf_counter() - began
            times += [seconds] * (_least(engine, new) - len(times))
            for event in events:
                if isinstance(event, Failure):
                    raise RuntimeError(event.message)
                if event.id == "0":
                    tokens += [token.id for token in event.tokens]
    finally:
        for request in requests:
            engine.abort(request.id)
    return times, tokens


def _least(engine: Engine, new: int) -> int:
    """Tokens that every sequence has."""
    scheduler = engine.scheduler
    if scheduler.waiting:
        return min(q.n_generated for q in scheduler.waiting)
    return min((q.n_generated for q in scheduler.running), default=new)


def fill(engine: Engine) -> None:
    """Have idle sequences hold all rows, as in a server that has run for long.

    Nothing was computed for them, so no prompt may begin as they do: with the end of a text.
    """
    noise = np.random.default_rng(0)
    while engine.pool.free >= IDLE:
        rows = engine.pool.take(IDLE)
        engine.pool.unpin(rows)
        tokens = noise.integers(engine.model.n_vocab, size=IDLE, dtype=np.int32)
        tokens[0] = engine.tokenizer.end_of_text
        engine.sessions.keep("", tokens, rows)


@contextmanager
def vocabulary_beside(model: str) -> Iterator[str]:
    """The model; a GPT-2 that has only weights gets a made-up vocabulary, as no text is measured.

    What it needs is linked into a folder of our own: nothing is written beside the weights.
    """
    path = checkpoint.resolve(model)
    config = path / formats.CONFIG
    size = json.loads(config.read_bytes()).get("vocab_size") if config.is_file() else None
    if size is None or any((path / name).exists() for name in ("merges.txt", FILE_NAME)):
        yield model
        return
    if size < 257:
        raise CheckpointError(f"{path}: {size} tokens are too few for a byte-level vocabulary")
    with tempfile.TemporaryDirectory() as folder:
        for file in [config, *path.glob("*.safetensors*")]:
            (Path(folder) / file.name).symlink_to(file.absolute())
        _vocabulary(size).save(Path(folder) / FILE_NAME)
        yield folder


def _vocabulary(size: int) -> Tokenizer:
    """`size` tokens: all bytes, then pairs of bytes, and the end of text."""
    pairs = (bytes(divmod(i, 256)) for i in range(size - 257))
    tokens = [*(bytes([i]) for i in range(256)), *pairs]
    return Tokenizer.from_ranks({token: i for i, token in enumerate(tokens)}, "made up")


if __name__ == "__main__":
    main()
