"""From runs to numbers: figures, floors, shares and ratios. What is not defined is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from model.config import GPTConfig
from server.loadtest.engine.ceilings import Ceilings
from server.loadtest.engine.cells import Cell, Kind
from server.loadtest.engine.floors import Floor, floor
from server.loadtest.engine.rounds import Record, Run
from server.loadtest.figures import Spread


@dataclass(frozen=True, slots=True)
class Figure:
    """What one contender made of one cell."""

    ms: Spread  # to the first token, or for one token of each stream
    value: Spread  # the same in the cell's unit
    runs: int
    disturbed: bool  # others computed during one of these runs
    floor: Floor | None = None  # of a variant of onerow, whose model is known

    @classmethod
    def of(cls, cell: Cell, runs: Sequence[Run], repeats: int, least: Floor | None) -> Figure:
        """Of the runs that were disturbed least, as many as were asked for."""
        kept = sorted(runs, key=lambda run: (run.disturbed, run.other_cores or 0.0))[:repeats]
        ms = Spread.of(run.ms for run in kept)
        value = Spread.of(cell.figure(run.ms) for run in kept)
        assert ms
        assert value
        return cls(ms, value, len(kept), any(run.disturbed for run in kept), least)

    @property
    def share(self) -> float | None:
        """Of the floor: 1 is as fast as the machine allows."""
        return self.floor.ms / self.ms.median if self.floor else None

    def as_json(self) -> dict[str, Any]:
        numbers = {
            **asdict(self.value),
            "ms": self.ms.median,
            "runs": self.runs,
            "disturbed": self.disturbed,
        }
        return numbers | ({"floor": self.floor.as_json(self.ms.median)} if self.floor else {})


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of onerow, as it says of itself."""

    name: str
    config: GPTConfig
    dtype: str
    weight_bytes: int  # of one number
    row_bytes: int

    @classmethod
    def of(cls, name: str, ready: Mapping[str, Any]) -> Variant:
        config = GPTConfig.model_validate(ready["shape"])
        return cls(name, config, *(ready[key] for key in ("dtype", "weight_bytes", "row_bytes")))

    def floor(self, cell: Cell, ceilings: Ceilings) -> Floor:
        numbers = (self.dtype, self.weight_bytes, self.row_bytes)
        return floor(cell, self.config, *numbers, ceilings)


Figures = dict[Cell, dict[str, Figure]]


def figures(
    record: Record, repeats: int, variants: Mapping[str, Variant], ceilings: Ceilings
) -> Figures:
    """By cell and contender. A pair without a run has none."""
    groups: dict[tuple[Cell, str], list[Run]] = {}
    for run in record.runs:
        groups.setdefault((run.cell, run.name), []).append(run)
    result: Figures = {}
    for (cell, name), runs in groups.items():
        v = variants.get(name)
        least = v.floor(cell, ceilings) if v else None
        result.setdefault(cell, {})[name] = Figure.of(cell, runs, repeats, least)
    return result


def ratios(of: Mapping[str, Figure], variant: str) -> dict[str, float | None]:
    """How many times longer each of the others takes: above 1 the variant is ahead."""
    mine = of.get(variant)
    return {
        name: round(other.ms.median / mine.ms.median, 3) if mine and mine.ms.median else None
        for name, other in of.items()
        if name != variant
    }


def worth(found: Figures, name: str) -> dict[int, float]:
    """How many times longer a token takes without the cache, by the length of the prompt."""
    times = {cell: of[name].ms.median for cell, of in found.items() if name in of}
    return {
        cell.prompt: round(ms / kept, 2)
        for cell, ms in sorted(times.items(), key=lambda item: item[0].prompt)
        if cell.kind is Kind.UNCACHED and cell.streams == 1
        if (kept := times.get(Cell(Kind.DECODE, 1, cell.prompt)))
    }


def agreement(record: Record, name: str, other: str) -> float | None:
    """Of the runs that two had with the same prompts, the share whose first tokens were the same.

    With the same weights it is 1 in float32, but for ties.
    """
    first = {(r.cell, r.number): r.tokens[:1] for r in record.runs if r.name == name and r.tokens}
    same = [
        first[run.cell, run.number] == run.tokens[:1]
        for run in record.runs
        if run.name == other and run.tokens and (run.cell, run.number) in first
    ]
    return round(sum(same) / len(same), 3) if same else None
