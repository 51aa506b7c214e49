"""From runs to figures, against numbers worked out by hand; and what is drawn of them."""

from __future__ import annotations

import pytest

from model.config import PRESETS
from server.loadtest.engine.ceilings import Ceilings
from server.loadtest.engine.cells import Cell
from server.loadtest.engine.figures import Figures, Variant, agreement, figures, ratios, worth
from server.loadtest.engine.plots import plots
from server.loadtest.engine.rounds import Record, Run

GPT2 = PRESETS["gpt2"]
MACHINE = Ceilings(40e9, {"float32": 200e9})
VARIANTS = {"onerow": Variant("onerow", GPT2, "float32", 4, GPT2.row_bytes(4))}


def run(
    cell: str, name: str, ms: float, cores: float | None = 0.0, number: int = 1, token: int = 5
) -> Run:
    which = Cell.read(cell)
    times = [ms / 1000 * (i + 1) for i in range(which.new)]
    return Run(which, name, number, times, [token, 6], cores, disturbed=bool(cores))


def found(*runs: Run, repeats: int = 3) -> Figures:
    return figures(Record([*runs]), repeats, VARIANTS, MACHINE)


class TestFigures:
    def test_the_median_and_the_spread(self) -> None:
        times = (20, 16, 18)
        [(cell, of)] = found(*(run("decode-8x128", "onerow", ms) for ms in times)).items()
        figure = of["onerow"]
        assert (figure.ms.median, figure.ms.least, figure.ms.greatest) == (18, 16, 20)
        assert figure.value.median == pytest.approx(8 / 0.018, rel=1e-4)
        assert figure.floor is not None
        assert figure.share == pytest.approx(figure.floor.ms / 18)
        assert not figure.disturbed
        assert cell == Cell.read("decode-8x128")

    def test_the_least_disturbed_runs_count(self) -> None:
        runs = [run("prefill-1x8", "peer", ms, cores) for ms, cores in ((9, 0.9), (5, 0), (4, 0.5))]
        figure = found(*runs, repeats=2)[Cell.read("prefill-1x8")]["peer"]
        assert (figure.ms.least, figure.ms.greatest, figure.runs) == (4, 5, 2)
        assert figure.disturbed
        assert not found(*runs, repeats=1)[Cell.read("prefill-1x8")]["peer"].disturbed

    def test_a_peer_has_no_floor(self) -> None:
        """Nobody knows what it keeps and in which numbers."""
        figure = found(run("decode-1x8", "peer", 9))[Cell.read("decode-1x8")]["peer"]
        assert figure.floor is None
        assert figure.share is None
        assert "floor" not in figure.as_json()


class TestRatios:
    def test_above_one_is_ahead_whatever_the_unit(self) -> None:
        for name in ("decode-1x8", "decode-8x8", "prefill-1x8"):
            of = found(run(name, "onerow", 10), run(name, "slow", 15), run(name, "quick", 5))
            assert ratios(of[Cell.read(name)], "onerow") == {"slow": 1.5, "quick": 0.5}

    def test_without_our_own_figure(self) -> None:
        of = found(run("decode-1x8", "slow", 15))
        assert ratios(of[Cell.read("decode-1x8")], "onerow") == {"slow": None}

    def test_what_the_cache_is_worth(self) -> None:
        of = found(
            run("decode-1x128", "onerow", 10),
            run("uncached-1x128", "onerow", 60),
            run("uncached-1x1000", "onerow", 900),
            run("uncached-1x128", "peer", 60),
        )
        assert worth(of, "onerow") == {128: 6.0}
        assert worth(of, "peer") == {}


class TestAgreement:
    def test_of_runs_with_the_same_prompts(self) -> None:
        runs = [run("decode-1x8", "us", 1, number=n, token=n) for n in (1, 2, 3)]
        runs += [run("decode-1x8", "them", 1, number=n, token=2) for n in (2, 3, 4)]
        assert agreement(Record(runs), "us", "them") == 0.5
        assert agreement(Record(runs), "us", "nobody") is None


class TestPlots:
    def test_of_two_points_at_least(self) -> None:
        names = ("decode-1x128", "decode-1x512", "decode-2x128")
        of = found(*(run(name, "onerow", 9) for name in names))
        drawn = plots(of, ["onerow"], {})
        assert [plot.name for plot in drawn] == ["engine-context", "engine-streams"]
        assert all(plot.png.startswith(b"\x89PNG") for plot in drawn)
        assert plots(found(run("decode-1x128", "onerow", 9)), ["onerow"], {}) == []

    def test_of_both_arms_and_of_pools(self) -> None:
        names = ("decode-1x128", "decode-1x512", "uncached-1x128", "uncached-1x512")
        runs = [run(name, "onerow", 9) for name in names]
        runs += [run("decode-1x128", name, 9) for name in ("small", "large")]
        drawn = plots(found(*runs), ["onerow"], {"small": 2**28, "large": 2**30})
        assert [plot.name for plot in drawn] == ["engine-context", "engine-pool", "engine-cache"]
