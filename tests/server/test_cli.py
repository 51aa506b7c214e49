"""The command: its flags, its answers, and how it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import SecretStr
from typer.testing import CliRunner, Result

from model import checkpoint
from model.config import PRESETS, GPTConfig
from server.cli import app
from server.loadtest.client import ServerError
from server.loadtest.host import own_server
from server.loadtest.target import Target
from server.settings import Settings
from server.version import VERSION
from tests.server.live import wait_until
from tests.server.loadtest.fake import answer, serving
from tests.tiny import save_quick

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ONEROW_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_quick(tmp_path_factory.mktemp("tiny"))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def one_line(result: Result) -> str:
    """The single line that an error is."""
    [line] = result.stderr.splitlines()
    assert line.startswith("onerow: ")
    return line


class TestCommand:
    def test_version(self) -> None:
        assert run("--version").stdout == f"onerow {VERSION}\n"

    def test_help_names_every_command(self) -> None:
        result = run("--help")
        assert result.exit_code == 0
        commands = re.findall(r"^  (\w+)  ", result.stdout, re.MULTILINE)
        assert {"serve", "generate", "info", "train", "bench"} <= set(commands)

    def test_without_torch_until_it_is_needed(self) -> None:
        """Help, and the cost of a preset, must not wait for seconds of imports."""
        code = (
            "import sys\n"
            "from server.cli import app\n"
            "for words in (['--help'], ['serve', '--help'], ['info', 'gpt2']):\n"
            "    app(words, standalone_mode=False)\n"
            "assert 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)

    def test_as_a_module(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "server", "--version"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout == f"onerow {VERSION}\n"


SAMPLE = {
    "step_tokens": "300",
    "device": "cpu",
    "dtype": "bfloat16",
    "log_level": "debug",
    "log_format": "json",
}


class TestServe:
    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
        """The settings that the server would have run with."""
        seen: list[Settings] = []

        def serve(settings: Settings, load_engine: object) -> int:
            seen.append(settings)
            return 0

        stand_in = SimpleNamespace(serve=serve)
        monkeypatch.setitem(sys.modules, "server.app", stand_in)
        return seen

    @pytest.mark.parametrize("name", Settings.model_fields)
    def test_every_setting_is_a_flag_and_a_variable(
        self, name: str, served: list[Settings], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        field = Settings.model_fields[name]
        is_bool, is_on = field.annotation is bool, field.default is True
        value = str(not is_on) if is_bool else SAMPLE.get(name, "100")
        flag = f"--{'no-' if is_on else ''}{name.replace('_', '-')}"
        assert run("serve", *([flag] if is_bool else [flag, value])).exit_code == 0
        monkeypatch.setenv(f"ONEROW_{name.upper()}", value)
        assert run("serve").exit_code == 0
        by_flag, by_variable = (getattr(settings, name) for settings in served)
        plain = by_flag.get_secret_value() if isinstance(by_flag, SecretStr) else by_flag
        assert by_flag == by_variable
        assert plain != field.get_default(call_default_factory=True)

    def test_flags_win_over_variables_over_defaults(
        self, served: list[Settings], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("ONEROW_PORT", "8001")
        monkeypatch.setenv("ONEROW_HOST", "0.0.0.0")
        run("serve", "--port", "8002")
        [settings] = served
        assert (settings.port, settings.host) == (8002, "0.0.0.0")
        assert settings.model == "stories"

    def test_sizes_have_units(self, served: list[Settings]) -> None:
        run("serve", "--kv-cache-memory", "3GiB")
        assert served[0].kv_cache_memory == 3 * 2**30

    @pytest.mark.parametrize(
        ("flags", "reason"),
        [
            (["--port", "many"], "port"),
            (["--port", "70000"], "port"),
            (["--kv-cache-memory", "lots"], "kv_cache_memory"),
            (["--device", "tpu"], "device"),
            (["--step-tokens", "2"], "step_tokens"),
        ],
    )
    def test_a_bad_setting_is_one_line(self, flags: list[str], reason: str) -> None:
        result = run("serve", *flags)
        assert result.exit_code == 2
        assert reason in one_line(result)

    def test_a_bad_variable_is_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ONEROW_PORT", "many")
        result = run("serve")
        assert result.exit_code == 2
        assert "port" in one_line(result)

    def test_b111_more_than_one_process_is_refused(
        self, served: list[Settings], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        result = run("serve", "--workers", "2")
        assert result.exit_code == 2
        assert "one process" in one_line(result)
        monkeypatch.setenv("WEB_CONCURRENCY", "4")
        assert run("serve").exit_code == 2
        assert not served
        monkeypatch.setenv("WEB_CONCURRENCY", "1")
        assert run("serve", "--workers", "1").exit_code == 0
        assert served


class TestGenerate:
    def generate(self, tiny: str, *flags: str, prompt: str = "Once upon a time") -> Result:
        return run("generate", prompt, "--model", tiny, "--device", "cpu", *flags)

    def test_cached_and_uncached_agree(self, tiny: str) -> None:
        flags = ("--max-tokens", "20", "--temperature", "0")
        cached, uncached = self.generate(tiny, *flags), self.generate(tiny, *flags, "--no-cache")
        assert cached.exit_code == uncached.exit_code == 0
        assert cached.stdout == uncached.stdout
        assert cached.stdout.endswith("\n")

    def test_a_seed_is_a_text(self, tiny: str) -> None:
        flags = ("--max-tokens", "20", "--seed")
        first, same, other = (self.generate(tiny, *flags, seed) for seed in "112")
        assert first.stdout == same.stdout != other.stdout

    def test_without_a_seed_each_text_is_new_and_names_its_seed(self, tiny: str) -> None:
        first, second = (self.generate(tiny, "--max-tokens", "20") for _ in range(2))
        assert first.stdout != second.stdout
        [seed] = re.findall(r"seed (\d+)", first.stderr)
        again = self.generate(tiny, "--max-tokens", "20", "--seed", seed)
        assert again.stdout == first.stdout

    def test_statistics_do_not_mix_with_the_text(self, tiny: str) -> None:
        result = self.generate(tiny, "--max-tokens", "20", "--seed", "1")
        line = r"20 tokens, \d+\.\d tokens/s, the first after \d+ ms; length; seed 1"
        assert re.search(line, result.stderr)
        assert "tokens/s" not in result.stdout

    def test_stop(self, tiny: str) -> None:
        whole = self.generate(tiny, "--max-tokens", "20", "--temperature", "0").stdout.strip()
        cut = self.generate(tiny, "--max-tokens", "20", "--temperature", "0", "--stop", whole[5:9])
        assert cut.stdout.strip() == whole[: whole.index(whole[5:9])].strip()
        assert "; stop;" in cut.stderr

    def test_to_the_end_of_the_window(self, tiny: str) -> None:
        result = self.generate(tiny, "--temperature", "0")
        [n] = re.findall(r"^(\d+) tokens", result.stderr, re.MULTILINE)
        assert 50 < int(n) < 64
        assert "; length;" in result.stderr

    def test_an_empty_prompt_begins_a_text(self, tiny: str) -> None:
        assert self.generate(tiny, "--max-tokens", "3", prompt="").exit_code == 0

    def test_what_does_not_fit_is_refused(self, tiny: str) -> None:
        result = self.generate(tiny, prompt="word " * 200)
        assert result.exit_code == 2
        assert "the window of 64" in result.stderr.splitlines()[-1]
        assert self.generate(tiny, "--max-tokens", "64").exit_code == 2
        assert not result.stdout

    def test_no_such_model(self) -> None:
        result = run("generate", "x", "--model", "nowhere")
        assert result.exit_code == 1
        assert "nowhere: no such model" in one_line(result)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_no_gpu(self) -> None:
        result = run("generate", "x", "--device", "cuda")
        assert result.exit_code == 1
        assert "device cuda" in one_line(result)

    def test_ctrl_c_ends_cleanly(self) -> None:
        """What was said stays, the statistics come, and no traceback does."""
        # A shell's background job ignores the signal, and so would its children.
        code = (
            "import signal; from server.cli import main\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler); main()"
        )
        flags = ["--device", "cpu", "--temperature", "0", "--no-cache"]
        with subprocess.Popen(
            [sys.executable, "-c", code, "generate", "Once", *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            guard = threading.Timer(100, process.kill)
            guard.start()
            assert process.stdout is not None
            first = process.stdout.read(8)
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate()
            guard.cancel()
        assert process.returncode == 130
        assert (first + rest).endswith("\n")
        assert "interrupted" in errors
        assert "Traceback" not in errors


class TestInfo:
    def cost(self, *arguments: str) -> dict[str, Any]:
        result = run("info", *arguments, "--json")
        assert result.exit_code == 0
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def test_gpt2(self) -> None:
        """The numbers that everybody knows."""
        cost = self.cost("gpt2", "--tokens", "100")
        assert cost["parameters"] == 124_439_808
        assert cost["memory"]["bfloat16"]["row_bytes"] == 36_864
        assert cost["memory"]["bfloat16"]["full_sessions_per_gib"] == 28
        assert cost["memory"]["bfloat16"]["sessions_per_gib"] == 2**30 // 3_686_400
        assert cost["memory"]["float32"]["weight_bytes"] == 4 * 124_439_808
        assert cost["shape"]["d_head"] == 64
        d, layers, vocabulary = 768, 12, 50257
        assert cost["flops_per_token"]["1024"] == 2 * (
            layers * (12 * d * d + 2 * 1024 * d) + vocabulary * d
        )

    def test_the_embedded_model_is_the_preset_of_its_name(self, tmp_path: Path) -> None:
        config = GPTConfig.load(checkpoint.resolve("stories") / "config.json")
        assert config == PRESETS["stories"]
        assert self.cost()["parameters"] == config.parameters

    def test_a_folder(self, tiny: str) -> None:
        assert self.cost(tiny)["shape"]["n_ctx"] == 64

    def test_tables(self) -> None:
        result = run("info", "gpt2")
        assert result.exit_code == 0
        assert "124,439,808 parameters" in result.stdout
        assert "36,864 B" in result.stdout

    def test_no_such_model(self) -> None:
        result = run("info", "gpt3")
        assert result.exit_code == 1
        assert "gpt3: no such model" in one_line(result)


class TestTrain:
    @pytest.fixture
    def trained(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], bool]]:
        calls: list[tuple[tuple[Any, ...], bool]] = []

        def train(*arguments: object, compiled: bool) -> float:
            calls.append((arguments, compiled))
            return 0.75

        monkeypatch.setattr("model.train.train", train)
        return calls

    @pytest.fixture
    def story(self, tmp_path: Path) -> Path:
        path = tmp_path / "story.txt"
        path.write_text("Once.\n<|endoftext|>\n")
        return path

    def test_hands_over_everything(
        self, trained: list[tuple[tuple[Any, ...], bool]], story: Path, tmp_path: Path
    ) -> None:
        run_folder, out = tmp_path / "run", tmp_path / "out"
        result = run(
            "train", str(story), "--run", str(run_folder), "--out", str(out),
            "--tokens", "5000", "--seed", "3", "--device", "cpu", "--compile",
        )  # fmt: skip
        assert result.exit_code == 0
        assert "0.7500 bits per byte" in result.stdout
        [((files, *folders, config, recipe, device), compiled)] = trained
        assert files == [story]
        assert folders == [run_folder, out]
        assert config == PRESETS["stories"]
        assert (recipe.tokens, recipe.seed) == (5000, 3)
        assert device == torch.device("cpu")
        assert compiled

    def test_needs_its_libraries(
        self, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        result = run("train", str(story), "--run", str(tmp_path), "--out", str(tmp_path))
        assert result.exit_code == 1
        assert "pip install" in one_line(result)

    def test_a_refused_run_is_one_line(
        self, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise ValueError("begun with another recipe")

        monkeypatch.setattr("model.train.train", refuse)
        result = run("train", str(story), "--run", str(tmp_path), "--out", str(tmp_path))
        assert result.exit_code == 2
        assert one_line(result) == "onerow: begun with another recipe"

    def test_an_interrupt_says_how_to_go_on(
        self, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("model.train.train", interrupt)
        result = run("train", str(story), "--run", str(tmp_path), "--out", str(tmp_path))
        assert result.exit_code == 130
        assert "the same command goes on" in one_line(result)


@pytest.mark.slow
class TestBench:
    def bench(self, out: Path, *flags: str) -> Result:
        return run("bench", "--context", "4", "--context", "8", "--out", str(out), *flags)

    def test_a_server_of_its_own(self, tiny: str, tmp_path: Path) -> None:
        result = self.bench(
            tmp_path, "--model", tiny, "--device", "cpu", "--tokens", "4", "--repeats", "2"
        )
        assert result.exit_code == 0, result.stderr
        summary = json.loads(result.stdout.splitlines()[-1])
        whole = json.loads((tmp_path / "result.json").read_text())
        samples, cells = whole.pop("samples"), whole.pop("cells")
        assert whole == summary
        assert [c["context"] for c in summary["contexts"]] == [4, 8]
        assert all(c["cached"]["median"] > 0 and c["ratio"] > 0 for c in summary["contexts"])
        assert summary["failures"] == 0
        assert len(samples) == 2 * 2 * 2 * 2
        assert len(cells) == 2 * 2
        assert all(cell["server"]["decode_ms"] > 0 for cell in cells)
        assert (summary["conditions"]["device"], summary["conditions"]["dtype"]) == (
            "cpu",
            "float32",
        )
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {"result.json", "report.html", "context.png", "timeline.png"}
        assert "ratio" in result.stdout

    def test_b115_b119_a_second_run_finds_nothing_of_the_first(
        self, tiny: str, tmp_path: Path
    ) -> None:
        """Hit tokens say so: what is shared is found, by the cached arm alone, and nothing else."""
        load = ("--context", "32", "--tokens", "3", "--repeats", "1")
        with own_server([f"--model={tiny}", "--device=cpu"]) as url:
            summaries = []
            for more in ([], [], ["--shared", "0.5"], ["--turns", "2"]):
                result = run("bench", "--url", url, "--out", str(tmp_path), *load, *more)
                assert result.exit_code == 0, result.stderr
                summaries.append(json.loads(result.stdout.splitlines()[-1])["arms"])
        for arms in summaries:
            assert arms["uncached"]["cached_tokens"] == 0
            for name in ("tokens", "prompt_tokens", "requests"):
                assert arms["cached"][name] == arms["uncached"][name]
        first, second, shared, turns = (arms["cached"]["cached_tokens"] for arms in summaries)
        assert first <= 4  # two random prompts may begin with the same id
        assert second <= 4
        assert 16 <= shared < 16 + 8  # the second of two prompts finds half of the first
        assert turns >= 2 * 18  # each second turn finds the first one and its answer

    def test_one_arm_where_use_cache_is_not_known(self, tmp_path: Path) -> None:
        with serving() as fake:
            result = self.bench(tmp_path, "--url", fake.url, "--repeats", "1")
        assert result.exit_code == 0, result.stderr
        summary = json.loads(result.stdout.splitlines()[-1])
        assert [*summary["arms"]] == ["as_served"]
        assert "does not know use_cache" in result.stderr

    def test_failures_are_told_and_counted(self, tmp_path: Path) -> None:
        with serving() as fake:
            fake.status, fake.script = 503, lambda _: ["busy"]
            result = self.bench(tmp_path, "--url", fake.url, "--repeats", "1")
        assert result.exit_code == 1
        assert "6 of 6 requests failed" in result.stderr
        assert "6 times: status 503" in result.stderr
        assert "503" in (tmp_path / "report.html").read_text()

    def test_ctrl_c_writes_what_was_measured(self, tmp_path: Path) -> None:
        with serving() as fake:
            fake.script = partial(answer, pause=0.05)
            command = [sys.executable, "-m", "server", "bench", "--url", fake.url]
            command += [
                "--context",
                "8",
                "--tokens",
                "8",
                "--repeats",
                "99",
                "--out",
                str(tmp_path),
            ]
            process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            wait_until(lambda: len(fake.bodies) >= 5, 60)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        summary = json.loads(out.splitlines()[-1])
        assert summary["interrupted"]
        assert summary["requests"] >= 3
        assert summary["failures"] == 0
        assert "was interrupted" in (tmp_path / "report.html").read_text()

    def test_compare(self, tmp_path: Path) -> None:
        with serving() as fake:
            for name in ("a", "b"):
                self.bench(tmp_path / name, "--url", fake.url, "--repeats", "1", "--tokens", "3")
        files = [str(tmp_path / name / "result.json") for name in ("a", "b")]
        result = run("bench", "--compare", *files)
        assert result.exit_code == 0, result.stderr
        assert "context 8, 3 tokens" in result.stdout
        assert "b / a" in result.stdout
        assert "no such" in one_line(run("bench", "--compare", files[0], "nowhere.json")).lower()

    def test_the_end_of_the_test_is_the_end_of_its_server(self, tiny: str) -> None:
        """SIGTERM is taken as Ctrl-C is, so that no server is left behind."""
        before, addresses = signal.getsignal(signal.SIGTERM), []

        def interrupted() -> None:
            with own_server([f"--model={tiny}", "--device=cpu"]) as address:
                addresses.append(address)
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert signal.getsignal(signal.SIGTERM) is before
        with pytest.raises(ServerError):
            Target.at(addresses[0])

    def test_a_server_that_does_not_start(self, tmp_path: Path) -> None:
        result = self.bench(tmp_path, "--model", str(tmp_path / "nothing"))
        assert result.exit_code == 1
        assert "the server did not start" in one_line(result)
        assert "no such model" in result.stderr

    def test_more_than_the_window(self, tiny: str, tmp_path: Path) -> None:
        result = self.bench(
            tmp_path, "--model", tiny, "--device", "cpu", "--context", "61", "--tokens", "4"
        )
        assert result.exit_code == 2
        assert "61 + 4 tokens exceed the window of 64" in one_line(result)

    def test_a_server_that_runs_has_its_own_model(self, tiny: str, tmp_path: Path) -> None:
        result = self.bench(tmp_path, "--url", "http://127.0.0.1:9", "--model", tiny)
        assert result.exit_code == 2
        assert "--url" in one_line(result)

    def test_nobody_there(self, tmp_path: Path) -> None:
        assert self.bench(tmp_path, "--url", "http://127.0.0.1:9").exit_code == 1

    def test_a_bad_setting_is_told_before_anything_starts(self, tmp_path: Path) -> None:
        result = self.bench(tmp_path, "--device", "tpu")
        assert result.exit_code == 2
        assert "device" in one_line(result)

    @pytest.mark.parametrize("flags", [["--slo", "fast"], ["--context", "4", "--turns", "5"]])
    def test_what_cannot_be_measured(self, flags: list[str], tmp_path: Path) -> None:
        with serving() as fake:
            result = run("bench", "--url", fake.url, "--out", str(tmp_path), *flags)
        assert result.exit_code == 2
        assert flags[-1] in one_line(result)
        assert not fake.bodies

    def test_a_folder_that_cannot_be(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with serving() as fake:
            result = self.bench(tmp_path / "file", "--url", fake.url, "--repeats", "1")
        assert result.exit_code == 1
        assert "--out" in result.stderr
