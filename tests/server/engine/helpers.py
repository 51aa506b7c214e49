"""A model that notices every wrong row, and an engine around it that can be checked and asked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypedDict, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from model.rows import RowPool
from model.step import Draw, Ids, Model, Sampling, TokenScore, Work
from model.tokenizer import Tokenizer
from server.engine.engine import Engine
from server.engine.sequence import Delta, Event, Failure, Finish, Request, Sequence
from server.engine.snapshot import Snapshot

BYTES = Tokenizer.from_ranks({bytes([i]): i for i in range(256)}, "bytes")
END: int = BYTES.end_of_text
ROW_BYTES = 8
# What the fake model says: plain letters, the halves of characters, and now and then the end.
ALPHABET: list[int] = [*b"aaabbc ", *"é".encode(), *"日".encode(), END]

Counts = NDArray[np.integer[Any]]
Next = Callable[[tuple[int, ...], int], int]  # (tokens, n_prompt) to the token that follows


def ids(text: str | bytes) -> tuple[int, ...]:
    """Tokens of the byte vocabulary."""
    return tuple(text.encode() if isinstance(text, str) else text)


class FakeModel:
    """Says what a hash of all tokens says, read through their rows.

    A row remembers its token and the hash of all tokens up to it, and is forgotten once it is free.
    So a row that is missing, stale, freed, or another text's raises.
    """

    def __init__(self, n_ctx: int, pool: RowPool, says: Next | None = None) -> None:
        self.n_ctx, self.n_vocab = n_ctx, BYTES.n_vocab
        self.pool, self.says = pool, says
        self.spans: list[list[int]] = []  # tokens computed by each Work, step by step
        self.draws = 0
        self.broken = False  # raise in the next step
        self.nan = False  # no number of the next step is finite
        self._rows: dict[int, tuple[int, int]] = {}

    def run(self, work: list[Work]) -> list[Draw]:
        if self.broken:
            self.broken = False
            raise RuntimeError("broken")
        self._rows = {r: v for r, v in self._rows.items() if self.pool.references[r]}
        self._check(work)
        hashes = [self._read(w) for w in work]
        draws = [self._write(w, h) for w, h in zip(work, hashes, strict=True)]
        return self._done(work, draws)

    def _check(self, work: list[Work]) -> None:
        """What the pool says of the rows of a step."""
        for w in work:
            assert 0 <= w.start < w.end <= self.n_ctx
            assert len(w.rows) >= w.end
            assert (self.pool.pins[w.rows[: w.end]] > 0).all(), "a row is not pinned"
        written = np.concatenate([w.rows[w.start : w.end] for w in work])
        assert len(set(written)) == len(written), "a row is written twice"
        assert (self.pool.references[written] == 1).all(), "a row is written that others hold"

    def _done(self, work: list[Work], draws: list[Draw]) -> list[Draw]:
        """Count a step that is over; what is told of it."""
        self.spans.append([w.end - w.start for w in work])
        self.draws += sum(draw.token is not None for draw in draws)
        if self.nan:
            self.nan = False
            return [Draw(failed=True) for _ in draws]
        return draws

    def _read(self, work: Work) -> int:
        """Hash of the tokens before `start`, after a check of every row."""
        h = 0
        for row, token in zip(work.rows[: work.start], work.tokens, strict=False):
            h = step_hash(h, token)
            assert self._rows.get(row) == (token, h), f"row {row} is not that of its token"
        return h

    def _write(self, work: Work, h: int) -> Draw:
        draw = Draw()
        targets = [] if work.targets is None else work.targets.tolist()
        for i in range(work.start, work.end):
            token = int(work.tokens[i])
            h = step_hash(h, token)
            self._rows[int(work.rows[i])] = token, h
            if i - work.start < len(targets):
                draw.prompt_scores.append(TokenScore(targets[i - work.start], -float(h % 997), ()))
        if work.sampling is not None:
            draw.token = self._next(work, work.sampling, h)
            if work.sampling.logprobs is not None:
                draw.score = TokenScore(draw.token, -float(h % 991), ())
        return draw

    def _next(self, work: Work, sampling: Sampling, h: int) -> int:
        if self.says is not None:
            return self.says(tuple(work.tokens.tolist()), work.n_prompt)
        noise = hash((sampling.seed, sampling.copy, work.position)) if sampling.temperature else 0
        choices = [token for token in ALPHABET if token not in work.banned]
        return choices[(h ^ noise) % len(choices)]


def step_hash(h: int, token: int) -> int:
    return (h * 1_000_003 + int(token) + 1) % (2**61 - 1)


def script(answer: str | bytes) -> Next:
    """Every prompt is answered with these bytes, again and again."""
    said = ids(answer)
    return lambda tokens, n_prompt: said[(len(tokens) - n_prompt) % len(said)]


TALKS = script("a")  # never ends by itself


def fake_engine(
    *,
    n_rows: int = 2000,
    n_ctx: int = 64,
    max_running: int = 16,
    step_tokens: int = 64,
    max_sessions: int = 100,
    says: Next | None = None,
) -> tuple[Engine, FakeModel]:
    pool = RowPool(n_rows, ROW_BYTES)
    model = FakeModel(n_ctx, pool, says)
    engine = Engine(
        cast(Model, model),  # it steps; nobody here saves rows or inspects
        BYTES,
        pool,
        max_running=max_running,
        step_tokens=step_tokens,
        max_sessions=max_sessions,
    )
    return engine, model


@dataclass
class Answer:
    """What came of one choice."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)  # the prompt's first, if it is echoed
    scores: list[TokenScore | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: Finish | None = None
    failure: Failure | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def said(self) -> tuple[object, ...]:
        """What must be the same, however it was computed."""
        reason = self.finish and self.finish.reason
        return self.text, self.tokens, self.scores, self.offsets, reason, self.completion_tokens


class Client:
    """Submits requests to an engine, steps it, and keeps the answers by (id, index)."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[tuple[str, int], Answer] = {}
        self._calls = 0

    def submit(self, *requests: Request) -> list[Answer]:
        """One call; the requests get its id."""
        self._calls += 1
        requests = tuple(replace(r, id=f"call-{self._calls}") for r in requests)
        assert all(len(r.prompt) + r.max_tokens <= self.engine.model.n_ctx for r in requests)
        answers = [self.answers.setdefault((r.id, r.index), Answer()) for r in requests]
        self.engine.submit(requests)
        return answers

    def step(self) -> list[Event]:
        events = self.engine.step()
        for event in events:
            if isinstance(event, Failure):
                for (call, _), answer in self.answers.items():
                    if call == event.id:
                        answer.failure = event
            else:
                self._enter(event)
        check(self.engine)
        return events

    def _enter(self, delta: Delta) -> None:
        answer = self.answers[delta.id, delta.index]
        assert answer.finish is None, "an answer goes on after its end"
        assert delta.text or delta.finish, "an event without text"
        answer.text += delta.text
        answer.tokens += [token.id for token in delta.tokens]
        answer.scores += [token.score for token in delta.tokens]
        answer.offsets += [token.offset for token in delta.tokens]
        answer.cached_tokens = delta.cached_tokens
        answer.completion_tokens = delta.completion_tokens
        answer.finish = delta.finish

    def run(self, most_steps: int = 10_000) -> int:
        """Step until nothing is left to do; returns the number of steps."""
        steps = 0
        while self.engine.has_work:
            assert steps < most_steps, "no end is in sight"
            self.step()
            steps += 1
        return steps

    def ask(self, *requests: Request) -> list[Answer]:
        answers = self.submit(*requests)
        self.run()
        return answers


class Fields(TypedDict, total=False):
    """What a test may want of a request beside its prompt."""

    index: int
    sampling: Sampling
    stop: tuple[str, ...]
    stop_ids: frozenset[int]
    min_tokens: int
    echo: bool
    score_prompt: bool
    show_special: bool
    use_cache: bool
    session: str | None
    tenant: str


def request(
    prompt: str | bytes | Iterable[int], max_tokens: int = 8, **fields: Unpack[Fields]
) -> Request:
    """A greedy request that ends at the end of text."""
    tokens = ids(prompt) if isinstance(prompt, str | bytes) else tuple(prompt)
    plain = Request("", 0, tokens, max_tokens, Sampling(temperature=0.0), stop_ids=frozenset({END}))
    return replace(plain, **fields)


def copies(n: int, first: Request) -> list[Request]:
    """`n` copies of a request that share its prompt; they differ by their noise."""
    sampling = replace(first.sampling, temperature=1.0)
    return [
        replace(
            first,
            index=i,
            sampling=replace(sampling, copy=i),
            after=0 if i and first.use_cache else None,
        )
        for i in range(n)
    ]


@cache
def alone(asked: Request) -> tuple[Answer, tuple[int, ...]]:
    """The oracle: the request in an engine of its own without a cache, and what its session holds
    afterwards.
    """
    engine, _ = fake_engine(n_rows=64, max_running=1)
    (answer,) = Client(engine).ask(
        replace(asked, index=0, use_cache=False, session="s", tenant="", after=None)
    )
    return answer, session_tokens(engine, "s")


def session_tokens(engine: Engine, name: str, tenant: str = "") -> tuple[int, ...]:
    return tuple(engine.sessions._named[tenant, name].tokens.tolist())


def check(engine: Engine) -> None:
    """Everything that the pool, the sessions and the snapshot say adds up between two steps."""
    pool, running = engine.pool, engine.scheduler.running
    ahead = engine._flight.sequences if engine._flight else []
    for sequence in running:
        done = sequence.computed + (sequence in ahead)  # a step in flight computes one row
        assert 0 <= done == sequence.taken <= sequence.n_tokens <= sequence.capacity
    assert all(sequence.taken == 0 for sequence in engine.scheduler.waiting)
    pins = count(pool, (sequence.rows for sequence in running))
    references = pins + count(pool, (kept.rows for kept in engine.sessions.with_rows()))
    np.testing.assert_array_equal(pool.pins, pins)
    np.testing.assert_array_equal(pool.references, references)
    assert sorted(pool.free_rows()) == np.flatnonzero(references == 0).tolist()
    check_snapshot(engine.snapshot(), pool, running, references, pins)


def count(pool: RowPool, arrays: Iterable[Ids]) -> Counts:
    """How often each row of the pool stands in the arrays."""
    return np.bincount(np.concatenate([*arrays, np.zeros(0, np.int32)]), minlength=pool.n_rows)


def check_snapshot(
    s: Snapshot,
    pool: RowPool,
    running: Collection[Sequence],
    references: Counts,
    pins: Counts,
) -> None:
    assert s.rows == pool.n_rows == s.rows_free + s.rows_running + s.rows_idle
    assert s.rows_free == np.count_nonzero(references == 0)
    assert s.rows_running == np.count_nonzero(pins)
    assert s.rows_shared == np.count_nonzero(references > 1)
    assert s.row_bytes == pool.row_bytes
    assert s.running == len(running)
    assert s.rows_recomputed_total <= s.rows_computed_total
    assert s.rows_reused_total <= s.prompt_tokens_total
    for record in s.sessions.values():
        assert record.bytes == record.rows * pool.row_bytes
        assert record.rows <= record.tokens
