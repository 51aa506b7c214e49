"""What is asked of the server: cold prompts of fixed lengths, each with the cache and without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Every byte-level vocabulary has these ids, and every row costs the same whatever its token.
N_IDS = 256


@dataclass(frozen=True, slots=True)
class Trial:
    """One completion: `context` prompt tokens, then exactly `tokens` more. Repeat 0 is warm-up."""

    context: int
    use_cache: bool
    repeat: int
    tokens: int
    prompt: tuple[int, ...]


def trials(contexts: Sequence[int], tokens: int, repeats: int, seed: int) -> list[Trial]:
    """All trials in their order: the two arms side by side, taking turns in going first.

    Each prompt is new, so none finds rows of another; the arms get equally many tokens.
    """
    noise = random.Random(seed)
    return [
        Trial(context, use_cache, repeat, tokens, tuple(noise.choices(range(N_IDS), k=context)))
        for repeat in range(repeats + 1)
        for context in contexts
        for use_cache in ((True, False) if repeat % 2 else (False, True))
    ]
