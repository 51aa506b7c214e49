"""The network says what GPT-2 says: two oracles, one by definition and one by other hands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel

from model.config import GPTConfig
from model.gpt import GPT
from tests import oracle
from tests.tiny import Driver, Text, arrays, config, full_pass, gpt, hugging_face, prompt

Pair = tuple[GPT2LMHeadModel, GPT]

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two key heads for four": {"n_kv_head": 2},
    "one key head for four": {"n_kv_head": 1},
    "untied head": {"tied_head": False},
    "padded vocabulary": {"n_vocab_padded": 128},
    "exact GELU": {"activation": "gelu"},
    "ReLU": {"activation": "relu"},
    "large epsilon": {"norm_epsilon": 0.1},
    "first GPT": {"norm_first": False},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_logits_equal_the_definition(shape: dict[str, Any]) -> None:
    model = gpt(config(**shape))
    tokens = prompt(100, 97)
    ours = full_pass(model, tokens)
    assert ours.shape == (100, 97)
    assert_close(ours, oracle.logits(arrays(model), model.config, tokens))


def test_fewer_key_heads_are_key_heads_repeated() -> None:
    grouped = gpt(config(n_kv_head=2))
    repeated = GPT(config())
    weights = grouped.state_dict()
    for name, tensor in weights.items():
        if ".c_attn." in name:
            query, key, value = tensor.split((48, 24, 24))
            key, value = (x.unflatten(0, (2, 12)).repeat_interleave(2, 0) for x in (key, value))
            weights[name] = torch.cat([query, key.flatten(0, 1), value.flatten(0, 1)])
    repeated.load_state_dict(weights)
    tokens = prompt(100, 97)
    assert_close(full_pass(grouped, tokens), full_pass(repeated, tokens))


def test_initial_weights_are_gpt2s() -> None:
    """N(0, 0.02), residual projections less by sqrt(2 n_layer), norms 1 and 0, and by seed."""
    first, second, other = (GPT(config(d_model=256, tied_head=False)) for _ in range(3))
    first.initialise(torch.Generator().manual_seed(1))
    second.initialise(torch.Generator().manual_seed(1))
    other.initialise(torch.Generator().manual_seed(2))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        if parameter.dim() == 2:
            assert not torch.equal(parameter, other.get_parameter(name))
            expected = 0.02 / 6**0.5 if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
        else:
            is_scale = "ln_" in name and name.endswith("weight")
            assert (parameter == float(is_scale)).all(), name


@pytest.fixture(scope="module")
def small() -> Pair:
    """A small GPT-2 with GPT-2's window."""
    shape = {"n_layer": 2, "n_head": 4, "n_embd": 32, "vocab_size": 211, "n_positions": 1024}
    return hugging_face(0.3, **shape)


def test_small_logits_equal_hugging_face_over_the_whole_window(small: Pair) -> None:
    theirs, ours = small
    tokens = prompt(1024, 211)
    assert_close(full_pass(ours, tokens), hf_logits(theirs, tokens))


VARIANTS: dict[str, dict[str, Any]] = {
    "cached": {},
    "row by row": {"chunk": 1},
    "in chunks": {"chunk": 7},
    "uncached": {"cached": False},
    "uncached in chunks": {"cached": False, "chunk": 50},
}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_greedy_text_equals_hugging_face(small: Pair, variant: dict[str, Any]) -> None:
    theirs, ours = small
    tokens = prompt(11, 211)
    text = Driver(ours, n_rows=256).generate([Text(tokens, **variant)], 200)[0]
    assert text == hf_generate(theirs, tokens, 200)
    assert len(set(text)) > 20, "a text of one word proves little"


def test_greedy_texts_in_one_batch_equal_hugging_face(small: Pair) -> None:
    theirs, ours = small
    texts = [
        Text(prompt(n, 211), **variant)
        for n, variant in zip((1, 200, 9, 60, 11), VARIANTS.values(), strict=True)
    ]
    expected = [hf_generate(theirs, text.tokens, 100) for text in texts]
    assert Driver(ours).generate(texts, 100) == expected


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_last_rows_of_the_window(small: Pair, variant: dict[str, Any]) -> None:
    """Rows 1020 to 1023 are computed one by one; the last token stands past the window."""
    theirs, ours = small
    text = Text(prompt(1020, 211), **variant)
    Driver(ours).generate([text], 5)
    assert len(text.tokens) == 1025
    assert text.made == hf_choices(theirs, text.tokens[:1024])[-5:]


@pytest.fixture(scope="module")
def gpt2() -> Pair:
    """The shape of GPT-2 124M."""
    return hugging_face(0.05)


@pytest.mark.slow
@torch.inference_mode()
def test_gpt2_logits_equal_both_oracles_to_the_end_of_the_window(gpt2: Pair) -> None:
    theirs, ours = gpt2
    assert ours.config == GPTConfig(n_layer=12, n_head=12, d_model=768, n_ctx=1024, n_vocab=50257)
    tokens = prompt(1024, 50257)
    expected = theirs(torch.tensor([tokens]), logits_to_keep=2).logits[0]
    driver = Driver(ours, n_rows=1024)
    text = Text(tokens[:1022])
    for i in range(2):
        text.tokens = tokens[: 1023 + i]
        (draw,) = driver.step([text])
        assert draw.token == int(expected[i].argmax())
    start = full_pass(ours, tokens[:24])
    assert_close(start, oracle.logits(arrays(ours), ours.config, tokens[:24]))
    assert_close(start, hf_logits(theirs, tokens[:24]))


@pytest.mark.slow
def test_gpt2_greedy_texts_equal_hugging_face(gpt2: Pair) -> None:
    """30 tokens, cached, in one batch of unequal lengths, one prompt computed row by row; the small
    network above writes longer ones.

    Token i of a greedy text is the best one after tokens[:i]; one pass over the finished text
    asks that of every i at once, of transformers and of ourselves without a cache.
    """
    theirs, ours = gpt2
    texts = [Text(prompt(3, 50257)), Text(prompt(40, 50257)), Text(prompt(9, 50257), chunk=1)]
    Driver(ours, n_rows=200).generate(texts, 30)
    for text in texts:
        assert len(set(text.made)) > 5  # no single token over and over
        computed = text.tokens[:-1]
        assert text.made == hf_choices(theirs, computed)[-30:]
        assert text.made == full_pass(ours, computed).argmax(dim=-1).tolist()[-30:]


def assert_close(found: Tensor, expected: Tensor | oracle.Array) -> None:
    np.testing.assert_allclose(found.numpy(), np.asarray(expected), rtol=0, atol=1e-4)


@torch.inference_mode()
def hf_logits(theirs: GPT2LMHeadModel, tokens: Sequence[int]) -> Tensor:
    logits: Tensor = theirs(torch.tensor([tokens])).logits[0]
    return logits


def hf_choices(theirs: GPT2LMHeadModel, tokens: Sequence[int]) -> list[int]:
    """The greedy choice after each token."""
    choices: list[int] = hf_logits(theirs, tokens).argmax(dim=-1).tolist()
    return choices


def hf_generate(theirs: GPT2LMHeadModel, tokens: Sequence[int], n: int) -> list[int]:
    ids = torch.tensor([tokens])
    out = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=n,
        eos_token_id=None,
        pad_token_id=0,
    )
    made: list[int] = out[0, len(tokens) :].tolist()
    return made
