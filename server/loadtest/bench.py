"""A whole load test: find the server, measure it, write down what was seen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.loadtest import figures, report, result
from server.loadtest.client import Client
from server.loadtest.conditions import conditions
from server.loadtest.figures import Cell, Comparison, Objective
from server.loadtest.measurement import Measurement, measure
from server.loadtest.plots import plots
from server.loadtest.target import Target
from server.loadtest.workload import Run, Workload


class WorkloadError(ValueError):
    """What is asked for cannot be measured on this server: one line that says why."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of a load test, and the files that they became."""

    measurement: Measurement
    cells: list[Cell]
    comparisons: list[Comparison]
    summary: dict[str, Any]

    @property
    def failed(self) -> bool:
        n, failures = len(self.measurement.samples), self.measurement.failures
        return not n or failures > result.MANY * n

    @property
    def errors(self) -> Counter[str]:
        return Counter(s.error for s in self.measurement.samples if s.error is not None)

    def write(self, folder: Path, workload: Workload) -> list[Path]:
        """The result first, so that nothing that goes wrong later can lose it."""
        folder.mkdir(parents=True, exist_ok=True)
        whole = {
            **self.summary,
            "cells": [cell.as_json() for cell in self.cells],
            "samples": result.samples(self.measurement),
        }
        paths = [folder / "result.json"]
        paths[0].write_text(json.dumps(whole, indent=1) + "\n")
        pictures = plots(self.cells, workload.sweeps, self.measurement.records)
        for picture in pictures:
            paths.append(folder / f"{picture.name}.png")
            paths[-1].write_bytes(picture.png)
        page = report.html_report(self.comparisons, self.cells, pictures, self.summary)
        paths.append(folder / "report.html")
        paths[-1].write_text(page)
        return paths


def run(
    url: str,
    api_key: str | None,
    target: Target,
    workload: Workload,
    seed: int,
    objective: Objective | None,
    facts: dict[str, Any],
) -> Outcome:
    """Measure the server at `url`. Raises WorkloadError."""
    _check(workload, target)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=0.2,  # within a run drawing takes time from the server
    ) as progress:
        total = len(workload.loads) * len(target.arms) * (workload.repeats + 1)
        task = progress.add_task("warming up", total=total)

        def advance(run: Run) -> None:
            words = f"repeat {run.repeat}" if run.repeat else "warming up"
            words = f"{words}, context {run.load.context}"
            progress.update(task, advance=1, description=words, refresh=True)

        measurement = measure(
            lambda: Client(url, target.model, api_key), workload, target.arms, seed, advance
        )
        progress.update(task, total=progress.tasks[task].completed, description="measured")
    cells = figures.cells(measurement, objective)
    comparisons = figures.compare(cells, workload.sweeps.get("context", workload.loads))
    made_with = conditions(
        model=target.model,
        window=target.window,
        device=target.device,
        dtype=target.dtype,
        server_version=target.version,
        **facts,
        arms=", ".join(arm.label for arm in target.arms),
        repeats=measurement.repeats,
        goodput=_words(objective),
        seed=seed,
    )
    summary = result.summary(measurement, cells, comparisons, made_with, target.arms)
    return Outcome(measurement, cells, comparisons, summary)


def _check(workload: Workload, target: Target) -> None:
    for load in workload.loads:
        if target.window is not None and load.longest > target.window:
            generated = load.turns * load.tokens
            raise WorkloadError(
                f"{load.context} + {generated} tokens exceed the window of {target.window}"
            )
        if load.turns > load.context:
            raise WorkloadError(f"{load.turns} turns need a context of as many tokens at least")


def _words(objective: Objective | None) -> str | None:
    if objective is None:
        return None
    limits = {name: limit for name, limit in asdict(objective).items() if limit is not None}
    return ", ".join(f"{name} within {limit:g} ms" for name, limit in limits.items())


def command_line(arguments: Sequence[str], secret: str | None) -> list[str]:
    """What was typed, without the key: reports are passed on."""
    return [word.replace(secret, "...") if secret else word for word in arguments]
