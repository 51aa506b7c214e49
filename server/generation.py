"""One completion straight from the engine, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from model.step import Sampling
from server.engine.engine import Engine
from server.engine.sequence import Failure, Request


class GenerationError(Exception):
    """A prompt that cannot be continued, or a model that failed at it: one line."""


def plan(
    engine: Engine,
    prompt: str,
    sampling: Sampling,
    max_tokens: int | None = None,
    stop: tuple[str, ...] = (),
    *,
    use_cache: bool = True,
) -> Request:
    """The request for a continuation, by default up to the end of the window.

    An empty prompt begins where a text does: behind the end of another.
    """
    tokenizer, window = engine.tokenizer, engine.model.n_ctx
    tokens = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    room = window - len(tokens)
    if room < (max_tokens or 1):
        raise GenerationError(
            f"a prompt of {len(tokens)} tokens and {max_tokens or 1} more do not fit into the "
            f"window of {window}"
        )
    return Request(
        id="generate",
        index=0,
        prompt=tuple(tokens),
        max_tokens=max_tokens or room,
        sampling=sampling,
        stop=stop,
        stop_ids=frozenset({tokenizer.end_of_text}),
        use_cache=use_cache,
    )


@dataclass(slots=True)
class Outcome:
    """What came of a request, as seen from outside the engine."""

    tokens: int = 0
    ttft: float = 0.0  # seconds to the first text
    tokens_per_second: float = 0.0  # after the first text
    ending: str = "interrupted"


def run(engine: Engine, request: Request, write: Callable[[str], object]) -> Outcome:
    """Hand the text to `write` piece by piece. Ctrl-C ends the text, not the program."""
    outcome = Outcome()
    began = time.perf_counter()
    n_first = 0
    engine.submit([request])
    try:
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Failure):
                    raise GenerationError(event.message)
                write(event.text)
                seconds = time.perf_counter() - began
                outcome.tokens = event.completion_tokens
                if not n_first:
                    n_first, outcome.ttft = event.completion_tokens, seconds
                elif seconds > outcome.ttft:
                    n_later = event.completion_tokens - n_first
                    outcome.tokens_per_second = n_later / (seconds - outcome.ttft)
                if event.finish:
                    outcome.ending = event.finish.reason
    except KeyboardInterrupt:
        engine.abort(request.id)
    return outcome
