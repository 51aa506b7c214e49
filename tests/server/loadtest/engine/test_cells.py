"""What is measured, and what is left of it where there is little room."""

from __future__ import annotations

import pytest

from server.loadtest.engine.cells import DEFAULT, GROWTH, POOL, Cell, CellError, Kind, Room, fit

WIDE = Room(window=1024, rows=100_000, streams=64)


def cells(*names: str) -> list[Cell]:
    return [Cell.read(name) for name in names]


class TestNames:
    @pytest.mark.parametrize("name", [*DEFAULT, *GROWTH, POOL])
    def test_there_and_back(self, name: str) -> None:
        assert str(Cell.read(name)) == name

    @pytest.mark.parametrize(
        "name", ["decode", "decode-8", "decode-0x8", "read-1x8", "decode-1x8x8", " decode-1x8", ""]
    )
    def test_of_no_cell(self, name: str) -> None:
        with pytest.raises(CellError, match="is not like decode-1x128"):
            Cell.read(name)


class TestUnits:
    def test_one_stream_is_told_in_time(self) -> None:
        assert Cell.read("decode-1x8").figure(4.0) == 4.0
        assert Cell.read("uncached-1x8").unit == "ms/token"
        assert Cell.read("prefill-1x8").unit == "ms to first token"

    def test_several_by_what_they_make(self) -> None:
        assert Cell.read("decode-8x8").unit == "tokens/s"
        assert Cell.read("decode-8x8").figure(4.0) == 2000


class TestRoom:
    def test_all_the_default_cells_fit_gpt2(self) -> None:
        wanted = cells(*DEFAULT)
        assert fit(wanted, WIDE) == (wanted, [])

    def test_a_short_window_cuts_prompts(self) -> None:
        """Both arms alike; what comes to the same cell is measured once; and it is said."""
        wanted = cells("decode-1x512", "decode-1x1000", "uncached-1x1000", "prefill-1x900")
        fitting, notes = fit(wanted, WIDE._replace(window=512))
        assert fitting == cells("decode-1x488", "uncached-1x488", "prefill-1x511")
        assert len(notes) == 4
        assert notes[1] == "decode-1x1000: cut to decode-1x488, the window is 512"

    def test_a_window_of_nothing(self) -> None:
        fitting, notes = fit(cells("decode-1x8", "prefill-1x8"), WIDE._replace(window=20))
        assert fitting == cells("prefill-1x8")
        assert notes == ["decode-1x8: left out, the window is 20"]

    def test_a_small_pool(self) -> None:
        """The last token leaves no row: 8 x (128 + 23) are enough."""
        assert fit(cells("decode-8x128"), WIDE._replace(rows=1208))[1] == []
        fitting, [note] = fit(cells("decode-8x128"), WIDE._replace(rows=1207))
        assert fitting == []
        words = "left out, it takes 1,208 rows and the pool has 1,207 (--kv-cache-memory)"
        assert note == f"decode-8x128: {words}"

    def test_more_streams_than_run_at_once(self) -> None:
        assert fit(cells("decode-64x128"), WIDE)[1] == []
        assert "no more than 64 run at once" in fit(cells("decode-65x128"), WIDE)[1][0]


def test_kinds_are_told_apart() -> None:
    assert [Cell.read(f"{kind}-1x8").kind for kind in Kind] == [*Kind]
