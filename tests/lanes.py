"""Attention of lanes spelled out, and a runner that decodes as graphs do: for tests of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from model.gpt import GPT
from model.graphs import GraphRunner
from model.lanes import LaneBackend, Lanes
from model.step import Work
from tests.tiny import Driver


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


def driver(model: GPT, n_lanes: int, n_rows: int = 2048, backend: LaneBackend = attend) -> Driver:
    made = Driver(model, n_rows)
    made.runner = Counted(model, n_rows, torch.float32, n_lanes=n_lanes, lane_backend=backend)
    return made


def decoded(driver: Driver) -> int:
    assert isinstance(driver.runner, Counted)
    return driver.runner.decoded
