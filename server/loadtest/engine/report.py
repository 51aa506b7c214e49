"""The figures for people: a table with a line for each cell and variant, and what to know of it."""

from __future__ import annotations

from server.loadtest.engine.bench import Outcome
from server.loadtest.engine.cells import Cell
from server.loadtest.engine.figures import Figure, ratios
from server.loadtest.figures import MISSING, digits, shown

NOTE = (
    "decode-8x128: 8 streams, prompts of 128 tokens. "
    "In brackets: beside onerow the least and the greatest of the runs; beside a peer its time as "
    "a multiple of onerow's: above 1 onerow is ahead. *: others used the machine meanwhile."
)


def title(outcome: Outcome) -> str:
    limits, conditions = outcome.summary["ceilings"], outcome.summary["conditions"]
    speeds = ", ".join(f"{n:,.0f} GFLOP/s {t}" for t, n in limits["matmul_GFLOP_s"].items())
    return f"{conditions['model']}, {conditions['machine']}: {limits['read_GB_s']} GB/s, {speeds}"


def rows(outcome: Outcome) -> list[list[str]]:
    """Header and rows: a line for each cell and variant of onerow."""
    contenders = outcome.plan.contenders
    variants = [c.name for c in contenders if c.ours and not c.pool]
    known = outcome.summary["contenders"]
    peers = [c.name for c in contenders if not c.ours and known[c.name]["version"]]
    several = len(variants) > 1
    table = [["cell", "unit", "onerow" if several else variants[0], "floor", "of floor", *peers]]
    for cell in map(Cell.read, outcome.summary["cells"]):
        of = outcome.found.get(cell, {})
        for name in variants:
            mine = of.get(name)
            floor = mine.floor if mine else None
            table.append(
                [
                    f"{cell} {name.removeprefix('onerow ')}" if several else str(cell),
                    cell.unit,
                    f"{mine.value}{_mark(mine)}" if mine else MISSING,
                    shown(cell.figure(floor.ms) if floor else None),
                    f"{mine.share:.0%}" if mine and mine.share else MISSING,
                    *(_beside(of.get(peer), ratios(of, name).get(peer)) for peer in peers),
                ]
            )
    return table


def remarks(outcome: Outcome) -> list[str]:
    """What else is to be said, a line each."""
    summary = outcome.summary
    memory = [
        f"memory of {name}: {shown(c['loaded_mb'])} MB after load, {shown(c['peak_mb'])} MB at most"
        for name, c in summary["contenders"].items()
        if c["version"]
    ]
    worth = [
        f"without the cache a token takes {digits(ratio)} times as long: {name}, prompt {prompt:,}"
        for name, of in summary["cache"].items()
        for prompt, ratio in of.items()
    ]
    left_out = [f"left out: {what}: {why}" for what, why in summary["left_out"].items()]
    return [*memory, *worth, *summary["notes"], *left_out]


def _beside(theirs: Figure | None, ratio: float | None) -> str:
    return f"{digits(theirs.value.median)}{_mark(theirs)} ({shown(ratio)})" if theirs else MISSING


def _mark(figure: Figure) -> str:
    return "*" if figure.disturbed else ""
