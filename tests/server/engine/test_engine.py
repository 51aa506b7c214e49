"""Requests in, events out: reuse, sessions, copies, aborts and failures of whole requests."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import replace
from typing import Unpack

import pytest
import torch

from model.rows import RowPool
from model.runner import Runner
from model.step import Draw, Sampling, Work
from model.tokenizer import Tokenizer
from server.engine.engine import Engine
from server.engine.sequence import FinishReason, Request
from tests.server.engine.helpers import (
    BYTES,
    END,
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
from tests.tiny import config, gpt

LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def reason(answer: Answer) -> FinishReason:
    assert answer.finish is not None
    return answer.finish.reason


def fake(says: Next | None = None) -> tuple[Client, FakeModel]:
    engine, model = fake_engine(says=says)
    return Client(engine), model


class TestReuse:
    def test_a_prompt_that_is_wholly_cached_computes_one_row(self) -> None:
        """B008: three times the same, and once more with the answer behind it."""
        client, model = fake()
        asked = request("the same prompt", 6, stop_ids=frozenset())
        answers = [client.ask(asked)[0] for _ in range(3)]
        assert answers[0].said == answers[1].said == answers[2].said == alone(asked)[0].said
        assert [answer.cached_tokens for answer in answers] == [0, 14, 14]
        assert model.spans[6:12] == 6 * [[1]]
        longer = request(asked.prompt + tuple(answers[0].tokens), 3)
        (answer,) = client.ask(longer)
        assert answer.said == alone(longer)[0].said
        assert answer.cached_tokens == 15 + 6 - 1  # the last token was never computed

    @pytest.mark.parametrize("session", [None, "s"])
    def test_the_next_turn_computes_only_what_is_new(self, session: str | None) -> None:
        """B004, B010: prompt, answer and more text; the last token of the answer has no row yet."""
        client, model = fake()
        (first,) = client.ask(request("p" * 20, 5, session=session, stop_ids=frozenset()))
        asked = request((*ids("p" * 20), *first.tokens, *ids(" more")), 5, session=session)
        steps = len(model.spans)
        (second,) = client.ask(asked)
        assert second.said == alone(asked)[0].said
        assert second.cached_tokens == 20 + 5 - 1
        assert model.spans[steps] == [1 + len(" more")]

    @pytest.mark.parametrize("session", [None, "s"])
    @pytest.mark.parametrize(
        ("prompt", "cached"),
        [("ABCDxy", 4), ("ABX", 2), ("different", 0), ("ABC", 2), ("A", 0), ("ABCD", 3)],
    )
    def test_a_diverging_prompt_shares_what_it_has_in_common(
        self, prompt: str, cached: int, session: str | None
    ) -> None:
        """B012. The last token of a prompt is always computed, for its logits."""
        client, _ = fake()
        client.ask(request("ABCD", 4, session=session))
        asked = request(prompt, 4, session=session)
        (answer,) = client.ask(asked)
        assert answer.said == alone(asked)[0].said
        assert answer.cached_tokens == cached

    def test_a_running_request_lends_what_it_has_computed(self) -> None:
        engine, _ = fake_engine(step_tokens=32)
        client = Client(engine)
        (first,) = client.submit(request("x" * 50, 4))
        client.step()
        (second,) = client.submit(request("x" * 40 + "y", 4))
        client.step()
        assert engine.pool.shared == 32
        client.run()
        assert (first.cached_tokens, second.cached_tokens) == (0, 32)
        assert second.said == alone(request("x" * 40 + "y", 4))[0].said

    @pytest.mark.parametrize("running", [True, False])
    def test_tenants_never_share(self, running: bool) -> None:
        client, _ = fake(TALKS)
        client.submit(request("a prompt", 9, tenant="one", session="s"))
        client.step()
        if not running:
            client.run()
        (foreign,) = client.ask(request("a prompt", 2, tenant="other", session="s"))
        (own,) = client.ask(request("a prompt", 2, tenant="one"))
        assert (foreign.cached_tokens, own.cached_tokens) == (0, 7)
        assert client.engine.snapshot().sessions.keys() == {("one", "s"), ("other", "s")}

    def test_without_the_cache_every_token_computes_every_row(self) -> None:
        client, model = fake(TALKS)
        client.ask(request("0123456789", 4))
        (answer,) = client.ask(request("0123456789", 4, use_cache=False))
        assert model.spans[4:] == [[10], [11], [12], [13]]
        assert answer.cached_tokens == 0
        snapshot = client.engine.snapshot()
        assert snapshot.rows_recomputed_total == 10 + 11 + 12
        assert snapshot.rows_idle == 10 + 3  # of the first; the second leaves nothing

    def test_an_uncached_turn_leaves_its_tokens_and_no_rows(self) -> None:
        client, _ = fake(TALKS)
        client.ask(request("turn", 4, session="s", use_cache=False))
        assert session_tokens(client.engine, "s") == ids("turnaaaa")
        assert client.engine.pool.free == client.engine.pool.n_rows

    def test_scored_prompts_are_computed_and_scored_once(self) -> None:
        client, _ = fake()
        client.ask(request("to be scored", 3))
        asked = request("to be scored", 3, echo=True, score_prompt=True)
        (answer,) = client.ask(asked)
        assert answer.cached_tokens == 0
        assert answer.said == alone(asked)[0].said
        assert answer.scores[0] is None
        assert [score.token for score in answer.scores[1:12] if score] == answer.tokens[1:12]


class TestCopies:
    def test_copies_compute_their_prompt_once(self) -> None:
        client, model = fake()
        requests = copies(4, request("p" * 30, 5, stop_ids=frozenset()))
        answers = client.ask(*requests)
        assert sum(map(sum, model.spans)) == 30 + 3 + 4 * 4
        assert model.spans[:2] == [[30], [1, 1, 1, 1]]
        assert [answer.cached_tokens for answer in answers] == [0, 29, 29, 29]
        assert [a.said for a in answers] == [
            alone(replace(r, after=None))[0].said for r in requests
        ]
        assert len({answer.text for answer in answers}) > 1

    def test_copies_without_the_cache_share_nothing(self) -> None:
        client, model = fake(TALKS)
        client.ask(*copies(2, request("p" * 10, 2, use_cache=False)))
        assert sum(map(sum, model.spans)) == 2 * (10 + 11)

    def test_copies_of_a_scored_prompt_score_it_once(self) -> None:
        client, model = fake()
        first = request("p" * 10, 2, echo=True, score_prompt=True, stop_ids=frozenset())
        answers = client.ask(*copies(3, first))
        assert model.spans[:2] == [[10], [1, 1, 1]]
        assert answers[0].scores[:10] == answers[2].scores[:10]
        assert None not in answers[2].scores[1:10]

    def test_copies_follow_though_no_token_is_wanted(self) -> None:
        client, _ = fake()
        answers = client.ask(*copies(2, request("p", 0, echo=True)))
        assert [(a.text, reason(a), a.completion_tokens) for a in answers] == 2 * [("p", LENGTH, 0)]

    def test_several_prompts_of_one_call_run_side_by_side(self) -> None:
        client, model = fake(TALKS)
        client.ask(*(request(f"{i}" * 5, 3, index=i) for i in range(4)))
        assert model.spans == [[5, 5, 5, 5], [1, 1, 1, 1], [1, 1, 1, 1]]


class TestSessions:
    """DESIGN 5: a session holds what was sent and said, without the end and the stop string."""

    @pytest.mark.parametrize(
        ("says", "fields", "text", "held"),
        [
            ("abcdefgh", Fields(), "abcdef", "Pabcdef"),
            ("abc", Fields(stop_ids=frozenset(b"b")), "a", "Pa"),
            ("one STOP", Fields(stop=(" S",)), "one", "Pone"),
            ("日本", Fields(stop=("本",)), "日", "P日"),
            ("abc", Fields(stop=("abc",)), "", "P"),
            ("abcdef", Fields(echo=True), "Pabcdef", "Pabcdef"),
            ("PabPab", Fields(stop=("Pab",), echo=True), "P", "P"),
        ],
    )
    def test_what_a_session_holds_after_a_turn(
        self, says: str, fields: Fields, text: str, held: str
    ) -> None:
        client, _ = fake(script(says))
        (answer,) = client.ask(replace(request("P", 6, **fields), session="s"))
        assert answer.text == text
        assert session_tokens(client.engine, "s") == ids(held)

    def test_a_turn_that_wants_no_token_leaves_its_prompt(self) -> None:
        client, _ = fake()
        client.ask(request("prompt", 0, session="s"))
        assert session_tokens(client.engine, "s") == ids("prompt")

    def test_the_end_token_is_not_held(self) -> None:
        client, _ = fake(lambda tokens, n_prompt: END if len(tokens) == 4 else 97)
        (answer,) = client.ask(request("P", 20, session="s"))
        assert (answer.text, reason(answer)) == ("aaa", STOP)
        assert answer.tokens == [97, 97, 97, END]
        assert session_tokens(client.engine, "s") == ids("Paaa")

    def test_a_token_that_a_stop_string_cuts_is_dropped_and_its_rest_encoded_anew(self) -> None:
        """B011. The rows before it stay, and the next turn finds all of them."""
        tokenizer = Tokenizer.from_ranks(
            {**{bytes([i]): i for i in range(256)}, b"one": 256, b" two!": 257}, "words"
        )
        engine, model = fake_engine()
        engine.tokenizer = tokenizer
        model.says = lambda tokens, n_prompt: [256, 257][(len(tokens) - n_prompt) % 2]
        client = Client(engine)
        asked = request("P", 20, session="s", stop=("!o",), stop_ids=frozenset())
        (answer,) = client.ask(asked)
        assert answer.text == "one two"
        assert session_tokens(engine, "s") == (ids("P")[0], 256, *ids(" two"))
        record = engine.snapshot().sessions["", "s"]
        assert (record.tokens, record.rows) == (6, 2)
        (answer,) = client.ask(request((ids("P")[0], 256, *ids(" two"), *ids(" more")), 1))
        assert answer.cached_tokens == 2

    @pytest.mark.parametrize("end", ["abort", "broken", "nan"])
    def test_a_turn_that_does_not_end_by_itself_is_rolled_back(self, end: str) -> None:
        """B014. The next turn finds the session as it was, and reuses it."""
        client, model = fake()
        client.ask(request("the first turn", 5, session="s", stop_ids=frozenset()))
        held = session_tokens(client.engine, "s")
        record = client.engine.snapshot().sessions["", "s"]
        (lost,) = client.submit(request((*held, *ids(" second")), 9, session="s"))
        client.step()
        asked = request((*held, *ids(" third")), 5, session="s")
        (after,) = client.submit(asked)  # waits in line
        if end == "abort":
            assert client.engine.abort("call-2")
        else:
            setattr(model, end, True)
        client.step()
        assert session_tokens(client.engine, "s") == held
        assert replace(client.engine.snapshot().sessions["", "s"], last_used=0) == replace(
            record, last_used=0
        )
        client.run()
        assert lost.finish is None
        assert after.said == alone(asked)[0].said
        assert after.cached_tokens >= len(held) - 1


class TestAbort:
    """DESIGN 3: rows come back at once, in whatever state a request is."""

    def test_a_running_request(self) -> None:
        client, _ = fake(TALKS)
        client.submit(request("a prompt", 9))
        client.step()
        assert client.engine.abort("call-1")
        assert not client.engine.has_work
        assert client.engine.pool.running == 0
        assert client.step() == []
        assert client.ask(request("a prompt", 1))[0].cached_tokens == 7  # it was no loss

    def test_a_waiting_request(self) -> None:
        engine, _ = fake_engine(max_running=1)
        client = Client(engine)
        client.submit(request("first", 3, stop_ids=frozenset()))
        client.submit(request("second", 3))
        client.step()
        assert engine.abort("call-2")
        assert engine.snapshot().waiting == 0
        client.run()

    @pytest.mark.parametrize("steps", range(4))
    def test_copies_whether_they_have_begun_or_not(self, steps: int) -> None:
        engine, _ = fake_engine(step_tokens=32)
        client = Client(engine)
        client.submit(*copies(3, request("p" * 50, 9, stop_ids=frozenset())))
        for _ in range(steps):
            client.step()
        assert engine.abort("call-1")
        assert not engine.has_work
        snapshot = engine.snapshot()
        assert (snapshot.running, snapshot.waiting, snapshot.rows_running) == (0, 0, 0)
        assert client.step() == []

    def test_a_preempted_request(self) -> None:
        engine, _ = fake_engine(n_rows=40, n_ctx=40, says=TALKS)
        client = Client(engine)
        (first,) = client.submit(request("1" * 10, 30))
        client.submit(request("2" * 10, 30))
        while not engine.scheduler.preemptions:
            client.step()
        assert engine.abort("call-2")
        client.run()
        assert first.text == 30 * "a"

    def test_it_is_known_once(self) -> None:
        client, _ = fake(TALKS)
        assert not client.engine.abort("call-1")
        client.submit(request("x", 5))
        assert client.engine.abort("call-1")
        assert not client.engine.abort("call-1")
        client.ask(request("x", 1))
        assert not client.engine.abort("call-2")


class TestFailure:
    def test_a_model_that_raises_fails_the_calls_of_the_step_and_no_others(self) -> None:
        engine, model = fake_engine(max_running=2)
        client = Client(engine)
        failed = client.submit(*(request(f"{i}", 9, index=i) for i in range(3)))
        (waited,) = client.submit(request("later", 3))
        client.step()
        model.broken = True
        client.step()
        assert all(answer.failure and answer.finish is None for answer in failed)
        assert failed[0].failure is not None
        assert failed[0].failure.code == "engine_error"
        assert engine.pool.free == engine.pool.n_rows
        client.run()
        assert waited.said == alone(request("later", 3))[0].said

    def test_numbers_that_are_not_finite_fail_one_request_and_leave_no_rows(self) -> None:
        """B063, with the real network: whoever reaches position 10 reads NaN."""
        engine = real_engine()
        engine.model.model.wpe.weight[10] = torch.nan  # type: ignore[attr-defined]
        client = Client(engine)
        good = [client.submit(real_request(f"{i}", 10))[0] for i in range(3)]
        (bad,) = client.submit(real_request("more than ten", 10, session="s"))
        (late,) = client.submit(real_request("8 tokens", 10, session="t"))
        client.run()
        assert [a.tokens for a in good] == [real_alone(real_request(f"{i}", 10)) for i in range(3)]
        for answer in (bad, late):
            assert answer.finish is None
            assert answer.failure is not None
            assert answer.failure.code == "model_failed"
        assert not engine.snapshot().sessions
        assert engine.pool.idle == 3 * 10


class TestNetwork:
    """With a real network. Free rows and the scratch row are NaN in every step."""

    def test_neighbours_do_not_matter(self) -> None:
        """Short and long, greedy and seeded, cached and not, copies and sessions in one batch."""
        requests = [
            real_request("short", 20),
            real_request("a long prompt, longer than a step", 20, echo=True),
            real_request("a long prompt, longer than others", 20, session="s"),
            real_request("seeded", 20, sampling=Sampling(seed=7)),
            real_request("cold", 20, sampling=Sampling(seed=1, temperature=0.3, top_p=0.9)),
            real_request("uncached", 20, use_cache=False, sampling=Sampling(seed=3)),
            real_request("a long prompt, uncached", 9, use_cache=False),
            real_request("penalties", 20, sampling=Sampling(0.0, frequency_penalty=1.0)),
        ]
        several = copies(3, real_request("copies", 20))
        client = Client(real_engine(step_tokens=32))
        answers = [client.submit(asked)[0] for asked in requests]
        answers += client.submit(*several)
        client.run()
        for asked, answer in zip([*requests, *several], answers, strict=True):
            assert answer.tokens == real_alone(asked)

    def test_a_tiny_pool_changes_no_answer(self) -> None:
        requests = [
            real_request(
                f"{i} in a tiny pool" * (1 + i % 2), 24, use_cache=i != 3, session=f"{i % 4}"
            )
            for i in range(8)
        ]
        client = Client(real_engine(n_rows=64, step_tokens=8, max_running=4))
        answers = [client.submit(asked)[0] for asked in requests]
        client.run()
        snapshot = client.engine.snapshot()
        assert snapshot.preemptions_total
        assert snapshot.rows_evicted_total
        assert [answer.tokens for answer in answers] == [real_alone(asked) for asked in requests]

    def test_turns_of_a_session_answer_as_without_it(self) -> None:
        client = Client(real_engine())
        tokens, known = ids("Once"), 0
        for more in (" upon", " a", " time"):
            tokens += ids(more)
            asked = real_request(tokens, 8, session="s", sampling=Sampling(seed=5))
            (answer,) = client.ask(asked)
            assert answer.tokens == real_alone(asked)
            assert answer.cached_tokens == known
            known = len(tokens) + 8 - 1
            tokens += tuple(answer.tokens)


class PoisonedRunner(Runner):
    """Before every step, what nobody may read is NaN."""

    pool: RowPool

    def run(self, work: Ordered[Work]) -> list[Draw]:
        self.kv[:, :, self.pool.free_rows()] = torch.nan
        self.kv[:, :, self.pool.scratch] = torch.nan
        return super().run(work)


def real_engine(n_rows: int = 600, step_tokens: int = 64, max_running: int = 16) -> Engine:
    model = gpt(config(n_layer=2, n_ctx=64, n_vocab=BYTES.n_vocab))
    pool = RowPool(n_rows, model.config.row_bytes(4))
    runner = PoisonedRunner(model, n_rows)
    runner.pool = pool
    return Engine(runner, BYTES, pool, max_running=max_running, step_tokens=step_tokens)


def real_request(
    prompt: str | tuple[int, ...], max_tokens: int, **fields: Unpack[Fields]
) -> Request:
    """It runs to its limit, whatever the network says."""
    return replace(request(prompt, max_tokens, **fields), stop_ids=frozenset())


def real_alone(asked: Request) -> list[int]:
    """The tokens that the request gets in an engine of its own, without a cache."""
    (answer,) = Client(real_engine()).ask(replace(asked, index=0, use_cache=False, after=None))
    return answer.tokens
