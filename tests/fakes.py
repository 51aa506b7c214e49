"""A model and a vocabulary of bytes that tests can read, slow down, hold and break."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.rows import RowPool
from model.step import Draw, Ids, Inspection, MatrixShape, Sampling, TokenScore, Work
from model.tokenizer import Tokenizer
from server.engine.engine import Engine
from server.engine.store import Store
from server.settings import Settings

BYTES = Tokenizer.from_ranks({bytes([i]): i for i in range(256)}, "bytes")
END = BYTES.end_of_text
N_CTX = 64
ROW_BYTES = 8


@dataclass
class FakeModel:
    """Implements model.step.Model. Its logits follow from the last token alone: one letter is
    much likelier than the rest. `raises_at`, `nan_at` and `holds_at` are numbers of calls of `run`.
    """

    n_ctx: int = N_CTX
    n_vocab: int = BYTES.n_vocab
    n_layer: int = 3
    n_head: int = 2
    delay: float = 0.0  # seconds that a step takes
    raises_at: int | None = None
    nan_at: int | None = None
    holds_at: int | None = None  # calls before that one do not wait for `may_run`
    runs: int = 0
    tokens: int = 0  # computed
    may_run: threading.Event = field(default_factory=threading.Event)  # clear it to hold a step
    running: threading.Event = field(default_factory=threading.Event)  # set while a step is held

    def __post_init__(self) -> None:
        if self.holds_at is None:
            self.may_run.set()

    def hold_at(self, run: int) -> None:
        self.holds_at = run
        self.may_run.clear()

    def run(self, work: list[Work]) -> list[Draw]:
        self.runs += 1
        self.running.set()
        if self.runs >= (self.holds_at or 0) and not self.may_run.wait(timeout=60):
            raise TimeoutError("nobody lets the model run")
        self.running.clear()
        time.sleep(self.delay)
        self.tokens += sum(w.end - w.start for w in work)
        if self.runs == self.raises_at:
            raise RuntimeError("the fake model is broken, as it was told")
        return [
            Draw(failed=self.runs == self.nan_at) if self.runs == self.nan_at else draw(w)
            for w in work
        ]

    def read_rows(self, rows: Ids) -> NDArray[np.uint8]:
        return np.zeros((len(rows), ROW_BYTES), np.uint8)  # its rows hold nothing

    def write_rows(self, rows: Ids, data: NDArray[np.uint8]) -> None:
        assert data.shape == (len(rows), ROW_BYTES)

    def inspect(self, tokens: Sequence[int], layer: int, head: int) -> Inspection:
        """Each token looks at itself and those before it alike; scores name layer and head."""
        n = len(tokens)
        weights = (
            np.tril(np.ones((n, n), np.float32)) / np.arange(1, n + 1, dtype=np.float32)[:, None]
        )
        scores = np.full((n, n), 10 * layer + head, np.float32)
        return Inspection(scores, weights, weights[-1], [MatrixShape("Q", "", (n, 4), (1, 4))])

    def break_next(self) -> None:
        self.raises_at = self.runs + 1


def logits_after(token: int) -> NDArray[np.float64]:
    logits: NDArray[np.float64] = np.sin(np.arange(BYTES.n_vocab) * (token + 1.0))
    logits[ord("a") + (token * 7 + 1) % 26] = 5.0
    logits[END] = -20.0  # never by chance
    return logits


def draw(work: Work) -> Draw:
    result = Draw()
    if work.score is not None and work.targets is not None:
        for last, target in zip(work.tokens[work.start :], work.targets, strict=False):
            result.prompt_scores.append(score(logits_after(int(last)), int(target), work.score))
    if work.sampling is not None:
        raw = logits_after(int(work.tokens[-1]))
        result.token = choose(raw, work.sampling, work.banned, work.position)
        if work.sampling.logprobs is not None:
            result.score = score(raw, result.token, work.sampling.logprobs)
    return result


def score(logits: NDArray[np.float64], token: int, n: int) -> TokenScore:
    logprobs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logprobs, kind="stable")[:n]
    return TokenScore(
        token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best)
    )


def choose(
    raw: NDArray[np.float64], sampling: Sampling, banned: tuple[int, ...], position: int
) -> int:
    logits = raw.copy()
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    logits[list(banned)] = -np.inf
    if sampling.temperature < 1e-5:
        return int(np.argmax(logits))
    weights = np.exp((logits - logits.max()) / sampling.temperature)
    key = f"{sampling.seed} {sampling.copy} {position}".encode()
    uniform = int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") / 2**48
    return int(np.searchsorted(np.cumsum(weights) / weights.sum(), uniform, side="right"))


def store_of(settings: Settings) -> Store | None:
    if settings.state_dir is None:
        return None
    return Store(settings.state_dir, model="fake", tokenizer=BYTES.fingerprint)


LoadEngine = Callable[[Settings], Engine]


def loads(model: FakeModel, *, rows: int = 4096) -> LoadEngine:
    """What create_app takes: an engine around the fake model."""

    def load(settings: Settings) -> Engine:
        return Engine(
            model,
            BYTES,
            RowPool(rows, ROW_BYTES),
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,
            max_sessions=settings.max_sessions,
            session_ttl=settings.session_ttl,
            store=store_of(settings),
            name="fake",
            root="/models/fake",
        )

    return load
