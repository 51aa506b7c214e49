"""The official Python client against a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.conftest import ServeLive
from tests.fakes import FakeModel
from tests.server.live import Live, wait_until


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(n_ctx=4096)


@pytest.fixture
def live(serve_live: ServeLive, model: FakeModel) -> Live:
    return serve_live(model, max_queue=8)


@pytest.fixture
def client(live: Live) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def test_models(client: OpenAI) -> None:
    (model,) = list(client.models.list())
    assert client.models.retrieve(model.id) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_whole_and_streamed(client: OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "logprobs": 2, "echo": True}
    whole = client.completions.create(model="fake", prompt="ab", **options)
    assert whole.object == "text_completion"
    assert whole.usage
    assert whole.usage.total_tokens == 10
    assert whole.usage.prompt_tokens_details
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole._request_id
    with client.completions.create(
        model="fake", prompt="ab", stream=True, stream_options={"include_usage": True}, **options
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == whole.choices[0].text
    tokens = [t for c in chunks[:-1] for t in (c.choices[0].logprobs.tokens or [])]
    assert whole.choices[0].logprobs
    assert tokens == whole.choices[0].logprobs.tokens
    assert chunks[-1].choices == []
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == 8


def test_a_failure_in_mid_stream_raises(client: OpenAI, model: FakeModel) -> None:
    model.raises_at = model.runs + 3
    stream = client.completions.create(model="fake", prompt="ab", temperature=0, stream=True)
    next(stream)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    assert caught.value.code == "engine_error"


def test_errors_have_their_types(client: OpenAI) -> None:
    create = client.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="no-such-model", prompt="ab")
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
        create(model="fake", prompt="ab" * 5000)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        create(model="fake", prompt="ab", temperature=5)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        create(model="fake", prompt="ab" * 5000, stream=True)


def test_b097_overload_and_the_clients_own_retries(client: OpenAI, model: FakeModel) -> None:
    model.may_run.clear()
    stream = client.completions.create(model="fake", prompt="ab", n=16, stream=True)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(model="fake", prompt="ab")
    assert caught.value.response.headers["retry-after"] == "1"
    model.may_run.set()
    patient = client.with_options(max_retries=5)
    assert patient.completions.create(model="fake", prompt="ab", max_tokens=2).choices
    assert [c for chunk in stream for c in chunk.choices]


def test_b052_closing_a_stream_frees_it(client: OpenAI, live: Live, model: FakeModel) -> None:
    model.delay = 0.01
    for _ in range(3):
        stream = client.completions.create(
            model="fake", prompt="ab", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        stream.close()
    wait_until(lambda: live.worker.open == 0 and live.snapshot.running == 0)
    assert live.outcomes() == {"cancelled": 3}


def test_b053_a_client_timeout_frees_it(client: OpenAI, live: Live, model: FakeModel) -> None:
    model.delay = 0.02
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model="fake", prompt="ab", max_tokens=4000, extra_body={"ignore_eos": True}
        )
    wait_until(lambda: live.worker.open == 0 and live.snapshot.running == 0)
    wait_until(lambda: live.outcomes() == {"cancelled": 1})


def test_extra_fields_pass(client: OpenAI) -> None:
    answer = client.completions.create(
        model="fake", prompt="ab", max_tokens=8, user="someone",
        extra_body={"min_tokens": 8, "repetition_penalty": 1.0, "some_unknown_field": 1},
    )  # fmt: skip
    assert answer.usage
    assert answer.usage.completion_tokens == 8
