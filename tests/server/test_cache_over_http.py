"""Theme A over HTTP: an answer is the same with the cache, without it, and in whatever order."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.conftest import ServeLive
from tests.fakes import N_CTX, FakeModel
from tests.server.live import wait_until

Json = dict[str, Any]


def ask(client: TestClient, **body: object) -> Json:
    response = client.post("/v1/completions", json={"temperature": 0, "max_tokens": 5, **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def text(client: TestClient, **body: object) -> str:
    found: str = ask(client, **body)["choices"][0]["text"]
    return found


def cached(answer: Json) -> int:
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_b005_prompts_of_unequal_length_are_answered_as_each_alone(client: TestClient) -> None:
    prompts = ["abc", "lmnopqrstuvwxyz", "q"]
    for use_cache in (True, False):
        together = ask(client, prompt=prompts, use_cache=use_cache)["choices"]
        alone = [text(client, prompt=prompt, use_cache=False) for prompt in prompts]
        assert [choice["text"] for choice in together] == alone


def test_b009_a_client_that_left_before_the_first_token_leaves_nothing_wrong(
    serve_live: ServeLive,
) -> None:
    model = FakeModel()
    live = serve_live(model)
    model.may_run.clear()
    lost = live.send(prompt="abcdef", max_tokens=9, stream=True, session_id="s")
    assert model.running.wait(5)
    lost.close()
    model.may_run.set()
    wait_until(lambda: live.snapshot.running == 0)
    body = {"prompt": "abcdefghijk", "max_tokens": 4, "temperature": 0}
    after = live.complete(**body, session_id="s").json()["choices"][0]["text"]
    assert after == live.complete(**body, use_cache=False).json()["choices"][0]["text"]


def test_b010_the_last_token_of_a_turn_is_part_of_the_next(client: TestClient) -> None:
    first = text(client, prompt="abc", session_id="s")
    again = ask(client, prompt=f"abc{first} more", session_id="s")
    assert cached(again) == len("abc") + 4  # its last token was drawn, and is computed now
    whole = text(client, prompt=f"abc{first} more", use_cache=False)
    assert again["choices"][0]["text"] == whole


def test_b012_a_session_that_diverges_keeps_what_is_common(client: TestClient) -> None:
    for prompt, common in (("A B C D", 0), ("A B X", 4), ("A B", 2), ("zzz", 0)):
        answer = ask(client, prompt=prompt, session_id="s", max_tokens=2)
        assert answer["choices"][0]["text"] == text(
            client, prompt=prompt, max_tokens=2, use_cache=False
        )
        assert cached(answer) >= common


@pytest.mark.parametrize("use_cache", [True, False])
def test_b024_up_to_the_very_end_of_the_window(client: TestClient, use_cache: bool) -> None:
    last = ask(client, prompt=[97] * (N_CTX - 1), max_tokens=1, use_cache=use_cache)
    assert last["usage"]["total_tokens"] == N_CTX
    full = [97] * N_CTX
    scored = ask(client, prompt=full, max_tokens=0, echo=True, logprobs=0, use_cache=use_cache)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == N_CTX
    for prompt, max_tokens in ((full, 1), ([97] * (N_CTX + 1), 0)):
        body = {"prompt": prompt, "max_tokens": max_tokens, "use_cache": use_cache}
        refused = client.post("/v1/completions", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_b025_a_prompt_that_does_not_fit_is_refused_with_all_three_numbers(
    client: TestClient,
) -> None:
    refused = client.post("/v1/completions", json={"prompt": "a" * (N_CTX - 2), "max_tokens": 5})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert all(str(number) in message for number in (N_CTX, N_CTX - 2, 5))
