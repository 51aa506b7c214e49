"""The shapes of one step: everything has as many rows as are computed, but the keys and values."""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

from model.config import PRESETS, GPTConfig
from model.runner import Runner
from model.trace import MEANINGS, attend_plainly, trace
from tests import tiny

VARIANTS = {
    "GPT-2": tiny.config(),
    "multi-query": tiny.config(n_kv_head=1),
    "first GPT": tiny.config(norm_first=False),
}
T = 11  # unlike every width


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_one_row_where_there_were_many(config: GPTConfig) -> None:
    lines = {line.name: line for line in trace(config, T)}
    absent = set() if config.norm_first else {"ln_f"}
    assert lines.keys() == MEANINGS.keys() - absent
    for name, line in lines.items():
        if name in ("K", "V"):
            assert line.cached == line.uncached == (config.n_kv_head, T, config.d_head)
        elif name == "logits":
            assert line.cached == line.uncached == (1, config.n_vocab)
        elif name in ("scores", "weights"):
            assert line.uncached == (config.n_head, T, T)
            assert line.cached == (config.n_head, 1, T)
        else:
            assert T in line.uncached
            assert line.cached == tuple(1 if n == T else n for n in line.uncached)


def test_gpt2_in_the_order_of_the_computation() -> None:
    lines = trace(PRESETS["gpt2"], 4)
    assert [line.name for line in lines] == list(MEANINGS)
    shapes = {line.name: line.cached for line in lines}
    assert shapes["X"] == (1, 768)
    assert shapes["Q"] == shapes["new K"] == shapes["H"] == (12, 1, 64)
    assert shapes["K"] == shapes["V"] == (12, 4, 64)
    assert shapes["weights"] == (12, 1, 4)
    assert shapes["wide"] == (1, 3072)


def test_the_first_gpt_normalises_later() -> None:
    names = [line.name for line in trace(VARIANTS["first GPT"], 4)]
    assert names.index("Y") < names.index("ln_1") < names.index("wide") < names.index("ln_2")


def test_the_first_token_has_nothing_before_it() -> None:
    assert all(line.cached == line.uncached for line in trace(tiny.config(), 1))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_the_plain_products_make_the_same_text(config: GPTConfig) -> None:
    """Of several texts in one batch, so that rows are padded and masked."""

    def texts() -> list[tiny.Text]:
        return [
            tiny.Text(tiny.prompt(n, 97), cached=cached)
            for n, cached in ((3, True), (4, True), (20, True), (9, False))
        ]

    model, seen = tiny.gpt(config), set()

    def note(name: str, x: Tensor) -> None:
        seen.add(name)

    driver = tiny.Driver(model, n_rows=200)
    expected = driver.generate(texts(), 10)
    driver.runner = Runner(model, 200, backend=partial(attend_plainly, note=note))
    assert driver.generate(texts(), 10) == expected
    assert seen == {"Q", "new K", "new V", "K", "V", "scores", "weights", "H"}
