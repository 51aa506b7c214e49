"""The command from end to end, on a tiny random model and beside fake peers."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from server.cli import app
from server.loadtest.engine import bench, ceilings
from server.loadtest.engine.process import ProcessError
from tests.server.loadtest.engine import fake_peer
from tests.tiny import save_quick

QUICK = ("--device", "cpu", "--threads", "1", "--repeats", "1", "--patience", "0", "--seed", "1")


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ceilings.Ceilings(10e9, {"float32": 50e9})
    monkeypatch.setattr(ceilings, "measure", lambda threads, device: found)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_quick(tmp_path_factory.mktemp("tiny"))


def run(model: str, out: Path, *flags: str) -> Result:
    words = ("bench", "--engine", "--model", model, "--out", str(out), *QUICK, *flags)
    return CliRunner().invoke(app, words)


def peer(name: str, fault: str = "none", ms: float = 2.0) -> tuple[str, str]:
    return "--peer", f"{name}={shlex.join(fake_peer.command(fault, ms))}"


def last_line(result: Result) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return summary


@pytest.mark.slow
class TestMeasured:
    def test_beside_peers_good_and_bad(self, tiny: str, tmp_path: Path) -> None:
        names = ("decode-1x16", "decode-2x16", "prefill-1x99", "uncached-1x16")
        cells = [word for name in names for word in ("--cell", name)]
        peers = [*peer("fake", "obeys"), *peer("mortal", "dies"), *peer("odd", "short")]
        peers += [*peer("absent", "absent"), "--peer", "nothing=/no/such/python"]
        result = run(tiny, tmp_path, *cells, *peers)
        assert result.exit_code == 0, result.stderr
        summary = last_line(result)
        whole = json.loads((tmp_path / "engine.json").read_text())
        runs = whole.pop("runs")
        assert whole == summary

        assert [*summary["cells"]] == [
            "decode-1x16",
            "decode-2x16",
            "prefill-1x63",
            "uncached-1x16",
        ]
        assert summary["notes"] == ["prefill-1x99: cut to prefill-1x63, the window is 64"]
        for cell in summary["cells"].values():
            figures = cell["figures"]
            mine, fake = figures["onerow"], figures["fake"]
            assert mine["floor"]["ms"] > 0
            assert mine["floor"]["share"] == pytest.approx(
                mine["floor"]["ms"] / mine["ms"], 0.02, 0.001
            )
            assert cell["ratios"]["onerow"]["fake"] == pytest.approx(fake["ms"] / mine["ms"], 0.02)
        assert summary["cells"]["decode-2x16"]["figures"]["fake"]["median"] == pytest.approx(1000)
        assert summary["cells"]["uncached-1x16"]["figures"]["fake"]["ms"] == pytest.approx(20)

        left_out = summary["left_out"]
        assert left_out["nothing"] == "/no/such/python: No such file or directory"
        assert "ModuleNotFoundError" in left_out["absent"]
        assert left_out["mortal"] == "it ended: Killed"
        assert left_out["decode-1x16, odd"] == "26 times for 24 tokens"
        assert summary["missing"] == []
        assert summary["cache"]["onerow"]["16"] > 0
        assert summary["contenders"]["onerow"]["loaded_mb"] > 50
        assert summary["contenders"]["absent"] == {"version": None}
        assert {r["contender"] for r in runs} >= {"onerow", "fake"}
        assert summary["ceilings"]["read_GB_s"] == 10
        assert not summary["interrupted"]

        [line] = [line for line in result.stdout.splitlines()[:-1] if "decode-2x16" in line]
        assert "-" in line.split()  # what a peer did not do is missing, and no number
        assert "left out: mortal: it ended: Killed" in result.stderr

    def test_growth(self, tiny: str, tmp_path: Path) -> None:
        """Points, streams and pools of our own; none of them for peers."""
        memory = ("--kv-cache-memory", "2MiB")
        result = run(tiny, tmp_path, "--growth", "--cell", "prefill-1x8", *memory, *peer("fake"))
        assert result.exit_code == 0, result.stderr
        summary = last_line(result)
        done = {c: [*cell["figures"]] for c, cell in summary["cells"].items()}
        assert done["prefill-1x8"] == ["onerow", "fake"]
        assert done["decode-1x16"] == ["onerow"]
        names = {path.name for path in tmp_path.iterdir()}
        assert {"engine.json", "engine-context.png", "engine-cache.png"} <= names
        assert [c["pool"] for c in summary["contenders"].values()][:4] == [
            None,
            2**19,
            2**21,
            2**23,
        ]

    def test_two_types_of_numbers(self, tiny: str, tmp_path: Path) -> None:
        types = ("--dtype", "bfloat16", "--dtype", "int8")  # the rows are bfloat16 with both
        result = run(tiny, tmp_path, *types, "--cell", "decode-1x8")
        assert result.exit_code == 0, result.stderr
        cell = last_line(result)["cells"]["decode-1x8"]
        floors = [figure["floor"]["bytes"] for figure in cell["figures"].values()]
        assert floors[0] == pytest.approx(2 * floors[1], rel=0.02)
        assert cell["ratios"]["onerow int8"].keys() == {"onerow bfloat16"}
        assert "decode-1x8 bfloat16" in result.stdout

    def test_what_is_missing_of_our_own_fails_the_command(
        self, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise ProcessError("it ended: Killed")

        monkeypatch.setattr("server.loadtest.engine.rounds.play", fail)
        result = run(tiny, tmp_path, "--cell", "decode-1x8")
        assert result.exit_code == 1
        summary = last_line(result)
        assert summary["missing"] == ["decode-1x8, onerow"]
        assert summary["cells"]["decode-1x8"]["figures"] == {}

    def test_ctrl_c_tells_what_was_measured(
        self, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("server.loadtest.engine.rounds.play", interrupt)
        result = run(tiny, tmp_path, "--cell", "decode-1x8")
        assert result.exit_code == 130
        assert last_line(result)["interrupted"]

    def test_nothing_that_fits(self, tiny: str, tmp_path: Path) -> None:
        result = run(tiny, tmp_path, "--cell", "decode-65x8")
        assert result.exit_code == 1
        last = result.stderr.splitlines()[-1]
        assert last == "onerow: decode-65x8: left out, no more than 64 run at once"

    def test_a_model_that_is_not_there(self, tmp_path: Path) -> None:
        result = run(str(tmp_path / "nothing"), tmp_path)
        assert result.exit_code == 1
        assert "no such model" in result.stderr.splitlines()[-1]
        assert not result.stdout


class TestRefused:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--cell", "decode"], "'decode' is not like decode-1x128"),
            (["--peer", "nobody"], "'nobody' is not like NAME=COMMAND"),
            (["--dtype", "float8"], "dtype"),
            (["--url", "http://127.0.0.1"], "--url: not with --engine"),
            (["--rate", "2"], "--rate: not with --engine"),
        ],
    )
    def test_with_engine(self, tmp_path: Path, flags: list[str], words: str) -> None:
        result = run("stories", tmp_path, *flags)
        assert result.exit_code == 2
        assert words in result.stderr

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--growth"], "--growth: only with --engine"),
            (["--cell", "decode-1x128"], "--cell: only with --engine"),
            (["--kv-cache-memory", "1GiB"], "--kv-cache-memory: only with --engine"),
            (["--dtype", "float32", "--dtype", "bfloat16"], "--dtype: several only with --engine"),
        ],
    )
    def test_without(self, flags: list[str], words: str) -> None:
        result = CliRunner().invoke(app, ["bench", *flags])
        assert result.exit_code == 2
        assert words in result.stderr


def test_plan_is_what_is_typed(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bench.Plan] = []

    def stop(plan: bench.Plan, facts: object) -> None:
        seen.append(plan)
        raise bench.EngineError("enough")

    monkeypatch.setattr(bench, "run", stop)
    result = run(tiny, tmp_path, "--cell", "decode-3x5", *peer("fake"))
    assert result.exit_code == 1
    assert result.stderr == "onerow: enough\n"
    [plan] = seen
    assert [c.name for c in plan.contenders] == ["onerow", "fake"]
    assert [str(cell) for cell in plan.cells] == ["decode-3x5"]
    assert (plan.repeats, plan.threads, plan.seed, plan.patience) == (1, 1, 1, 0)
