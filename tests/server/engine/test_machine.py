"""Any order of requests, turns, aborts and failures: all counts agree after every step, and every
answer is what the same request gets alone, in a large pool, without a cache.
"""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from server.engine.sequence import Failure, Request
from tests.server.engine.helpers import (
    END,
    Answer,
    Client,
    Fields,
    alone,
    check,
    copies,
    fake_engine,
    ids,
    request,
    session_tokens,
)

N_CTX = 24
STATES = ("free", "idle", "running")
WORDS = [ids(word) for word in ("aaaa", "ab", "b", "é日", b"\xe6", "abcabc")] + [(END,)]
PROMPTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=5).map(
    lambda words: tuple(sum(words, ()))[: N_CTX - 1]
)
SELDOM = st.sampled_from([False, False, False, True])
WISHES = st.fixed_dictionaries(
    {
        "use_cache": SELDOM.map(lambda seldom: not seldom),
        "score_prompt": SELDOM,
        "echo": SELDOM,
        "show_special": SELDOM,
        "stop": st.lists(st.sampled_from(["ba", "c a", "é", "日", "\ufffd"]), max_size=2).map(
            tuple
        ),
        "stop_ids": st.sampled_from(
            [frozenset[int](), frozenset({END}), frozenset({END, ids("b")[0]})]
        ),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "tenant": st.sampled_from(["one", "one", "other"]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        n_rows=st.integers(N_CTX, 2 * N_CTX),
        max_running=st.integers(1, 6),
        extra_tokens=st.integers(0, 12),
        max_sessions=st.integers(1, 4),
    )
    def start(self, n_rows: int, max_running: int, extra_tokens: int, max_sessions: int) -> None:
        self.engine, self.model = fake_engine(
            n_rows=n_rows,
            n_ctx=N_CTX,
            max_running=max_running,
            step_tokens=2 * max_running + extra_tokens,
            max_sessions=max_sessions,
        )
        self.client = Client(self.engine)
        self.asked: dict[tuple[str, int], Request] = {}
        self.sessions: dict[tuple[str, str], Request] = {}  # the last turn that was asked for
        self.held: dict[tuple[str, str], tuple[int, ...]] = {}  # what each session is to hold
        self.aborted: set[str] = set()
        self.undisturbed = True

    @rule(prompt=PROMPTS, max_tokens=st.integers(0, 20), n=st.integers(1, 4), wishes=WISHES)
    def submit(self, prompt: tuple[int, ...], max_tokens: int, n: int, wishes: Fields) -> None:
        self._submit(*copies(n, _fitting(prompt, max_tokens, wishes)))

    @rule(
        session=st.sampled_from("st"), prompt=PROMPTS, max_tokens=st.integers(0, 20), wishes=WISHES
    )
    def first_turn(
        self, session: str, prompt: tuple[int, ...], max_tokens: int, wishes: Fields
    ) -> None:
        self._submit(_fitting(prompt, max_tokens, Fields(**wishes, session=session)))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), cut=st.integers(0, 6), more=PROMPTS, wishes=WISHES)
    def next_turn(
        self, data: st.DataObject, cut: int, more: tuple[int, ...], wishes: Fields
    ) -> None:
        """The text of the last turn, its end cut, and other text behind it."""
        tenant, session = data.draw(st.sampled_from(sorted(self.sessions)))
        _, tokens = alone(_plain(self.sessions[tenant, session]))
        prompt = (tokens[: len(tokens) - cut] + more)[: N_CTX - 1]
        same = Fields(**{**wishes, "session": session, "tenant": tenant})
        self._submit(_fitting(prompt, 8, same))

    @precondition(lambda self: self.engine.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        call = data.draw(st.sampled_from(sorted({call for call, _ in self.asked})))
        known = not all(self._ended(key) for key in self.asked if key[0] == call)
        assert self.engine.abort(call) is known
        if known:
            self.aborted.add(call)
            self.undisturbed = False

    @rule(session=st.sampled_from("st"), tenant=st.sampled_from(["one", "other"]))
    def forget(self, session: str, tenant: str) -> None:
        known = (tenant, session) in self.engine.snapshot().sessions
        assert self.engine.sessions.forget(tenant, session) is known

    @precondition(lambda self: self.engine.snapshot().sessions)
    @rule(data=st.data(), new=st.sampled_from("uv"))
    def fork(self, data: st.DataObject, new: str) -> None:
        """The same tokens and the very same rows."""
        tenant, session = data.draw(st.sampled_from(sorted(self.engine.snapshot().sessions)))
        taken = (tenant, new) in self.engine.snapshot().sessions
        rows = self.engine.pool.free
        assert (self.engine.fork(tenant, session, new) is None) is taken
        if not taken:
            self.held[tenant, new] = self.held[tenant, session]
            assert self.engine.pool.free >= rows

    @precondition(lambda self: self.engine.snapshot().sessions)
    @rule(data=st.data(), n=st.integers(0, N_CTX))
    def rewind(self, data: st.DataObject, n: int) -> None:
        tenant, session = data.draw(st.sampled_from(sorted(self.engine.snapshot().sessions)))
        possible = n <= len(self.held[tenant, session])
        assert (self.engine.rewind(tenant, session, n) is not None) is possible
        if possible:
            self.held[tenant, session] = self.held[tenant, session][:n]

    @rule(tenant=st.sampled_from([None, "one", "other"]))
    def reset(self, tenant: str | None) -> None:
        idle, free = self.engine.pool.idle, self.engine.pool.free
        dropped = self.engine.reset(tenant)
        assert self.engine.pool.free == free + dropped.rows_freed
        assert tenant is not None or (dropped.rows_freed == idle and self.engine.pool.idle == 0)

    @precondition(lambda self: self.engine.has_work)
    @rule(fault=st.sampled_from(["broken", "nan"]))
    def fail(self, fault: str) -> None:
        setattr(self.model, fault, True)
        events = self.client.step()
        assert events
        assert all(isinstance(event, Failure) for event in events)
        self.undisturbed = False

    @precondition(lambda self: self.engine.has_work)
    @rule(n=st.integers(1, 3))
    def step(self, n: int) -> None:
        for _ in range(n):
            self._step()

    @invariant()
    def everything_adds_up(self) -> None:
        if hasattr(self, "engine"):
            check(self.engine)
            self._rows_are_listed_exactly()
            snapshot = self.engine.snapshot()
            for tenant, session in snapshot.sessions:
                held = session_tokens(self.engine, session, tenant)
                assert held == self.held[tenant, session]
            assert snapshot.rows_computed_total == sum(map(sum, self.model.spans))
            assert snapshot.steps_total == len(self.model.spans)
            unfinished = [key for key in self.asked if not self._ended(key)]
            assert snapshot.running + snapshot.waiting == len(unfinished)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        most_steps = sum((len(r.prompt) + r.max_tokens) ** 2 for r in self.asked.values())
        while self.engine.has_work:
            assert most_steps, "no end is in sight"
            self._step()
            most_steps -= 1
        self.everything_adds_up()
        self._answers_are_right()
        self._nothing_is_left()

    def _rows_are_listed_exactly(self) -> None:
        pool, runs = self.engine.pool, self.engine.row_runs(None)
        assert [run.start for run in runs] == [0, *(run.start + run.n for run in runs[:-1])]
        counts = {state: sum(r.n for r in runs if r.state == state) for state in STATES}
        assert counts == {"free": pool.free, "idle": pool.idle, "running": pool.running}
        assert sum(run.n for run in runs if run.holders > 1) == pool.shared
        for record in self.engine.sessions.records().values():
            assert record.shared_rows <= record.rows
        (nothing,) = self.engine.row_runs("nobody")  # what belongs to others looks free
        assert (nothing.n, nothing.state, nothing.holders) == (pool.n_rows, "free", 0)

    def _ended(self, key: tuple[str, int]) -> bool:
        answer = self.client.answers[key]
        return bool(answer.finish or answer.failure or key[0] in self.aborted)

    def _submit(self, *requests: Request) -> None:
        answers = self.client.submit(*requests)
        for asked, key in zip(requests, list(self.client.answers)[-len(answers) :], strict=True):
            self.asked[key] = asked
            if asked.session is not None:
                self.sessions[asked.tenant, asked.session] = asked

    def _step(self) -> None:
        """A step, and the promises that the scheduler makes about every step."""
        scheduler = self.engine.scheduler
        before, preemptions = list(scheduler.running), scheduler.preemptions
        second_tries = [sequence for sequence in before if sequence.preempted]
        computed = sum(map(sum, self.model.spans))
        for event in self.client.step():
            assert not isinstance(event, Failure)
            asked = self.asked[event.id, event.index]
            if event.finish and asked.session is not None:
                self.held[asked.tenant, asked.session] = alone(_plain(asked))[1]
        assert sum(map(sum, self.model.spans)) > computed or not self.engine.has_work
        assert before[:1] == [] or before[0] not in scheduler.waiting, "the oldest did not proceed"
        assert not any(s in scheduler.waiting for s in second_tries), "preempted twice"
        if scheduler.preemptions > preemptions:
            assert set(scheduler.running) <= set(before), "admitted in a step that preempted"

    def _answers_are_right(self) -> None:
        rows = 0
        for key, asked in self.asked.items():
            answer = self.client.answers[key]
            if answer.finish is None:
                assert answer.failure or key[0] in self.aborted
                continue
            right, _ = alone(_plain(asked))
            assert answer.said == right.said
            assert answer.cached_tokens == answer.finish.timings.rows_reused < len(asked.prompt)
            if not asked.use_cache:
                assert answer.cached_tokens == 0
            rows += _rows(asked, answer)
        if self.undisturbed:
            s = self.engine.snapshot()
            answers = self.client.answers.values()
            assert s.rows_computed_total - s.rows_recomputed_total + s.rows_reused_total == rows
            assert s.rows_reused_total == sum(a.cached_tokens for a in answers)
            assert s.generated_tokens_total == sum(a.completion_tokens for a in answers)
            assert s.generated_tokens_total == self.model.draws
            assert s.prompt_tokens_total == sum(len(r.prompt) for r in self.asked.values())

    def _nothing_is_left(self) -> None:
        engine = self.engine
        assert not engine.scheduler.running
        assert not engine.scheduler.waiting
        before, idle = engine.sessions.rows_evicted, engine.pool.idle
        assert engine.sessions.evict(idle) == idle == engine.sessions.rows_evicted - before
        assert engine.pool.free == engine.pool.n_rows
        check(engine)
        assert all(record.rows == 0 for record in engine.snapshot().sessions.values())


def _fitting(prompt: tuple[int, ...], max_tokens: int, wishes: Fields) -> Request:
    fitting = min(max_tokens, N_CTX - len(prompt))
    return request(prompt, fitting, **wishes)


def _plain(asked: Request) -> Request:
    """The request, but for who asks and where its rows come from: what decides its answer."""
    return replace(asked, id="", index=0, use_cache=True, session=None, tenant="", after=None)


def _rows(asked: Request, answer: Answer) -> int:
    """How many rows a request needs: one for every token but the last one drawn."""
    return len(asked.prompt) + max(0, answer.completion_tokens - 1)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    deadline=None,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
