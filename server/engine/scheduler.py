"""Who computes which tokens in this step: admission, equal shares, eviction, preemption.

There is no prefill phase and no decode phase. Every running request has tokens without a row; a
step deals out a budget of them. A request that decodes gets its one token. The rest is dealt in
equal slices to all that have more to compute: prompts and uncached requests alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Ordered

from model.rows import RowPool
from model.step import Ids
from server.engine.sequence import Request, Sequence
from server.engine.sessions import Sessions, common_prefix
from server.engine.snapshot import SessionKey


class Scheduler:
    """The queue and the running requests, oldest first.

    `step_tokens` bounds the tokens of a step. It must leave at least one token for each of
    `max_running` requests beside those that decode. The pool must hold one whole window.
    """

    def __init__(
        self, pool: RowPool, sessions: Sessions, *, n_ctx: int, max_running: int, step_tokens: int
    ) -> None:
        if step_tokens < 2 * max_running:
            raise ValueError(
                f"step_tokens {step_tokens} is below twice max_running {max_running}: "
                "some requests would wait in every step"
            )
        if pool.n_rows < n_ctx:
            raise ValueError(f"a pool of {pool.n_rows} rows cannot hold a window of {n_ctx} tokens")
        self.pool, self.sessions = pool, sessions
        self.max_running, self.step_tokens = max_running, step_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # a set that keeps its order
        self.preemptions = 0
        self.rows_reused = 0
        self.prompt_tokens = 0
        self._turn = 0  # whose turn it is to get the odd token of a share

    def schedule(self) -> list[Sequence]:
        """Choose the step's work and take the rows for it: each sequence is to compute its tokens
        from `computed` up to `taken`.
        """
        before = self.preemptions
        decoding = [q for q in self.running if q.decoding]
        n = min(len(decoding), self._available())
        self._free(n)  # at once: an eviction is a search
        if n == len(decoding):
            for sequence, row in zip(decoding, self.pool.take(n).tolist(), strict=True):
                sequence.extend_by(row)
        else:
            for sequence in decoding:
                self._compute(sequence, 1)
        if self.preemptions == before:
            self._admit()
        others = [q for q in self.running if q.taken == q.computed]  # without a share so far
        if others:
            slices = deal(self.step_tokens - len(decoding), [q.missing for q in others], self._turn)
            self._turn += 1
            for sequence, share in zip(others, slices, strict=True):
                if share:
                    self._compute(sequence, share)
        return [q for q in self.running if q.taken > q.computed]

    def follow(self, step: Ordered[Sequence]) -> list[int]:
        """Choose the work of the step behind one whose tokens nobody knows yet, and take a row for
        each: the places in `step` of those that go on, unless their token is a stop. No places, if
        the step behind is to do anything else, or may have to: then it is scheduled when the tokens
        are known. So it is while anybody waits for a free place, though it be for something else.

        Idle rows are evicted for it, as they will be anyway; nobody is preempted.
        """
        left = [i for i, q in enumerate(step) if q in self.running]
        if not all(step[i].settled for i in left):
            return []
        lanes = [i for i in left if step[i].n_generated + 1 < step[i].request.max_tokens]
        if (self.waiting and len(lanes) < self.max_running) or len(lanes) > self._available():
            return []
        self._free(len(lanes))
        for i, row in zip(lanes, self.pool.take(len(lanes)).tolist(), strict=True):
            step[i].expect(row, i)
        return lanes

    def _compute(self, sequence: Sequence, n: int) -> None:
        """Take rows for the next `n` tokens, or as many as there are; for none if the sequence is
        preempted, or was for another a moment ago.

        The newest running request gives up its rows first, so the oldest always proceeds.
        """
        if sequence not in self.running:
            return
        while self._available() == 0:
            victim = next(q for q in reversed(self.running) if q is sequence or self._frees(q))
            self._preempt(victim)
            if victim is sequence:
                return
        sequence.extend(self._take(min(n, self._available())))

    def _frees(self, sequence: Sequence) -> bool:
        """Whether preempting it would leave at least one row that nobody else pins."""
        return bool((self.pool.pins[sequence.rows] == 1).any())

    def _available(self) -> int:
        return self.pool.free + self.pool.idle

    def _take(self, n: int) -> Ids:
        self._free(n)
        return self.pool.take(n)

    def _free(self, n: int) -> None:
        """Have `n` rows free; they are available."""
        if n > self.pool.free:
            self.sessions.evict(n - self.pool.free)

    def _preempt(self, sequence: Sequence) -> None:
        """trim(0), and back to the head of the queue: it costs the request nothing but time."""
        self.pool.give_back(self.release(sequence))
        sequence.preempted = True
        self.preemptions += 1
        self.waiting.appendleft(sequence)

    def release(self, sequence: Sequence) -> Ids:
        """Take a sequence out of the running ones; the caller owns its rows from now on."""
        del self.running[sequence]
        rows = sequence.trim(0)
        self.pool.unpin(rows)
        return rows

    def trim(self, sequence: Sequence, k: int) -> None:
        """Give back a running sequence's rows[k:]."""
        rows = sequence.trim(k)
        self.pool.unpin(rows)
        self.pool.give_back(rows)

    def _admit(self) -> None:
        """Start waiting requests, first come first served, while there is room for them."""
        if not self.waiting or len(self.running) >= self.max_running:
            return
        busy = {key for q in self.running if (key := session_key(q.request))}
        passed: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_running:
            sequence = self.waiting.popleft()
            key = session_key(sequence.request)
            if key in busy:  # the turns of a session come one after the other
                passed.append(sequence)
                continue
            if not self._start(sequence):
                passed.append(sequence)
                break
            if key:
                busy.add(key)
        self.waiting.extendleft(reversed(passed))

    def _start(self, sequence: Sequence) -> bool:
        """Pin the rows that others have already, and run, if the rest may be expected to fit."""
        shared = self._match(sequence)
        self.pool.share(shared)
        self.pool.pin(shared)  # before anything is evicted for the others
        sequence.extend(shared)
        sequence.computed = sequence.taken
        if self.running and self._available() < self._expected(sequence):
            self.trim(sequence, 0)
            return False
        self.running[sequence] = None
        if sequence.started is None:
            sequence.started = time.perf_counter()
            self.prompt_tokens += sequence.n_prompt
        self.rows_reused += sequence.reuse(len(shared))
        return True

    def _expected(self, sequence: Sequence) -> int:
        """Rows that must be available before a request is started beside others.

        A first start is optimistic: what each has to compute for its next token. One that was
        preempted waits until all could run to their limits, so it is not preempted again.
        """
        everyone = [sequence, *self.running]
        if not sequence.preempted:
            return sum(q.missing for q in everyone)
        return sum(q.capacity - q.computed for q in everyone)

    def _match(self, sequence: Sequence) -> Ids:
        """Rows of the longest prefix that any sequence of the tenant has computed."""
        limit = sequence.reusable
        if limit == 0:
            return sequence.rows[:0]
        tokens = sequence.tokens[:limit]
        best = self.sessions.match(sequence.request.tenant, tokens)
        for other in self.running:
            if other.request.tenant == sequence.request.tenant and other.computed > len(best):
                length = common_prefix(tokens, other.tokens[: other.computed])
                if length > len(best):
                    best = other.rows[:length]
        return best


def session_key(request: Request) -> SessionKey | None:
    """The session whose turn the request is, if it has one."""
    return None if request.session is None else (request.tenant, request.session)


def deal(budget: int, needs: Ordered[int], first: int) -> list[int]:
    """Deal `budget` tokens in equal slices, none larger than its need.

    What small needs leave over goes to the larger ones; odd tokens go round from `first` on.
    """
    slices = [0] * len(needs)
    order = sorted(range(len(needs)), key=lambda i: (i - first) % len(needs))
    while budget and (hungry := [i for i in order if slices[i] < needs[i]]):
        equal = max(1, budget // len(hungry))
        for i in hungry[:budget]:
            n = min(equal, needs[i] - slices[i])
            slices[i] += n
            budget -= n
    return slices
