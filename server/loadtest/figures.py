"""From samples to numbers. Times are milliseconds; what is not defined is None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from server.loadtest.client import Sample
from server.loadtest.measurement import Measurement, Record
from server.loadtest.workload import Arm, Load

LATE = 10.0  # ms behind the schedule that are worth a warning
MISSING = "-"
BUSY = 0.8  # share of a CPU that the client may take before it may be what is slow


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of one measure over all requests of a load."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float | None], scale: float = 1000.0) -> Distribution | None:
        known = [scale * value for value in values if value is not None]
        if not known:
            return None
        return cls(*(_round(x) for x in (np.mean(known), *np.percentile(known, (50, 90, 99)))))


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one number over the repeats: how far it can be trusted."""

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Iterable[float | None], scale: float = 1.0) -> Spread | None:
        known = [_round(scale * value) for value in values if value is not None]
        return cls(_round(np.median(known)), min(known), max(known)) if known else None

    def __str__(self) -> str:
        middle, least, greatest = map(digits, (self.median, self.least, self.greatest))
        return middle if least == greatest else f"{middle} ({least}-{greatest})"


def _round(number: float | np.floating[Any]) -> float:
    return round(float(number), 3)


def digits(number: float) -> str:
    """Three digits, or all that stand before the point."""
    size = abs(number)
    return f"{number:,.{2 if size < 10 else 1 if size < 100 else 0}f}"


def shown(value: object) -> str:
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return digits(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Objective:
    """What a good answer keeps to, in milliseconds."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def read(cls, text: str) -> Objective:
        """From "ttft=200,tpot=50". Raises ValueError."""
        try:
            limits = {name: float(value) for name, value in (p.split("=") for p in text.split(","))}
            if any(not 0 < limit < float("inf") for limit in limits.values()):
                raise ValueError(text)
            return cls(**limits)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{text!r} is not like ttft=200,tpot=50 (ms; also e2e)") from error

    def met(self, sample: Sample) -> bool:
        """A time that is not defined, such as that per token of a single one, breaks no limit."""
        times = {"ttft": sample.ttft, "tpot": sample.tpot, "e2e": sample.e2e}
        return sample.error is None and all(
            limit is None or (time := times[name]) is None or 1000 * time <= limit
            for name, limit in asdict(self).items()
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One load with one arm, over its repeats."""

    load: Load
    arm: Arm
    requests: int
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    service: Distribution | None  # end to end, from when it was really sent
    lateness: Distribution | None
    requests_per_second: Spread | None
    tokens_per_second: Spread | None
    goodput: Spread | None  # good answers per second
    tpot_repeats: Spread | None  # of each repeat's median
    ttft_repeats: Spread | None
    p99_repeats: Spread | None  # of each repeat's 99th percentile, end to end
    server: dict[str, float]  # medians of what the server says of itself
    cpu_share: float | None  # of one CPU, that the client took
    ms_per_event: float | None  # of the client's CPU time
    lag: Distribution | None  # of the client's clock

    @classmethod
    def of(cls, records: Sequence[Record], objective: Objective | None) -> Cell:
        samples = [sample for record in records for sample in record.samples]
        good = [sample for sample in samples if sample.error is None]
        wall, cpu = sum(r.wall for r in records), sum(r.cpu for r in records)
        events = sum(r.events for r in records)
        load, arm = records[0].run.load, records[0].run.arm
        each = [[s for s in record.samples if s.error is None] for record in records]
        queued = load.rate is not None and load.concurrency is not None
        return cls(
            load=load,
            arm=arm,
            requests=len(samples),
            failed=len(samples) - len(good),
            errors=dict(Counter(s.error for s in samples if s.error is not None)),
            prompt_tokens=sum(s.prompt_tokens for s in good),
            cached_tokens=sum(s.cached_tokens for s in good),
            tokens=sum(s.tokens for s in good),
            ttft=Distribution.of(s.ttft for s in good),
            itl=Distribution.of(pause for s in good for pause in s.itl),
            tpot=Distribution.of(s.tpot for s in good),
            e2e=Distribution.of(s.e2e for s in good),
            service=Distribution.of(s.service for s in good),
            # Waiting for a place among the most that may run is the load's will, not lateness.
            lateness=None if queued else Distribution.of(s.lateness for s in good),
            requests_per_second=_rates(records, [len(mine) for mine in each]),
            tokens_per_second=_rates(records, [sum(s.tokens for s in mine) for mine in each]),
            goodput=_rates(records, [sum(map(objective.met, m)) for m in each])
            if objective
            else None,
            tpot_repeats=Spread.of(_median(s.tpot for s in mine) for mine in each),
            ttft_repeats=Spread.of(_median(s.ttft for s in mine) for mine in each),
            p99_repeats=Spread.of(d.p99 if d else None for d in map(_e2e, each)),
            server=_server(good),
            cpu_share=_round(cpu / wall) if wall else None,
            ms_per_event=_round(1000 * cpu / events) if events else None,
            lag=Distribution.of(lag for record in records for lag in record.lags),
        )

    @property
    def warnings(self) -> list[str]:
        result = []
        if self.lateness and self.lateness.p99 > LATE:
            result.append(f"the client was up to {digits(self.lateness.p99)} ms late (p99)")
        if self.lag and self.lag.p99 > LATE:
            result.append(f"the client's clock lagged {digits(self.lag.p99)} ms (p99)")
        if self.cpu_share and self.cpu_share > BUSY:
            result.append(f"the client took {self.cpu_share:.0%} of a CPU")
        return result

    def as_json(self) -> dict[str, Any]:
        words = {"label": self.load.label, "mode": self.load.mode, "warnings": self.warnings}
        return {**asdict(self), **words}


def _median(values: Iterable[float | None]) -> float | None:
    known = [1000 * value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _e2e(samples: Iterable[Sample]) -> Distribution | None:
    return Distribution.of(s.e2e for s in samples)


def _rates(records: Sequence[Record], counts: Sequence[int]) -> Spread | None:
    pairs = zip(records, counts, strict=True)
    return Spread.of(n / record.wall if record.wall else None for record, n in pairs)


def _server(samples: Iterable[Sample]) -> dict[str, float]:
    told = [s.timings for s in samples if s.timings]
    names = dict.fromkeys(name for timings in told for name in timings)
    return {name: _round(np.median([t[name] for t in told if name in t])) for name in names}


def cells(measurement: Measurement, objective: Objective | None = None) -> list[Cell]:
    groups: dict[tuple[Load, Arm], list[Record]] = {}
    for record in measurement.records:
        groups.setdefault((record.run.load, record.run.arm), []).append(record)
    return [Cell.of(records, objective) for records in groups.values()]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load with each arm that was measured."""

    load: Load
    arms: dict[Arm, Cell]

    @property
    def ratio(self) -> float | None:
        """How many times longer a token takes without the cache."""
        without, cached = self.per_token(Arm.UNCACHED), self.per_token(Arm.CACHED)
        if not without or not cached or not cached.median:
            return None
        return _round(without.median / cached.median)

    def per_token(self, arm: Arm) -> Spread | None:
        cell = self.arms.get(arm)
        return cell.tpot_repeats if cell else None

    def ttft(self, arm: Arm) -> Spread | None:
        cell = self.arms.get(arm)
        return cell.ttft_repeats if cell else None

    def as_json(self, arms: Sequence[Arm]) -> dict[str, Any]:
        def plain(spread: Spread | None) -> dict[str, float] | None:
            return asdict(spread) if spread else None

        return {
            "context": self.load.context,
            **{arm.value: plain(self.per_token(arm)) for arm in arms},
            **{f"{arm}_ttft": plain(self.ttft(arm)) for arm in arms},
            "ratio": self.ratio,
        }


def compare(cells: Iterable[Cell], loads: Iterable[Load]) -> list[Comparison]:
    """The arms beside each other, for those of `loads` that were measured."""
    found = {(cell.load, cell.arm): cell for cell in cells}
    comparisons = [
        Comparison(load, {arm: found[load, arm] for arm in Arm if (load, arm) in found})
        for load in loads
    ]
    return [comparison for comparison in comparisons if comparison.arms]


def growth(comparisons: Sequence[Comparison]) -> float | None:
    """Cached time per token at the longest context over that at the shortest."""
    if len(comparisons) < 2:
        return None
    first, last = (c.per_token(Arm.CACHED) for c in (comparisons[0], comparisons[-1]))
    return _round(last.median / first.median) if first and last and first.median else None


def crossing(comparisons: Sequence[Comparison]) -> float | None:
    """The context from which the cache is worth it: where the two lines cross, if they do."""
    points = [
        (c.load.context, without.median - cached.median)
        for c in comparisons
        if (without := c.per_token(Arm.UNCACHED)) and (cached := c.per_token(Arm.CACHED))
    ]
    for (x, gain), (next_x, next_gain) in pairwise(points):
        if gain <= 0 < next_gain:
            return _round(x - gain * (next_x - x) / (next_gain - gain))
    return None
