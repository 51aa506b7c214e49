"""From samples to numbers, against numbers worked out elsewhere."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from statistics import fmean, quantiles

import pytest

from server.loadtest import result
from server.loadtest.client import Sample
from server.loadtest.figures import (
    Cell,
    Distribution,
    Objective,
    Spread,
    cells,
    compare,
    crossing,
    digits,
    growth,
    shown,
)
from server.loadtest.measurement import Measurement, Record
from server.loadtest.workload import Arm, Load, Run

BOTH = (Arm.CACHED, Arm.UNCACHED)


def sample(ttft: float, per_token: float, tokens: int = 3, cached: int = 0) -> Sample:
    times = [ttft + n * per_token for n in range(tokens)]
    counts = [*range(1, tokens + 1)]
    return Sample(0.0, 0.0, times[-1], times, counts, 8, cached, tokens)


def record(load: Load, arm: Arm, *samples: Sample, wall: float = 2.0, repeat: int = 1) -> Record:
    return Record(Run(load, arm, repeat, ()), list(samples), wall)


def line(context: int, cached: float, uncached: float) -> list[Record]:
    load = Load(context)
    return [
        record(load, Arm.CACHED, sample(0.01, cached)),
        record(load, Arm.UNCACHED, sample(0.01, uncached)),
    ]


SHORT, LONG = Load(32), Load(480)
MEASUREMENT = Measurement(
    [
        record(SHORT, Arm.CACHED, sample(0.010, 0.002)),
        record(SHORT, Arm.CACHED, sample(0.020, 0.004), repeat=2),
        record(SHORT, Arm.CACHED, sample(0.012, 0.003), repeat=3),
        record(SHORT, Arm.UNCACHED, sample(0.010, 0.030)),
        record(LONG, Arm.CACHED, sample(0.050, 0.0045, cached=5)),
        record(LONG, Arm.UNCACHED, Sample(0.0, error="lost")),
    ],
    repeats=3,
)


class TestDistribution:
    def test_against_the_standard_library(self) -> None:
        noise = random.Random(0)
        values = [noise.lognormvariate(-3, 1) for _ in range(997)]
        d = Distribution.of(values)
        cuts = quantiles(values, n=100, method="inclusive")
        expected = [1000 * x for x in (fmean(values), cuts[49], cuts[89], cuts[98])]
        assert d is not None
        assert [d.mean, d.p50, d.p90, d.p99] == pytest.approx(expected, abs=0.001)

    def test_undefined_is_missing_and_not_zero(self) -> None:
        assert Distribution.of([]) is None
        assert Distribution.of([None]) is None
        assert Spread.of([None]) is None
        assert shown(None) == "-"

    def test_of_one(self) -> None:
        assert Distribution.of([0.5, None]) == Distribution(500, 500, 500, 500)


class TestCell:
    def test_numbers(self) -> None:
        bad = Sample(0.0, error="lost")
        good = sample(0.1, 0.05, cached=2), sample(0.3, 0.05), bad
        cell = Cell.of([record(SHORT, Arm.CACHED, *good)], None)
        assert (cell.requests, cell.failed, cell.errors) == (3, 1, {"lost": 1})
        assert (cell.prompt_tokens, cell.cached_tokens, cell.tokens) == (16, 2, 6)
        assert cell.ttft == Distribution(200, 200, 280, 298)
        assert cell.itl is not None
        assert cell.itl.p50 == 50
        assert cell.e2e is not None
        assert cell.e2e.mean == 300
        assert cell.requests_per_second == Spread(1, 1, 1)
        assert cell.tokens_per_second == Spread(3, 3, 3)
        assert cell.goodput is None

    def test_goodput(self) -> None:
        several = sample(0.1, 0.05), sample(0.3, 0.05), Sample(0.0, error="lost")
        for text, rate in (("ttft=200", 0.5), ("tpot=50.1", 1.0), ("tpot=49,ttft=999", 0.0)):
            cell = Cell.of([record(SHORT, Arm.CACHED, *several)], Objective.read(text))
            assert cell.goodput == Spread(rate, rate, rate)

    def test_a_time_that_is_not_defined_breaks_no_limit(self) -> None:
        assert Objective.read("tpot=1").met(sample(0.1, 0.05, tokens=1))

    @pytest.mark.parametrize("text", ["", "ttft", "ttft=x", "ttft=-1", "ttft=nan", "speed=3"])
    def test_no_objective(self, text: str) -> None:
        with pytest.raises(ValueError, match="ttft=200"):
            Objective.read(text)

    def test_a_queue_that_was_asked_for_is_no_lateness(self) -> None:
        load = replace(SHORT, rate=5.0)
        waited = replace(sample(0.1, 0.1), sent=0.09)
        assert Cell.of([record(load, Arm.CACHED, waited)], None).lateness is None
        free = replace(load, concurrency=None)
        cell = Cell.of([record(free, Arm.CACHED, waited)], None)
        assert "late" in cell.warnings[0]

    def test_the_servers_medians(self) -> None:
        told = [replace(sample(0.1, 0.1), timings={"queue_ms": t}) for t in (1.0, 5.0, 2.0)]
        assert Cell.of([record(SHORT, Arm.CACHED, *told)], None).server == {"queue_ms": 2}


class TestComparison:
    def test_arms_beside_each_other(self) -> None:
        short, long = compare(cells(MEASUREMENT), [SHORT, LONG, Load(9)])
        assert short.per_token(Arm.CACHED) == Spread(3, 2, 4)
        assert short.ttft(Arm.CACHED) == Spread(12, 10, 20)
        assert short.ratio == 10
        assert long.per_token(Arm.UNCACHED) is None
        assert long.ratio is None

    def test_growth(self) -> None:
        assert growth(compare(cells(MEASUREMENT), [SHORT, LONG])) == 1.5
        assert growth([]) is None

    @pytest.mark.parametrize(
        ("uncached", "expected"),
        [((0.002, 0.006, 0.009), 150), ((0.005, 0.006, 0.007), None), ((0.001,) * 3, None)],
    )
    def test_crossing(self, uncached: tuple[float, ...], expected: float | None) -> None:
        """Cached 4 ms; uncached 2 ms at 100 and 6 ms at 200: they meet half-way."""
        contexts = (100, 200, 300)
        records = [r for c, u in zip(contexts, uncached, strict=True) for r in line(c, 0.004, u)]
        loads = [Load(context) for context in contexts]
        assert crossing(compare(cells(Measurement(records)), loads)) == expected

    def test_digits(self) -> None:
        assert list(map(digits, (0.1234, 12.34, 1234.5))) == ["0.12", "12.3", "1,234"]


class TestSummary:
    def test_it_is_json(self) -> None:
        every = cells(MEASUREMENT)
        summary = result.summary(
            MEASUREMENT, every, compare(every, [SHORT, LONG]), {"seed": 0}, BOTH
        )
        assert json.loads(json.dumps(summary)) == summary
        assert (summary["requests"], summary["failures"], summary["growth"]) == (6, 1, 1.5)
        assert summary["contexts"][0]["ratio"] == 10
        assert summary["contexts"][0]["cached"] == {"median": 3, "least": 2, "greatest": 4}
        assert summary["contexts"][1]["uncached"] is None
        assert summary["arms"]["cached"]["cached_tokens"] == 5
        words = " ".join(summary["warnings"])
        assert "1 of 6 requests failed" in words
        assert "different amounts of work" in words
        assert "10.0 times as long" in summary["findings"][0]

    def test_nothing_measured(self) -> None:
        nothing = Measurement(interrupted=True)
        summary = result.summary(nothing, [], [], {}, BOTH)
        assert summary["contexts"] == []
        assert summary["growth"] is None
        assert summary["findings"] == []
        assert "interrupted" in summary["warnings"][0]
