"""Theme A over HTTP: an answer is the same with the cache, without it, and in whatever order."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from server.api import cache
from server.api.schemas import CacheEvent
from server.engine.rowmap import RowRun
from server.engine.snapshot import Records, SessionRecord, Snapshot
from tests.conftest import ServeLive
from tests.fakes import N_CTX, FakeModel
from tests.server.live import events, wait_until

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


def record(i: int, tokens: int = 9, last_used: float | None = None) -> SessionRecord:
    when = i if last_used is None else last_used
    return SessionRecord(f"{i}", tokens, 8, 0, 64, 1, 0, created=i, last_used=when, expires=None)


class Listener:
    """One that listens to a server whose engine says what the test wants."""

    def __init__(self, records: Records) -> None:
        self.snapshot = Snapshot(rows=10, rows_free=10, row_bytes=8, sessions=records)
        self.asked = 0
        served = SimpleNamespace(device="cpu", dtype="float32", rows_dtype="float32")
        service = SimpleNamespace(served=served, worker=self, keyed=False)
        app = SimpleNamespace(state=SimpleNamespace(service=service))
        request: Any = SimpleNamespace(app=app, state=SimpleNamespace(tenant=""))
        self.events = cache.changes(request)

    async def ask(self, question: Callable[..., object]) -> list[RowRun]:
        """As the worker does, with a new snapshot that may say the same."""
        self.asked += 1
        self.snapshot = self.snapshot._replace()
        return [RowRun(0, 10, "free", None, 0)]

    async def next(self) -> Json:
        found: Json = json.loads((await anext(self.events)).removeprefix("data: "))
        return found


class TestEvents:
    @pytest.fixture(autouse=True)
    def often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache, "INTERVAL", 0.001)

    def test_a_look_costs_nothing_while_nothing_changes(self) -> None:
        """Beside 10,000 sessions, of which each would take longer than all looks together may."""
        records = Records().changed({("", f"{i}"): record(i) for i in range(10_000)})

        async def listen() -> tuple[float, int]:
            listener = Listener(records)
            await listener.next()
            begin = time.thread_time()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await listener.next()
            return time.thread_time() - begin, listener.asked

        seconds, asked = asyncio.run(listen())
        assert asked == 1
        assert seconds < 0.3  # of up to 500 looks

    def test_those_used_last_are_told_and_as_they_change(self) -> None:
        n = cache.MOST_SESSIONS
        records = Records().changed({("", f"{i}"): record(i) for i in range(n + 50)})

        async def listen() -> tuple[Json, Json, Json]:
            listener = Listener(records)
            first = await listener.next()
            used = record(7, tokens=99, last_used=1e9)
            others = {("", "7"): used, ("", "old"): record(-1), ("another", "8"): record(8)}
            changed = listener.snapshot.sessions.changed(others)
            listener.snapshot = listener.snapshot._replace(sessions=changed)
            second = await listener.next()
            listener.snapshot = listener.snapshot._replace(rows_free=9, rows_idle=1)
            return first, second, await listener.next()

        first, second, third = asyncio.run(listen())
        assert [e["n_sessions"] for e in (first, second, third)] == [n + 50, n + 51, n + 51]
        assert [s["id"] for s in first["sessions"]] == [f"{i}" for i in range(50, n + 50)]
        assert [s["id"] for s in second["sessions"]] == ["7", *(f"{i}" for i in range(51, n + 50))]
        assert second["sessions"][0]["tokens"] == 99
        assert (first["runs"][0]["n"], second["runs"]) == (10, [])
        assert third["rows"]["idle"] == 1
        assert third["sessions"] == second["sessions"]

    def test_a_session_that_is_not_told_is_counted(
        self, serve_live: ServeLive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cache, "MOST_SESSIONS", 2)
        live = serve_live()
        for name in "abc":
            live.complete(prompt=name, max_tokens=1, session_id=name)
        with live.client.stream("GET", "/v1/cache/events") as response:
            lines = response.iter_lines()
            first = next(told(lines))
            live.client.delete("/v1/sessions/a")
            second = next(told(lines))
        assert (first["n_sessions"], second["n_sessions"]) == (3, 2)
        for now in (first, second):
            assert [session["id"] for session in now["sessions"]] == ["b", "c"]
        CacheEvent.model_validate(first)
        document = live.client.get("/openapi.json").json()
        operation = document["paths"]["/v1/cache/events"]["get"]
        schema = operation["responses"]["200"]["content"]["text/event-stream"]["schema"]
        fields = schema["properties"]["data"]["contentSchema"]["properties"]
        assert fields.keys() == first.keys()
        assert fields["n_sessions"]["type"] == "integer"
        assert first.keys() - live.client.get("/v1/cache").json().keys() == {"n_sessions", "runs"}

    def test_with_keys_they_are_of_the_callers_own(
        self, serve_live: ServeLive, tmp_path: Path
    ) -> None:
        keys = {name: f"{name}-key-0123456789" for name in ("ann", "bob")}
        file = tmp_path / "keys"
        file.write_text("".join(f"{name}: {key}\n" for name, key in keys.items()))
        live = serve_live(api_key_file=file)
        heads = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}

        def turn(name: str, session: str) -> None:
            body = {"prompt": session, "max_tokens": 3, "session_id": session}
            live.client.post("/v1/completions", json=body, headers=heads[name]).raise_for_status()

        for session in "abc":
            turn("ann", session)
        turn("bob", "x")
        with live.client.stream("GET", "/v1/cache/events", headers=heads["bob"]) as response:
            lines, seen = told(response.iter_lines()), []
            seen.append(next(lines))
            turn("ann", "d")
            turn("bob", "y")
            while seen[-1]["n_sessions"] < 2:
                seen.append(next(lines))
        assert [s["id"] for s in seen[0]["sessions"]] == ["x"]
        assert [s["id"] for s in seen[-1]["sessions"]] == ["x", "y"]
        for now in seen:
            assert now["totals"] is None
            assert now["n_sessions"] == len(now["sessions"])
            assert now["rows"]["idle"] + now["rows"]["running"] <= 2 * 3
            assert now["rows"]["total"] == sum(now["rows"][s] for s in ("free", "running", "idle"))


def told(lines: Iterator[str]) -> Iterator[Json]:
    return (event for line in lines if line for event in events(line + "\n\n"))
