"""Attention of lanes spelled out, and runners that decode as graphs do: for tests of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from model.batch import Batch
from model.gpt import GPT
from model.graphs import GraphRunner, Slot
from model.lanes import LaneBackend, Lanes
from model.rows import RowPool
from model.step import Draw, Ids, Launched, Work
from tests.tiny import Driver, Text


def attend(q: Tensor, k: Tensor, v: Tensor, pool_layer: Tensor, lanes: Lanes) -> Tensor:
    """Lane by lane: the older rows from the pool, the own one from the step, which is stored."""
    out = torch.empty_like(q)
    for lane, (start, older) in enumerate(zip(lanes.starts, lanes.positions, strict=True)):
        rows = lanes.rows[start : start + older].long()
        keys, values = (
            torch.cat([pool_layer[i, rows].to(q.dtype), own[lane : lane + 1]]).transpose(0, 1)
            for i, own in enumerate((k, v))
        )
        out[lane] = F.scaled_dot_product_attention(
            q[lane][:, None], keys, values, enable_gqa=True
        ).squeeze(1)
    pool_layer[0, lanes.write] = k.to(pool_layer.dtype)
    pool_layer[1, lanes.write] = v.to(pool_layer.dtype)
    return out


class Counted(GraphRunner):
    """Counts the steps for which there was a graph."""

    decoded = 0

    def decodes(self, work: Sequence[Work]) -> bool:
        found = super().decodes(work)
        self.decoded += found
        return found


class Late(Counted):
    """Does what a device might do that is behind: nothing of a replayed step, not even the copy of
    its input, happens before somebody waits for it. When it `hurries`, the steps behind that one
    happen at the same time, before it is read.

    What nobody may read is NaN: the scratch row, and the rows that are free at a step's launch.
    """

    def __init__(
        self, model: GPT, pool: RowPool, n_lanes: int, hurries: Callable[[], bool]
    ) -> None:
        self.pool, self.hurries = pool, hurries
        self._stream: deque[tuple[Slot, Callable[[], None]]] = deque()
        super().__init__(model, pool.n_rows, torch.float32, n_lanes=n_lanes, lane_backend=attend)

    def _enqueue(self, slot: Slot, written: Tensor, n: int, drawing: bool) -> None:
        poison = partial(self._poison, self.pool.free_rows())
        step = partial(super()._enqueue, slot, written, n, drawing)
        self._stream.extend([(slot, poison), (slot, step)])

    def _wait(self, slot: Slot) -> None:
        while any(slot is other for other, _ in self._stream):
            self._compute()
        while self._stream and self.hurries():
            self._compute()

    def _compute(self) -> None:
        self._stream.popleft()[1]()

    def _finish(self) -> None:
        while self._stream:
            self._compute()

    def _poison(self, rows: Ids) -> None:
        self.kv[:, :, rows] = torch.nan
        self.kv[:, :, self.pool.scratch] = torch.nan

    def hidden(self, batch: Batch) -> Tensor:
        self._finish()
        self._poison(self.pool.free_rows())
        return super().hidden(batch)

    def read_rows(self, rows: Ids) -> NDArray[np.uint8]:
        self._finish()
        return super().read_rows(rows)

    def write_rows(self, rows: Ids, data: NDArray[np.uint8]) -> None:
        self._finish()
        super().write_rows(rows, data)


def driver(model: GPT, n_lanes: int, n_rows: int = 2048, backend: LaneBackend = attend) -> Driver:
    made = Driver(model, n_rows)
    made.runner = Counted(model, n_rows, torch.float32, n_lanes=n_lanes, lane_backend=backend)
    return made


def decoded(driver: Driver) -> int:
    assert isinstance(driver.runner, Counted)
    return driver.runner.decoded


def steps_ahead(
    driver: Driver, texts: Sequence[Text], orders: Sequence[Sequence[int]]
) -> list[list[Draw]]:
    """A decode step of the texts in each order, each launched before the one in front is read."""
    runner = driver.runner
    assert isinstance(runner, GraphRunner)
    draws: list[list[Draw]] = []
    flight: Launched | None = None
    for order, before in zip(orders, [[], *orders], strict=False):
        for i in order if flight else []:
            texts[i].tokens.append(-1 - before.index(i))
        launched = runner.launch([texts[i].work(driver.pool.take(1)) for i in order])
        assert launched.leads
        if flight:
            draws.append(flight.read())
        flight = launched
    assert flight
    return [*draws, flight.read()]
