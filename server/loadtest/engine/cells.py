"""What is measured: one kind of work, for some streams, at some length of the prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    DECODE = "decode"  # ms from one token to the next
    PREFILL = "prefill"  # ms to the first token
    UNCACHED = "uncached"  # as decode, with all rows computed for every token


NEW = {Kind.DECODE: 24, Kind.PREFILL: 1, Kind.UNCACHED: 5}  # tokens generated in a run
# The longest prompt leaves room for these, in both arms, so that the two can be compared.
ROOM = {Kind.DECODE: 24, Kind.PREFILL: 1, Kind.UNCACHED: 24}

DEFAULT = (
    *("decode-1x128", "decode-8x128", "decode-16x128", "decode-64x128"),
    *("decode-1x512", "decode-1x1000", "prefill-1x128", "prefill-1x900"),
    *("uncached-1x128", "uncached-1x1000"),
)
# What else the lines of the plots are drawn through.
GROWTH = (
    *("decode-1x16", "decode-1x64", "decode-1x256", "decode-1x768"),
    *("decode-2x128", "decode-4x128", "decode-32x128", "uncached-1x256", "uncached-1x512"),
)
POOL = "decode-1x128"  # what is measured at several sizes of the pool


class CellError(ValueError):
    """A name that is not a cell's: one line."""


@dataclass(frozen=True, slots=True)
class Cell:
    """`streams` sequences at once, each with a prompt of its own of `prompt` tokens."""

    kind: Kind
    streams: int
    prompt: int

    @classmethod
    def read(cls, name: str) -> Cell:
        """From "decode-8x128". Raises CellError."""
        found = re.fullmatch(rf"({'|'.join(Kind)})-([1-9]\d*)x([1-9]\d*)", name)
        if found is None:
            raise CellError(f"{name!r} is not like {', '.join(DEFAULT[:2])}, prefill-1x900")
        return cls(Kind(found[1]), int(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.kind}-{self.streams}x{self.prompt}"

    @property
    def new(self) -> int:
        """Tokens generated for each stream."""
        return NEW[self.kind]

    @property
    def context(self) -> int:
        """Rows that the average of the timed tokens attends to."""
        return self.prompt + (self.new // 2)

    @property
    def unit(self) -> str:
        if self.kind is Kind.PREFILL:
            return "ms to first token"
        return "ms/token" if self.streams == 1 else "tokens/s"

    def figure(self, ms: float) -> float:
        """A time in the cell's unit; more streams are told by what they make in a second."""
        return 1000 * self.streams / ms if self.unit == "tokens/s" else ms


class Room(NamedTuple):
    """What a model and its pool have room for."""

    window: int  # tokens of a sequence
    rows: int  # of all sequences
    streams: int  # sequences at once


def fit(cells: Iterable[Cell], room: Room) -> tuple[list[Cell], list[str]]:
    """The cells as far as there is room for them, and what was changed about them, in words."""
    fitting: dict[Cell, None] = {}
    notes = []
    for cell in cells:
        longest = room.window - ROOM[cell.kind]
        cut = replace(cell, prompt=min(cell.prompt, longest))
        rows = cut.streams * (cut.prompt + cut.new - 1)
        if longest < 1:
            notes.append(f"{cell}: left out, the window is {room.window}")
        elif cut.streams > room.streams:
            notes.append(f"{cell}: left out, no more than {room.streams} run at once")
        elif rows > room.rows:
            words = f"it takes {rows:,} rows and the pool has {room.rows:,} (--kv-cache-memory)"
            notes.append(f"{cell}: left out, {words}")
        else:
            fitting[cut] = None
            if cut != cell:
                notes.append(f"{cell}: cut to {cut}, the window is {room.window}")
    return list(fitting), notes
