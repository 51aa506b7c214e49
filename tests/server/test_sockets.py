"""What only a real socket shows: clients that leave or stall, bodies that trickle, a slow model."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice

import httpx2
import pytest

from model.step import Draw, Work
from server.api import bodies
from tests.conftest import ServeLive
from tests.fakes import FakeModel
from tests.server.live import Live, events, wait_until

LONG = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
WINDOW = 4096
ENDLESS = {**LONG, "max_tokens": 4000}  # nobody waits so long: it ends because it is cancelled


def read_until(connection: socket.socket, word: bytes) -> bytes:
    seen = b""
    while word not in seen:
        part = connection.recv(65536)
        assert part, seen
        seen += part
    return seen


def status(connection: socket.socket) -> int:
    return int(read_until(connection, b"\r\n").split()[1])


class PerToken(FakeModel):
    """Two milliseconds for each token; notes the most that were computed in one step."""

    longest = 0

    def run(self, work: list[Work]) -> list[Draw]:
        n = sum(w.end - w.start for w in work)
        self.longest = max(self.longest, n)
        self.delay = 0.002 * n
        return super().run(work)


def slow(delay: float = 0.01) -> FakeModel:
    return FakeModel(delay=delay, n_ctx=WINDOW)


def gone(live: Live) -> bool:
    """Everything that requests held is given back."""
    now = live.snapshot
    return (now.running, now.waiting, now.rows_running, live.worker.open) == (0, 0, 0, 0)


class TestDisconnect:
    @pytest.mark.parametrize("stream", [True, False])
    def test_b052_b053_before_anything_is_computed(
        self, serve_live: ServeLive, stream: bool
    ) -> None:
        """The engine is busy when the request comes, and the client does not wait for it."""
        model = slow()
        live = serve_live(model)
        model.may_run.clear()
        connection = live.send(**LONG, stream=stream)
        wait_until(lambda: live.worker.open == 1)
        connection.close()
        wait_until(lambda: live.worker.open == 0)
        runs = model.runs
        model.may_run.set()
        wait_until(lambda: gone(live))
        assert model.runs <= runs + 1
        wait_until(lambda: live.outcomes() == {"cancelled": 1})

    @pytest.mark.parametrize("stream", [True, False])
    def test_b052_b053_in_the_middle(self, serve_live: ServeLive, stream: bool) -> None:
        model = slow()
        live = serve_live(model)
        connection = live.send(**ENDLESS, stream=stream)
        wait_until(lambda: live.snapshot.generated_tokens_total >= 3)
        connection.close()
        wait_until(lambda: gone(live))
        generated = live.snapshot.generated_tokens_total
        assert generated < 4000
        assert live.outcomes() == {"cancelled": 1}, "and tokens generated before it are counted"
        assert live.snapshot.generated_tokens_total == generated

    def test_b052_while_waiting_in_line(self, serve_live: ServeLive) -> None:
        model = slow()
        live = serve_live(model, max_running=1)
        first = live.send(**ENDLESS, stream=True)
        wait_until(lambda: live.snapshot.running == 1)
        others = [live.send(**LONG, stream=s) for s in (True, False, True)]
        wait_until(lambda: live.snapshot.waiting == 3)
        for connection in others:
            connection.close()
        wait_until(lambda: live.worker.open == 1)
        wait_until(lambda: live.snapshot.waiting == 0)
        assert live.snapshot.running == 1
        first.close()
        wait_until(lambda: gone(live))
        assert live.outcomes() == {"cancelled": 4}

    def test_b014_while_waiting_for_its_session(self, serve_live: ServeLive) -> None:
        live = serve_live(slow())
        first = live.send(**ENDLESS, stream=True, session_id="s")
        wait_until(lambda: live.snapshot.running == 1)
        others = [live.send(**LONG, stream=s, session_id="s") for s in (True, False)]
        lines = live.app.state.service.lines
        wait_until(lambda: lines.waiting == 2)
        for connection in others:
            connection.close()
        wait_until(lambda: lines.waiting == 0)
        assert live.snapshot.running == 1
        first.close()
        assert live.complete(prompt="ab", max_tokens=2, session_id="s").is_success
        wait_until(lambda: gone(live))
        assert live.outcomes() == {"cancelled": 3, "length": 1}

    def test_b052_in_prefill(self, serve_live: ServeLive) -> None:
        live = serve_live(slow(), max_running=1, step_tokens=2)
        connection = live.send(prompt="a" * 4000, max_tokens=2, stream=True)
        wait_until(lambda: live.snapshot.rows_computed_total > 2)
        connection.close()
        wait_until(lambda: gone(live))
        assert live.snapshot.generated_tokens_total == 0
        assert live.snapshot.rows_computed_total < 4000

    def test_b052_b110_many(self, serve_live: ServeLive) -> None:
        live = serve_live(slow(0.002), max_queue=100)
        connections = [live.send(**ENDLESS, stream=i % 2 == 0) for i in range(20)]
        wait_until(lambda: live.snapshot.generated_tokens_total > 5)
        for connection in connections:
            connection.close()
        wait_until(lambda: gone(live))
        wait_until(lambda: live.outcomes() == {"cancelled": 20})
        assert live.complete(**LONG).is_success

    def test_a_client_that_leaves_after_the_end_cancels_nothing(
        self, serve_live: ServeLive
    ) -> None:
        live = serve_live()
        connection = live.send(prompt="ab", max_tokens=2, stream=True)
        read_until(connection, b"[DONE]")
        connection.close()
        wait_until(lambda: live.outcomes() == {"length": 1})

    def test_a_client_that_leaves_in_mid_body(self, serve_live: ServeLive) -> None:
        live = serve_live()
        connection = live.send_raw(b'{"prompt": ', {"Content-Length": "100"})
        time.sleep(0.05)
        connection.close()
        wait_until(lambda: live.outcomes() == {"cancelled": 1})
        assert live.worker.open == 0


class TestStalledReader:
    def open_one(self, live: Live, **more: object) -> socket.socket:
        """A stream whose reader takes nothing: its buffers fill, and the send waits."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.connect(("127.0.0.1", live.port))
        asked = {**LONG, "stream": True, "logprobs": 20, "n": 60, "temperature": 1}
        body = json.dumps({**asked, **more})
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
        return connection

    def test_it_holds_neither_the_loop_nor_rows(self, serve_live: ServeLive) -> None:
        live = serve_live(slow(0.001), max_running=32, step_tokens=512)
        stalled = self.open_one(live)
        wait_until(lambda: live.worker.open > 30)
        assert live.client.get("/health").is_success
        assert live.complete(prompt="x", max_tokens=2).is_success
        wait_until(lambda: gone(live))
        stalled.close()
        wait_until(lambda: sum(live.outcomes().values()) == 2)

    def test_its_client_may_leave(self, serve_live: ServeLive) -> None:
        live = serve_live(slow(0.05), rows=10_000, max_running=32, step_tokens=512)
        stalled = self.open_one(live, max_tokens=200)
        wait_until(lambda: live.snapshot.generated_tokens_total > 200)
        stalled.close()
        wait_until(lambda: gone(live))
        assert live.outcomes() == {"cancelled": 1}


class TestStream:
    def test_b048_headers_at_once_and_comments_after_a_silence(self, serve_live: ServeLive) -> None:
        model = FakeModel()
        live = serve_live(model, keepalive_comment=1.0)  # longer than a busy machine pauses
        model.may_run.clear()
        connection = live.send(prompt="ab", max_tokens=2, stream=True)
        head = read_until(connection, b"\r\n\r\n")
        assert b"200 OK" in head
        assert b"data:" not in head
        read_until(connection, b": still here\n\n")
        model.may_run.set()
        rest = read_until(connection, b"[DONE]")
        assert b": still here" not in rest.partition(b"data:")[2], "no comment while tokens flow"
        connection.close()
        seen = live.client.get("/metrics").text
        assert "onerow_time_to_first_token_seconds_count 1.0" in seen

    def test_no_comment_when_nothing_is_slow(self, serve_live: ServeLive) -> None:
        live = serve_live(keepalive_comment=15)
        response = live.complete(**LONG, stream=True)
        assert ":" not in {line[:1] for line in response.text.split("\n")}

    def test_one_event_per_token_as_it_comes(self, serve_live: ServeLive) -> None:
        """Three tokens are read while the model waits for leave to compute the fourth."""
        model = FakeModel()
        live = serve_live(model)
        model.hold_at(model.runs + 4)
        seen = ""
        with live.client.stream(
            "POST", "/v1/completions", json={**LONG, "stream": True}
        ) as response:
            for part in response.iter_text():
                seen += part
                if seen.count("data: ") == 3:
                    model.may_run.set()
        assert len(events(seen)) == 61

    def test_the_connection_is_kept(self, serve_live: ServeLive) -> None:
        live = serve_live()
        connection = live.send(prompt="ab", max_tokens=2, stream=True)
        read_until(connection, b"0\r\n\r\n")
        body = b'{"prompt": "ab"}'
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(f"POST /tokenize HTTP/1.1\r\n{head}".encode() + body)
        assert status(connection) == 200
        connection.close()


class TestBody:
    def test_b122_chunked(self, serve_live: ServeLive) -> None:
        live = serve_live(max_body=1000)
        for path in ("/v1/completions", "/tokenize"):
            response = live.client.post(
                path,
                content=(b"x" * 100 for _ in range(200)),
                headers={"Content-Type": "application/json"},
            )
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert live.client.get("/health").is_success

    def test_b122_a_large_declared_body_is_refused_before_it_is_sent(
        self, serve_live: ServeLive
    ) -> None:
        live = serve_live()
        connection = live.send_raw(b"", {"Content-Length": str(20 * 2**20)})
        assert status(connection) == 413
        connection.close()

    def test_b122_one_byte_at_a_time(self, serve_live: ServeLive) -> None:
        """Bytes that keep coming do not put off the end of its time."""
        live = serve_live(body_timeout=0.3)
        connection = live.send_raw(b'{"prompt"', {"Content-Length": "1000"})
        for _ in range(900):
            if select.select([connection], [], [], 0.02)[0]:
                break
            connection.sendall(b" ")
        seen = read_until(connection, b"}}")
        assert b" 408 " in seen
        assert b'"code":"request_timeout"' in seen
        connection.close()

    def test_b122_a_false_length(self, serve_live: ServeLive) -> None:
        """Too short: what follows is no request. Too long: the rest never comes."""
        live = serve_live(body_timeout=0.3)
        for length, expected in (("5", 400), ("100000", 408)):
            connection = live.send_raw(b'{"prompt": "ab"}', {"Content-Length": length})
            assert status(connection) == expected
            connection.close()
        assert live.complete(prompt="ab").is_success

    @pytest.mark.parametrize("line", [b"x" * 16384, b"X-A: " + b"x" * 1000 + b"\r\n"])
    def test_b122_a_head_without_end(self, serve_live: ServeLive, line: bytes) -> None:
        """In one header, or in many."""
        live = serve_live()
        connection = socket.create_connection(("127.0.0.1", live.port), timeout=60)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-B: ")
        sent = 0
        with suppress(ConnectionError):
            while sent < 2**25:
                connection.sendall(line)
                sent += len(line)
        assert sent < 2**23
        connection.close()
        assert live.client.get("/health").is_success

    def test_a_large_head_passes(self, serve_live: ServeLive) -> None:
        live = serve_live()
        for _ in range(3):  # on one connection
            headers = {"X-Long": "x" * 30_000}
            assert live.client.get("/health", headers=headers).is_success

    def test_b122_a_head_that_takes_for_ever(
        self, serve_live: ServeLive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server.protocol.SECONDS", 1.0)  # longer than a busy machine pauses
        live = serve_live()
        silent = socket.create_connection(("127.0.0.1", live.port), timeout=60)
        slow_one = socket.create_connection(("127.0.0.1", live.port), timeout=60)
        slow_one.sendall(b"GET /health HTTP/1.1\r\n")
        assert silent.recv(1) == slow_one.recv(1) == b""
        later = live.send_raw(b'{"prompt": "ab"}', path="/tokenize")
        assert b"200 OK" in read_until(later, b"}")
        later.sendall(b"GET /health")
        assert later.recv(1) == b""
        for connection in (silent, slow_one, later):
            connection.close()

    def test_b122_a_key_is_asked_for_before_the_body_comes(self, serve_live: ServeLive) -> None:
        live = serve_live(api_key="k")
        connection = live.send_raw(b"", {"Content-Length": "1000"})
        assert status(connection) == 401
        connection.close()


class TestLoad:
    def test_b099_health_while_the_model_is_busy(self, serve_live: ServeLive) -> None:
        """Nobody waits for a step: they are answered in the middle of one that does not end."""
        model = FakeModel()
        live = serve_live(model)
        model.hold_at(model.runs + 2)
        with ThreadPoolExecutor() as pool:
            running = [pool.submit(live.complete, **{**LONG, "max_tokens": 4}) for _ in range(4)]
            wait_until(lambda: model.runs == model.holds_at)
            for path in ("/health", "/metrics", "/v1/cache"):
                assert live.client.get(path).is_success
            model.may_run.set()
            assert all(future.result().is_success for future in running)

    @pytest.mark.parametrize("use_cache", [True, False])
    def test_b101_long_prompts_do_not_stall_running_streams(
        self, serve_live: ServeLive, use_cache: bool
    ) -> None:
        """Each token costs time here. A step takes no more of them than its budget, so that is
        what bounds the gap in a stream; and a short prompt does not wait for long ones.
        """
        model = PerToken(n_ctx=WINDOW)
        live = serve_live(model, rows=30_000, max_running=16, step_tokens=32)
        streams = [live.send(**ENDLESS, stream=True) for _ in range(5)]
        wait_until(lambda: live.snapshot.running == 5)
        model.longest = 0
        others = [live.send(prompt="x" * 2000, max_tokens=4, use_cache=use_cache) for _ in range(4)]
        wait_until(lambda: live.snapshot.running > 5)
        assert live.complete(prompt="y", max_tokens=1).is_success
        assert live.snapshot.running > 5, "the long ones are not done yet"
        before = live.snapshot.generated_tokens_total
        wait_until(lambda: live.snapshot.generated_tokens_total > before + 20)
        assert live.snapshot.running > 5, "and the streams flow beside them"
        for connection in (*streams, *others):
            connection.close()
        assert 20 < model.longest <= 32

    def test_b100_b123_large_bodies_are_parsed_encoded_and_decoded_off_the_loop(
        self, serve_live: ServeLive, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        live = serve_live()
        assert live.worker.served
        kind = type(live.worker.served.tokenizer)
        threads: list[str] = []

        def note(owner: object, name: str) -> None:
            work = getattr(owner, name)

            def noted(*args: object, **keywords: object) -> object:
                threads.append(threading.current_thread().name)
                return work(*args, **keywords)

            monkeypatch.setattr(owner, name, noted)

        for owner, name, path, field, unit in (
            (bodies, "_parse", "/v1/completions", "prompt", [97]),
            (kind, "encode", "/tokenize", "prompt", "ab"),
            (kind, "decode", "/detokenize", "tokens", [97]),
        ):
            note(owner, name)
            for n in (1, 10_000):
                live.client.post(path, json={field: unit * n})
            monkeypatch.undo()
            on, off = dict.fromkeys(threads)
            assert on == live.thread.name
            assert off.startswith("aside")
            threads.clear()

    def test_b100_b123_health_while_ten_large_texts_are_encoded(
        self, serve_live: ServeLive
    ) -> None:
        """They take a while, and health is answered more than twice as often as one is ready."""
        live = serve_live()
        body = json.dumps({"prompt": "^a " * 100_000}).encode()
        connections = [live.send_raw(body, path="/tokenize") for _ in range(10)]
        answered = 0
        while len(select.select(connections, [], [], 0)[0]) < 10:
            assert live.client.get("/health").is_success
            answered += 1
        assert answered > 2 * len(connections)
        for connection in connections:
            assert status(connection) == 200
            connection.close()

    def test_b102_a_refusal_is_fast(self, serve_live: ServeLive) -> None:
        """It does not even wait for the step that runs."""
        model = FakeModel()
        live = serve_live(model, max_running=1, max_queue=0)
        model.hold_at(model.runs + 2)
        connection = live.send(**LONG, stream=True)
        wait_until(lambda: model.runs == model.holds_at)
        assert live.complete(prompt="ab").status_code == 429
        model.may_run.set()
        connection.close()

    def test_b102_b097_a_full_queue_says_429(self, serve_live: ServeLive) -> None:
        model = FakeModel()
        live = serve_live(model, max_running=2, max_queue=8)
        model.may_run.clear()
        limits = httpx2.Limits(max_connections=100)

        async def burst() -> list[httpx2.Response]:
            async with httpx2.AsyncClient(
                base_url=live.url, trust_env=False, limits=limits, timeout=60
            ) as client:
                body = {"prompt": "ab", "max_tokens": 2}
                calls = [
                    asyncio.create_task(
                        client.post("/v1/completions", json={**body, "stream": i % 2 == 0})
                    )
                    for i in range(60)
                ]
                for call in islice(asyncio.as_completed(calls), 50):
                    await call
                assert live.worker.open == 10
                seen = await client.get("/metrics")
                assert "onerow_requests_waiting 1" in seen.text or "_waiting 8" in seen.text
                assert (await client.get("/health")).is_success
                model.may_run.set()
                return list(await asyncio.gather(*calls))

        responses = asyncio.run(burst())
        refused = [r for r in responses if r.status_code == 429]
        assert len(refused) == 50
        for response in refused:
            assert response.headers["retry-after"] == "1"
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["code"] == "queue_full"
        assert all(r.status_code == 200 for r in responses if r not in refused)
        assert live.outcomes() == {"length": 10, "overloaded": 50}

    def test_the_same_text_alone_and_in_company(self, serve_live: ServeLive) -> None:
        live = serve_live(slow(0.001))
        alone = [live.complete(**{**LONG, "prompt": p}).json()["choices"] for p in "abcdefgh"]
        with ThreadPoolExecutor() as pool:
            together = pool.map(
                lambda p: live.complete(**{**LONG, "prompt": p}).json()["choices"], "abcdefgh"
            )
        assert list(together) == alone
