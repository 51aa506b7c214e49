"""A measurement as one JSON object and as a folder of files; two of them beside each other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from server.loadtest.figures import Cell, Comparison, crossing, digits, growth, shown
from server.loadtest.measurement import Measurement
from server.loadtest.workload import Arm

MANY = 0.01  # of the requests failed: no number of the rest can be trusted

EXAMPLES = 3  # of cases in a warning; the cells have all


class ResultError(ValueError):
    """A file that is no result, in one line."""


def summary(
    measurement: Measurement,
    cells: Sequence[Cell],
    comparisons: Sequence[Comparison],
    conditions: dict[str, Any],
    arms: Sequence[Arm],
) -> dict[str, Any]:
    """All that a program wants to know of a run."""
    return {
        "conditions": conditions,
        "interrupted": measurement.interrupted,
        "requests": len(measurement.samples),
        "failures": measurement.failures,
        "unit": "ms",
        "contexts": [c.as_json(arms) for c in comparisons],
        "growth": growth(comparisons),
        "crossing": crossing(comparisons),
        "arms": {arm.value: work(cells, arm) for arm in arms},
        "warnings": warnings(measurement, cells, arms),
        "findings": findings(comparisons),
    }


def work(cells: Sequence[Cell], arm: Arm) -> dict[str, int]:
    mine = [cell for cell in cells if cell.arm is arm]
    names = ("requests", "failed", "prompt_tokens", "cached_tokens", "tokens")
    return {name: sum(getattr(cell, name) for cell in mine) for name in names}


def warnings(measurement: Measurement, cells: Sequence[Cell], arms: Sequence[Arm]) -> list[str]:
    """What a reader has to know before he believes a number."""
    result = []
    if measurement.interrupted:
        result.append("The run was interrupted: this is what was measured until then.")
    if measurement.failures:
        n = len(measurement.samples)
        result.append(f"{measurement.failures} of {n} requests failed; the times are of the rest.")
    if Arm.AS_SERVED in arms:
        result.append("The server does not know use_cache, so only one arm was measured.")
    totals = {work(cells, arm)["tokens"] for arm in arms}
    if len(totals) > 1 and not measurement.interrupted:
        result.append("The arms did different amounts of work.")
    slow = [c for c in cells if c.warnings]
    if slow:
        some = [f"{c.load.label}, {c.arm.label}: {', '.join(c.warnings)}" for c in slow[:EXAMPLES]]
        more = ["..."] if len(slow) > EXAMPLES else []
        result.append(
            f"The client may have been what was slow, in {len(slow)} of {len(cells)} cases "
            f"({'; '.join(some + more)})."
        )
    return result


def findings(comparisons: Sequence[Comparison]) -> list[str]:
    """The result in words."""
    known = [c for c in comparisons if c.ratio is not None]
    if not known:
        return []
    last = known[-1]
    with_cache, without = (last.per_token(arm) for arm in (Arm.CACHED, Arm.UNCACHED))
    times = [shown(spread and spread.median) for spread in (with_cache, without)]
    result = [
        f"At a context of {last.load.context:,} tokens, a token takes {times[0]} ms with the cache "
        f"and {times[1]} ms without: {shown(last.ratio)} times as long."
    ]
    grown = growth(comparisons)
    if grown:
        first = comparisons[0].load.context
        result.append(
            f"With the cache a token takes {digits(grown)} times as long there as at a context of "
            f"{first:,}."
        )
    return result


def samples(measurement: Measurement) -> list[dict[str, Any]]:
    """Every request, so that nobody has to believe the summary."""
    return [
        {**asdict(r.run.load), "arm": r.run.arm, "repeat": r.run.repeat, **_rounded(asdict(sample))}
        for r in measurement.records
        for sample in r.samples
    ]


def _rounded(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def read(path: Path) -> dict[str, Any]:
    """Raises ResultError."""
    try:
        result = json.loads(path.read_text())
        if not isinstance(result, dict) or not isinstance(result["cells"], list):
            raise ResultError(f"{path}: not a result of onerow bench")
        return result
    except OSError as error:
        raise ResultError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError) as error:
        raise ResultError(f"{path}: not a result of onerow bench") from error
