"""The least time of a cell, against numbers that were worked out by hand; the ceilings."""

from __future__ import annotations

import pytest
import torch

from model import cost, kernel
from model.config import PRESETS
from server.loadtest.engine import ceilings
from server.loadtest.engine.ceilings import Ceilings
from server.loadtest.engine.cells import Cell
from server.loadtest.engine.floors import Floor, floor

GPT2 = PRESETS["gpt2"]
MACHINE = Ceilings(42e9, {"float32": 190e9, "bfloat16": 418e9, "int8": 100e9})


BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


def of(name: str, dtype: str = "float32", row: int = GPT2.row_bytes(4)) -> Floor:
    return floor(Cell.read(name), GPT2, dtype, BYTES[dtype], row, MACHINE)


class TestDecode:
    @pytest.mark.parametrize(
        ("dtype", "mb"), [("float32", 494.6), ("bfloat16", 247), ("int8", 124)]
    )
    def test_the_weights_are_read(self, dtype: str, mb: float) -> None:
        """A token reads 494.6 MB of weights in float32, which takes 11.8 ms at 42 GB/s."""
        found = of("decode-1x128", dtype, row=0)
        # All but the table of positions, of which a row is read.
        assert found.bytes / 1e6 == pytest.approx(mb - 3.1 * mb / 494.6, rel=0.01)
        assert found.ms == pytest.approx(found.bytes / 42e6)

    def test_and_the_rows_of_all_streams(self) -> None:
        """With 24 new tokens those timed attend to 12 rows more than the prompt has."""
        row = GPT2.row_bytes(4)
        more = of("decode-8x128").bytes - of("decode-8x128", row=0).bytes
        assert more == 8 * (128 + 12) * row

    def test_with_many_streams_it_is_arithmetic(self) -> None:
        few, many = of("decode-1x128"), of("decode-64x128")
        assert many.flops == 64 * few.flops == 64 * GPT2.flops(140)
        assert many.ms == pytest.approx(1000 * many.flops / 190e9)
        assert many.ms > many.bytes / 42e6


class TestWholePasses:
    def test_prefill(self) -> None:
        """0.88 s for 900 tokens in float32."""
        assert of("prefill-1x900").ms == pytest.approx(880, rel=0.02)
        assert of("prefill-2x900").ms == pytest.approx(2 * of("prefill-1x900").ms)

    def test_uncached(self) -> None:
        """A pass over the prompt and half of the five new tokens."""
        assert of("uncached-1x898").flops == of("prefill-1x900").flops

    @pytest.mark.parametrize("streams", [1, 3])
    @pytest.mark.parametrize("context", [1, 2, 17])
    def test_only_what_no_mask_hides_is_counted(self, streams: int, context: int) -> None:
        """Row by row: each attends to those before it and to itself."""
        rows = [cost.decode(1, n) for n in range(1, context + 1)]
        assert cost.whole(streams, context) == (
            streams * sum(row.rows for row in rows),
            streams * sum(row.pairs for row in rows),
            streams,
        )


class TestCeilings:
    def test_a_type_may_be_converted_to_a_wider_one(self) -> None:
        assert MACHINE.compute("float32") == 190e9
        assert MACHINE.compute("bfloat16") == 418e9
        assert MACHINE.compute("int8") == 418e9
        assert Ceilings(1.0, {"float32": 5.0}).compute("int8") == 5.0

    def test_the_better_of_two(self) -> None:
        other = Ceilings(50e9, {"float32": 200e9, "bfloat16": 400e9})
        assert MACHINE.best(other) == other.best(MACHINE)
        assert MACHINE.best(other) == Ceilings(
            50e9, {"float32": 200e9, "bfloat16": 418e9, "int8": 100e9}
        )

    def test_of_this_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ceilings, "SECONDS", 0.01)
        monkeypatch.setattr(ceilings, "READ_BYTES", 2**24)
        before = torch.get_num_threads()
        found = ceilings.measure(1, "cpu")
        assert torch.get_num_threads() == before
        assert 1e6 < found.bandwidth < 1e12
        assert all(1e6 < speed < 1e13 for speed in found.matmul.values())
        assert kernel.library() is None or found.matmul.keys() == {"float32", "bfloat16", "int8"}
        assert found.as_json()["read_GB_s"] == pytest.approx(found.bandwidth / 1e9, abs=0.01)
