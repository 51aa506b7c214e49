"""Numbers for people and for programs: medians and their spread, by context and arm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from server.loadtest.client import Sample
from server.loadtest.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of some times, in milliseconds."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Spread | None:
        times = [round(1000 * s, 3) for s in seconds]
        return cls(round(median(times), 3), min(times), max(times)) if times else None

    def __str__(self) -> str:
        return f"{digits(self.median)} ({digits(self.least)}-{digits(self.greatest)})"


def digits(number: float) -> str:
    """Three digits, or all that stand before the point."""
    return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both arms at one context. None where an arm has no sample."""

    context: int
    cached: Spread | None  # ms per token
    uncached: Spread | None
    cached_ttft: Spread | None
    uncached_ttft: Spread | None

    @property
    def ratio(self) -> float | None:
        """How many times longer a token takes without the cache."""
        if self.cached is None or self.uncached is None:
            return None
        return round(self.uncached.median / self.cached.median, 2)


def compare(samples: Iterable[Sample]) -> list[Comparison]:
    good = [sample for sample in samples if sample.error is None]

    def arm(context: int, use_cache: bool) -> tuple[Spread | None, Spread | None]:
        mine = [s for s in good if s.context == context and s.use_cache is use_cache]
        return Spread.of(s.per_token for s in mine), Spread.of(s.ttft for s in mine)

    comparisons = []
    for context in sorted({sample.context for sample in good}):
        (cached, cached_ttft), (uncached, uncached_ttft) = arm(context, True), arm(context, False)
        comparisons.append(Comparison(context, cached, uncached, cached_ttft, uncached_ttft))
    return comparisons


def table(comparisons: Iterable[Comparison], title: str) -> Table:
    result = Table(title=title, caption="milliseconds: median (least-greatest)")
    for name in ("context", "cached", "uncached", "ratio", "cached TTFT", "uncached TTFT"):
        result.add_column(name, justify="right", no_wrap="TTFT" not in name)
    for c in comparisons:
        first = [ttft and digits(ttft.median) for ttft in (c.cached_ttft, c.uncached_ttft)]
        cells = (c.context, c.cached, c.uncached, c.ratio, *first)
        result.add_row(*("-" if cell is None else str(cell) for cell in cells))
    return result


def summary(measurement: Measurement, conditions: dict[str, Any]) -> dict[str, Any]:
    """All that a program wants to know of a run, in one JSON object."""
    comparisons = compare(measurement.samples)
    return {
        "conditions": conditions,
        "interrupted": measurement.interrupted,
        "failures": len(measurement.failures),
        "unit": "ms",
        "contexts": [{**asdict(c), "ratio": c.ratio} for c in comparisons],
        "growth": growth(comparisons),
    }


def growth(comparisons: list[Comparison]) -> float | None:
    """Cached time per token at the longest context over that at the shortest."""
    if len(comparisons) < 2:
        return None
    first, last = comparisons[0].cached, comparisons[-1].cached
    return round(last.median / first.median, 2) if first and last else None
