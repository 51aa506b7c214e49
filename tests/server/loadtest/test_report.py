"""What people see: whole pictures, and a page that needs nothing but itself."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from server.loadtest import comparison, report, result
from server.loadtest.bench import Outcome, command_line
from server.loadtest.client import Sample
from server.loadtest.figures import Objective, cells, compare
from server.loadtest.measurement import Measurement
from server.loadtest.plots import context_plot, crossing_words, plots
from server.loadtest.workload import Arm, Load, Workload
from tests.server.loadtest.test_figures import BOTH, line, record, sample

CONTEXTS = [Load(32), Load(64)]
CONCURRENCY = [Load(32), Load(32, concurrency=16)]
NAME = '<script>alert("x")</script> & co'
WORK = Workload({"context": CONTEXTS, "concurrency": CONCURRENCY}, 2)
CONDITIONS: dict[str, Any] = {
    "date": "today",
    "model": NAME,
    "machine": "abacus",
    "onerow": "0",
    "command_line": "onerow bench --url http://x",
}


def outcome(measurement: Measurement, arms: tuple[Arm, ...] = BOTH) -> Outcome:
    every = cells(measurement)
    comparisons = compare(every, CONTEXTS)
    summary = result.summary(measurement, every, comparisons, CONDITIONS, arms)
    return Outcome(measurement, every, comparisons, summary)


@pytest.fixture
def some() -> Outcome:
    records = [*line(32, 0.004, 0.002), *line(64, 0.004, 0.008)]
    for arm in BOTH:
        samples = sample(0.1, 0.01), Sample(0.1, error=f"lost by {NAME}")
        records.append(record(CONCURRENCY[1], arm, *samples))
    return outcome(Measurement(records, repeats=1))


class Page(HTMLParser):
    """Its tags, what they refer to, and whether each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = ("src", "href", "srcset", "action", "data")
        self.references += [value or "" for name, value in attributes if name in names]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


class TestPlots:
    def test_every_picture_is_whole(self, some: Outcome, tmp_path: Path) -> None:
        paths = some.write(tmp_path, WORK)
        pictures = [path for path in paths if path.suffix == ".png"]
        assert {path.stem for path in pictures} == {"context", "concurrency", "timeline"}
        for path in pictures:
            with Image.open(path) as image:
                image.load()
                assert image.format == "PNG"
                assert image.width >= 900
                assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10

    def test_a_crossing_is_told(self, some: Outcome) -> None:
        assert "cross at a context of 43 tokens" in context_plot(some.comparisons).words

    def test_no_crossing_is_told(self) -> None:
        for uncached, words in ((0.009, "faster at every length"), (0.001, "never faster")):
            records = [r for c in (32, 64) for r in line(c, 0.004, uncached)]
            told = crossing_words(outcome(Measurement(records)).comparisons)
            assert "do not cross" in told
            assert words in told

    def test_failures_stand_beside_a_picture(self, some: Outcome) -> None:
        [_, picture, _] = plots(some.cells, WORK.sweeps, some.measurement.records)
        assert "2 of 6 requests failed" in picture.words

    def test_where_nothing_was_measured_there_are_none(self) -> None:
        assert plots([], WORK.sweeps, []) == []

    def test_where_all_failed(self, tmp_path: Path) -> None:
        lost = [record(load, Arm.CACHED, Sample(0.0, error="lost")) for load in CONTEXTS]
        nothing = outcome(Measurement(lost, repeats=1), (Arm.CACHED,))
        assert nothing.failed
        assert (tmp_path / "report.html") in nothing.write(tmp_path, WORK)


class TestPage:
    def test_it_needs_nothing_else(self, some: Outcome, tmp_path: Path) -> None:
        some.write(tmp_path, WORK)
        text = (tmp_path / "report.html").read_text()
        page = Page(text)
        assert len(page.references) == 3
        assert all(ref.startswith("data:image/png;base64,") for ref in page.references)
        assert "script" not in page.tags
        assert "link" not in page.tags
        assert not re.search(r"url\(|@import", text)

    def test_names_are_text(self, some: Outcome, tmp_path: Path) -> None:
        some.write(tmp_path, WORK)
        text = (tmp_path / "report.html").read_text()
        assert "<script" not in text
        assert "lost by &lt;script&gt;" in text

    def test_it_says_how_and_what(self, some: Outcome, tmp_path: Path) -> None:
        some.write(tmp_path, WORK)
        text = (tmp_path / "report.html").read_text()
        for words in ("abacus", "onerow bench --url", "2 of 6 requests failed", "16 at once"):
            assert words in text

    def test_a_key_is_not_passed_on(self) -> None:
        words = command_line(["bench", "--api-key=k3y", "--api-key", "k3y"], "k3y")
        assert "k3y" not in " ".join(words)
        assert command_line(["bench"], None) == ["bench"]

    def test_nothing_measured(self, tmp_path: Path) -> None:
        nothing = outcome(Measurement(interrupted=True))
        assert nothing.failed
        nothing.write(tmp_path, WORK)
        assert "was interrupted" in (tmp_path / "report.html").read_text()


class TestTables:
    def text(self, outcome: Outcome) -> str:
        console = Console(width=80, file=io.StringIO(), record=True)
        console.print(report.tables(outcome.comparisons, outcome.cells, outcome.summary))
        return console.export_text()

    def test_they_fit_into_a_terminal(self, some: Outcome) -> None:
        text = self.text(some)
        assert "…" not in text
        assert "8.00" in text
        assert re.search(r"^ *16 tokens, 16 at once ", text, re.MULTILINE)

    def test_one_arm(self) -> None:
        records = [record(load, Arm.AS_SERVED, sample(0.1, 0.02)) for load in CONTEXTS]
        text = self.text(outcome(Measurement(records), (Arm.AS_SERVED,)))
        assert "as served" in text
        assert "uncached" not in text

    def test_no_number_is_cut_however_long(self) -> None:
        loads = [Load(128, 24, concurrency=n, talks=n) for n in (2, 16)]
        times = [sample(12.345 * i, 1.0) for i in (1, 2)]
        records = [record(load, arm, s) for load in loads for arm in BOTH for s in times]
        assert "…" not in self.text(outcome(Measurement(records, repeats=2)))

    def test_goodput_is_a_column_where_there_is_a_limit(self) -> None:
        measured = Measurement([record(CONTEXTS[0], Arm.CACHED, sample(0.1, 0.02))])
        for objective, there in ((None, False), (Objective(ttft=1e9), True)):
            header, row = report.load_rows(cells(measurement=measured, objective=objective))
            assert ("goodput/s" in header) is there
            assert len(header) == len(row)

    def test_a_warning_names_some_cases_and_counts_all(self) -> None:
        slow = [record(Load(n), Arm.CACHED, sample(0.1, 0.02)) for n in range(1, 10)]
        for each in slow:
            each.lags = [0.05]
        [words] = outcome(Measurement(slow), (Arm.CACHED,)).summary["warnings"]
        assert "in 9 of 9 cases" in words
        assert words.count("clock lagged") == 3

    @pytest.mark.parametrize(("arm", "told"), [(Arm.AS_SERVED, True), (Arm.CACHED, False)])
    def test_why_there_is_one_arm_is_told_unless_it_was_asked_for(
        self, arm: Arm, told: bool
    ) -> None:
        records = [record(load, arm, sample(0.1, 0.02)) for load in CONTEXTS]
        warnings = " ".join(outcome(Measurement(records), (arm,)).summary["warnings"])
        assert ("does not know use_cache" in warnings) is told


class TestCompare:
    def test_side_by_side(self, some: Outcome, tmp_path: Path) -> None:
        for name in ("a", "b"):
            some.write(tmp_path / name, WORK)
        a, b = (result.read(tmp_path / name / "result.json") for name in ("a", "b"))
        b["cells"][0]["tpot_repeats"]["median"] = 8.0
        b["cells"][1]["tpot_repeats"] = None
        b["conditions"]["machine"] = "slide rule"
        del b["cells"][-1]
        rows = comparison.rows(a, b)
        assert [
            "context 32, 16 tokens",
            "cached",
            "ms per token",
            "4.00",
            "8.00",
            "2.00",
            "0, 0",
        ] in rows
        assert [
            "context 32, 16 tokens",
            "uncached",
            "ms per token",
            "2.00",
            "-",
            "-",
            "0, 0",
        ] in rows
        assert len(rows) == 1 + 5 * 4
        assert comparison.differences(a, b) == ["machine: abacus and slide rule"]

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": 3}'])
    def test_no_result(self, text: str, tmp_path: Path) -> None:
        path = tmp_path / "a.json"
        path.write_text(text)
        with pytest.raises(result.ResultError, match="not a result"):
            result.read(path)
