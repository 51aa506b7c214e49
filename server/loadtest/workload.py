"""What is asked of the server: loads, each with both arms, with fresh prompts in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate

# Every byte-level vocabulary has these ids, and every row costs the same whatever its token.
N_IDS = 256
# Contexts and the prompt of the other sweeps, as shares of the window (of its first 1,024 tokens).
SPAN = 1024
WARM = 4


class Arm(StrEnum):
    CACHED = "cached"
    UNCACHED = "uncached"
    AS_SERVED = "as_served"  # the only one where a server does not know `use_cache`

    @property
    def label(self) -> str:
        return self.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Load:
    """One point of the space that is measured."""

    context: int  # prompt tokens, in the last turn without the answers before it
    tokens: int = 16  # generated in each answer, exactly
    concurrency: int | None = 1  # conversations at the same time; with a rate the most, if any
    rate: float | None = None  # conversations that begin per second; None: when another has ended
    shared: float = 0.0  # share of the first prompt that all conversations of a run have
    turns: int = 1  # requests of a conversation, each with all that was said before
    talks: int = 2  # conversations in a run

    @property
    def words(self) -> list[str]:
        """The load for people, without what goes without saying."""
        words = [f"context {self.context:,}", f"{self.tokens} tokens"]
        if self.rate is not None:
            words.append(f"{self.rate:g}/s")
        if self.concurrency not in (None, 1):
            words.append(f"{self.concurrency} at once")
        if self.shared:
            words.append(f"{self.shared:.0%} shared")
        if self.turns > 1:
            words.append(f"{self.turns} turns")
        return words

    @property
    def label(self) -> str:
        return ", ".join(self.words)

    @property
    def mode(self) -> str:
        return "closed loop" if self.rate is None else "open loop"

    @property
    def longest(self) -> int:
        """Tokens of the longest text in it."""
        return self.context + self.turns * self.tokens


@dataclass(frozen=True, slots=True)
class Talk:
    """One conversation: what each turn adds, and when it is to begin, in seconds of its run."""

    parts: tuple[tuple[int, ...], ...]
    due: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """A load, played once with one arm. Repeat 0 is warm-up."""

    load: Load
    arm: Arm
    repeat: int
    talks: tuple[Talk, ...] = field(repr=False)

    @property
    def tokens(self) -> int:
        """In each answer. Warm-up need not wait for all of them."""
        return self.load.tokens if self.repeat else min(WARM, self.load.tokens)


@dataclass(frozen=True, slots=True)
class Workload:
    """The loads, and which of them differ in one thing alone: the sweeps."""

    sweeps: dict[str, list[Load]]
    repeats: int
    seconds: float = float("inf")  # no further repeat begins that would end after it

    @property
    def loads(self) -> list[Load]:
        return list(dict.fromkeys(load for loads in self.sweeps.values() for load in loads))

    def runs(self, arms: Sequence[Arm], seed: int) -> Iterator[Run]:
        """All runs in their order: the arms side by side, taking turns in going first."""
        for repeat in range(self.repeats + 1):
            for load in self.loads:
                for arm in arms if repeat % 2 else reversed(arms):
                    yield Run(load, arm, repeat, talks(load, arm, repeat, seed))


def talks(load: Load, arm: Arm, repeat: int, seed: int) -> tuple[Talk, ...]:
    """The conversations of a run. Its prompts are its own, so that none finds rows of another;
    its arrivals are those of the other arm.
    """
    n = load.talks if repeat else min(load.talks, load.concurrency or 1)
    noise = random.Random(f"{seed} {load} {arm} {repeat}")
    size, more = divmod(load.context, load.turns)
    sizes = [size + more, *[size] * (load.turns - 1)]
    common = _ids(noise, round(load.shared * sizes[0]))
    result = []
    for due in arrivals(load, n, random.Random(f"{seed} {load} {repeat}")):
        first = common + _ids(noise, sizes[0] - len(common))
        result.append(Talk((first, *(_ids(noise, size) for size in sizes[1:])), due))
    return tuple(result)


def arrivals(load: Load, n: int, noise: random.Random) -> list[float] | list[None]:
    """When each conversation is to begin: a Poisson process, its first arrival at 0."""
    if load.rate is None:
        return [None] * n
    return list(accumulate((noise.expovariate(load.rate) for _ in range(n - 1)), initial=0.0))


def _ids(noise: random.Random, n: int) -> tuple[int, ...]:
    return tuple(noise.choices(range(N_IDS), k=n))


@dataclass(frozen=True, slots=True)
class Preset:
    """What is swept when nobody says what, and how thoroughly."""

    seconds: float
    repeats: int
    talks: int
    tokens: int
    shares: tuple[float, ...]  # of the window: the contexts
    values: dict[str, tuple[float, ...]]  # the other sweeps


PRESETS = {
    "quick": Preset(
        seconds=38,
        repeats=3,
        talks=2,
        tokens=8,
        shares=(1 / 16, 1 / 4, 1 / 2, 15 / 16),
        values={"concurrency": (1, 2, 4), "rate": (2,), "shared": (0, 0.9), "turns": (1, 3)},
    ),
    "standard": Preset(
        seconds=300,
        repeats=5,
        talks=4,
        tokens=24,
        shares=(1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16),
        values={
            "tokens": (4, 24, 64),
            "concurrency": (1, 2, 4, 8, 16),
            "rate": (1, 2, 4),
            "shared": (0, 0.5, 0.9),
            "turns": (1, 2, 4),
        },
    ),
    "full": Preset(
        seconds=3600,
        repeats=10,
        talks=8,
        tokens=32,
        shares=(1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 15 / 16),
        values={
            "tokens": (4, 8, 16, 32, 64, 128),
            "concurrency": (1, 2, 4, 8, 16, 32, 64),
            "rate": (0.5, 1, 2, 4, 8, 16),
            "shared": (0, 0.25, 0.5, 0.75, 0.9),
            "turns": (1, 2, 4, 8),
        },
    ),
}

SWEEPS = ("context", "tokens", "concurrency", "rate", "shared", "turns")


def plan(
    preset: Preset,
    given: Mapping[str, Sequence[float]],
    window: int | None,
    repeats: int | None,
    talks: int | None = None,
) -> Workload:
    """The preset's sweeps; or, if any values are given, those alone: a thing with one value has it
    in every load, a thing with several is swept while the others keep their first. A run has
    `talks` conversations, in a closed loop at least those at once; or as many as its load takes.
    """
    span = min(window or SPAN, SPAN)
    values = given or {
        "context": [max(1, int(span * share)) for share in preset.shares],
        **preset.values,
    }
    base = Load(context=span // 4, tokens=preset.tokens, talks=preset.talks)
    if given:
        base = _with(base, **{name: several[0] for name, several in given.items()})
    swept = [name for name in SWEEPS if len(values.get(name, ())) > (1 if given else 0)]
    sweeps = {name: [_with(base, **{name: value}) for value in values[name]] for name in swept}
    # When everything is given once there is one load to measure, and nothing to draw a line by.
    sweeps = sweeps or {"context": [base]}
    if talks:
        for name, loads in sweeps.items():
            sweeps[name] = [
                replace(load, talks=max(talks, 0 if load.rate else load.concurrency or 0))
                for load in loads
            ]
    seconds = float("inf") if given or repeats or talks else preset.seconds
    return Workload(sweeps, repeats or preset.repeats, seconds)


def _with(load: Load, **values: float) -> Load:
    """The load with these values, and as many conversations as it takes to see their effect."""
    if "rate" in values and "concurrency" not in values:
        load = replace(load, concurrency=None)
    load = replace(load, **values)  # type: ignore[arg-type]  # counts are given as counts
    enough = 2 * (load.concurrency or 1) if load.rate is None else round(2 * load.rate)
    return replace(load, talks=max(load.talks, enough))
