"""`onerow trace` and the plan of `onerow info`: what is printed is what the model and runner do."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from model import cost
from model.config import PRESETS
from model.trace import trace
from server.cli import app

GPT2 = PRESETS["gpt2"]


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, arguments)


class TestTrace:
    def test_as_json(self) -> None:
        result = run("trace", "gpt2", "--tokens", "5", "--json")
        assert result.exit_code == 0
        lines = json.loads(result.stdout)
        assert [line["name"] for line in lines] == [line.name for line in trace(GPT2, 5)]
        weights = next(line for line in lines if line["name"] == "weights")
        assert weights["uncached"] == [12, 5, 5]
        assert weights["cached"] == [12, 1, 5]

    def test_as_a_table_of_the_embedded_model(self) -> None:
        result = run("trace")
        assert result.exit_code == 0
        cells = {
            row[1].strip(): [cell.strip() for cell in row[2:4]]
            for row in (line.split("│") for line in result.stdout.splitlines())
            if len(row) == 6
        }
        assert cells["Q"] == ["8 x 4 x 32", "8 x 1 x 32"]
        assert cells["K"] == ["8 x 4 x 32", "8 x 4 x 32"]
        assert cells["wide"] == ["4 x 1024", "1 x 1024"]
        assert cells["logits"] == ["1 x 4096", "1 x 4096"]

    def test_beyond_the_window(self) -> None:
        result = run("trace", "gpt2", "--tokens", "1025")
        assert result.exit_code == 2
        assert "--tokens: the window of gpt2 is 1024" in result.stderr

    def test_no_such_model(self) -> None:
        result = run("trace", "gpt3")
        assert result.exit_code == 1
        assert "gpt3: no such model" in result.stderr


class TestPlan:
    def plan(self, *arguments: str) -> dict[str, Any]:
        result = run("info", "gpt2", *arguments, "--json")
        assert result.exit_code == 0
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def test_room(self) -> None:
        plan = self.plan("--tokens", "512", "--memory", "2GiB")["memory"]["bfloat16"]
        assert plan["session_bytes"] == 512 * 36_864
        assert plan["sessions"] == 2**31 // (512 * 36_864) == 113
        assert plan["sessions_per_gib"] == 56

    def test_time(self) -> None:
        """A token reads the weights and its rows: no machine is faster than that."""
        plan = self.plan("--tokens", "512", "--bandwidth", "100", "--compute", "1000")
        memory = plan["memory"]["float32"]
        assert memory["bytes_per_token"] == cost.bytes_read(GPT2, context=512, itemsize=4)
        assert memory["seconds_per_token"] == pytest.approx(memory["bytes_per_token"] / 100e9)
        assert memory["caching_pays_from"] == cost.pays_from(GPT2, itemsize=4, balance=10)

    def test_operations(self) -> None:
        completion = self.plan("--tokens", "101")["completion"]
        assert (completion["prompt"], completion["new"]) == (50, 51)
        assert completion["cached_flops"] == cost.cached(50, 51).flops(GPT2)
        assert completion["uncached_flops"] == cost.uncached(50, 51).flops(GPT2)

    def test_what_fewer_key_heads_save(self) -> None:
        rows = self.plan()["row_bytes_by_key_heads"]
        assert rows == {str(n): 3_072 * n for n in (12, 6, 4, 3, 2, 1)}

    @pytest.mark.parametrize("tokens", ["1", "1024"])
    def test_tables(self, tokens: str) -> None:
        result = run("info", "gpt2", "--tokens", tokens, "--memory", "2GiB")
        assert result.exit_code == 0
        for words in ("token 1,024", "2.0GiB", "50 GB/s", "29 rows", "12 (this model)"):
            assert words in result.stdout

    def test_memory_is_a_number_of_bytes(self) -> None:
        assert run("info", "gpt2", "--memory", "much").exit_code == 2
