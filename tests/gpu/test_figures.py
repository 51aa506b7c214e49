"""What of the script for a GPU can be tried without one: everything but the GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch

from model import cost
from model.config import PRESETS
from tests import lanes
from tests.gpu import figures
from tests.gpu.figures import Cell
from tests.tiny import config, gpt

CPU = torch.device("cpu")
CELL = Cell(
    streams=16,
    context=900,
    floor=0.25,
    cached=0.5,
    replay=0.4,
    served=0.64,
    in_turn=0.8,
    eager=4.0,
    uncached=25.0,
)


def test_the_floor_reads_the_weights_once_and_every_streams_rows() -> None:
    shape = PRESETS["gpt2"]
    one = figures.floor(shape, 1, 900, 2, bytes_per_ms=4e9)
    assert one * 4e9 == cost.bytes_read(shape, 900, 2)
    many = figures.floor(shape, 256, 900, 2, bytes_per_ms=4e9)
    assert many * 4e9 == pytest.approx(one * 4e9 + 255 * 900 * 36864)
    assert figures.floor(shape, 1, 0, 2, 4.8e9) == pytest.approx(0.0515, abs=1e-3)  # 51 us


def test_a_cell_says_what_its_times_mean() -> None:
    assert CELL.share == 50
    assert CELL.tokens_per_s(CELL.cached) == 32_000
    assert CELL.tokens_per_s(None) is None
    assert json.loads(json.dumps(asdict(CELL)))["uncached"] == 25


def test_the_table_has_a_line_per_cell_and_a_dash_for_what_is_missing() -> None:
    title, heads, *lines = figures.table([CELL, replace(CELL, transformers=5.0)], 4.3e9).split("\n")
    assert "4,300 GB/s" in title
    assert [len(line) for line in lines] == [len(heads)] * 2
    words = ["16", "900", "0.250", "0.500", "0.400", "50", "25,000", "20,000"]
    words += ["32,000", "4,000", "640", "50.0"]
    assert lines[0].split() == [*words, "-", "-"]
    assert lines[1].split() == [*words, "3,200", "10.0"]


def test_every_number_is_measured() -> None:
    cells = figures.measure(
        gpt(config()), lanes.attend, (1, 3), (8, 20), bytes_per_ms=1e7, seconds=0.001
    )
    assert [(cell.streams, cell.context) for cell in cells] == [(1, 8), (1, 20), (3, 8), (3, 20)]
    for cell in cells:
        assert min(cell.floor, cell.cached, cell.replay, cell.eager, cell.uncached) > 0
        assert min(cell.served, cell.in_turn) > 0
    assert figures.bandwidth(CPU, 2**20, 0.001) > 0


def test_transformers_is_measured_where_it_is() -> None:
    shape = config(n_layer=1, n_ctx=80)
    assert figures.transformers_ms(shape, CPU, 2, 40, compiled=False) != 0


def test_help_and_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        figures.main(["--help"])
    assert "--no-proofs" in capsys.readouterr().out
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="2"):
            figures.main([])
        assert "no NVIDIA GPU here" in capsys.readouterr().err
