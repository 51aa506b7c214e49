"""A whole benchmark: start everyone, measure the ceilings and then the cells, write it down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.loadtest.conditions import conditions
from server.loadtest.engine import ceilings, cores
from server.loadtest.engine import figures as f
from server.loadtest.engine.cells import GROWTH, POOL, Cell, Kind, Room, fit
from server.loadtest.engine.contenders import Contender
from server.loadtest.engine.plots import plots
from server.loadtest.engine.process import Process, ProcessError
from server.loadtest.engine.rounds import Pair, Record, measure
from server.loadtest.host import interruptible


class EngineError(Exception):
    """onerow's own engine does not start: one line."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured: by whom, which cells, how often."""

    contenders: Sequence[Contender]  # onerow's variants first
    cells: Sequence[Cell]
    growth: bool  # further cells and pools, of onerow alone
    repeats: int
    threads: int
    seed: int
    patience: float  # seconds to wait for others to be quiet, in all


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a benchmark."""

    plan: Plan
    found: f.Figures
    record: Record
    summary: dict[str, Any]

    @property
    def failed(self) -> bool:
        """Whether a number of onerow's own is missing."""
        return bool(self.summary["missing"])

    def write(self, folder: Path) -> list[Path]:
        """The result first, so that nothing that goes wrong later can lose it."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "engine.json"]
        whole = {**self.summary, "runs": [run.as_json() for run in self.record.runs]}
        paths[0].write_text(json.dumps(whole, indent=1) + "\n")
        ours = [c for c in self.plan.contenders if c.ours]
        pools = {c.name: c.pool for c in ours if c.pool}
        names = [c.name for c in ours if not c.pool]
        for picture in plots(self.found, names, pools):
            paths.append(folder / f"{picture.name}.png")
            paths[-1].write_bytes(picture.png)
        return paths


def run(plan: Plan, facts: dict[str, Any]) -> Outcome:
    """Measure. Raises EngineError; a peer that fails is left out and the summary says why."""
    console = Console(stderr=True)
    with interruptible(), ExitStack() as stack:
        processes: dict[str, Process] = {}
        absent: dict[str, str] = {}

        def start(contenders: Sequence[Contender]) -> None:
            for contender in contenders:
                console.print(f"starting {contender.name}", style="dim")
                try:
                    process = Process(contender.command, contender.variables(plan.threads))
                except ProcessError as error:
                    absent[contender.name] = str(error)
                else:
                    processes[contender.name] = process
                    stack.callback(process.close)

        ours = [c for c in plan.contenders if c.ours]
        start(ours)
        variants = {
            c.name: f.Variant.of(c.name, processes[c.name].ready)
            for c in ours
            if c.name in processes
        }
        main = [c.name for c in ours if not c.pool]
        if gone := [name for name in main if name in absent]:
            raise EngineError(f"{gone[0]}: {absent[gone[0]]}")
        console.print("measuring what the machine can do", style="dim")
        patience = cores.wait_until_quiet(plan.patience)
        ready = [processes[name].ready for name in main]
        limits = ceilings.measure(plan.threads, ready[0]["device"])
        start([c for c in plan.contenders if not c.ours])
        room = Room(
            variants[main[0]].config.n_ctx,
            min(r["rows"] for r in ready),
            min(r["streams"] for r in ready),
        )
        pairs, cells, notes = _pairs(plan, processes, room)
        if not pairs:
            raise EngineError("; ".join(notes))
        n_vocab = variants[main[0]].config.n_vocab
        record = _measure(plan, processes, pairs, n_vocab, patience, console)
        if not record.interrupted:
            limits = limits.best(ceilings.measure(plan.threads, ready[0]["device"]))
        found = f.figures(record, plan.repeats, variants, limits)
        reasons = {f"{cell}, {name}": words for (cell, name), words in record.failures.items()}
        summary = {
            "conditions": conditions(
                device=ready[0]["device"],
                threads=plan.threads,
                repeats=plan.repeats,
                seed=plan.seed,
                **facts,
            ),
            "interrupted": record.interrupted,
            "ceilings": limits.as_json(),
            "contenders": {
                c.name: _contender(c, processes.get(c.name), record, main[0])
                for c in plan.contenders
            },
            "cells": {str(cell): _cell(cell, found.get(cell, {}), main) for cell in cells},
            "cache": {name: f.worth(found, name) for name in main},
            "notes": notes,
            "left_out": {**absent, **record.gone, **reasons},
            "missing": [
                f"{cell}, {name}"
                for cell, name in pairs
                if name in main and name not in found.get(cell, {})
            ],
        }
    return Outcome(plan, found, record, summary)


def _pairs(
    plan: Plan, processes: dict[str, Process], room: Room
) -> tuple[list[Pair], list[Cell], list[str]]:
    """Who does what, cell by cell; the cells that fit; what was changed about them."""
    for_all, notes = fit(plan.cells, room)
    more, _ = fit(map(Cell.read, (*GROWTH, POOL) if plan.growth else ()), room)
    cells = list(dict.fromkeys([*for_all, *more]))
    pairs: list[Pair] = []
    for cell in cells:
        for contender in plan.contenders:
            if contender.name not in processes:
                continue
            if cell.kind is Kind.UNCACHED and not processes[contender.name].uncached:
                continue
            if contender.pool and str(cell) != POOL:
                continue
            if contender.ours or cell in for_all:
                pairs.append((cell, contender.name))
    return pairs, cells, notes


def _measure(
    plan: Plan,
    processes: dict[str, Process],
    pairs: list[Pair],
    n_vocab: int,
    patience: float,
    console: Console,
) -> Record:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("warming up", total=len(pairs) * (plan.repeats + 1))

        def advance(words: str) -> None:
            done = progress.tasks[task]  # runs that were disturbed are made up for
            total = max(done.total or 0, done.completed + 1)
            progress.update(task, advance=1, total=total, description=words)

        return measure(processes, pairs, plan.repeats, n_vocab, plan.seed, patience, advance)


def _contender(
    contender: Contender, process: Process | None, record: Record, first: str
) -> dict[str, Any]:
    if process is None:
        return {"version": None}
    return {
        "version": process.ready["ready"],
        "load_s": process.ready.get("load_s"),
        "loaded_mb": process.loaded_mb,
        "peak_mb": process.peak_mb,
        "pool": contender.pool,
        "agreement": f.agreement(record, first, contender.name),
    }


def _cell(cell: Cell, of: dict[str, f.Figure], main: Sequence[str]) -> dict[str, Any]:
    return {
        "kind": cell.kind,
        "unit": cell.unit,
        "streams": cell.streams,
        "prompt": cell.prompt,
        "new": cell.new,
        "figures": {name: figure.as_json() for name, figure in of.items()},
        "ratios": {name: f.ratios(of, name) for name in main},
    }
