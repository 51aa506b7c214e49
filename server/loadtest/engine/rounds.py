"""Plays the runs: one process works at a time, and they take turns."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.loadtest.engine import cores
from server.loadtest.engine.cells import Cell, Kind
from server.loadtest.engine.process import AnswerError, Process, ProcessError

TRIES = 2  # further runs of a pair whose runs were disturbed
Pair = tuple[Cell, str]  # a cell, and the name of who is to do it


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a cell by a contender. Times are seconds since its start."""

    cell: Cell
    name: str
    number: int  # of this pair; runs of the same number have the same prompts
    times: list[float]
    tokens: list[int]  # the first ones of the first answer
    other_cores: float | None  # that others used meanwhile; None: nobody knows
    disturbed: bool

    @property
    def ms(self) -> float:
        """Milliseconds to the first token, or for one token of every stream after it."""
        if self.cell.kind is Kind.PREFILL:
            return 1000 * self.times[0]
        return 1000 * (self.times[-1] - self.times[0]) / (len(self.times) - 1)

    def as_json(self) -> dict[str, Any]:
        return {
            "cell": str(self.cell),
            "contender": self.name,
            "number": self.number,
            "ms": round(self.ms, 4),
            "first_ms": round(1000 * self.times[0], 4),
            "other_cores": self.other_cores,
            "disturbed": self.disturbed,
            "tokens": self.tokens,
        }


@dataclass(slots=True)
class Record:
    """All runs but the warm-up, and what could not be run, in words."""

    runs: list[Run] = field(default_factory=list)
    failures: dict[Pair, str] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)  # contenders that ended
    interrupted: bool = False


def following(pairs: Sequence[Pair], record: Record, repeats: int) -> Pair | None:
    """Whose turn it is: the pair with the fewest runs, of those that need more. None at the end.

    So they interleave, and runs that were disturbed are made up for in the end.
    """
    runs, good = dict.fromkeys(pairs, 0), dict.fromkeys(pairs, 0)
    for run in record.runs:
        pair = run.cell, run.name
        if pair in runs:
            runs[pair] += 1
            good[pair] += not run.disturbed
    open_ = [
        (runs[pair], i)
        for i, pair in enumerate(pairs)
        if good[pair] < repeats and runs[pair] < repeats + TRIES
        if pair not in record.failures and pair[1] not in record.gone
    ]
    return pairs[min(open_)[1]] if open_ else None


def measure(
    processes: Mapping[str, Process],
    pairs: Sequence[Pair],
    repeats: int,
    n_vocab: int,
    seed: int,
    patience: float,
    advance: Callable[[str], None] = lambda words: None,
) -> Record:
    """Every pair once for warm-up, then in rounds. `patience` is how long, in seconds, the whole
    may wait for others to be quiet. Ctrl-C ends the runs, not the measurement.
    """
    record = Record()

    def run(pair: Pair, number: int) -> Run | None:
        nonlocal patience
        cell, name = pair
        advance(f"{name}: {cell}")
        try:
            patience = cores.wait_until_quiet(patience)
            return play(processes[name], name, cell, number, prompts(cell, number, n_vocab, seed))
        except AnswerError as error:
            record.failures[pair] = str(error)
        except ProcessError as error:
            record.gone[name] = str(error)
        return None

    try:
        for pair in pairs:
            if pair[1] not in record.gone:
                run(pair, 0)
        while (turn := following(pairs, record, repeats)) is not None:
            number = 1 + sum((r.cell, r.name) == turn for r in record.runs)
            if made := run(turn, number):
                record.runs.append(made)
    except KeyboardInterrupt:
        record.interrupted = True
    return record


def play(process: Process, name: str, cell: Cell, number: int, texts: list[list[int]]) -> Run:
    """One run. Raises AnswerError and ProcessError."""
    busy, own, began = cores.busy(), process.cpu_seconds, time.perf_counter()
    times, tokens = process.generate(texts, cell.new, use_cache=cell.kind is not Kind.UNCACHED)
    seconds = time.perf_counter() - began
    other, after = None, cores.busy()
    disturbed = False
    if busy is not None and after is not None:
        others = max(0.0, after - busy - (process.cpu_seconds - own))
        other = round(others / seconds, 2)
        disturbed = other > cores.BUSY and others > cores.TICKS * cores.tick()
    return Run(cell, name, number, times, tokens, other, disturbed)


def prompts(cell: Cell, number: int, n_vocab: int, seed: int) -> list[list[int]]:
    """Random ids, fresh in every run and the same for everyone. The last id ends texts."""
    noise = random.Random(f"{seed} {cell} {number}")
    return [noise.choices(range(n_vocab - 1), k=cell.prompt) for _ in range(cell.streams)]
