"""The engine: requests in, steps, events out. Synchronous, without threads, usable without HTTP."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Ordered
from itertools import zip_longest

import numpy as np

from model.rows import RowPool
from model.step import Draw, Ids, Model, TokenScore, Work
from model.tokenizer import Tokenizer
from server.engine.flight import Flight, launches
from server.engine.rowmap import RowRun, row_runs
from server.engine.scheduler import Scheduler
from server.engine.sequence import (
    Delta,
    Event,
    Failure,
    Finish,
    FinishReason,
    Request,
    Sequence,
    Timings,
    Token,
)
from server.engine.sessions import Kept, Reset, Sessions, SessionView, common_prefix
from server.engine.snapshot import Snapshot
from server.engine.store import SavedRows, Store

log = logging.getLogger(__name__)


class Engine:
    """Serves requests with a model and a pool of rows, one step at a time.

    `name`, `root`, `device`, `dtype` and `rows_dtype` are words for those who ask. A request is
    checked by its sender: ids below `model.n_vocab`, at least one prompt token, prompt and answer
    within `model.n_ctx`.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        pool: RowPool,
        *,
        max_running: int,
        step_tokens: int,
        max_sessions: int = 10_000,
        session_ttl: float | None = None,
        store: Store | None = None,
        name: str = "",
        root: str = "",
        device: str = "cpu",
        dtype: str = "float32",
        rows_dtype: str = "float32",
    ) -> None:
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.name, self.root, self.device = name, root, device
        self.dtype, self.rows_dtype = dtype, rows_dtype
        self.sessions = Sessions(pool, max_sessions, session_ttl, store)
        self.scheduler = Scheduler(
            pool,
            self.sessions,
            n_ctx=model.n_ctx,
            max_running=max_running,
            step_tokens=step_tokens,
        )
        self._calls: dict[str, list[Sequence]] = {}  # unfinished sequences of each call
        self._launch = launches(model)
        self._flight: Flight | None = None  # the step that is to be read next, if it has begun
        self._steps = self._computed = self._recomputed = self._generated = 0

    def submit(self, requests: Ordered[Request]) -> None:
        """Take all choices of one call, in the order of their index."""
        self.sessions.expire()
        sequences = {request.index: Sequence(request) for request in requests}
        for sequence in sequences.values():
            if sequence.request.after is None:
                self.scheduler.waiting.append(sequence)
            else:
                sequences[sequence.request.after].followers.append(sequence)
        self._calls[requests[0].id] = list(sequences.values())
        if requests[0].session is not None:
            self._load_rows(requests[0].tenant, requests[0].session)

    def abort(self, id: str) -> bool:
        """Drop a call; there is no event. What it computed stays as a cache; its session is as it
        was before. False if the call is not known, or has ended.
        """
        if id not in self._calls:
            return False
        self._drop(id, keep=True)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._calls) or self._flight is not None

    def step(self) -> list[Event]:
        """Compute one step and say what came of it. A model that raises fails the step's calls.

        If it can be, the next step is launched before this one is read, and computed while this
        one's tokens are handled. Then a stop is found late: it costs the row of one token, which
        was computed and counts as such, and is given back.
        """
        flight, self._flight = self._flight, None
        running = self.scheduler.running
        sequences = flight.sequences if flight else self.scheduler.schedule()
        if not sequences:
            return []
        try:
            flight = flight or Flight(self._launch, sequences, [_work(q) for q in sequences])
            self._flight = flight.follow(self.scheduler)
            draws = flight.read()
        except Exception:
            log.exception("the model failed in a step of %d requests", len(sequences))
            self._flight = None  # whose requests are among these
            ids = {q.request.id for q in sequences if q in running}
            return [self._fail(id, "engine_error", "the model failed") for id in sorted(ids)]
        self._steps += 1
        for sequence, work in zip(sequences, flight.work, strict=True):
            end = work.end
            self._computed += end - work.start
            if sequence in running:
                self._recomputed += sequence.advance(end)
        events: list[Event] = []
        for sequence, work, draw in zip(sequences, flight.work, draws, strict=True):
            if sequence in running:  # not if it has ended, or another choice of its call failed
                event = self._enter(sequence, work.start, draw)
                if event is not None:
                    events.append(event)
        self.commit()
        return events

    def commit(self) -> None:
        """Have all changes of sessions on disk, if they are kept there, before anyone is told."""
        if self.sessions.store:
            self.sessions.store.commit()

    @property
    def patience(self) -> float | None:
        """Seconds that the engine may be left alone for while it has no work; None: for ever."""
        return self.sessions.patience if self.sessions.counted else 0.0

    def rest(self) -> None:
        """What is to be done when nothing else is, a little of it at a time: sessions expire, and
        their shared rows are counted.
        """
        self.sessions.expire()
        self.sessions.count_shared()
        self.commit()

    def session(self, tenant: str, name: str) -> SessionView | None:
        """A session of the tenant; None if there is none, or not any more."""
        self.sessions.expire()
        self.commit()
        return self.sessions.view(tenant, name)

    def create(self, tenant: str, name: str) -> SessionView | None:
        """A new, empty session; None if the name is taken."""
        if self.session(tenant, name):
            return None
        self.sessions.create(tenant, name)
        return self.session(tenant, name)

    def fork(self, tenant: str, name: str, new: str) -> SessionView | None:
        """A new session with the tokens and the rows of another; None if the new name is taken.
        Raises KeyError if there is no such session.
        """
        kept = self._existing(tenant, name)
        if self.sessions.get(tenant, new):
            return None
        self.sessions.fork(kept, new)
        return self.session(tenant, new)

    def rewind(self, tenant: str, name: str, n: int) -> SessionView | None:
        """Cut a session to its first `n` tokens; None if it has fewer. KeyError as for `fork`."""
        kept = self._existing(tenant, name)
        if n > len(kept.tokens):
            return None
        self.sessions.rewind(kept, n)
        return self.session(tenant, name)

    def forget(self, tenant: str, name: str) -> bool:
        """Drop a session; False if there is none."""
        found = self.sessions.forget(tenant, name)
        self.commit()
        return found

    def reset(self, tenant: str | None) -> Reset:
        """Free all idle rows of a tenant, or of all (None); named sessions keep their tokens."""
        return self.sessions.reset(tenant)

    def close(self) -> None:
        """The end: save rows of named sessions, the last used ones first, as far as they may go."""
        store = self.sessions.store
        if store is None:
            return
        saved, budget = {}, store.rows_budget
        for kept in reversed(self.sessions.with_rows()):
            size = len(kept.rows) * self.pool.row_bytes
            if kept.name is not None and size <= budget:
                budget -= size
                tokens = kept.tokens[: len(kept.rows)]
                saved[kept.tenant, kept.name] = SavedRows(tokens, self.model.read_rows(kept.rows))
        store.save_rows(saved)
        store.close()

    def _existing(self, tenant: str, name: str) -> Kept:
        self.sessions.expire()
        kept = self.sessions.get(tenant, name)
        if kept is None:
            raise KeyError(name)
        return kept

    def _load_rows(self, tenant: str, name: str) -> None:
        """Bring back the saved rows of a session, as far as they fit and belong to its tokens."""
        kept, store = self.sessions.get(tenant, name), self.sessions.store
        if store is None or kept is None or len(kept.rows):
            return
        saved = store.rows(tenant, name)
        if saved is not None:
            n = min(common_prefix(saved.tokens, kept.tokens), self.pool.free)
            if n:
                rows = self.pool.take(n)
                self.model.write_rows(rows, saved.rows[:n])
                self.sessions.give_rows(kept, rows)

    def row_runs(self, tenant: str | None) -> list[RowRun]:
        """All rows of the pool, run-length coded, as a tenant may see them (None: the operator)."""
        return row_runs(self.pool, self.scheduler.running, self.sessions.with_rows(), tenant)

    def snapshot(self) -> Snapshot:
        pool, scheduler = self.pool, self.scheduler
        unfinished = sum(map(len, self._calls.values()))
        return Snapshot(
            rows=pool.n_rows,
            rows_free=pool.free,
            rows_running=pool.running,
            rows_idle=pool.idle,
            rows_shared=pool.shared,
            row_bytes=pool.row_bytes,
            running=len(scheduler.running),
            waiting=unfinished - len(scheduler.running),
            steps_total=self._steps,
            rows_computed_total=self._computed,
            rows_recomputed_total=self._recomputed,
            rows_reused_total=scheduler.rows_reused,
            rows_evicted_total=self.sessions.rows_evicted,
            preemptions_total=scheduler.preemptions,
            prompt_tokens_total=scheduler.prompt_tokens,
            generated_tokens_total=self._generated,
            sessions_expired_total=self.sessions.expired,
            sessions_evicted_total=self.sessions.evicted,
            sessions=self.sessions.records(),
        )

    def _enter(self, sequence: Sequence, start: int, draw: Draw) -> Event | None:
        """Enter what a step made of one sequence."""
        if draw.failed:
            message = "the model's numbers are not finite"
            return self._fail(sequence.request.id, "model_failed", message)
        if draw.prompt_scores:
            known = len(sequence.prompt_scores)
            sequence.prompt_scores += draw.prompt_scores[max(0, known - start) :]
        if sequence.followers and sequence.computed >= sequence.n_prompt:
            for follower in sequence.followers:
                follower.prompt_scores = sequence.prompt_scores  # the same, and complete
            self.scheduler.waiting.extendleft(reversed(sequence.followers))
            sequence.followers = []
        if sequence.missing:
            return None
        if draw.token is None:  # no token is wanted: the prompt was all
            sequence.first_token = time.perf_counter()
            return self._finish(sequence, FinishReason.LENGTH, self._echo(sequence))
        return self._append(sequence, draw.token, draw.score)

    def _append(self, sequence: Sequence, token: int, score: TokenScore | None) -> Delta | None:
        """Enter a drawn token: its text, and the end of the choice if it is one."""
        request, text = sequence.request, sequence.text
        shown = ""
        if sequence.first_token is None:
            sequence.first_token = time.perf_counter()
            shown = self._echo(sequence)
        sequence.append(token)
        self._generated += 1
        ends = token in request.stop_ids
        sequence.unsent.append(Token(token, text.offset, score))
        is_special = token == self.tokenizer.end_of_text
        silent = not request.show_special if is_special else ends
        shown += text.push(b"" if silent else self.tokenizer.token_bytes[token])
        if ends or text.stopped:
            return self._finish(sequence, FinishReason.STOP, shown)
        if sequence.n_generated == request.max_tokens:
            return self._finish(sequence, FinishReason.LENGTH, shown)
        if not request.use_cache:
            self.scheduler.trim(sequence, 0)
        return self._delta(sequence, shown) if shown else None

    def _echo(self, sequence: Sequence) -> str:
        """The prompt's text, if it is part of the answer; its tokens are unsent from then on."""
        if not sequence.request.echo:
            return ""
        shown = ""
        request, text = sequence.request, sequence.text
        for token, score in zip_longest(request.prompt, [None, *sequence.prompt_scores]):
            sequence.unsent.append(Token(token, text.offset, score))
            silent = token == self.tokenizer.end_of_text and not request.show_special
            shown += text.echo(b"" if silent else self.tokenizer.token_bytes[token])
        return shown

    def _finish(self, sequence: Sequence, reason: FinishReason, shown: str) -> Delta:
        """End a choice. Its rows stay as a cache; a session takes its tokens, too."""
        shown += sequence.text.finish()
        if sequence.text.stopped:  # the flush of half a character may complete a stop string
            reason = FinishReason.STOP
        request = sequence.request
        tokens = self._remaining_tokens(sequence, reason)
        known = sequence.tokens[: sequence.computed]
        rows = self.scheduler.release(sequence)
        usable = common_prefix(tokens, known) if request.use_cache else 0
        self.pool.give_back(rows[usable:])
        if request.session is not None:
            self.sessions.turn(
                request.tenant, request.session, tokens, rows[:usable], sequence.cached_tokens
            )
        elif usable:
            self.sessions.keep(request.tenant, tokens, rows[:usable])
        calls = self._calls[request.id]
        calls.remove(sequence)
        if not calls:
            del self._calls[request.id]
        return self._delta(sequence, shown, reason)

    def _delta(self, sequence: Sequence, text: str, reason: FinishReason | None = None) -> Delta:
        tokens, sequence.unsent = tuple(sequence.unsent), []
        return Delta(
            id=sequence.request.id,
            index=sequence.request.index,
            text=text,
            tokens=tokens,
            prompt_tokens=sequence.n_prompt,
            completion_tokens=sequence.n_generated,
            cached_tokens=sequence.cached_tokens,
            finish=None if reason is None else Finish(reason, _timings(sequence)),
        )

    def _remaining_tokens(self, sequence: Sequence, reason: FinishReason) -> Ids:
        """What a session holds after this turn: ids sent and generated, without the end token and
        the stop string. A token that the stop string cuts is dropped, and its text encoded anew.
        """
        if sequence.text.stopped:
            n, rest = sequence.text.kept()
            whole = sequence.tokens[: sequence.n_prompt + n]
            return np.concatenate([whole, np.array(self.tokenizer.encode(rest), np.int32)])
        if reason is FinishReason.STOP:
            return sequence.tokens[:-1]
        return sequence.tokens

    def _fail(self, id: str, code: str, message: str) -> Failure:
        self._drop(id, keep=False)
        return Failure(id, code, message)

    def _drop(self, id: str, *, keep: bool) -> None:
        """Forget a call. Its rows become a cache, or go where they cannot be trusted."""
        for sequence in self._calls.pop(id):
            if sequence in self.scheduler.running:
                tokens = sequence.tokens[: sequence.computed]
                rows = self.scheduler.release(sequence)
                kept = len(tokens) if keep and sequence.request.use_cache else 0
                self.pool.give_back(rows[kept:])
                if kept:
                    self.sessions.keep(sequence.request.tenant, tokens, rows[:kept])
            elif sequence in self.scheduler.waiting:
                self.scheduler.waiting.remove(sequence)


def _work(sequence: Sequence) -> Work:
    """What the model is to do for one sequence in this step."""
    request, start, end = sequence.request, sequence.computed, sequence.taken
    work = Work(sequence.head(end), start, sequence.rows, sequence.n_prompt)
    if end == sequence.n_tokens and request.max_tokens:
        work.sampling = request.sampling
        if sequence.n_generated < request.min_tokens:
            work.banned = tuple(request.stop_ids)
    if request.score_prompt and not sequence.prompt_scored:
        work.targets = sequence.tokens[start + 1 : min(end + 1, sequence.n_prompt)]
        work.score = request.sampling.logprobs or 0
    return work


def _timings(sequence: Sequence) -> Timings:
    now = time.perf_counter()
    started = sequence.started or now
    first_token = sequence.first_token or now
    return Timings(
        queue=started - sequence.arrived,
        prefill=first_token - started,
        decode=now - first_token,
        rows_computed=sequence.rows_computed,
        rows_reused=sequence.cached_tokens,
    )
