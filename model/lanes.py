"""The input of a decode step in memory that never moves, as CUDA graphs need it.

A lane is the newest token of one sequence. All that a step must know of its lanes is staged in one
block of host memory and sent in one copy; the lists of rows are packed one after another, so that
the copy is as long as they are. They are sent anew in every step: to find out for certain that a
lane's rows are those of the step before takes as long as to write them again, and a lane that were
wrong about it would read another sequence's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from model.sampler import uniform
from model.step import Work


class Lanes(NamedTuple):
    """B lanes on the device; `(B,)` each, but for `rows`.

    A lane that pads the bucket has position 0, so it reads no row, and it writes the scratch row.
    """

    tokens: Tensor  # int64 ids; -1 - i stands for what lane i of the last step drew
    positions: Tensor  # int64; as many rows are older than the lane's own
    write: Tensor  # int64: the lane's own row, which this step computes
    starts: Tensor  # int64: where in `rows` the lane's older rows begin
    heat: Tensor  # float64 temperature; 0 is greedy
    noise: Tensor  # float64 uniform number in [0, 1)
    rows: Tensor  # int32 row numbers


LaneBackend = Callable[[Tensor, Tensor, Tensor, Tensor, Lanes], Tensor]
"""`(q, k, v, pool_layer, lanes)`, with the shapes of `model.attention.attend`, one token a lane."""

NUMBERS = len(Lanes._fields) - 1  # of 8 bytes each, per lane


class LaneAttention:
    """The attention of a decode step for `GPT.forward`: a backend, the pool's tensor, the lanes."""

    def __init__(self, backend: LaneBackend, kv: Tensor, lanes: Lanes) -> None:
        self.backend, self.kv, self.lanes = backend, kv, lanes

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.backend(q, k, v, self.kv[layer], self.lanes)


class Staging:
    """The device's memory of up to `n_lanes` lanes of `n_ctx` rows each, and blocks on the host in
    which lanes are written down before they are sent. A step in flight has a block of its own.
    """

    def __init__(self, n_lanes: int, n_ctx: int, scratch: int, device: torch.device) -> None:
        self.scratch = scratch
        words = n_lanes * (NUMBERS + (n_ctx + 1) // 2)  # two row numbers are as long as a word
        self._sent = torch.zeros(words, dtype=torch.int64, device=device)

    def block(self) -> Tensor:
        """Host memory for the lanes of one step."""
        # Only from pinned memory does a copy go its way while the CPU goes on.
        pinned = self._sent.device.type == "cuda"
        return torch.zeros(len(self._sent), dtype=torch.int64, pin_memory=pinned)

    def lanes(self, n: int) -> Lanes:
        """Where the first `n` lanes are found on the device."""
        numbers = self._sent[: NUMBERS * n].view(NUMBERS, n)
        tokens, positions, write, starts = numbers[:4]
        heat, noise = numbers[4:].view(torch.float64)
        rows = self._sent[NUMBERS * n :].view(torch.int32)
        return Lanes(tokens, positions, write, starts, heat, noise, rows)

    def write(self, block: Tensor, work: Sequence[Work], n: int, drawing: bool = False) -> Tensor:
        """Put `work`, of one token each, into the `n` lanes of a block, and padding into the rest
        of them; returns the part of the block that is to be sent.

        Noise is made only if there is `drawing`.
        """
        words = block.numpy()
        numbers = words[: NUMBERS * n].reshape(NUMBERS, n)
        numbers[:, len(work) :] = 0
        numbers[2, len(work) :] = self.scratch
        numbers = numbers[:, : len(work)]
        lengths = np.array([w.end for w in work], np.int64)
        numbers[0] = [w.tokens[-1] for w in work]
        numbers[1] = lengths - 1
        numbers[2] = [w.rows[-1] for w in work]
        numbers[3] = np.cumsum(lengths) - lengths
        numbers[4:] = 0
        if drawing:
            numbers[4:].view(np.float64)[:] = np.array([_heat_and_noise(w) for w in work]).T
        n_rows = int(lengths.sum())
        if work:
            rows = words[NUMBERS * n :].view(np.int32)[:n_rows]
            np.concatenate([w.rows for w in work], out=rows)
        return block[: NUMBERS * n + (n_rows + 1) // 2]

    def send(self, written: Tensor) -> None:
        """Copy what `write` gave, on the current stream; until that is done the block may not be
        written again.
        """
        self._sent[: len(written)].copy_(written, non_blocking=True)


def _heat_and_noise(work: Work) -> tuple[float, float]:
    sampling = work.sampling
    if sampling is None or sampling.temperature == 0:
        return 0.0, 0.0
    return sampling.temperature, uniform(sampling, work.position)
