"""POST /v1/completions/{id}/cancel: in every phase, by its owner, as often as one likes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest

from model.tokenizer import Tokenizer
from server.api import register
from tests.conftest import ServeLive
from tests.fakes import FakeModel
from tests.server.live import Live, events, wait_until

LONG = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
ENDLESS = {**LONG, "max_tokens": 4000}  # nobody waits so long: it ends because it is cancelled


@pytest.fixture
def model() -> FakeModel:
    return FakeModel(delay=0.02, n_ctx=4096)


@pytest.fixture
def live(serve_live: ServeLive, model: FakeModel) -> Live:
    return serve_live(model, max_running=2)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def cancel(live: Live, name: str, **headers: str) -> httpx2.Response:
    return live.client.post(f"/v1/completions/{name}/cancel", headers=headers)


def ask(live: Live, pool: ThreadPoolExecutor, name: str, **body: object) -> Future[httpx2.Response]:
    fields = {**ENDLESS, **body}
    headers = {"X-Request-Id": name}
    return pool.submit(live.client.post, "/v1/completions", json=fields, headers=headers)


def check_cancelled(response: httpx2.Response) -> None:
    assert response.status_code == 499
    assert response.json()["error"]["code"] == "request_cancelled"


def gone(live: Live) -> bool:
    now = live.snapshot
    return (now.running, now.waiting, now.rows_running, live.worker.open) == (0, 0, 0, 0)


def test_b105_a_stream_by_the_id_of_its_answer(live: Live) -> None:
    with live.client.stream(
        "POST", "/v1/completions", json={**ENDLESS, "stream": True}
    ) as response:
        parts = response.iter_text()
        first = next(parts)
        name = events(first)[0]["id"]
        assert cancel(live, name).json() == {"id": name, "cancelled": True}
        *chunks, last = events(first + "".join(parts))
    assert last["error"]["code"] == "request_cancelled"
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks)
    wait_until(lambda: gone(live))
    assert live.snapshot.generated_tokens_total < 4000
    assert live.outcomes() == {"cancelled": 1}


def test_b105_a_whole_answer_by_the_id_of_its_request(live: Live, pool: ThreadPoolExecutor) -> None:
    answer = ask(live, pool, "mine:1")
    wait_until(lambda: live.snapshot.generated_tokens_total > 2)
    for _ in range(2):
        assert cancel(live, "mine:1").json() == {"id": "mine:1", "cancelled": True}
    check_cancelled(answer.result())
    assert cancel(live, "mine:1").json()["cancelled"], "also when it is over"
    wait_until(lambda: gone(live))
    assert live.outcomes() == {"cancelled": 1}


def test_while_it_waits_for_a_free_place(
    live: Live, pool: ThreadPoolExecutor, model: FakeModel
) -> None:
    model.may_run.clear()
    running = [ask(live, pool, f"r{i}", **LONG) for i in range(2)]
    wait_until(lambda: live.worker.open == 2)
    waiting = ask(live, pool, "w")
    wait_until(lambda: live.worker.open == 3)
    assert cancel(live, "w").is_success
    check_cancelled(waiting.result())
    model.may_run.set()
    assert all(answer.result().is_success for answer in running)
    assert live.outcomes() == {"cancelled": 1, "length": 2}


def test_while_it_waits_for_its_session(
    live: Live, pool: ThreadPoolExecutor, model: FakeModel
) -> None:
    model.may_run.clear()
    first = ask(live, pool, "a", session_id="s", max_tokens=2)
    wait_until(lambda: live.worker.open == 1)
    second = ask(live, pool, "b", session_id="s", stream=True)
    third = ask(live, pool, "c", session_id="s", max_tokens=2)
    wait_until(lambda: live.app.state.service.lines.waiting == 2)
    assert cancel(live, "b").is_success
    check_cancelled(second.result())
    model.may_run.set()
    assert first.result().is_success
    assert third.result().is_success
    wait_until(lambda: gone(live))
    assert live.outcomes() == {"cancelled": 1, "length": 2}


def test_deleting_its_session_ends_the_running_turn_whoever_has_left_the_line(
    live: Live, pool: ThreadPoolExecutor
) -> None:
    first = ask(live, pool, "a", session_id="s")
    wait_until(lambda: live.snapshot.running == 1)
    second = ask(live, pool, "b", session_id="s")
    wait_until(lambda: live.app.state.service.lines.waiting == 1)
    cancel(live, "b")
    check_cancelled(second.result())
    assert live.client.delete("/v1/sessions/s").is_success
    check_cancelled(first.result())


def test_while_its_text_is_encoded(
    live: Live, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has it not yet; it ends as soon as it has."""
    monkeypatch.setattr("server.api.calls.LONG", 1)
    assert live.worker.served
    kind = type(live.worker.served.tokenizer)
    encode = kind.encode

    def slow(self: Tokenizer, text: str, *, special: bool = False) -> list[int]:
        wait_until(lambda: live.app.state.service.register.cancel("", "e"))
        return encode(self, text, special=special)

    monkeypatch.setattr(kind, "encode", slow)
    check_cancelled(ask(live, pool, "e").result())
    wait_until(lambda: gone(live))
    assert live.outcomes() == {"cancelled": 1}


def test_a_session_is_as_it_was_before(live: Live, pool: ThreadPoolExecutor) -> None:
    assert live.complete(prompt="ab", max_tokens=2, session_id="s").is_success
    (before,) = live.client.get("/v1/cache").json()["sessions"]
    answer = ask(live, pool, "x", session_id="s", prompt="abcdef")
    wait_until(lambda: live.snapshot.running)
    cancel(live, "x")
    check_cancelled(answer.result())
    wait_until(lambda: gone(live))
    (after,) = live.client.get("/v1/cache").json()["sessions"]
    assert [after[k] for k in ("tokens", "turns")] == [before[k] for k in ("tokens", "turns")]


def test_what_has_ended_by_itself_stays_so(live: Live) -> None:
    response = live.complete(prompt="ab", max_tokens=2)
    for name in (response.json()["id"], response.headers["x-request-id"]):
        assert cancel(live, name).json() == {"id": name, "cancelled": False}
    assert live.outcomes() == {"length": 1}


def test_unknown_ids_are_404(live: Live) -> None:
    for name in ("cmpl-none", "x" * 300, "%0a", "abc"):
        response = cancel(live, name)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "completion_not_found"


def test_two_with_one_id_are_both_cancelled(live: Live, pool: ThreadPoolExecutor) -> None:
    answers = [ask(live, pool, "twin") for _ in range(2)]
    wait_until(lambda: live.snapshot.running == 2)
    cancel(live, "twin")
    for answer in answers:
        check_cancelled(answer.result())


def test_b121_only_the_owner_can(
    serve_live: ServeLive, tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    ann, bob = ({"Authorization": f"Bearer {name}-key-0123456789"} for name in ("ann", "bob"))
    file = tmp_path / "keys"
    file.write_text("ann ann-key-0123456789\nbob bob-key-0123456789\n")
    live = serve_live(FakeModel(delay=0.02), api_key_file=file)
    body = {**LONG, "max_tokens": 40}
    headers = {**ann, "X-Request-Id": "a1"}
    answer = pool.submit(live.client.post, "/v1/completions", json=body, headers=headers)
    wait_until(lambda: live.snapshot.running)
    theirs, missing = cancel(live, "a1", **bob), cancel(live, "a2", **bob)
    assert theirs.status_code == missing.status_code == 404
    assert theirs.text == missing.text.replace("a2", "a1")
    name = answer.result().json()["id"]
    assert cancel(live, name, **bob).status_code == 404
    assert cancel(live, name, **ann).json()["cancelled"] is False


def test_names_that_have_ended_are_forgotten_in_time(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(register, "REMEMBERED", 4)
    names = [live.complete(prompt="ab", max_tokens=1).json()["id"] for _ in range(3)]
    assert [cancel(live, name).status_code for name in names] == [404, 200, 200]
    service = live.app.state.service
    assert service.register._open == {}


def test_b097_the_official_client_does_not_repeat_it(live: Live, pool: ThreadPoolExecutor) -> None:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=3) as client:

        def create() -> None:
            client.completions.create(
                model="fake", prompt="ab", max_tokens=4000, extra_body={"ignore_eos": True},
                extra_headers={"X-Request-Id": "sdk"},
            )  # fmt: skip

        answer = pool.submit(create)
        wait_until(lambda: live.snapshot.running)
        cancel(live, "sdk")
        with pytest.raises(openai.APIStatusError) as caught:
            answer.result()
    assert caught.value.status_code == 499
    assert live.outcomes() == {"cancelled": 1}
