"""Loading from every format, and the refusal of all that would load as garbage."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model, PreTrainedModel

from model import tokenizer
from model.checkpoint import Checkpoint, CheckpointError, load, resolve, save
from model.config import GPTConfig
from model.gpt import GPT
from model.tokenizer import FILE_NAME, Tokenizer

TOKENS = torch.tensor([5, 250, 7, 7, 0, 256, 31, 99])
BYTES = Tokenizer.from_ranks({bytes([byte]): byte for byte in range(256)}, "bytes")
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
SQUARE = "transformer.h.1.attn.c_proj.weight"

Tensors = dict[str, Tensor]
Module = TypeVar("Module", bound=torch.nn.Module)


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


@torch.inference_mode()
def logits(model: GPT) -> Tensor:
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), causal))


def small(**changes: object) -> GPT2Config:
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 257}
    fields: dict[str, Any] = {**shape, "bos_token_id": 256, "eos_token_id": 256, **changes}
    return GPT2Config(**fields)


def randomised(model: Module) -> Module:
    """Biases and norms too, and weights large enough for an error in any of them to show."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def hf_model() -> GPT2LMHeadModel:
    return randomised(GPT2LMHeadModel(small()))


@pytest.fixture
def folder(tmp_path: Path, hf_model: GPT2LMHeadModel) -> Path:
    """A Hugging Face folder with one weight file."""
    return saved(hf_model, tmp_path / "hf")


@pytest.fixture
def sharded(tmp_path: Path, hf_model: GPT2LMHeadModel) -> Path:
    return saved(hf_model, tmp_path / "sharded", max_shard_size="8KB")


def saved(model: PreTrainedModel, folder: Path, max_shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    BYTES.save(folder / FILE_NAME)
    return folder


@torch.inference_mode()
def hf_logits(model: GPT2LMHeadModel) -> Tensor:
    found: Tensor = model(TOKENS[None]).logits[0]
    return found


def edit_weights(path: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    edit(tensors)
    safetensors.torch.save_file(tensors, path)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


# Ours


CONFIG = GPTConfig(n_layer=2, n_head=2, d_model=16, n_ctx=32, n_vocab=257)


def ours(folder: Path, config: GPTConfig = CONFIG, dtype: torch.dtype = torch.float32) -> GPT:
    model = randomised(GPT(config))
    save(folder, model, BYTES, dtype)
    return model


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_head": False},
        {"n_vocab_padded": 320},
        {"activation": "relu", "d_ff": 24, "norm_epsilon": 1e-3},
    ],
)
def test_ours_comes_back_as_it_was_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = ours(tmp_path / "mine", CONFIG.model_validate({**CONFIG.model_dump(), **changes}))
    loaded = load(tmp_path / "mine")
    assert loaded.config == model.config
    assert loaded.name == "mine"
    assert loaded.tokenizer.token_bytes == BYTES.token_bytes
    assert torch.equal(logits(loaded.model), logits(model))


def test_loaded_model_is_ready_to_run(tmp_path: Path) -> None:
    ours(tmp_path, dtype=torch.bfloat16)
    model = load(tmp_path).model
    assert not any(module.training for module in model.modules())
    for parameter in model.parameters():
        assert (parameter.device.type, parameter.dtype) == ("cpu", torch.float32)
        assert parameter.is_contiguous()
        assert not parameter.requires_grad
    assert model.lm_head.weight is model.wte.weight
    assert sum(p.numel() for p in model.parameters()) == model.config.parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_is_the_one_asked_for(folder: Path, dtype: torch.dtype) -> None:
    assert {p.dtype for p in load(folder, dtype).model.parameters()} == {dtype}


def test_replacing_the_file_does_not_touch_a_loaded_model(tmp_path: Path) -> None:
    ours(tmp_path)
    loaded = load(tmp_path)
    before = logits(loaded.model)
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.truncate(100)
    assert torch.equal(logits(loaded.model), before)


def test_saved_files_are_readable_by_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        ours(tmp_path)
    finally:
        os.umask(before)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", WEIGHTS, FILE_NAME}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o644}


def test_an_interrupted_save_leaves_the_old_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(tmp_path)

    def fail(path: Path, content: bytes) -> None:
        path.open("wb").close()
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, randomised(GPT(CONFIG)), BYTES)
    assert torch.equal(logits(load(tmp_path).model), logits(model))


def test_vocabulary_must_be_the_one_of_the_config(tmp_path: Path) -> None:
    ours(tmp_path)
    edit_json(tmp_path / "config.json", lambda c: c.update(n_vocab=250))
    assert "n_vocab 250, but tokenizer.tiktoken has 257" in refusal(tmp_path)


def test_a_tied_config_does_not_take_a_head(tmp_path: Path) -> None:
    ours(tmp_path)
    edit_weights(tmp_path / WEIGHTS, lambda t: t.update({"lm_head.weight": t["wte.weight"] * 1}))
    assert f"{WEIGHTS}: unexpected lm_head.weight" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", WEIGHTS, FILE_NAME])
def test_each_missing_file_is_named(tmp_path: Path, name: str) -> None:
    ours(tmp_path)
    (tmp_path / name).unlink()
    assert name in refusal(tmp_path)


# Hugging Face


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "gelu"},
        {"activation_function": "gelu_pytorch_tanh"},
        {"activation_function": "relu"},
        {"n_inner": 24, "layer_norm_epsilon": 1e-2},
        {"reorder_and_upcast_attn": True},
        {"tie_word_embeddings": False},
    ],
)
def test_b144_logits_equal_hugging_face(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = randomised(GPT2LMHeadModel(small(**changes)))
    loaded = load(saved(model, tmp_path))
    torch.testing.assert_close(logits(loaded.model), hf_logits(model), atol=1e-4, rtol=0)
    assert loaded.config.tied_head == changes.get("tie_word_embeddings", True)


def test_shards_equal_one_file(sharded: Path, folder: Path, hf_model: GPT2LMHeadModel) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 2
    loaded = load(sharded)
    torch.testing.assert_close(logits(loaded.model), hf_logits(hf_model), atol=1e-4, rtol=0)
    assert loaded.fingerprint == load(folder).fingerprint


def test_names_without_prefix(tmp_path: Path, hf_model: GPT2LMHeadModel) -> None:
    bare = GPT2Model(small())
    bare.load_state_dict(hf_model.transformer.state_dict())
    path = saved(bare, tmp_path)
    assert "wte.weight" in safetensors.torch.load_file(path / WEIGHTS)
    torch.testing.assert_close(logits(load(path).model), hf_logits(hf_model), atol=1e-4, rtol=0)


def test_b140_the_square_projection_is_transposed_too(
    folder: Path, hf_model: GPT2LMHeadModel
) -> None:
    """It fits either way, so that only the format can tell (and a loader that forgot it fails)."""
    loaded = load(folder)
    matrix = loaded.model.get_parameter("h.1.attn.c_proj.weight")
    stored = safetensors.torch.load_file(folder / WEIGHTS)[SQUARE]
    assert torch.equal(matrix, stored.t())
    assert not torch.equal(matrix, stored)
    edit_weights(folder / WEIGHTS, lambda t: t.update({SQUARE: t[SQUARE].t().contiguous()}))
    assert (logits(load(folder).model) - hf_logits(hf_model)).abs().max() > 0.01


def test_masks_are_skipped_and_nothing_else(folder: Path, hf_model: GPT2LMHeadModel) -> None:
    masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32, dtype=torch.uint8)}
    masks["transformer.h.1.attn.masked_bias"] = torch.tensor(-1e4)
    edit_weights(folder / WEIGHTS, lambda t: t.update(masks))
    torch.testing.assert_close(logits(load(folder).model), hf_logits(hf_model), atol=1e-4, rtol=0)
    edit_weights(
        folder / WEIGHTS, lambda t: t.update({"transformer.h.1.attn.scale": torch.ones(1)})
    )
    assert "unexpected h.1.attn.scale" in refusal(folder)


def test_b142_head_equal_to_the_embedding_is_tied(folder: Path) -> None:
    before = load(folder)
    edit_weights(
        folder / WEIGHTS, lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] * 1})
    )
    after = load(folder)
    assert after.config.tied_head
    assert after.model.lm_head.weight is after.model.wte.weight
    assert after.fingerprint == before.fingerprint


def test_b142_head_different_from_the_embedding_is_kept(folder: Path) -> None:
    head = torch.randn(257, 16)
    edit_weights(folder / WEIGHTS, lambda t: t.update({"lm_head.weight": head}))
    loaded = load(folder)
    assert not loaded.config.tied_head
    assert torch.equal(loaded.model.lm_head.weight, head)


def test_b142_head_alone_is_the_embedding(folder: Path, hf_model: GPT2LMHeadModel) -> None:
    def rename(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")

    edit_weights(folder / WEIGHTS, rename)
    loaded = load(folder)
    assert loaded.config.tied_head
    torch.testing.assert_close(logits(loaded.model), hf_logits(hf_model), atol=1e-4, rtol=0)


def test_b142_neither_head_nor_embedding_is_refused(folder: Path) -> None:
    edit_weights(folder / WEIGHTS, lambda t: t.pop("transformer.wte.weight"))
    assert f"{WEIGHTS}: neither wte.weight nor lm_head.weight" in refusal(folder)


def test_an_untied_head_that_is_missing_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(tie_word_embeddings=False))
    assert "lm_head.weight is missing, and the head is not tied" in refusal(folder)


def test_b069_padded_rows_have_no_logits(tmp_path: Path) -> None:
    model = randomised(GPT2LMHeadModel(small(vocab_size=320)))
    loaded = load(saved(model, tmp_path))
    assert (loaded.config.n_vocab, loaded.config.n_vocab_padded) == (257, 320)
    expected = hf_logits(model)[:, :257]
    torch.testing.assert_close(logits(loaded.model), expected, atol=1e-4, rtol=0)


def test_fewer_rows_than_tokens_are_refused(tmp_path: Path) -> None:
    path = saved(GPT2LMHeadModel(small(vocab_size=256, bos_token_id=0, eos_token_id=0)), tmp_path)
    assert "the vocabulary has 257 tokens, the embedding 256 rows" in refusal(path)


def test_n_ctx_is_read_where_n_positions_is_not_there(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(n_ctx=c.pop("n_positions")))
    assert load(folder).config.n_ctx == 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_function", "silu"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("add_cross_attention", True),
        ("model_type", "llama"),
        ("n_layer", "many"),
        ("n_embd", None),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    folder: Path, field: str, value: object
) -> None:
    edit_json(folder / "config.json", lambda c: c.update({field: value}))
    message = refusal(folder)
    assert "config.json" in message
    assert field in message


def test_shapes_that_cannot_be_built_are_refused(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(n_head=3))
    assert "config.json: d_model 16 is not divisible by n_head 3" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
def test_a_broken_config_is_refused(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json: not" in refusal(folder)


def test_pickled_weights_are_refused_with_a_way_out(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert f"neither {WEIGHTS} nor {INDEX} is there" in refusal(folder)


@pytest.mark.parametrize("written", ["vocab.json and merges.txt", "tokenizer.json"])
def test_hugging_face_vocabulary_is_used(folder: Path, written: str) -> None:
    """The pair of older releases comes before all others, and the newer file before GPT-2's own."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["ab"], vocab_size=256, show_progress=False)
    if written == "tokenizer.json":
        (folder / FILE_NAME).unlink()
        bpe.save(str(folder / written))
    else:
        bpe.save_model(str(folder))
    found = load(folder).tokenizer
    assert (found.n_vocab, found.token_bytes[0]) == (257, b"!")  # our own file begins with byte 0


def test_no_vocabulary_at_all(folder: Path) -> None:
    (folder / FILE_NAME).unlink()
    assert "no vocabulary for 257 tokens" in refusal(folder)


# Every parameter exactly once


NAMES = st.sampled_from(sorted(GPT2LMHeadModel(small()).state_dict().keys() - {"lm_head.weight"}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(randomised(GPT2LMHeadModel(small())), tmp_path_factory.mktemp("whole"))


@given(name=NAMES, fault=st.sampled_from(["missing", "renamed", "longer", "integers"]))
@settings(deadline=None, max_examples=60)
def test_any_faulty_tensor_is_named(whole: Path, name: str, fault: str) -> None:
    content = (whole / WEIGHTS).read_bytes()
    ours = name.removeprefix("transformer.")

    def spoil(tensors: Tensors) -> None:
        found = tensors.pop(name)
        if fault == "renamed":
            tensors[name + "_"] = found
        elif fault == "longer":
            tensors[name] = torch.cat([found, found])
        elif fault == "integers":
            tensors[name] = found.to(torch.int8)

    try:
        edit_weights(whole / WEIGHTS, spoil)
        message = refusal(whole)
    finally:
        (whole / WEIGHTS).write_bytes(content)
    assert WEIGHTS in message
    assert ours in message


def test_wrong_shapes_are_told_with_the_right_ones(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(n_positions=64))
    assert "wpe.weight is (32, 16), config.json asks for (64, 16)" in refusal(folder)


def test_a_layer_too_many_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(n_layer=1))
    assert "unexpected h.1.attn.c_attn.bias" in refusal(folder)


def test_the_same_tensor_under_two_names_is_refused(folder: Path) -> None:
    edit_weights(
        folder / WEIGHTS, lambda t: t.update({"ln_f.bias": t["transformer.ln_f.bias"] * 1})
    )
    assert f"{WEIGHTS}: ln_f.bias is there twice" in refusal(folder)


@given(keep=st.floats(0, 0.9999))
@settings(deadline=None, max_examples=40)
def test_a_file_cut_anywhere_is_named(whole: Path, keep: float) -> None:
    content = (whole / WEIGHTS).read_bytes()
    try:
        (whole / WEIGHTS).write_bytes(content[: int(len(content) * keep)])
        assert f"{WEIGHTS}: empty, cut short" in refusal(whole)
    finally:
        (whole / WEIGHTS).write_bytes(content)


# Shards


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / INDEX).read_text())
    return folder / str(index["weight_map"][name])


def test_b146_an_absent_shard_is_named(sharded: Path) -> None:
    shard = shard_of(sharded, SQUARE)
    shard.unlink()
    assert f"{shard}: no such file" in refusal(sharded)


@pytest.mark.parametrize("cut", [1000, None])
def test_b146_a_cut_shard_is_named(sharded: Path, cut: int | None) -> None:
    shard = shard_of(sharded, SQUARE)
    shard.write_bytes(shard.read_bytes()[:-cut] if cut else b"")
    assert f"{shard}: empty, cut short" in refusal(sharded)


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    shard = shard_of(sharded, SQUARE)
    edit_weights(shard, lambda t: t.pop(SQUARE))
    assert f"{shard}: lacks {SQUARE}" in refusal(sharded)


@pytest.mark.parametrize("name", [SQUARE, "transformer.h.7.ln_1.bias"])
def test_a_tensor_that_the_index_places_elsewhere_is_named(sharded: Path, name: str) -> None:
    """Twice in the shards, or there since the index was written."""
    other = shard_of(sharded, "transformer.ln_f.bias")
    assert other != shard_of(sharded, SQUARE)
    edit_weights(other, lambda t: t.update({name: torch.ones(16, 16)}))
    assert f"{other}: {INDEX} does not place there {name}" in refusal(sharded)


def test_a_tensor_that_no_shard_has_is_named(sharded: Path) -> None:
    edit_weights(shard_of(sharded, SQUARE), lambda t: t.pop(SQUARE))
    edit_json(sharded / INDEX, lambda c: c["weight_map"].pop(SQUARE))
    assert f"{INDEX}: missing h.1.attn.c_proj.weight" in refusal(sharded)


@pytest.mark.parametrize("place", ["../elsewhere.safetensors", "/etc/passwd"])
def test_an_index_stays_in_its_folder(sharded: Path, place: str) -> None:
    edit_json(sharded / INDEX, lambda c: c["weight_map"].update({SQUARE: place}))
    assert "not a file beside it" in refusal(sharded)


@pytest.mark.parametrize("content", ["", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": []}'])
def test_a_broken_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    assert INDEX in refusal(sharded)


@pytest.mark.parametrize("name", [WEIGHTS, "model-00009-of-00009.safetensors"])
def test_b146_files_that_the_index_does_not_name_are_left_alone(
    sharded: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = load(sharded)
    assert not caplog.messages
    safetensors.torch.save_file({SQUARE: torch.zeros(16, 16)}, sharded / name)
    assert load(sharded).fingerprint == before.fingerprint
    assert f"{sharded / name}: not part of the model, left alone" in caplog.messages


# nanoGPT


def nanogpt(folder: Path, *, bias: bool = True, prefix: str = "", **changes: object) -> Path:
    """A `ckpt.pt` as nanoGPT writes it, with an optimiser's state beside the model."""
    args: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 24}
    args |= {"vocab_size": 257, "bias": bias, "dropout": 0.0, **changes}
    width, tensors = 16, {}
    generator = torch.Generator().manual_seed(1)

    def add(name: str, *shape: int) -> None:
        tensors[f"{prefix}transformer.{name}.weight"] = torch.randn(shape, generator=generator) / 3
        if bias and not name.endswith("e"):
            out = shape[:1]
            tensors[f"{prefix}transformer.{name}.bias"] = torch.randn(out, generator=generator) / 3

    add("wte", args["vocab_size"], width)
    add("wpe", args["block_size"], width)
    for layer in range(2):
        add(f"h.{layer}.ln_1", width)
        add(f"h.{layer}.attn.c_attn", 3 * width, width)
        add(f"h.{layer}.attn.c_proj", width, width)
        add(f"h.{layer}.ln_2", width)
        add(f"h.{layer}.mlp.c_fc", 4 * width, width)
        add(f"h.{layer}.mlp.c_proj", width, 4 * width)
        tensors[f"{prefix}transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24)
    add("ln_f", width)
    tensors[f"{prefix}lm_head.weight"] = tensors[f"{prefix}transformer.wte.weight"]
    folder.mkdir(exist_ok=True)
    BYTES.save(folder / FILE_NAME)
    optimizer = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3}]}
    content = {"model": tensors, "optimizer": optimizer, "model_args": args, "iter_num": 5}
    torch.save({**content, "config": {"dataset": "x"}}, folder / "ckpt.pt")
    return folder / "ckpt.pt"


def plain_logits(path: Path) -> Tensor:
    """What nanoGPT computes from the file, written with Hugging Face's network: exact GELU."""
    content = torch.load(path, weights_only=True)
    args = content["model_args"]
    config = small(n_positions=24, activation_function="gelu", vocab_size=args["vocab_size"])
    model = GPT2LMHeadModel(config)
    model.train(False)
    wanted = model.state_dict()
    for name, tensor in wanted.items():
        stored = content["model"].get(name, content["model"].get(f"_orig_mod.{name}"))
        if stored is None:
            tensor.zero_()
        else:
            transposed = "wte" not in name and "wpe" not in name and "lm_head" not in name
            tensor.copy_(stored.t() if stored.dim() == 2 and transposed else stored)
    return hf_logits(model)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_nanogpt(tmp_path: Path, bias: bool, prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    path = nanogpt(tmp_path / "out-mine", bias=bias, prefix=prefix)
    loaded = load(path)
    assert (loaded.name, loaded.config.n_ctx, loaded.config.activation) == ("out-mine", 24, "gelu")
    assert loaded.config.tied_head
    torch.testing.assert_close(logits(loaded.model), plain_logits(path), atol=1e-4, rtol=0)
    assert any("prefer safetensors" in message for message in caplog.messages)
    assert load(path.parent).fingerprint == loaded.fingerprint


def test_nanogpt_can_be_saved_as_ours(tmp_path: Path) -> None:
    loaded = load(nanogpt(tmp_path / "theirs", bias=False))
    save(tmp_path / "ours", loaded.model, loaded.tokenizer, torch.float32)
    assert load(tmp_path / "ours").fingerprint == loaded.fingerprint


def test_a_nanogpt_file_may_have_any_name(tmp_path: Path) -> None:
    path = nanogpt(tmp_path).rename(tmp_path / "step.2000.pt")
    assert load(path).name == "step.2000"


def test_nanogpt_biases_must_be_what_the_file_says(tmp_path: Path) -> None:
    path = nanogpt(tmp_path)
    content = torch.load(path, weights_only=True)
    content["model_args"]["bias"] = False
    torch.save(content, path)
    assert "ckpt.pt: unexpected h.0.attn.c_attn.bias" in refusal(path)
    content = torch.load(nanogpt(tmp_path, bias=False), weights_only=True)
    content["model_args"]["bias"] = True
    torch.save(content, path)
    assert "ckpt.pt: missing h.0.attn.c_attn.bias" in refusal(path)


def test_a_fork_of_nanogpt_is_refused_by_the_name_of_its_switch(tmp_path: Path) -> None:
    assert "use_rmsnorm" in refusal(nanogpt(tmp_path, use_rmsnorm=True))


@pytest.mark.parametrize("key", ["model", "model_args"])
def test_a_file_without_its_parts_is_refused(tmp_path: Path, key: str) -> None:
    path = nanogpt(tmp_path)
    content = torch.load(path, weights_only=True)
    del content[key]
    torch.save(content, path)
    assert f"ckpt.pt: {key}: Field required" in refusal(path)


def test_meta_pkl_is_not_read(tmp_path: Path) -> None:
    path = nanogpt(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / "meta.pkl").write_bytes(b"")
    assert "no vocabulary for 257 tokens" in refusal(path)


class Trap:
    """Unpickled without restrictions, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_b124_code_in_a_pickle_does_not_run(tmp_path: Path, zipped: bool) -> None:
    content = {"model": Trap(tmp_path / "sprung"), "model_args": {}}
    torch.save(content, tmp_path / "ckpt.pt", _use_new_zipfile_serialization=zipped)
    message = refusal(tmp_path)
    assert not (tmp_path / "sprung").exists()
    assert "ckpt.pt" in message
    assert "weights_only" not in message
    assert "mkdir" in message or not zipped


@pytest.mark.parametrize("keep", [0.0, 0.5, 0.999])
def test_a_cut_pickle_is_refused(tmp_path: Path, keep: float) -> None:
    path = nanogpt(tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    assert "ckpt.pt: empty, cut short, or not written by torch.save" in refusal(path)


# GPT-2's vocabulary from tiktoken


def test_b131_gpt2_vocabulary_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the network swallows the request instead of failing."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    over = threading.Event()
    monkeypatch.setattr("tiktoken.get_encoding", lambda name: over.wait(60))
    monkeypatch.setattr(tokenizer, "DOWNLOAD_SECONDS", 0.1)
    path = nanogpt(tmp_path, vocab_size=50257)
    (tmp_path / FILE_NAME).unlink()
    message = refusal(path)
    over.set()
    assert str(tmp_path / "cache" / tokenizer.GPT2_CACHE["vocab.bpe"]) in message
    assert "TIKTOKEN_CACHE_DIR" in message
    assert "vocab.json and merges.txt" in message


@pytest.mark.parametrize("rows", [50257, 50304])
def test_gpt2_vocabulary_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    letters = {bytes([i]): i for i in range(256)}
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)][: 50256 - 256]
    gpt2 = Tokenizer.from_ranks(letters | {p: 256 + i for i, p in enumerate(pairs)}, "gpt2")
    monkeypatch.setattr("tiktoken.get_encoding", {"gpt2": gpt2.encoding}.__getitem__)
    path = nanogpt(tmp_path, vocab_size=rows)
    (tmp_path / FILE_NAME).unlink()
    config = load(path).config
    assert (config.n_vocab, config.n_vocab_padded) == (50257, rows)


# Names and fingerprints


def test_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("stories").parts[-2:] == ("weights", "stories")
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~") == tmp_path
    with pytest.raises(CheckpointError, match="gpt5: no such model; give stories"):
        resolve("gpt5")


def test_a_path_that_is_no_model(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(tmp_path)
    (tmp_path / "x.bin").touch()
    assert "x.bin: neither a folder" in refusal(tmp_path / "x.bin")


def test_fingerprint_follows_weights_shape_and_type(tmp_path: Path) -> None:
    def fingerprint(**changes: object) -> str:
        ours(tmp_path, CONFIG.model_validate({**CONFIG.model_dump(), **changes}))
        return load(tmp_path).fingerprint

    first = fingerprint()
    assert len(first) == 64
    assert fingerprint() == first
    assert fingerprint(norm_epsilon=1e-6) != first
    assert load(tmp_path, torch.bfloat16).fingerprint != load(tmp_path).fingerprint
    fingerprint()
    edit_weights(tmp_path / WEIGHTS, lambda t: t["ln_f.bias"][3].add_(1e-3))
    assert load(tmp_path).fingerprint != first


def test_checkpoint_is_frozen(tmp_path: Path) -> None:
    ours(tmp_path)
    loaded: Checkpoint = load(tmp_path)
    with pytest.raises(AttributeError):
        loaded.name = "other"  # type: ignore[misc]
