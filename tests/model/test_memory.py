"""The pool's size on a GPU: the arithmetic, and that the trial asks for no more than it may."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from model import memory
from model.graphs import GraphRunner
from model.runner import Runner
from tests import lanes
from tests.tiny import config, gpt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nine_tenths_of_what_is_free_beside_a_server_at_work(dtype: torch.dtype) -> None:
    """The trial's own rows are free, too: one window, a step's, and scratch."""
    shape = config()
    model = gpt(shape).to(dtype)

    def make(n_rows: int) -> Runner:
        return GraphRunner(model, n_rows, dtype, n_lanes=3, lane_backend=lanes.attend)

    found = memory.for_rows(make, shape.n_ctx, max_running=3, step_tokens=40, free=lambda: 10**9)
    rows = shape.n_ctx + 40 + 1
    assert found == int(0.9 * (10**9 + rows * shape.row_bytes(dtype.itemsize)))


@pytest.mark.parametrize(("max_running", "step_tokens"), [(1, 2), (3, 40), (64, 4096)])
def test_the_largest_steps_are_as_large_as_the_settings_allow(
    max_running: int, step_tokens: int
) -> None:
    together, alone = memory.largest_steps(256, max_running, step_tokens)
    sizes = [w.end - w.start for w in together]
    assert sizes == [1] * max_running + [min(256, step_tokens - max_running)]
    assert len(alone) == 1
    for w in together + alone:
        assert len(w.tokens) == len(w.rows) == 256
        assert w.rows.max() < 256 + step_tokens
    own = [int(w.rows[-1]) for w in together]
    assert len(set(own)) == len(own)
    assert np.concatenate([w.rows for w in together]).dtype == np.int32
