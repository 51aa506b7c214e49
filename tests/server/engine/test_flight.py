"""Steps that are launched before those in front of them are read. Nobody can tell from the answers:
neither where the device is behind, so that nothing has happened when the next step is launched, nor
where it has done all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import initialize, precondition, rule

from model.gpt import GPT
from model.graphs import is_plain
from model.rows import RowPool
from model.step import Draw, Launched, Model, Sampling, Work
from server.engine.engine import Engine
from server.engine.sequence import Failure, FinishReason, Request, Sequence
from tests.gpu.figures import OneByOne
from tests.lanes import Late
from tests.server.engine.helpers import (
    BYTES,
    END,
    ROW_BYTES,
    TALKS,
    Answer,
    Client,
    FakeModel,
    Fields,
    Next,
    alone,
    copies,
    fake_engine,
    ids,
    request,
    script,
    session_tokens,
)
from tests.server.engine.test_machine import N_CTX, EngineMachine
from tests.tiny import config, gpt


class AheadModel(FakeModel):
    """Computes a step when it is read or, at a whim, with the one in front of it: as a device does,
    from what it was given at the launch, in the order of the launches.
    """

    def __init__(self, n_ctx: int, pool: RowPool, says: Next | None = None) -> None:
        super().__init__(n_ctx, pool, says)
        self.hurries: Callable[[], bool] = lambda: False
        self.fault = ""  # "read" raises there, "launch" at the next launch, if it comes before
        self.order: list[str] = []  # of launches and reads
        self.launches = 0
        self._stream: deque[Callable[[], None]] = deque()
        self._drawn: list[int] = []

    def run(self, work: list[Work]) -> list[Draw]:
        return self.launch(work).read()

    def launch(self, work: list[Work]) -> Launched:
        if self.fault == "launch":
            self.fail()
        self._check(work)
        sent = [replace(w, tokens=w.tokens.copy(), rows=w.rows.copy()) for w in work]
        draws: list[Draw] = []
        self._stream.append(partial(self._compute, sent, self.pool.free_rows().tolist(), draws))
        self.launches += 1
        self.order.append(f"launch {self.launches}")
        single = all(w.end - w.start == 1 and w.score is None for w in work)
        read = partial(self._finish, self.launches, sent, draws)
        return Launched(read, leads=single and all(is_plain(w) for w in work))

    def fail(self) -> None:
        self.fault = ""
        raise RuntimeError("a fault")

    def _compute(self, work: list[Work], free: list[int], draws: list[Draw]) -> None:
        for row in free:
            self._rows.pop(row, None)
        for w in work:
            if w.tokens[-1] < 0:
                w.tokens[-1] = self._drawn[-1 - w.tokens[-1]]
        hashes = [self._read(w) for w in work]
        draws += [self._write(w, h) for w, h in zip(work, hashes, strict=True)]
        self._drawn = [draw.token or 0 for draw in draws]

    def _finish(self, number: int, work: list[Work], draws: list[Draw]) -> list[Draw]:
        if self.fault:
            self.fail()
        while self._stream and (not draws or self.hurries()):
            self._stream.popleft()()
        self.order.append(f"read {number}")
        return self._done(work, draws)


def ahead(
    says: Next | None = None,
    *,
    n_rows: int = 2000,
    n_ctx: int = 64,
    max_running: int = 16,
    step_tokens: int = 64,
    max_sessions: int = 100,
) -> tuple[Client, AheadModel]:
    pool = RowPool(n_rows, ROW_BYTES)
    model = AheadModel(n_ctx, pool, says)
    engine = Engine(
        cast(Model, model),
        BYTES,
        pool,
        max_running=max_running,
        step_tokens=step_tokens,
        max_sessions=max_sessions,
    )
    return Client(engine), model


class AheadMachine(EngineMachine):
    """Any order of requests, turns, aborts and failures, with a step in flight all the while."""

    model: AheadModel

    @initialize(
        n_rows=st.integers(N_CTX, 3 * N_CTX),
        max_running=st.integers(1, 6),
        extra_tokens=st.integers(0, 12),
        max_sessions=st.integers(1, 4),
        random=st.randoms(use_true_random=False),
    )
    def start(
        self,
        n_rows: int,
        max_running: int,
        extra_tokens: int,
        max_sessions: int,
        random: Random,
    ) -> None:
        super().start(
            n_rows=n_rows,
            max_running=max_running,
            extra_tokens=extra_tokens,
            max_sessions=max_sessions,
        )
        self.client, self.model = ahead(
            n_rows=n_rows,
            n_ctx=N_CTX,
            max_running=max_running,
            step_tokens=2 * max_running + extra_tokens,
            max_sessions=max_sessions,
        )
        self.engine = self.client.engine
        self.model.hurries = lambda: random.random() < 0.5

    @precondition(lambda self: self.engine.has_work)
    @rule(n=st.integers(4, 12))
    def run(self, n: int) -> None:
        for _ in range(n):
            self._step()

    @precondition(lambda self: self.engine.has_work)
    @rule(fault=st.sampled_from(["launch", "read", "nan"]))
    def fail(self, fault: str) -> None:
        """Of the step that is read, or of the one behind it."""
        if fault == "nan":
            self.model.nan = True
        else:
            self.model.fault = fault
        assert all(isinstance(event, Failure) for event in self.client.step())
        assert not self.engine._flight or fault == "nan"
        self.undisturbed = False

    def _answers_are_right(self) -> None:
        """A late stop costs one row and one draw, which count, and nothing else."""
        undisturbed, self.undisturbed = self.undisturbed, False
        super()._answers_are_right()
        s, answers = self.engine.snapshot(), self.client.answers
        late = self.model.draws - s.generated_tokens_total
        ended = [a for a in answers.values() if a.finish and a.finish.reason == FinishReason.STOP]
        assert late >= 0
        if undisturbed:
            assert late <= len(ended)
            rows = sum(
                len(self.asked[key].prompt) + max(0, answer.completion_tokens - 1)
                for key, answer in answers.items()
            )
            computed = s.rows_computed_total - s.rows_recomputed_total
            assert computed + s.rows_reused_total == rows + late
            assert s.generated_tokens_total == sum(a.completion_tokens for a in answers.values())


TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(
    deadline=None,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def in_flight(model: AheadModel) -> list[int]:
    """How many steps were in flight at each launch, itself among them."""
    open_steps, counts = 0, []
    for event in model.order:
        open_steps += 1 if event.startswith("launch") else -1
        if event.startswith("launch"):
            counts.append(open_steps)
    return counts


def test_the_next_step_is_launched_before_this_one_is_read() -> None:
    """The first computes a prompt; behind the fifth, nothing is left to do."""
    client, model = ahead(TALKS)
    (answer,) = client.ask(request("ab", 5))
    assert answer.text == "aaaaa"
    assert ", ".join(model.order) == (
        "launch 1, read 1, launch 2, launch 3, read 2, launch 4, read 3, launch 5, read 4, read 5"
    )


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (request("ab", 6), [1, 1, 2, 2, 2, 2]),
        (request("ab", 6, sampling=Sampling(seed=1)), [1, 1, 2, 2, 2, 2]),
        (request("a", 6, echo=True, score_prompt=True), [1, 2, 2, 2, 2, 2]),
        (request("ab", 6, min_tokens=3), [1, 1, 1, 1, 2, 2]),  # ids are banned in three steps
        (request("ab", 6, sampling=Sampling(0.0, logprobs=0)), [1] * 6),
        (request("ab", 6, sampling=Sampling(frequency_penalty=1.0)), [1] * 6),
        (request("a", 6, use_cache=False), [1] * 6),
        (request("a", 0), [1]),
        (request("a", 1), [1]),
    ],
)
def test_a_step_follows_if_the_next_token_is_all_that_is_needed(
    asked: Request, expected: list[int]
) -> None:
    client, model = ahead(TALKS)
    client.ask(asked)
    assert in_flight(model) == expected


def test_a_prompt_that_is_not_read_to_its_end_is_not_followed() -> None:
    """Though the step may be of one row only: it draws nothing."""
    sequence = Sequence(request("ab", 6))
    for settled in (False, True):
        sequence.extend_by(0)
        assert sequence.settled is settled


def test_one_that_asks_for_more_holds_up_all() -> None:
    client, model = ahead(TALKS)
    client.submit(request("ab", 9))
    client.submit(request("cd", 5, sampling=Sampling(0.0, logprobs=1)))
    client.run()
    assert in_flight(model) == [1, 1, 1, 1, 1, 1, 2, 2, 2]


def test_copies_start_as_soon_as_their_prompt_is_there() -> None:
    """No step of the first one alone comes before; then those with less to do leave."""
    client, model = ahead(TALKS)
    first, second = copies(2, request("a", 6))
    client.ask(first, replace(second, max_tokens=4))
    assert in_flight(model) == [1, 1, 2, 2, 2, 2]
    assert model.spans == [[1], [1, 1], [1, 1], [1, 1], [1, 1], [1]]


def test_those_that_go_on_find_their_tokens_whoever_leaves() -> None:
    """By a limit, which is known before, or by a stop, which is found late."""
    client, model = ahead()
    asked = [
        request(
            f"{i}",
            3 + 7 * i % 20,
            sampling=Sampling(float(i % 2), seed=i),
            stop_ids=frozenset([END, ord("b")][: i % 3]),
        )
        for i in range(16)
    ]
    answers = [client.submit(a)[0] for a in asked]
    client.run()
    assert [answer.said for answer in answers] == [alone(a)[0].said for a in asked]
    assert {answer.finish.reason for answer in answers if answer.finish} == set(FinishReason)
    assert in_flight(model) == [1, 1] + [2] * (len(model.spans) - 2)


def test_a_late_stop_costs_one_row() -> None:
    """All else is as it would have been: the session, its rows, what the next turn finds."""
    stop = frozenset(b"c")
    snapshots = []
    for client, model in (ahead(script("abcd")), fake(script("abcd"))):
        (answer,) = client.submit(request("P", 9, session="s", stop_ids=stop))
        while not answer.finish:
            client.step()
        assert (answer.text, answer.finish.reason) == ("ab", FinishReason.STOP)
        assert answer.finish.timings.rows_computed == 3
        assert client.engine.pool.idle == 3
        assert client.engine.pool.free == client.engine.pool.n_rows - 3  # the late row, too
        client.run()
        snapshots.append(client.engine.snapshot())
        assert session_tokens(client.engine, "s") == ids("Pab")
        (answer,) = client.ask(request("Pab, more", 1))
        assert answer.cached_tokens == 3
        assert sum(map(sum, model.spans)) == snapshots[-1].rows_computed_total + 6
    late, usual = snapshots
    assert late._replace(sessions=usual.sessions) == usual._replace(
        steps_total=usual.steps_total + 1, rows_computed_total=usual.rows_computed_total + 1
    )


def test_a_choice_that_ends_leaves_the_others_of_its_call() -> None:
    def says(tokens: tuple[int, ...], n_prompt: int) -> int:
        return ord("z" if tokens[0] == ord("x") and len(tokens) == 3 else "a")

    client, model = ahead(says)
    stop = frozenset(b"z")
    one, other = client.ask(request("x", 9, stop_ids=stop), request("y", 9, index=1, stop_ids=stop))
    assert (one.text, other.text) == ("aa", "aaaaaaaaa")
    assert model.spans == [[1, 1]] * 4 + [[1]] * 5  # the fourth, though one stops with the third
    assert in_flight(model) == [1] + [2] * 8


def test_the_engine_has_work_until_the_step_in_flight_is_read() -> None:
    client, model = ahead(script("ab"))
    (answer,) = client.submit(request("P", 9, stop_ids=frozenset(b"b")))
    while not answer.finish:
        client.step()
    assert client.engine.has_work
    assert client.step() == []
    assert not client.engine.has_work
    assert in_flight(model)[-1] == 2


def test_a_new_request_waits_for_one_step_at_most() -> None:
    client, _ = ahead(TALKS)
    (stream,) = client.submit(request("a stream", 20))
    for _ in range(5):
        client.step()
    (late,) = client.submit(request("late", 3))
    client.step()
    assert not late.text
    client.step()
    assert (stream.text, late.text) == ("a" * 7, "a")


def test_a_full_house_runs_ahead_though_others_wait() -> None:
    """Until it is known that somebody will leave: then the next one comes in at once."""
    client, model = ahead(TALKS, max_running=2)
    client.submit(*(request("ab", 6, index=i) for i in range(2)))
    client.submit(request("cd", 2))
    client.run()
    assert in_flight(model) == [1, 1, 2, 2, 2, 2, 1, 1]
    assert model.spans[6:] == [[2], [1]]


def test_idle_rows_are_evicted_for_a_step_ahead_and_nobody_is_preempted() -> None:
    """As in a server that has run for long: no row is free."""
    client, model = ahead(TALKS, n_rows=64, max_running=2)
    for i in range(4):
        client.ask(request(f"{i}" * 10, 6))
    assert client.engine.pool.free < 10
    model.order.clear()
    client.submit(request("x" * 20, 20))
    client.submit(request("y" * 5, 15))
    client.run()
    assert in_flight(model).count(2) > 15
    assert client.engine.sessions.rows_evicted > 30
    assert client.engine.scheduler.preemptions == 0
    model.order.clear()
    old, new = (client.submit(request(f"{i}" * 20, 20))[0] for i in range(2))
    while not client.engine.scheduler.preemptions:
        client.step()
    assert in_flight(model)[-1] == 1  # by a step that was scheduled when all was known
    client.run()
    assert old.text == new.text == "a" * 20


@pytest.mark.parametrize("fault", ["launch", "read"])
def test_a_step_that_raises_takes_its_requests_along_and_no_others(fault: str) -> None:
    """And the step behind it, whose requests are the same. All rows are free at once."""
    client, model = ahead(TALKS)
    failed = client.submit(*(request(f"{i}", 6 + 3 * i, index=i) for i in range(3)))
    client.submit(request("leaves", 9))
    for _ in range(2):
        client.step()
    client.engine.abort("call-2")
    model.fault = fault
    (failure,) = client.step()
    assert isinstance(failure, Failure)
    assert (failure.id, failure.code) == ("call-1", "engine_error")
    assert all(answer.failure == failure and answer.finish is None for answer in failed)
    assert not client.engine.has_work
    assert client.engine.pool.running == 0
    (answer,) = client.ask(request("later", 3))
    assert answer.text == "aaa"


def test_an_abort_drops_what_is_in_flight() -> None:
    client, model = ahead()
    (stays,) = client.submit(request("stays", 9, stop_ids=frozenset()))
    client.submit(request("leaves", 9, stop_ids=frozenset()))
    for _ in range(3):
        client.step()
    assert client.engine.abort("call-2")
    assert client.engine.pool.running == len("stays") + 3
    client.submit(request("comes", 3))  # and gets the rows that are still to be written
    client.run()
    assert stays.said == alone(request("stays", 9, stop_ids=frozenset()))[0].said
    assert in_flight(model)[:4] == [1, 1, 2, 2]


def fake(says: Next) -> tuple[Client, FakeModel]:
    engine, model = fake_engine(says=says)
    return Client(engine), model


LETTERS = tuple("etaoinshrdlu")
PLAIN = (Sampling(0.0), Sampling(seed=1), Sampling(0.7, seed=2))
MORE = (Sampling(0.0, logprobs=2), Sampling(seed=3, top_k=9), Sampling(frequency_penalty=1.0))
FEW = st.sampled_from([False] * 5 + [True])


@dataclass(frozen=True)
class Call:
    """A request, or several copies, that come with step `arrival`, and leave `patience` steps later
    unless they have ended. A turn comes when the turn before has ended, and goes on from there.
    """

    arrival: int
    asked: Request
    n: int
    patience: int | None


@st.composite
def calls(draw: st.DrawFn) -> Call:
    session = draw(st.sampled_from([None, None, None, "s", "t"]))
    wishes = Fields(
        sampling=draw(st.sampled_from(PLAIN * 4 + MORE)),
        stop=draw(st.sampled_from([(), (), LETTERS])),
        stop_ids=draw(st.sampled_from([frozenset[int](), frozenset(range(0, 256, 9))])),
        min_tokens=draw(st.sampled_from([0, 0, 0, 4])),
        use_cache=not draw(FEW),
        echo=draw(FEW),
        score_prompt=draw(FEW),
        session=session,
    )
    n_prompt = draw(st.integers(1, 12))
    prompt = Random(draw(st.integers(0, 9))).choices(range(256), k=n_prompt)
    return Call(
        arrival=draw(st.integers(0, 30)),
        asked=request(prompt, draw(st.integers(0, 24)), **wishes),
        n=1 if session else draw(st.sampled_from([1, 1, 1, 3])),
        patience=None if session else draw(st.sampled_from([None, None, 1, 3, 8])),
    )


@dataclass
class Play:
    """What becomes of some calls in an engine."""

    engine: Engine
    calls: list[Call]
    answers: dict[int, list[Answer]] = field(default_factory=dict)  # by the place of the call

    def run(self) -> None:
        client, came = Client(self.engine), dict[int, int]()
        step = 0
        while len(came) < len(self.calls) or self.engine.has_work:
            for i, call in enumerate(self.calls):
                if i not in came and call.arrival <= step and not self._busy(call.asked.session):
                    came[i] = step
                    self.answers[i] = client.submit(*self._requests(call))
                elif i in came and call.patience == step - came[i]:
                    self.engine.abort(f"call-{1 + list(came).index(i)}")
            client.step()
            step += 1

    def _busy(self, session: str | None) -> bool:
        return session is not None and any(
            self.calls[i].asked.session == session and not answers[0].finish
            for i, answers in self.answers.items()
        )

    def _requests(self, call: Call) -> list[Request]:
        asked = call.asked
        if ("", asked.session) in self.engine.snapshot().sessions:
            held = session_tokens(self.engine, asked.session or "")
            prompt = held[: WINDOW - asked.max_tokens - len(asked.prompt)] + asked.prompt
            asked = replace(asked, prompt=prompt)
        return copies(call.n, asked) if call.n > 1 else [asked]

    def told(self, *, whole: bool) -> list[Answer]:
        """What was answered to calls that were to end by themselves, or to the others."""
        answers = [self.answers[i] for i in sorted(self.answers)]
        return [
            answer
            for call, told in zip(self.calls, answers, strict=True)
            for answer in told
            if (call.patience is None) is whole
        ]


WINDOW = 48


@pytest.fixture(scope="module")
def network() -> GPT:
    return gpt(config(n_layer=1, n_ctx=WINDOW, n_vocab=BYTES.n_vocab))


def late_runner(network: GPT, pool: RowPool, n_lanes: int, random: Random | None = None) -> Late:
    return Late(network, pool, n_lanes, lambda: random is not None and random.random() < 0.5)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(calls(), min_size=1, max_size=8).map(
        lambda some: sorted(some, key=lambda c: c.arrival)
    ),
    st.integers(WINDOW, 3 * WINDOW),
    st.integers(1, 5),
    st.randoms(use_true_random=False),
)
def test_the_network_says_the_same_as_without_a_step_ahead(
    network: GPT, some: list[Call], n_rows: int, max_running: int, random: Random
) -> None:
    """Whatever comes and leaves when, in pools that are too small for all: tokens, texts, reasons,
    and what sessions hold. Free rows are NaN.
    """
    plays = []
    for ahead in (True, False):
        pool = RowPool(n_rows, ROW_BYTES)
        runner = late_runner(network, pool, max_running, random)
        model: Model = runner if ahead else OneByOne(runner)
        step_tokens = 2 * max_running + 5
        engine = Engine(model, BYTES, pool, max_running=max_running, step_tokens=step_tokens)
        play = Play(engine, some)
        play.run()
        plays.append(play)
    one, other = plays
    for mine, theirs in zip(one.told(whole=True), other.told(whole=True), strict=True):
        assert mine.said[:2] == theirs.said[:2]
        assert mine.said[3:] == theirs.said[3:]
        assert numbers(mine) == pytest.approx(numbers(theirs), abs=1e-4)
    for mine, theirs in zip(one.told(whole=False), other.told(whole=False), strict=True):
        n = min(len(mine.tokens), len(theirs.tokens))
        assert mine.tokens[:n] == theirs.tokens[:n]
    held = [
        {key: session_tokens(play.engine, key[1]) for key in play.engine.snapshot().sessions}
        for play in plays
    ]
    assert held[0] == held[1]
    for play in plays:
        assert play.engine.pool.running == 0
        play.engine.reset(None)
        assert play.engine.pool.free == n_rows


def numbers(answer: Answer) -> list[float]:
    return [score.logprob for score in answer.scores if score]


def client_of(network: GPT) -> Client:
    pool = RowPool(200, ROW_BYTES)
    runner = late_runner(network, pool, 4)
    return Client(Engine(runner, BYTES, pool, max_running=4, step_tokens=32))


@pytest.fixture
def broken() -> GPT:
    """What is computed at position 10 is not a number."""
    network = gpt(config(n_layer=1, n_ctx=WINDOW, n_vocab=BYTES.n_vocab))
    network.wpe.weight[10] = torch.nan
    return network


def test_numbers_that_are_not_finite_fail_one_request_alone(network: GPT, broken: GPT) -> None:
    """The step behind is in flight by then."""
    told = []
    for client in (client_of(network), client_of(broken)):
        none = frozenset[int]()
        good = [client.submit(request(f"{i}", 10, stop_ids=none))[0] for i in range(3)]
        (bad,) = client.submit(request("8 tokens", 10, session="t", stop_ids=none))
        client.run()
        told.append([answer.tokens for answer in good])
    assert told[0] == told[1]
    assert bad.failure
    assert bad.failure.code == "model_failed"
    assert client.engine.pool.idle == 3 * 10


def test_a_late_draw_that_fails_is_dropped_like_any_other(network: GPT, broken: GPT) -> None:
    (whole,) = client_of(network).ask(request("8 tokens", 10, stop_ids=frozenset()))
    stop = frozenset({whole.tokens[2]})  # drawn at position 9
    asked = request("8 tokens", 10, stop_ids=stop), request("1", 9, index=1, stop_ids=frozenset())
    one, other = client_of(broken).ask(*asked)
    assert one.tokens == whole.tokens[:3]
    assert other.completion_tokens == 9
