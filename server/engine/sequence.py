"""What the engine is asked (a request), works on (a sequence) and answers (events)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from model.step import Ids, Sampling, TokenScore
from server.engine.text import TextStream


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Request:
    """One completion of one prompt. A call for n copies of p prompts is n x p of them, one id."""

    id: str  # of the whole call
    index: int  # of this choice in the call: prompt x n + copy
    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int  # the prompt and these fit into the window
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()  # end of text among them, unless it is ignored
    min_tokens: int = 0
    echo: bool = False  # the text begins with the prompt
    score_prompt: bool = False  # log-probabilities of the prompt, too
    use_cache: bool = True
    session: str | None = None
    tenant: str = ""
    after: int | None = None  # index of the copy whose prompt rows this one waits to share
    show_special: bool = False  # the end token's own text is part of the answer


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time of one choice went, in seconds, and the rows it took."""

    queue: float  # arrival to the first step that computed for it
    prefill: float  # then to its first token
    decode: float  # then to its end
    rows_computed: int
    rows_reused: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of one choice."""

    reason: FinishReason
    timings: Timings


class Token(NamedTuple):
    """A token of the answer, with the place of its text in the choice's text, in characters."""

    id: int
    offset: int
    score: TokenScore | None  # None: not asked for, or the very first token of a prompt


@dataclass(slots=True)  # not frozen: that takes thrice as long to make, and there is one per token
class Delta:
    """New text of one choice, the tokens that it came from, and the end if this is it."""

    id: str
    index: int
    text: str
    tokens: tuple[Token, ...]
    prompt_tokens: int
    completion_tokens: int  # so far
    cached_tokens: int  # prompt tokens whose rows were there already
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a whole call without an answer."""

    id: str
    code: str  # "engine_error", "request_cancelled", "model_failed", ...
    message: str


Event = Delta | Failure


class Sequence:
    """A request at work: its tokens, and the rows of the first `computed` of them.

    Invariant: 0 <= computed <= taken <= n_tokens + 1. `rows`, of which there are `taken`, are held
    in the pool; those behind `computed` are being computed in the running step. A token is drawn
    when computed == n_tokens, and only then. `taken` is n_tokens + 1 only while a step is launched
    behind one that is not read yet: the last row is that of the token which is being drawn.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.n_prompt = len(request.prompt)
        self.n_tokens = self.n_prompt
        self.computed = 0
        self.taken = 0
        self._tokens = np.empty(self.n_prompt + request.max_tokens, np.int32)
        self._tokens[: self.n_prompt] = request.prompt
        self._rows = np.empty(len(self._tokens), np.int32)

        self.text = TextStream(request.stop)
        self.unsent: list[Token] = []  # tokens whose text is still held back
        self.prompt_scores: list[TokenScore] = []
        self.followers: list[Sequence] = []  # copies that wait to share this one's prompt rows

        self.most_rows = 0  # it had the rows below this before, computed or shared
        self.rows_computed = 0
        self.cached_tokens = 0
        self.preempted = False
        self.arrived = time.perf_counter()
        self.started: float | None = None
        self.first_token: float | None = None

    def head(self, n: int) -> Ids:
        """The first `n` tokens."""
        return self._tokens[:n]

    @property
    def tokens(self) -> Ids:
        return self._tokens[: self.n_tokens]

    @property
    def rows(self) -> Ids:
        """Row numbers of the first `taken` tokens."""
        return self._rows[: self.taken]

    @property
    def capacity(self) -> int:
        """Tokens that this request can grow to."""
        return len(self._tokens)

    @property
    def n_generated(self) -> int:
        return self.n_tokens - self.n_prompt

    @property
    def missing(self) -> int:
        """Tokens without a row: what is left to compute before the next draw."""
        return self.n_tokens - self.computed

    @property
    def decoding(self) -> bool:
        """Whether a single row gives the next token, as it does once the prompt is there."""
        return self.n_prompt < self.n_tokens == self.computed + 1 and self.request.use_cache

    @property
    def settled(self) -> bool:
        """Whether the running step gives its next token, and that token is all it needs then."""
        return self.taken == self.n_tokens and self.request.use_cache and not self.followers

    @property
    def reusable(self) -> int:
        """How many rows may come from others: the last token is always computed, for its logits,
        and so is every token whose successor in the prompt is still to be scored.
        """
        if not self.request.use_cache:
            return 0
        if self.request.score_prompt and not self.prompt_scored:
            return len(self.prompt_scores)
        return self.n_tokens - 1

    @property
    def prompt_scored(self) -> bool:
        return len(self.prompt_scores) >= self.n_prompt - 1

    def extend(self, rows: Ids) -> None:
        """Hold `rows` for the next tokens, to be computed in this step."""
        self._rows[self.taken : self.taken + len(rows)] = rows
        self.taken += len(rows)

    def extend_by(self, row: int) -> None:
        """The same for one token."""
        self._rows[self.taken] = row
        self.taken += 1

    def expect(self, row: int, lane: int) -> None:
        """The same for the token that lane `lane` of the running step draws."""
        self._tokens[self.n_tokens] = -1 - lane
        self.extend_by(row)

    def reuse(self, n: int) -> int:
        """It starts with the rows of `n` tokens from others; returns how many are hits: what it
        had before it was preempted is no hit.
        """
        hits = max(0, n - self.most_rows)
        self.most_rows += hits
        self.cached_tokens += hits
        return hits

    def advance(self, end: int) -> int:
        """The step is done: all rows up to `end` have been computed. Returns how many of them the
        sequence had before.
        """
        before, self.computed = self.computed, end
        self.rows_computed += end - before
        if before >= self.most_rows:  # as in every step of a request that was never preempted
            self.most_rows = end
            return 0
        recomputed = min(end, self.most_rows) - before
        self.most_rows = max(self.most_rows, end)
        return recomputed

    def append(self, token: int) -> None:
        self._tokens[self.n_tokens] = token
        self.n_tokens += 1

    def trim(self, k: int) -> Ids:
        """Let go of rows[k:]; returns them, for the pool."""
        dropped = self.rows[k:].copy()
        self.taken = k
        self.computed = min(self.computed, k)
        return dropped
