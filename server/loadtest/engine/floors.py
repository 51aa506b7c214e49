"""How fast a cell can be at best: what it must read, or compute, over what the machine does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model import cost
from model.config import GPTConfig
from server.loadtest.engine.ceilings import Ceilings
from server.loadtest.engine.cells import Cell, Kind


@dataclass(frozen=True, slots=True)
class Floor:
    """The least that one step of a cell reads and computes, and the time that this takes."""

    bytes: int
    flops: int
    ms: float

    def as_json(self, ms: float | None) -> dict[str, Any]:
        share = None if ms is None else round(self.ms / ms, 3)
        return {"bytes": self.bytes, "flops": self.flops, "ms": round(self.ms, 4), "share": share}


def floor(
    cell: Cell,
    config: GPTConfig,
    dtype: str,
    weight_bytes: int,
    row_bytes: int,
    ceilings: Ceilings,
) -> Floor:
    """Of one token for each stream; of a prefill, the whole prompts. `weight_bytes` are those of
    one number, which float32 may keep in fewer than its own.

    Rows that are computed in the same step need not be read from the pool.
    """
    read = cost.weights_read(config, weight_bytes)
    if cell.kind is Kind.DECODE:
        work = cost.decode(cell.streams, cell.context)
        read += cell.streams * cell.context * row_bytes
    else:
        context = cell.prompt if cell.kind is Kind.PREFILL else cell.context
        work = cost.whole(cell.streams, context)
    flops = work.flops(config)
    seconds = max(read / ceilings.bandwidth, flops / ceilings.compute(dtype))
    return Floor(read, flops, 1000 * seconds)
