"""A shape is checked, and what it costs is what torch counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from model.config import PRESETS, ConfigError, GPTConfig
from model.gpt import GPT
from model.runner import Runner
from model.step import Work
from tests.tiny import config, gpt

COSTS = {
    "plain": config(),
    "grouped heads": config(n_kv_head=2),
    "untied, padded": config(tied_head=False, n_vocab_padded=128),
    "default width of the FFN": config(d_ff=None),
}


def test_what_is_not_said_follows_from_the_rest() -> None:
    shape = GPTConfig(n_layer=1, n_head=4, d_model=64, n_ctx=8, n_vocab=10)
    derived = (shape.n_kv_head, shape.n_vocab_padded, shape.d_ff, shape.d_head, shape.d_kv)
    assert derived == (4, 10, 256, 16, 64)
    assert GPTConfig(**{**shape.model_dump(), "n_kv_head": 2}).d_kv == 32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_head": 5}, "d_model 48 is not divisible by n_head 5"),
        ({"n_kv_head": 3}, "n_head 4 is not divisible by n_kv_head 3"),
        ({"n_vocab_padded": 96}, "n_vocab_padded 96 is below n_vocab 97"),
        ({"n_layer": 0}, "n_layer"),
        ({"d_model": -48}, "d_model"),
        ({"d_model": "48", "d_ff": None}, "d_model"),
        ({"d_model": 48.0, "d_ff": None}, "d_model"),
        ({"n_ctx": True}, "n_ctx"),
        ({"norm_epsilon": 0}, "norm_epsilon"),
        ({"activation": "swish"}, "activation"),
        ({"n_haed": 4}, "n_haed"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused_by_name(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fields = {**config().model_dump(), **wrong}
    with pytest.raises(ValidationError, match=message):
        GPTConfig(**fields)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=message) as error:
        GPTConfig.load(path)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", "{}", "nonsense"])
def test_a_file_that_is_no_config_is_one_line(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    for place in (path, tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=str(place)) as error:
            GPTConfig.load(place)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", COSTS.values(), ids=COSTS)
def test_saved_and_loaded_it_is_the_same(shape: GPTConfig, tmp_path: Path) -> None:
    shape.save(tmp_path / "config.json")
    assert GPTConfig.load(tmp_path / "config.json") == shape


@pytest.mark.parametrize("shape", [*COSTS.values(), *PRESETS.values()])
def test_parameters_are_those_of_the_network(shape: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(shape)
    assert shape.parameters == sum(p.numel() for p in model.parameters())


def test_gpt2_has_the_parameters_it_is_known_for() -> None:
    assert PRESETS["gpt2"].parameters == 124_439_808
    assert PRESETS["gpt2-xl"].parameters == 1_557_611_200


@pytest.mark.parametrize("context", [1, 2, 100])
@pytest.mark.parametrize("shape", COSTS.values(), ids=COSTS)
def test_flops_are_those_that_torch_counts(shape: GPTConfig, context: int) -> None:
    """One decoded row and its logits, with the arithmetic of attention visible to the counter."""
    model = gpt(shape)
    runner = Runner(model, context)
    runner.kv.zero_()
    rows = np.arange(context, dtype=np.int32)
    work = Work(np.zeros(context, np.int32), context - 1, rows, 1, score=0)
    work.targets = np.zeros(1, np.int32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        runner.run([work])
    assert shape.flops(context) == counter.get_total_flops()


def test_bytes_of_a_row_are_those_of_the_pools_tensor() -> None:
    shape = config(n_kv_head=2)
    kv = Runner(gpt(shape), 9, torch.bfloat16).kv
    assert shape.row_bytes(2) * (9 + 1) == kv.nbytes  # and scratch
    assert PRESETS["gpt2"].row_bytes(2) == 36_864
