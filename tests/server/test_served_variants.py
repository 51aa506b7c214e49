"""A folder with any variant of the network is served like any other; fewer key heads, more rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from model import checkpoint
from model.tokenizer import Tokenizer
from server.cli import app
from server.loading import pool_rows
from tests import tiny

VARIANTS: dict[str, dict[str, object]] = {
    "grouped-query": {"n_kv_head": 2},
    "multi-query": {"n_kv_head": 1},
    "first GPT": {"norm_first": False},
    "first GPT, multi-query": {"norm_first": False, "n_kv_head": 1},
}


@pytest.mark.parametrize("changes", list(VARIANTS.values()), ids=list(VARIANTS))
def test_a_folder_is_served(changes: dict[str, object], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint.resolve("stories") / "tokenizer.tiktoken")
    model = tiny.gpt(tiny.config(n_vocab=tokenizer.n_vocab, **changes))
    checkpoint.save(tmp_path, model, tokenizer, torch.float32)
    arguments = ["generate", "Once upon a time", "--model", str(tmp_path), "--max-tokens", "24"]
    texts = []
    for cache in ("--cache", "--no-cache"):
        alone = CliRunner(env={"ONEROW_THREADS": "1"})  # a tiny model only waits for a second one
        result = alone.invoke(app, [*arguments, "--seed", "3", cache])
        assert result.exit_code == 0, result.stderr
        texts.append(result.stdout)
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("Once upon a time")


def test_the_same_memory_holds_more_rows() -> None:
    rows = [pool_rows(tiny.config(n_kv_head=n), 4, memory=2**20) + 1 for n in (4, 2, 1)]
    assert rows[0] == 2**20 // tiny.config().row_bytes(4)
    assert rows[1] // 2 == rows[2] // 4 == rows[0]
