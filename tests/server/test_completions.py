"""POST /v1/completions: prompts, options, answers, streams. Themes B, C and D of the cases."""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

import pytest
from starlette.testclient import TestClient

from server.api.schemas import CompletionBody
from server.engine.sequence import Request
from server.engine.worker import Mailbox
from tests.conftest import Serve
from tests.fakes import END, N_CTX, FakeModel
from tests.server.live import events

JSON = dict[str, Any]
EMOJI = list("😀".encode())
A = ord("a")


def ask(client: TestClient, **body: object) -> JSON:
    response = client.post("/v1/completions", json={"temperature": 0, **body})
    assert response.status_code == 200, response.text
    answer: JSON = response.json()
    return answer


def text(client: TestClient, **body: object) -> str:
    result: str = ask(client, **body)["choices"][0]["text"]
    return result


def stream(client: TestClient, **body: object) -> list[Any]:
    response = client.post("/v1/completions", json={"temperature": 0, "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response.text)


def refused(client: TestClient, status: int = 400, /, **body: object) -> JSON:
    response = client.post("/v1/completions", json={"prompt": "ab", **body})
    assert response.status_code == status, response.text
    error: JSON = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 400
    return error


def forced(*tokens: int) -> dict[str, int]:
    return {str(token): 100 for token in tokens}


class TestAnswer:
    def test_has_what_clients_read(self, client: TestClient) -> None:
        answer = ask(client, prompt="ab", max_tokens=5)
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == "fake"
        assert isinstance(answer["created"], int)
        (choice,) = answer["choices"]
        assert choice == {
            "index": 0,
            "text": "ldzxj",
            "logprobs": None,
            "finish_reason": "length",
        }
        assert answer["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 5,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert set(answer["timings"]) == {
            "queue_ms", "prefill_ms", "decode_ms", "rows_computed", "rows_reused",
        }  # fmt: skip

    def test_b089_default_is_16_tokens_in_both_modes(self, client: TestClient) -> None:
        assert ask(client, prompt="ab")["usage"]["completion_tokens"] == 16
        assert "".join(c["choices"][0]["text"] for c in stream(client, prompt="ab")[:-1]) == text(
            client, prompt="ab"
        )

    def test_b093_usage_counts_what_was_generated(self, client: TestClient) -> None:
        for n in (1, 5, 20):
            assert ask(client, prompt="ab", max_tokens=n)["usage"]["completion_tokens"] == n
        usage = ask(client, prompt=[1, 2, 3], n=3, max_tokens=4)["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 12)

    def test_b095_cached_tokens_are_always_there(self, client: TestClient) -> None:
        def cached(**body: object) -> int:
            usage = ask(client, prompt="abcdefgh", max_tokens=2, **body)["usage"]
            assert usage["prompt_tokens"] == 8
            result: int = usage["prompt_tokens_details"]["cached_tokens"]
            return result

        assert cached() == 0
        assert cached() == 7
        assert cached(use_cache=False) == 0
        body = {"prompt": "abcdefgh", "stream_options": {"include_usage": True}}
        assert stream(client, **body)[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 7

    def test_uncached_text_is_the_same(self, client: TestClient) -> None:
        assert text(client, prompt="abc", use_cache=False) == text(client, prompt="abc")


class TestPrompt:
    def test_b071_four_forms(self, client: TestClient) -> None:
        one = text(client, prompt="ab")
        other = text(client, prompt="c")
        for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
            assert text(client, prompt=prompt) == one
        for prompt in (["ab", "c"], [[97, 98], [99]]):
            choices = ask(client, prompt=prompt)["choices"]
            assert [c["text"] for c in choices] == [one, other]

    def test_b072_order_is_prompt_by_prompt(self, client: TestClient) -> None:
        answer = ask(client, prompt=["ab", "c"], n=2, max_tokens=3)
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        texts = [c["text"] for c in answer["choices"]]
        assert texts[0] == texts[1] != texts[2] == texts[3]
        assert answer["usage"]["prompt_tokens"] == 3

    @pytest.mark.parametrize(
        ("prompt", "where"),
        [
            ({"a": 1}, "must be a string"),
            (1, "must be a string"),
            (["a", 1], "element 1 must be a string"),
            ([64, "a"], "position 1 must be a token id, not 'a'"),
            ([[1], "a"], "element 1"),
            ([[[1]]], "element 0, position 0"),
            ([1.5], "not 1.5"),
            ([True], "not true"),
            ([None], "not null"),
            ([0, 257], "257 at position 1"),
            ([-1], "-1 at position 0"),
            ([2**63], "9223372036854775808 at position 0"),
            ([10**3000], "a huge number at position 0"),
            ([], "empty list"),
        ],
    )
    def test_b071_b080_other_forms_and_ids_are_refused(
        self, client: TestClient, prompt: object, where: str
    ) -> None:
        error = refused(client, prompt=prompt)
        assert where in error["message"]
        assert error["param"] == "prompt"

    def test_b071_number_of_prompts_is_limited(self, serve: Serve) -> None:
        client = serve(max_prompts=3)
        assert len(ask(client, prompt=["a"] * 3)["choices"]) == 3
        assert "limit is 3" in refused(client, prompt=["a"] * 4)["message"]

    def test_more_completions_than_the_server_holds_can_never_run(self, serve: Serve) -> None:
        client = serve(max_queue=0)
        assert len(ask(client, prompt="a", n=8)["choices"]) == 8
        assert refused(client, prompt="a", n=9)["param"] == "n"

    def test_b081_empty_prompts_start_from_end_of_text(self, client: TestClient) -> None:
        start = text(client, prompt=[END])
        empty: list[object] = ["", [""], [[]], None]
        for body in ({}, *({"prompt": prompt} for prompt in empty)):
            answer = ask(client, **body)
            assert answer["choices"][0]["text"] == start
            assert answer["usage"]["prompt_tokens"] == 1
            assert text(client, **body, echo=True) == start
            assert text(client, **body, session_id="s") == start

    def test_b082_special_text_is_ordinary_text(self, client: TestClient) -> None:
        prompt = "a<|endoftext|>b"
        answer = ask(client, prompt=prompt, stop=["<|endoftext|>"], echo=True, user="<|endoftext|>")
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        assert answer["choices"][0]["text"].startswith(prompt)

    def test_b123_text_that_cannot_fit_is_not_encoded(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service = client.app.state.service  # type: ignore[attr-defined]
        monkeypatch.setattr(service.served.tokenizer, "encode", None)
        for word in ("a", "^", " ", "é"):
            error = refused(client, prompt=word * 100_000)
            assert error["code"] == "context_length_exceeded"
            assert f"more than {N_CTX} tokens" in error["message"]

    def test_lone_surrogates_are_no_text(self, client: TestClient) -> None:
        response = client.post(
            "/v1/completions",
            content=b'{"prompt": "\\ud800"}',
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code == 400


class TestWindow:
    def test_b026_prompt_and_completion_may_fill_it(self, client: TestClient) -> None:
        answer = ask(client, prompt="a" * (N_CTX - 1), max_tokens=1)
        assert answer["usage"]["total_tokens"] == N_CTX

    @pytest.mark.parametrize(
        ("length", "max_tokens"), [(N_CTX - 1, 2), (N_CTX, 1), (N_CTX, None), (3, N_CTX)]
    )
    def test_b027_one_token_more_is_refused_before_a_stream(
        self, client: TestClient, length: int, max_tokens: int | None
    ) -> None:
        for streamed in (False, True):
            error = refused(client, prompt="a" * length, max_tokens=max_tokens, stream=streamed)
            assert error["code"] == "context_length_exceeded"
            assert f"This model's maximum context length is {N_CTX} tokens" in error["message"]

    def test_b027_default_is_cut_to_what_fits(self, client: TestClient) -> None:
        answer = ask(client, prompt="a" * (N_CTX - 3), max_tokens=None)
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["choices"][0]["finish_reason"] == "length"

    def test_b076_no_token_at_all(self, client: TestClient) -> None:
        full = "a" * N_CTX
        answer = ask(client, prompt=full, max_tokens=0, echo=True, logprobs=1)
        assert answer["choices"][0]["text"] == full
        assert len(answer["choices"][0]["logprobs"]["tokens"]) == N_CTX
        answer = ask(client, prompt="ab", max_tokens=0)
        assert answer["choices"][0]["text"] == ""
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
        assert [
            e["choices"][0]["text"] for e in stream(client, prompt="ab", max_tokens=0)[:-1]
        ] == [""]

    def test_one_long_prompt_among_several_is_refused(self, client: TestClient) -> None:
        assert refused(client, prompt=[[1], [1] * (N_CTX + 1)])["code"] == "context_length_exceeded"

    def test_max_completion_tokens_is_an_alias(self, client: TestClient) -> None:
        answer = ask(client, prompt="ab", max_completion_tokens=3)
        assert answer["usage"]["completion_tokens"] == 3
        assert ask(client, prompt="ab", max_completion_tokens=3, max_tokens=3)["choices"]
        error = refused(client, max_completion_tokens=3, max_tokens=4)
        assert error["param"] == "max_completion_tokens"


class TestFields:
    @pytest.mark.parametrize(
        ("field", "values"),
        [
            ("temperature", [-1, 2.1, 100, "hot", True, [1]]),
            ("top_p", [-0.1, 1.0001, "1"]),
            ("top_k", [-2, 1.5, "1", 2**31]),
            ("min_p", [-0.1, 1.1]),
            ("max_tokens", [-1, 1.5, "5", True, 1e9, 10**30]),
            ("n", [0, -1, 1.0, 129, True]),
            ("best_of", [0, -1, 129, 1.5, True]),
            ("logprobs", [-1, 21, 257, True, "1", 1.5]),
            ("stop", ["", [""], ["a"] * 17, [1], "x" * 1025]),
            ("stop_token_ids", [[257], [-1], ["1"], [True], 1, [0] * 1025]),
            ("logit_bias", [{"257": 1}, {"-1": 1}, {"1e3": 1}, {"abc": 1}, {"99999999999": 1}]),
            ("logit_bias", [{"07": 1}, {"1": 101}, {"1": -101}, {"1": "x"}, {"²": 1}, [], "x"]),
            ("presence_penalty", [2.1, -2.1, "x"]),
            ("frequency_penalty", [2.1, -2.1]),
            ("repetition_penalty", [0, -1, 11, 5e-324]),
            ("min_tokens", [-1, 17]),
            ("seed", [1.5, "1", 2**63, True]),
            ("stream", [1, "true"]),
            ("stream_options", [{}, {"include_usage": True}, 1]),
            ("echo", [1, "yes"]),
            ("use_cache", [0, "no"]),
            ("session_id", ["", ".", "../x", "/etc/x", "a\\b", "a" * 129, "a\0", "a\n", 1]),
            ("session_mode", ["append", "x"]),
            ("model", [1, ["fake"]]),
            ("user", [1]),
            ("suffix", ["x", 1]),
            ("use_beam_search", [True]),
            ("allowed_token_ids", [[1]]),
            ("prompt_logprobs", [1]),
            ("truncate_prompt_tokens", [5]),
            ("response_format", [{"type": "json_object"}]),
            ("priority", [1, False]),
            ("length_penalty", [2, True]),
        ],
    )
    def test_b060_b061_b065_b076_b077_b087_b125_wrong_values_are_refused_by_name(
        self, client: TestClient, field: str, values: list[object]
    ) -> None:
        for value in values:
            error = refused(client, **{field: value})
            assert (error["param"] or "").partition(".")[0] == field, (value, error)
            assert field in error["message"]
        assert ask(client, prompt="ab")["choices"], "the next request works"

    def test_b098_b042_stream_options_and_suffix_neutral(self, client: TestClient) -> None:
        neutral: JSON = {
            "suffix": "", "best_of": 1, "echo": False, "presence_penalty": 0, "logit_bias": {},
            "frequency_penalty": 0, "use_beam_search": False, "length_penalty": 1.0,
            "include_stop_str_in_output": False, "spaces_between_special_tokens": True,
            "add_special_tokens": True, "response_format": {"type": "text"}, "priority": 0,
            "logits_processors": [], "bad_words": [], "stop": [], "stop_token_ids": [],
            "min_p": 0, "top_k": -1, "repetition_penalty": 1, "user": "someone",
            "session_mode": "match", "skip_special_tokens": True,
        }  # fmt: skip
        response = client.post(
            "/v1/completions", json={"prompt": "ab", "temperature": 0, **neutral}
        )
        assert response.status_code == 200, response.text
        assert "warning" not in response.headers
        assert response.json()["choices"][0]["text"] == text(client, prompt="ab")

    def test_b066_b084_null_is_the_default(self, client: TestClient) -> None:
        fields = [*CompletionBody.model_fields, *CompletionBody.neutral]
        for streamed in (False, True):
            response = client.post(
                "/v1/completions", json={**dict.fromkeys(fields), "stream": streamed or None}
            )
            assert response.status_code == 200, response.text
        plain = text(client, prompt="ab")
        for field in set(fields) - {"prompt", "temperature"}:
            assert text(client, **{"prompt": "ab", field: None}) == plain

    def test_b087_unknown_fields_are_named(
        self, client: TestClient, caplog: pytest.LogCaptureFixture
    ) -> None:
        body = {"prompt": "ab", "max_token": 4, "foo": 1, "a\r\nX-Evil: 1": 1, "é": 1}
        options = {"stream": True, "stream_options": {"bar": 1}}
        for extra in ({}, options):
            response = client.post("/v1/completions", json={**body, **extra})
            assert response.status_code == 200
            warning = response.headers["warning"]
            assert warning.startswith(
                '299 onerow "unknown fields ignored: max_token, foo, a??X-Evil'
            )
            assert "x-evil" not in response.headers
        assert "stream_options.bar" in warning
        assert "unknown fields ignored: max_token, foo" in caplog.text
        assert all("\n" not in record.getMessage() for record in caplog.records)

    def test_b086_sixteen_stop_strings(self, client: TestClient) -> None:
        for n in (4, 5, 16):
            assert ask(client, prompt="ab", stop=["\x01"] * n)["choices"]

    def test_b090_model_names(self, client: TestClient, serve: Serve) -> None:
        for model in ("no-such", "", "x" * 10_000, "../x"):
            for streamed in (False, True):
                error = refused(client, 404, model=model, stream=streamed)
                assert error["code"] == "model_not_found"
                assert "'fake'" in error["message"]
        assert ask(client, model="fake")["model"] == "fake"
        assert ask(client, model="/models/fake")["model"] == "fake"
        assert ask(client, model=None)["model"] == "fake"
        assert ask(serve(lenient_model=True), model="gpt-4")["model"] == "fake"

    def test_b087_rules_of_best_of(self, client: TestClient) -> None:
        for body, words in (
            ({"n": 3, "best_of": 2}, "not be below n"),
            ({"best_of": 2, "stream": True}, "in a stream"),
            ({"best_of": 128, "prompt": ["a"] * 2}, "prompts x best_of"),
        ):
            error = refused(client, **body)
            assert error["param"] == "best_of"
            assert words in error["message"]
        assert refused(client, best_of=2, session_id="s")["param"] == "session_id"

    def test_numbers_of_one_answer_are_limited(self, serve: Serve) -> None:
        client = serve(max_prompts=1000, max_queue=1000)
        error = refused(client, prompt=["a"] * 300, logprobs=20, max_tokens=60)
        assert error["param"] == "logprobs"
        error = refused(client, prompt=["a"] * 3, n=100, logprobs=20, max_tokens=60)
        assert error["param"] == "logprobs"
        error = refused(client, prompt=["a"] * 8, best_of=100, n=1, logprobs=20, max_tokens=60)
        assert error["param"] == "logprobs"


class TestBestOf:
    BODY: ClassVar[JSON] = {
        "prompt": ["ab", "c"], "temperature": 1, "seed": 7, "max_tokens": 8, "ignore_eos": True,
    }  # fmt: skip

    def test_the_best_per_token_come_first(self, client: TestClient) -> None:
        candidates = ask(client, **self.BODY, n=5, logprobs=0)["choices"]

        def mean(choice: JSON) -> float:
            numbers = choice["logprobs"]["token_logprobs"]
            return math.fsum(numbers) / len(numbers)

        expected = []
        for first in (0, 5):
            of_one = sorted(candidates[first : first + 5], key=mean, reverse=True)
            assert len({c["text"] for c in of_one}) > 1
            expected += of_one[:2]
        answer = ask(client, **self.BODY, n=2, best_of=5)
        assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
        assert [c["text"] for c in answer["choices"]] == [c["text"] for c in expected]
        assert all(c["logprobs"] is None for c in answer["choices"]), "nobody asked for them"
        usage = answer["usage"]
        assert usage["prompt_tokens"] == 3
        assert usage["completion_tokens"] == 2 * 5 * 8, "all candidates are computed"
        scored = ask(client, **self.BODY, n=2, best_of=5, logprobs=2)["choices"]
        assert [c["text"] for c in scored] == [c["text"] for c in expected]
        assert [c["logprobs"]["token_logprobs"] for c in scored] == [
            c["logprobs"]["token_logprobs"] for c in expected
        ]

    def test_it_is_the_mean_and_not_the_sum(self, client: TestClient) -> None:
        """The sum would prefer whatever ends first."""
        body = {**self.BODY, "prompt": "ab", "max_tokens": 12, "stop": ["d"], "logprobs": 0}
        candidates = ask(client, **body, n=20)["choices"]
        means = [
            math.fsum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"])
            for c in candidates
        ]
        assert len({len(c["logprobs"]["tokens"]) for c in candidates}) > 1
        best = ask(client, **body, best_of=20)["choices"]
        assert [c["text"] for c in best] == [candidates[means.index(max(means))]["text"]]

    def test_the_echo_does_not_enter(self, client: TestClient) -> None:
        plain = ask(client, **self.BODY, best_of=4)["choices"]
        echoed = ask(client, **self.BODY, best_of=4, echo=True)["choices"]
        assert [c["text"] for c in echoed] == ["ab" + plain[0]["text"], "c" + plain[1]["text"]]

    def test_nothing_to_choose_from(self, client: TestClient) -> None:
        assert len(ask(client, prompt="ab", n=2, best_of=2)["choices"]) == 2
        assert len(ask(client, prompt="ab", n=2, best_of=1)["choices"]) == 2
        assert ask(client, prompt="ab", best_of=3, max_tokens=0)["choices"][0]["text"] == ""
        same = ask(client, prompt="ab", n=2, best_of=4)["choices"]
        assert same[0]["text"] == same[1]["text"] == text(client, prompt="ab")


class TestTokenIds:
    def test_of_prompt_and_completion(self, client: TestClient) -> None:
        body = {"prompt": [[97, 98], EMOJI], "n": 2, "max_tokens": 6, "return_token_ids": True}
        for echo in (False, True):
            choices = ask(client, **body, echo=echo)["choices"]
            assert [c["prompt_token_ids"] for c in choices] == [[97, 98]] * 2 + [EMOJI] * 2
            for choice in choices:
                assert len(choice["token_ids"]) == 6
                made = bytes(choice["token_ids"]).decode()
                assert choice["text"].endswith(made)
            joined: dict[int, list[int]] = {}
            prompts: dict[int, list[int]] = {}
            for chunk in stream(client, **body, echo=echo)[:-1]:
                (part,) = chunk["choices"]
                joined.setdefault(part["index"], []).extend(part["token_ids"])
                if "prompt_token_ids" in part:
                    assert part["index"] not in prompts
                    prompts[part["index"]] = part["prompt_token_ids"]
            assert joined == {c["index"]: c["token_ids"] for c in choices}
            assert prompts == {c["index"]: c["prompt_token_ids"] for c in choices}

    def test_the_end_token_is_one_and_nobody_gets_them_unasked(self, client: TestClient) -> None:
        body = {"prompt": "x", "logit_bias": forced(END)}
        (choice,) = ask(client, **body, return_token_ids=True)["choices"]
        assert choice["token_ids"] == [END]
        assert "token_ids" not in ask(client, **body)["choices"][0]


class TestSampling:
    def test_b056_seed_repeats_and_stream_is_the_same(self, client: TestClient) -> None:
        body = {"prompt": "ab", "temperature": 1, "max_tokens": 20, "ignore_eos": True}
        first = ask(client, **body, seed=42)["choices"][0]["text"]
        assert text(client, **body, seed=42) == first
        assert (
            "".join(c["choices"][0]["text"] for c in stream(client, **body, seed=42)[:-1]) == first
        )
        assert text(client, **body, seed=43) != first
        assert text(client, **body, seed=-1) != first

    def test_without_a_seed_texts_differ_also_within_one_list(self, client: TestClient) -> None:
        body = {"temperature": 2, "max_tokens": 20, "ignore_eos": True}
        assert text(client, prompt="ab", **body) != text(client, prompt="ab", **body)
        one, other = ask(client, prompt=["ab", "ab"], **body)["choices"]
        assert one["text"] != other["text"]

    def test_copies_differ_and_copy_0_is_the_single_answer(self, client: TestClient) -> None:
        body = {"temperature": 1, "seed": 5, "max_tokens": 20, "ignore_eos": True}
        single = text(client, prompt="ab", **body)
        for cached in (True, False):
            choices = ask(client, prompt=["c", "ab"], n=2, use_cache=cached, **body)["choices"]
            assert choices[2]["text"] == single != choices[3]["text"]

    def test_b060_b061_edges_are_greedy(self, client: TestClient) -> None:
        greedy = text(client, prompt="ab")
        assert text(client, prompt="ab", temperature=1e-10) == greedy
        assert ask(client, prompt="ab", temperature=None)["choices"]

    def test_forced_tokens(self, client: TestClient) -> None:
        assert text(client, prompt="x", logit_bias=forced(A), max_tokens=3) == "aaa"

    def test_options_reach_the_engine(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = client.app.state.service.worker  # type: ignore[attr-defined]
        submit = worker.submit
        seen: list[list[Request]] = []

        def noted(requests: list[Request], *, patient: bool) -> Mailbox:
            seen.append(requests)
            mailbox: Mailbox = submit(requests, patient=patient)
            return mailbox

        monkeypatch.setattr(worker, "submit", noted)
        ask(
            client, prompt=["ab", "c"], n=2, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=9,
            presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.1, logit_bias={"5": 2},
            min_tokens=1, stop="zz", stop_token_ids=[7], echo=True, logprobs=2, max_tokens=3,
            skip_special_tokens=False,
        )  # fmt: skip
        ask(client, prompt="ab", top_k=-1, ignore_eos=True, use_cache=False, session_id="s-1")
        requests, (last,) = seen
        assert [(r.index, r.after, r.sampling.copy) for r in requests] == [
            (0, None, 0), (1, 0, 1), (2, None, 0), (3, 2, 1),
        ]  # fmt: skip
        r = requests[3]
        assert r.prompt == (99,)
        assert (r.max_tokens, r.min_tokens, r.stop, r.stop_ids) == (
            3,
            1,
            ("zz",),
            frozenset({7, END}),
        )
        assert (r.echo, r.score_prompt, r.use_cache, r.show_special) == (True, True, True, True)
        s = r.sampling
        assert (s.temperature, s.top_k, s.top_p, s.min_p, s.seed) == (0.5, 3, 0.9, 0.1, 9)
        assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1, -1, 1.1)
        assert (s.logit_bias, s.logprobs) == (((5, 2.0),), 2)
        assert (last.sampling.top_k, last.stop_ids, last.session) == (0, frozenset(), "s-1")
        assert (last.use_cache, last.score_prompt, last.tenant) == (False, False, "")


class TestEnds:
    @pytest.mark.parametrize("streamed", [False, True])
    def test_b039_b043_b094_three_endings(self, client: TestClient, streamed: bool) -> None:
        for body, reason, tokens in (
            ({"logit_bias": forced(END), "max_tokens": 5}, "stop", 1),
            ({"logit_bias": forced(A), "stop": ["aaa"], "max_tokens": 10}, "stop", 3),
            ({"logit_bias": forced(A), "stop_token_ids": [A], "max_tokens": 10}, "stop", 1),
            ({"max_tokens": 0}, "length", 0),
        ):
            if streamed:
                options = {"include_usage": True}
                *chunks, last, done = stream(client, prompt="x", stream_options=options, **body)
                assert done == "[DONE]"
                reasons = [c["choices"][0]["finish_reason"] for c in chunks]
                assert reasons == [None] * (len(reasons) - 1) + [reason]
                assert "".join(c["choices"][0]["text"] for c in chunks) == ""
                assert last["usage"]["completion_tokens"] == tokens
            else:
                answer = ask(client, prompt="x", **body)
                assert answer["choices"][0]["finish_reason"] == reason
                assert answer["choices"][0]["text"] == ""
                assert answer["usage"]["completion_tokens"] == tokens

    def test_ignore_eos_and_min_tokens(self, client: TestClient) -> None:
        bias = {"logit_bias": forced(END), "max_tokens": 5}
        answer = ask(client, prompt="x", ignore_eos=True, **bias)
        assert answer["usage"]["completion_tokens"] == 5
        assert answer["choices"][0]["text"] == ""
        assert ask(client, prompt="x", min_tokens=3, **bias)["usage"]["completion_tokens"] == 4

    def test_the_end_token_is_text_only_on_demand(self, client: TestClient) -> None:
        bias = {"logit_bias": forced(END), "max_tokens": 2, "ignore_eos": True}
        shown = "<|endoftext|>" * 2
        assert text(client, prompt="x", skip_special_tokens=False, **bias) == shown
        assert text(client, prompt="x", skip_special_tokens=True, **bias) == ""

    def test_b130_stop_strings_are_literal(self, client: TestClient) -> None:
        body = {"prompt": "x", "logit_bias": forced(A), "max_tokens": 4}
        assert text(client, stop=["(a+)+$", ".*"], **body) == "aaaa"

    def test_a_false_start_of_a_stop_is_released(self, client: TestClient) -> None:
        body = {"prompt": "x", "logit_bias": forced(A), "max_tokens": 4, "stop": ["aaaaa", "ab"]}
        assert "".join(c["choices"][0]["text"] for c in stream(client, **body)[:-1]) == "aaaa"

    @pytest.mark.parametrize("streamed", [False, True])
    def test_b036_end_inside_a_character(self, client: TestClient, streamed: bool) -> None:
        for body, expected in (
            ({"prompt": "x", "logit_bias": forced(EMOJI[0]), "max_tokens": 1}, "\ufffd"),
            (
                {
                    "prompt": EMOJI[:3],
                    "logit_bias": forced(EMOJI[3]),
                    "max_tokens": 1,
                    "echo": True,
                },
                "😀",
            ),
        ):
            if streamed:
                chunks = stream(client, **body)[:-1]
                assert "".join(c["choices"][0]["text"] for c in chunks) == expected
            else:
                assert text(client, **body) == expected

    def test_b035_characters_are_never_cut(self, client: TestClient) -> None:
        chunks = stream(client, prompt=EMOJI, echo=True, max_tokens=4)[:-1]
        assert chunks[0]["choices"][0]["text"].startswith("😀")
        assert "\ufffd" not in "".join(c["choices"][0]["text"] for c in chunks)

    def test_b050_spaces_stay(self, client: TestClient) -> None:
        body = {"prompt": "   ", "logit_bias": forced(32), "max_tokens": 3}
        assert text(client, **body) == "   "
        assert text(client, **body, echo=True) == "      "


class TestLogprobs:
    def test_b077_zero_lists_the_chosen_token_alone(self, client: TestClient) -> None:
        logprobs = ask(client, prompt="ab", logprobs=0, max_tokens=3)["choices"][0]["logprobs"]
        for token, number, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert top == {token: number}

    def test_b073_b074_echo_scores_prompt_and_completion(self, client: TestClient) -> None:
        for bias in ({}, forced(END)):
            answer = ask(
                client, prompt=[[97, 98, 99], [100]], echo=True, logprobs=1, max_tokens=1,
                logit_bias=bias, seed=1234,
            )  # fmt: skip
            for choice, n in zip(answer["choices"], (3, 1), strict=True):
                logprobs = choice["logprobs"]
                assert {len(values) for values in logprobs.values()} == {n + 1}
                assert logprobs["token_logprobs"][0] is None
                assert logprobs["top_logprobs"][0] is None
                for token, number, top in list(
                    zip(
                        *(logprobs[k] for k in ("tokens", "token_logprobs", "top_logprobs")),
                        strict=True,
                    )
                )[1:]:
                    assert top[token] == number < 0
                    assert math.isfinite(number)
            assert answer["choices"][0]["logprobs"]["tokens"][3] == (
                "<|endoftext|>" if bias else "s"
            )

    def test_scored_numbers_are_the_generated_ones(self, client: TestClient) -> None:
        generated = ask(client, prompt="ab", logprobs=2, max_tokens=6)["choices"][0]
        scored = ask(client, prompt="ab" + generated["text"], echo=True, logprobs=2, max_tokens=0)[
            "choices"
        ][0]["logprobs"]
        for key in ("tokens", "token_logprobs", "top_logprobs"):
            assert scored[key][2:] == generated["logprobs"][key]

    def test_a_large_answer_is_the_same(self, client: TestClient) -> None:
        """It is made off the event loop."""
        body = {"prompt": "ab", "logprobs": 20, "max_tokens": 50, "ignore_eos": True}
        single = ask(client, **body)["choices"][0]
        choices = ask(client, prompt=["ab"] * 8, **{k: v for k, v in body.items() if k != "prompt"})
        assert [{**c, "index": 0} for c in choices["choices"]] == [single] * 8

    def test_keys_are_unique_and_bytes_are_named(self, client: TestClient) -> None:
        body = {"prompt": EMOJI, "echo": True, "logprobs": 5, "max_tokens": 0}
        logprobs = ask(client, **body)["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80"]
        assert all(len(top) in (5, 6) for top in logprobs["top_logprobs"][1:])

    def test_b038_deltas_of_a_stream_add_up(self, client: TestClient) -> None:
        body = {
            "prompt": [[97, 98], EMOJI], "n": 2, "echo": True, "logprobs": 2, "temperature": 1,
            "seed": 3, "max_tokens": 12, "stop": ["zx"],
        }  # fmt: skip
        whole = ask(client, **body)
        options = {"include_usage": True, "continuous_usage_stats": True}
        *chunks, last, done = stream(client, **body, stream_options=options)
        assert done == "[DONE]"
        assert last["choices"] == []
        joined: dict[int, JSON] = {}
        for chunk in chunks:
            (part,) = chunk["choices"]
            choice = joined.setdefault(part["index"], {"text": "", "logprobs": {}})
            choice["text"] += part["text"]
            choice["finish_reason"] = part["finish_reason"]
            for key, values in part["logprobs"].items():
                choice["logprobs"].setdefault(key, []).extend(values)
        assert [joined[i] for i in range(4)] == [
            {k: v for k, v in choice.items() if k != "index"} for choice in whole["choices"]
        ]
        for chunk in (chunks[-1], last):
            assert {**chunk["usage"], "prompt_tokens_details": 0} == {
                **whole["usage"], "prompt_tokens_details": 0,
            }  # fmt: skip
        for chunk in chunks:
            assert chunk["usage"]["completion_tokens"] <= whole["usage"]["completion_tokens"]


class TestStream:
    def test_b042_usage_only_when_asked(self, client: TestClient) -> None:
        for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
            chunks = stream(client, prompt="ab", max_tokens=3, stream_options=options)[:-1]
            assert len(chunks) == 3
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
            assert "timings" in chunks[-1]
            assert all("timings" not in chunk for chunk in chunks[:-1])
        *chunks, last, _ = stream(
            client, prompt="ab", max_tokens=3, stream_options={"include_usage": True}
        )
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 5
        assert "timings" in last
        *chunks, _ = stream(
            client, prompt="ab", max_tokens=3, stream_options={"continuous_usage_stats": True}
        )
        assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3]

    def test_b047_headers(self, client: TestClient) -> None:
        headers = client.post("/v1/completions", json={"prompt": "a", "stream": True}).headers
        assert headers["content-type"] == "text/event-stream; charset=utf-8"
        assert headers["cache-control"] == "no-cache"
        assert headers["x-accel-buffering"] == "no"
        assert "content-length" not in headers
        assert "content-encoding" not in headers

    def test_events_are_ascii(self, client: TestClient) -> None:
        """U+0085 and U+2028 end a line for clients that split text."""
        odd = "\u0085\u2028😀"
        response = client.post(
            "/v1/completions",
            json={"prompt": odd, "echo": True, "max_tokens": 0, "stream": True},
        )
        assert response.content.isascii()
        assert events(response.text)[0]["choices"][0]["text"] == odd

    def test_one_id_and_the_same_head_in_all_chunks(self, client: TestClient) -> None:
        chunks = stream(client, prompt="ab", n=2)[:-1]
        heads = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
        assert len(heads) == 1

    def test_b045_what_is_known_before_is_no_event(self, client: TestClient) -> None:
        for status, body in (
            (400, {"prompt": "a" * 2 * N_CTX}), (400, {"temperature": 9}), (404, {"model": "x"}),
            (400, {"prompt": [-1]}), (400, {"logprobs": 99}), (400, {"suffix": "x"}),
        ):  # fmt: skip
            response = client.post("/v1/completions", json={"stream": True, **body})
            assert response.status_code == status
            assert response.headers["content-type"] == "application/json"


class TestFailures:
    def test_b044_failure_in_mid_stream_is_one_error_event(self, serve: Serve) -> None:
        model = FakeModel()
        client = serve(model)
        model.raises_at = model.runs + 3
        *chunks, last = stream(client, prompt="ab", session_id="s")
        assert "".join(c["choices"][0]["text"] for c in chunks) == "ld"
        assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
        assert last["error"]["code"] == "engine_error"
        assert last["error"]["type"] == "server_error"
        assert client.get("/v1/cache").json()["sessions"] == []
        assert text(client, prompt="ab").startswith("ld")

    def test_b044_failure_of_a_whole_answer_is_a_500(self, serve: Serve) -> None:
        model = FakeModel()
        client = serve(model)
        for step in (1, 3):  # at once, and after two tokens
            model.raises_at = model.runs + step
            assert refused(client, 500)["code"] == "engine_error"
            assert client.get("/ready").status_code == 200

    def test_b063_numbers_that_are_not_finite_fail_the_request(self, serve: Serve) -> None:
        model = FakeModel()
        client = serve(model)
        model.nan_at = model.runs + 1
        error = refused(client, 500)
        assert error["type"] == "server_error"
        assert text(client, prompt="ab").startswith("ld")

    def test_b105_server_side_deadline(self, serve: Serve) -> None:
        model = FakeModel(delay=0.05)
        client = serve(model, request_timeout=0.2)
        response = client.post("/v1/completions", json={"max_tokens": 60, "ignore_eos": True})
        assert response.status_code == 504
        assert response.headers["x-should-retry"] == "false"
        assert response.json()["error"]["code"] == "request_timeout"
        *_, last = stream(client, max_tokens=60, ignore_eos=True)
        assert last["error"]["code"] == "request_timeout"
        service = client.app.state.service  # type: ignore[attr-defined]
        assert service.worker.open == 0


class TestSessions:
    def test_a_session_keeps_its_turn(self, client: TestClient) -> None:
        first = ask(client, prompt="abc", session_id="s", max_tokens=4)
        prompt = "abc" + first["choices"][0]["text"] + "d"
        usage = ask(client, prompt=prompt, session_id="s", max_tokens=2)["usage"]
        assert usage["prompt_tokens"] == 8
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 6
        (session,) = client.get("/v1/cache").json()["sessions"]
        assert (session["id"], session["turns"], session["tokens"]) == ("s", 2, 10)

    def test_one_prompt_and_one_copy(self, client: TestClient) -> None:
        assert refused(client, prompt=["a", "b"], session_id="s")["param"] == "session_id"
        assert refused(client, n=2, session_id="s")["param"] == "session_id"


def test_the_answer_is_json_without_nan(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt": "ab", "logprobs": 20, "echo": True})
    json.loads(response.text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
