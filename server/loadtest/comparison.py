"""Two results beside each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from server.loadtest.figures import shown
from server.loadtest.workload import Load

MEASURES = {
    "ms per token": ("tpot_repeats", "median"),
    "TTFT p50": ("ttft", "p50"),
    "end to end p99": ("e2e", "p99"),
    "tokens/s": ("tokens_per_second", "median"),
}
# What makes two results worth comparing: a difference in these is said.
SAME = ("model", "device", "dtype", "machine", "threads", "onerow", "server_version", "torch")


def rows(a: dict[str, Any], b: dict[str, Any]) -> list[list[str]]:
    """Header and rows: the loads that both have, measure by measure, and b as a multiple of a."""
    table = [["load", "arm", "measure", "a", "b", "b / a", "failed a, b"]]
    for label, arm, mine, yours in _pairs(a, b):
        for name, (measure, part) in MEASURES.items():
            x, y = (_number(cell, measure, part) for cell in (mine, yours))
            ratio = None if x is None or y is None or not x else y / x
            failed = f"{mine['failed']}, {yours['failed']}"
            table.append([label, arm, name, shown(x), shown(y), shown(ratio), failed])
    return table


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Conditions that are not the same."""
    mine, yours = a["conditions"], b["conditions"]
    return [
        f"{name}: {shown(mine.get(name))} and {shown(yours.get(name))}"
        for name in SAME
        if mine.get(name) != yours.get(name)
    ]


def _pairs(
    a: dict[str, Any], b: dict[str, Any]
) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    others = {_key(cell): cell for cell in b["cells"]}
    for cell in a["cells"]:
        if other := others.get(_key(cell)):
            yield cell["label"], cell["arm"].replace("_", " "), cell, other


def _key(cell: dict[str, Any]) -> tuple[object, ...]:
    """The load and the arm; how many conversations there were makes no other load of it."""
    names = [field.name for field in fields(Load) if field.name != "talks"]
    return (cell["arm"], *(cell["load"][name] for name in names))


def _number(cell: dict[str, Any], measure: str, part: str) -> float | None:
    values = cell[measure]
    return None if values is None else float(values[part])
