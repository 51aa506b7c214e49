"""Three ways to write a GPT to disk, read into one: ours, Hugging Face's GPT-2 and nanoGPT's.

A format is told by what a folder says of itself, never by the shapes in it: the square attention
projection looks the same transposed. Tensors stay views into the mapped files; nothing is copied.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.config import Activation, GPTConfig, explain
from model.tokenizer import FILE_NAME, Tokenizer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NANOGPT = "ckpt.pt"

EMBEDDING, HEAD = "wte.weight", "lm_head.weight"
PREFIXES = ("_orig_mod.", "transformer.")  # torch.compile's, then the one around the blocks
MASKS = (r"h\.\d+\.attn\.bias", r"h\.\d+\.attn\.masked_bias")  # causal masks, saved as if learned
CONV1D = r".*\.(c_attn|c_proj|c_fc)\.weight"  # Hugging Face keeps these (inputs, outputs)
GPT2_ROWS = (50257, 50304)  # GPT-2's vocabulary, and the same padded to a multiple of 64

HF_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}

log = logging.getLogger(__name__)


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it stands: which file, and what is wrong with it."""


@dataclass(frozen=True)
class Stored:
    """A checkpoint as read: our names, matrices `(outputs, inputs)`, tensors still on disk.

    A tied head is not among the tensors. `file` is what error messages about them name.
    """

    config: GPTConfig
    tokenizer: Tokenizer
    tensors: Mapping[str, Tensor]
    file: Path
    has_biases: bool = True


def read(path: Path) -> Stored:
    """Read a model folder, or a nanoGPT `.pt` file. Raises CheckpointError."""
    if path.is_file() and path.suffix == ".pt":
        return _read_nanogpt(path)
    config = path / CONFIG
    if config.is_file():
        model_type = _read_object(config).get("model_type")
        if model_type is None:
            return _read_ours(path)
        if model_type == "gpt2":
            return _read_hugging_face(path)
        raise CheckpointError(f"{config}: model_type {model_type!r} is not gpt2")
    if (path / NANOGPT).is_file():
        return _read_nanogpt(path / NANOGPT)
    raise CheckpointError(f"{path}: neither a folder with {CONFIG} or {NANOGPT} nor a .pt file")


def _read_ours(folder: Path) -> Stored:
    config = GPTConfig.load(folder / CONFIG)
    tokenizer = Tokenizer.load(folder / FILE_NAME)
    if tokenizer.n_vocab != config.n_vocab:
        raise CheckpointError(
            f"{folder / CONFIG}: n_vocab {config.n_vocab}, but {FILE_NAME} has {tokenizer.n_vocab}"
        )
    return Stored(config, tokenizer, _read_safetensors(folder / WEIGHTS), folder / WEIGHTS)


class _HuggingFaceConfig(BaseModel):
    """The part of `GPT2Config` that changes the result; a value we cannot honour is an error."""

    n_layer: int
    n_head: int
    n_embd: int
    n_positions: int = Field(validation_alias=AliasChoices("n_positions", "n_ctx"))
    vocab_size: int
    n_inner: int | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh", "gelu", "relu"] = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    add_cross_attention: Literal[False] = False


def _read_hugging_face(folder: Path) -> Stored:
    with _naming(folder / CONFIG):
        c = _HuggingFaceConfig.model_validate_json((folder / CONFIG).read_bytes())
    file, saved = _read_shards(folder)
    tensors = {
        name: tensor.t() if re.fullmatch(CONV1D, name) else tensor
        for name, tensor in _rename(saved, file).items()
    }
    if not c.tie_word_embeddings and HEAD not in tensors:
        raise CheckpointError(f"{file}: {HEAD} is missing, and the head is not tied")
    tensors, tied = _settle_head(tensors, file)
    tokenizer = _tokenizer_beside(folder, c.vocab_size)
    with _naming(folder / CONFIG):
        config = GPTConfig(
            n_layer=c.n_layer,
            n_head=c.n_head,
            d_model=c.n_embd,
            n_ctx=c.n_positions,
            n_vocab=tokenizer.n_vocab,
            n_vocab_padded=c.vocab_size,
            d_ff=4 * c.n_embd if c.n_inner is None else c.n_inner,
            activation=HF_ACTIVATIONS[c.activation_function],
            norm_epsilon=c.layer_norm_epsilon,
            tied_head=tied,
        )
    return Stored(config, tokenizer, tensors, file)


class _NanoGPTArgs(BaseModel):
    """nanoGPT's `model_args`. A fork's own switches change the network, so they are refused."""

    model_config = ConfigDict(extra="forbid")

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    vocab_size: int
    bias: bool
    dropout: float = 0.0


class _NanoGPTFile(BaseModel):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    args: _NanoGPTArgs = Field(validation_alias="model_args")
    tensors: dict[str, Tensor] = Field(validation_alias="model")


def _read_nanogpt(file: Path) -> Stored:
    log.warning("%s: a pickle, read by PyTorch's restricted loader; prefer safetensors", file)
    with _naming(file):
        saved = _NanoGPTFile.model_validate(_unpickle(file))
    c = saved.args
    tensors, tied = _settle_head(_rename(saved.tensors, file), file)
    tokenizer = _tokenizer_beside(file.parent, c.vocab_size)
    with _naming(file):
        config = GPTConfig(
            n_layer=c.n_layer,
            n_head=c.n_head,
            d_model=c.n_embd,
            n_ctx=c.block_size,
            n_vocab=tokenizer.n_vocab,
            n_vocab_padded=c.vocab_size,
            activation="gelu",  # exact since June 2023, and the file does not say which it was
            tied_head=tied,
        )
    return Stored(config, tokenizer, tensors, file, has_biases=c.bias)


def _unpickle(file: Path) -> object:
    if not zipfile.is_zipfile(file):
        raise CheckpointError(f"{file}: empty, cut short, or not written by torch.save")
    try:
        saved: object = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # The loader's message goes on to recommend the full unpickler: only its reason is kept.
        reason = re.search(r"unsupported (?:GLOBAL|global|class|operand)\S* \S+", str(error))
        detail = f" ({reason[0]})" if reason else ""
        raise CheckpointError(f"{file}: refused by PyTorch's restricted loader{detail}") from error
    return saved


def _read_shards(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The file that lists a folder's tensors, and the tensors.

    The index decides where there is one: what it does not name is left alone, even a single
    `model.safetensors` from another save.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if not single.exists() and not index.exists():
        pickles = sorted(folder.glob("pytorch_model*.bin"))
        if pickles:
            raise CheckpointError(
                f"{pickles[0]}: a pickle, which is not read; convert it once with transformers: "
                f"AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
            )
        raise CheckpointError(f"{folder}: neither {WEIGHTS} nor {INDEX} is there")
    if index.exists():
        tensors, shards = _read_index(index)
    else:
        tensors, shards = _read_safetensors(single), {WEIGHTS}
    for stray in sorted(folder.glob("*.safetensors")):
        if stray.name not in shards:
            log.warning("%s: not part of the model, left alone", stray)
    return index if index.exists() else single, tensors


def _read_index(index: Path) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors of every shard, each where the index places it, and the shards' names."""
    places = _read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(p, str) for p in places.values()):
        raise CheckpointError(f"{index}: weight_map does not place tensors in files")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(places.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index}: names {shard!r}, which is not a file beside it")
        found = _read_safetensors(index.parent / shard)
        placed = {name for name, place in places.items() if place == shard}
        if absent := placed - found.keys():
            raise CheckpointError(f"{index.parent / shard}: lacks {some(absent)}")
        if surplus := found.keys() - placed:
            raise CheckpointError(
                f"{index.parent / shard}: {INDEX} does not place there {some(surplus)}"
            )
        tensors |= found
    return tensors, set(places.values())


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    """Views into the mapped file. safetensors checks the header against the file's length."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"{file}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: empty, cut short or not safetensors ({error})") from error


def _rename(saved: Mapping[str, Tensor], file: Path) -> dict[str, Tensor]:
    """Our names, without prefixes and masks. Two tensors that come to one name are an error."""
    tensors: dict[str, Tensor] = {}
    for full_name, tensor in saved.items():
        name = full_name
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        if any(re.fullmatch(mask, name) for mask in MASKS):
            continue
        if name in tensors:
            raise CheckpointError(f"{file}: {name} is there twice, with and without a prefix")
        tensors[name] = tensor
    return tensors


def _settle_head(tensors: Mapping[str, Tensor], file: Path) -> tuple[dict[str, Tensor], bool]:
    """The tensors without a tied head, and whether it is tied.

    safetensors keeps one of two shared tensors, and not always the embedding.
    """
    embedding, head = tensors.get(EMBEDDING), tensors.get(HEAD)
    if embedding is None and head is None:
        raise CheckpointError(f"{file}: neither {EMBEDDING} nor {HEAD} is there")
    if embedding is not None and head is not None and not torch.equal(embedding, head):
        return dict(tensors), False
    kept = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    if embedding is None and head is not None:
        kept[EMBEDDING] = head
    return kept, True


def _tokenizer_beside(folder: Path, n_rows: int) -> Tokenizer:
    """The vocabulary of a foreign checkpoint: the first that lies beside the weights, or GPT-2's.

    `n_rows` of the embedding may be more than the vocabulary has (padding), never fewer.
    """
    if (folder / "vocab.json").exists() or (folder / "merges.txt").exists():
        tokenizer = Tokenizer.load_gpt2_files(folder)
    elif (folder / FILE_NAME).exists():
        tokenizer = Tokenizer.load(folder / FILE_NAME)
    elif (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.load_tokenizer_json(folder / "tokenizer.json")
    elif n_rows in GPT2_ROWS:
        tokenizer = Tokenizer.gpt2()
    else:
        raise CheckpointError(
            f"{folder}: no vocabulary for {n_rows} tokens: put {FILE_NAME}, or vocab.json and "
            f"merges.txt, beside the weights (a pickle such as meta.pkl is not read)"
        )
    if tokenizer.n_vocab > n_rows:
        raise CheckpointError(
            f"{folder}: the vocabulary has {tokenizer.n_vocab} tokens, the embedding {n_rows} rows"
        )
    return tokenizer


def _read_object(file: Path) -> dict[str, object]:
    with _naming(file):
        content = json.loads(file.read_bytes())
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: not a JSON object")
    return content


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn the faults of reading and checking `file` into one line that names it."""
    try:
        yield
    except CheckpointError:
        raise
    except ValidationError as error:
        raise CheckpointError(f"{file}: {explain(error)}") from error
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not JSON ({error})") from error


def some(names: Iterable[str], shown: int = 3) -> str:
    """A few names, and how many more there are."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - shown} more" if len(ordered) > shown else ""
    return ", ".join(ordered[:shown]) + rest
