"""What a model is (its shape) and what it costs (parameters, operations, bytes)."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

Activation = Literal["gelu_tanh", "gelu", "relu"]


class ConfigError(ValueError):
    """A shape that cannot be built, or a config file that cannot be read."""


class GPTConfig(BaseModel):
    """The shape of a decoder-only GPT. `d_head` and `d_ff` follow from the width.

    Widths and counts are in elements. `n_vocab` counts the tokens that the tokenizer knows;
    `n_vocab_padded` counts the rows of the embedding, which some checkpoints round up.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    n_layer: PositiveInt
    n_head: PositiveInt
    d_model: PositiveInt
    n_ctx: PositiveInt
    n_vocab: PositiveInt
    n_kv_head: PositiveInt = None  # type: ignore[assignment]  # filled below: n_head
    n_vocab_padded: PositiveInt = None  # type: ignore[assignment]  # filled below: n_vocab
    d_ff: PositiveInt = None  # type: ignore[assignment]  # filled below: 4 d_model
    activation: Activation = "gelu_tanh"
    norm_epsilon: PositiveFloat = 1e-5
    tied_head: bool = True
    norm_first: bool = True  # GPT-2's order; False: the first GPT's, which normalises each sum

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        derived = {
            "n_kv_head": fields.get("n_head"),
            "n_vocab_padded": fields.get("n_vocab"),
            "d_ff": 4 * fields["d_model"] if isinstance(fields.get("d_model"), int) else None,
        }
        return {**fields, **{k: v for k, v in derived.items() if fields.get(k) is None}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is not divisible by n_head {self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} is not divisible by n_kv_head {self.n_kv_head}")
        if self.n_vocab_padded < self.n_vocab:
            raise ValueError(
                f"n_vocab_padded {self.n_vocab_padded} is below n_vocab {self.n_vocab}"
            )
        return self

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read `config.json`. Raises ConfigError naming the file and the field."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            raise ConfigError(f"{path}: {explain(error)}") from error

    def save(self, path: Path) -> None:
        path.write_text(self.model_dump_json(indent=2) + "\n")

    @property
    def d_head(self) -> int:
        return self.d_model // self.n_head

    @property
    def d_kv(self) -> int:
        """Width of one token's keys (or values) over all heads."""
        return self.n_kv_head * self.d_head

    @property
    def parameters(self) -> int:
        """Trainable numbers, a tied head counted once."""
        d, norm = self.d_model, 2 * self.d_model
        attention = d * (d + 2 * self.d_kv) + (d + 2 * self.d_kv) + d * d + d
        ffn = 2 * d * self.d_ff + self.d_ff + d
        embeddings = (self.n_vocab_padded + self.n_ctx) * d
        head = 0 if self.tied_head else self.n_vocab_padded * d
        last_norm = norm if self.norm_first else 0
        return self.n_layer * (attention + ffn + 2 * norm) + last_norm + embeddings + head

    def flops(self, context: int, rows: int = 1, logits: int = 1) -> int:
        """Floating-point operations (2 per multiply-add) of `rows` rows, and the logits of some.

        `context` is the number of rows attended to, the new ones included; what a mask hides is
        counted, because it is computed.
        """
        layer = self.attention_multiply_adds(context) + 2 * self.d_model * self.d_ff
        head = self.n_vocab_padded * self.d_model
        return 2 * (rows * self.n_layer * layer + logits * head)

    def attention_multiply_adds(self, context: int) -> int:
        """Of one row in one layer: 4 d^2 for the projections, 2 context d for scores and sums.

        The T rows of each of B sequences take 4BTd^2 + 2BT^2d, however many heads there are; with
        fewer key heads the projections take less.
        """
        d = self.d_model
        return 2 * d * (d + self.d_kv) + 2 * context * d

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of one row: a token's key and value in every layer and head."""
        return 2 * self.n_layer * self.d_kv * itemsize


def explain(error: ValidationError) -> str:
    """The first fault of a pydantic error in one line: field, then what is wrong."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


PRESETS = {
    "gpt2": GPTConfig(n_layer=12, n_head=12, d_model=768, n_ctx=1024, n_vocab=50257),
    "gpt2-medium": GPTConfig(n_layer=24, n_head=16, d_model=1024, n_ctx=1024, n_vocab=50257),
    "gpt2-large": GPTConfig(n_layer=36, n_head=20, d_model=1280, n_ctx=1024, n_vocab=50257),
    "gpt2-xl": GPTConfig(n_layer=48, n_head=25, d_model=1600, n_ctx=1024, n_vocab=50257),
    "stories": GPTConfig(n_layer=6, n_head=8, d_model=256, n_ctx=512, n_vocab=4096),
}
