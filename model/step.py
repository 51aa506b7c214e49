"""One step of the model: what the engine asks for and what it gets back. Plain data, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request chooses its tokens. The neutral value of each field changes nothing."""

    temperature: float = 1.0  # 0 is greedy; the lowest id wins a tie
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    copy: int = 0  # which of the n copies of its prompt this is; enters the noise beside the seed
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None  # alternatives wanted beside the chosen token; None: no numbers


@dataclass(slots=True)
class Work:
    """One sequence's share of a step: compute the rows of tokens[start:end].

    `tokens` (end,) are all tokens of the sequence up to `end`; `rows` (end,) their row numbers in
    the pool, of which those before `start` are computed already. With `sampling`, the token after
    the last row is drawn; `n_prompt` says where the generated part of `tokens` begins. With
    `score`, the raw log-probabilities of `targets`, the known tokens at start + 1 and on, are
    wanted with that many alternatives each.
    """

    tokens: Ids
    start: int
    rows: Ids
    n_prompt: int
    sampling: Sampling | None = None
    banned: tuple[int, ...] = ()  # ids that may not be drawn in this step (min_tokens)
    score: int | None = None
    targets: Ids | None = None

    @property
    def end(self) -> int:
        return len(self.tokens)

    @property
    def position(self) -> int:
        """Where the drawn token will stand."""
        return len(self.tokens)


class TokenScore(NamedTuple):
    """A token, its raw log-probability, and the best alternatives, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Draw:
    """What a step made of one Work. `failed` says that its numbers were not finite."""

    token: int | None = None
    score: TokenScore | None = None
    prompt_scores: list[TokenScore] = field(default_factory=list)
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that has begun. `read` waits for its end and gives one Draw per Work, in order; it
    may raise, and the whole step is then lost.

    If it `leads`, one more step may be launched before it is read, and there -1 - i is the id of
    the token that Work i of this one draws (any token, if the draw fails).
    """

    read: Callable[[], list[Draw]]
    leads: bool = False


class MatrixShape(NamedTuple):
    """A matrix of the attention of one head: its shape when all rows are computed, and when the
    last one is.
    """

    name: str
    meaning: str
    uncached: tuple[int, ...]
    cached: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """One head over a text of T tokens. `scores` (T, T) are Q Kᵀ / √d before the mask, `weights`
    (T, T) after mask and softmax; `row` (T,) is the last row of weights, computed by itself.
    """

    scores: NDArray[np.float32]
    weights: NDArray[np.float32]
    row: NDArray[np.float32]
    shapes: list[MatrixShape]


class Model(Protocol):
    """What the engine needs of a model: the runner, or a fake with chosen answers in tests."""

    n_ctx: int
    n_vocab: int
    n_layer: int
    n_head: int

    def run(self, work: list[Work]) -> list[Draw]:
        """Compute every Work; one Draw each, in order. May raise: the whole step is then lost."""
        ...

    def read_rows(self, rows: Ids) -> NDArray[np.uint8]:
        """The bytes of rows that are computed: (n, row_bytes)."""
        ...

    def write_rows(self, rows: Ids, data: NDArray[np.uint8]) -> None:
        """Put back what `read_rows` gave, into other rows or in another process."""
        ...

    def inspect(self, tokens: Sequence[int], layer: int, head: int) -> Inspection:
        """What a head looks at, between two steps; no row of the pool is read or written."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """A model that computes while the CPU does something else: steps may be launched, and read
    later, in the order in which they were launched. What is computed is in that order, too, and so
    is all that reads or writes rows.
    """

    def launch(self, work: list[Work]) -> Launched:
        """Begin a step. May raise: the whole step is then lost."""
        ...
