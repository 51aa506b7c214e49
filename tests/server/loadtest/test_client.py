"""What the client sees of a stream whose timing is known."""

from __future__ import annotations

import asyncio
import json
import selectors
import shutil
import ssl
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from server.loadtest import connection
from server.loadtest.client import Answer, Client, Sample, ServerError
from server.loadtest.connection import Address, Connection, Unanswered
from server.loadtest.measurement import Record, play
from server.loadtest.target import Target
from server.loadtest.workload import Arm, Load, Run, talks
from tests.server.loadtest.fake import DONE, RESET, FakeServer, Script, answer, event, serving

PROMPT = (1, 2, 3, 4)


def measure(
    url: str, tokens: int = 3, arm: Arm = Arm.CACHED, key: str | None = None, waited: float = 0.0
) -> tuple[Sample, list[int]]:
    async def once() -> tuple[Sample, list[int]]:
        async with Client(url, "fake", key) as client:
            start = time.perf_counter() - waited
            return await client.measure(PROMPT, tokens, arm, start, 0.0)

    return asyncio.run(once())


class TestTimes:
    def test_tokens_and_not_events_are_counted(self, fake: FakeServer) -> None:
        # The second token was held back: three tokens in two events, 0.2 s apart.
        fake.script = lambda _: [0.1, event(1, cached=2), 0.2, event(3, cached=2), DONE]
        sample, _ = measure(fake.url)
        assert sample.error is None
        assert sample.ttft is not None
        assert sample.tpot is not None
        assert 0.1 <= sample.ttft < 1
        assert 0.09 < sample.tpot < 0.2  # over two events it would be 0.2 at least
        assert sample.tpot == pytest.approx(sample.itl[0] / 2)
        assert (sample.tokens, sample.prompt_tokens, sample.cached_tokens) == (3, 4, 2)

    def test_pauses(self, fake: FakeServer) -> None:
        fake.script = lambda _: [event(1), 0.1, event(2), 0.3, event(3), DONE]
        sample, _ = measure(fake.url)
        assert len(sample.itl) == 2
        assert 0.09 < sample.itl[0] < 0.25 < sample.itl[1] < 0.5
        assert sample.e2e > 0.4

    def test_an_event_without_new_tokens_is_no_token(self, fake: FakeServer) -> None:
        fake.script = lambda _: [event(0), event(1), event(3), 0.5, event(3), DONE]
        sample, _ = measure(fake.url)
        assert sample.tpot is not None
        assert sample.tpot < 0.2
        assert sample.e2e > 0.5

    def test_of_one_token_there_is_no_time_per_token(self, fake: FakeServer) -> None:
        sample, _ = measure(fake.url, tokens=1)
        assert sample.error is None
        assert sample.tpot is None
        assert sample.itl == []

    def test_a_latency_begins_when_it_was_due(self, fake: FakeServer) -> None:
        sample, _ = measure(fake.url, waited=5.0)
        assert sample.ttft is not None
        assert sample.ttft > 5
        assert sample.e2e > 5
        assert sample.lateness == pytest.approx(5, abs=0.5)
        assert sample.service < 1

    def test_a_server_that_counts_only_at_the_end(self, fake: FakeServer) -> None:
        text = json.dumps({"choices": [{"text": "x"}]})
        end = json.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 5}})
        fake.script = lambda _: [text, 0.2, text, end, DONE]
        sample, _ = measure(fake.url, tokens=5)
        assert sample.error is None
        assert sample.tokens == 5
        assert sample.tpot is not None
        assert 0.045 < sample.tpot < 0.1  # four tokens after the first

    def test_the_servers_own_times(self, fake: FakeServer) -> None:
        fake.script = lambda _: [event(3), event(3, timings={"prefill_ms": 7.5}), DONE]
        assert measure(fake.url)[0].timings == {"prefill_ms": 7.5}


class TestRequest:
    def test_asks_for_exactly_the_tokens(self, fake: FakeServer) -> None:
        _, ids = measure(fake.url, key="secret", arm=Arm.UNCACHED)
        [body], [head] = fake.bodies, fake.heads
        assert (body["prompt"], body["max_tokens"]) == ([1, 2, 3, 4], 3)
        assert body["ignore_eos"] is True
        assert body["use_cache"] is False
        assert "authorization: bearer secret" in head.lower()
        assert ids == [201, 202, 203]

    def test_a_server_that_knows_no_use_cache_is_not_told_of_it(self, fake: FakeServer) -> None:
        measure(fake.url, arm=Arm.AS_SERVED)
        assert "use_cache" not in fake.bodies[0]

    def test_where_and_as_whom_it_asks(self) -> None:
        address = Address.of("https://user@example.org/api/", "/v1/completions", "secret")
        assert (address.host, address.port) == ("example.org", 443)
        assert isinstance(address.tls, ssl.SSLContext)
        head, body = address.request(b"{}").decode().split("\r\n\r\n")
        assert head.splitlines() == [
            "POST /api/v1/completions HTTP/1.1",
            "Host: example.org",
            "Authorization: Bearer secret",
            "Content-Type: application/json",
            "Content-Length: 2",
        ]
        assert body == "{}"
        plain = Address.of("http://[::1]:8000", "/v1/completions", None)
        assert (plain.host, plain.port, plain.tls) == ("::1", 8000, None)
        assert b"Host: [::1]:8000\r\n" in plain.request(b"")


def fail_at(n: int, fake: FakeServer, monkeypatch: pytest.MonkeyPatch, after: float) -> None:
    """The n-th request gets no answer: `after` so many seconds the connection is closed."""
    complete = fake.complete

    async def closes(writer: asyncio.StreamWriter, body: dict[str, object]) -> None:
        if len(fake.bodies) == n:
            await asyncio.sleep(after)
            raise ConnectionError
        await complete(writer, body)

    monkeypatch.setattr(fake, "complete", closes)


class TestConnections:
    def ask_twice(self, fake: FakeServer) -> list[Sample]:
        async def twice() -> list[Sample]:
            async with Client(fake.url, "fake") as client:
                start = time.perf_counter()
                return [
                    (await client.measure(PROMPT, 3, Arm.CACHED, start, 0.0))[0] for _ in range(2)
                ]

        return asyncio.run(twice())

    def test_one_is_used_again(self, fake: FakeServer) -> None:
        assert [sample.error for sample in self.ask_twice(fake)] == [None] * 2
        assert fake.connections == 1

    def test_after_a_refusal_too(self, fake: FakeServer) -> None:
        fake.status = 503
        assert all(sample.error for sample in self.ask_twice(fake))
        assert fake.connections == 1

    def test_not_if_the_server_has_closed_it(
        self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "AT_ONCE", 10.0)  # longer than a busy machine pauses
        fake.closes = True
        fake.script = lambda body: [*answer(body), 0.1]  # so that the end comes with its close
        assert [sample.error for sample in self.ask_twice(fake)] == [None] * 2
        assert fake.connections == 2

    def test_nor_if_it_closes_it_as_the_request_comes(
        self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "AT_ONCE", 10.0)
        fail_at(2, fake, monkeypatch, after=0.0)
        assert [sample.error for sample in self.ask_twice(fake)] == [None] * 2
        assert (fake.connections, len(fake.bodies)) == (2, 3)

    def test_what_was_worked_on_is_not_asked_again(
        self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fail_at(2, fake, monkeypatch, after=0.2)
        errors = [sample.error for sample in self.ask_twice(fake)]
        assert errors == [None, "the server closed the connection without an answer"]
        assert (fake.connections, len(fake.bodies)) == (1, 2)

    def test_one_that_nobody_waits_for_is_closed(self, fake: FakeServer) -> None:
        """Even if that is so just when the answer is complete."""

        class Left(Connection):
            task: asyncio.Task[tuple[int, bytes]]

            def on_message_complete(self) -> None:
                super().on_message_complete()
                self.task.cancel()

        async def leave() -> None:
            address = Address.of(fake.url, "/v1/completions", None)
            left = await Left.to(address)
            request = address.request(b'{"prompt": [], "max_tokens": 1}')
            left.task = asyncio.create_task(left.ask(request, lambda _: False, 10.0))
            with pytest.raises(asyncio.CancelledError):
                await left.task
            with pytest.raises(Unanswered, match="is closed"):
                await left.ask(request, lambda _: False, 10.0)

        asyncio.run(leave())

    @pytest.mark.skipif(not shutil.which("openssl"), reason="there is no openssl")
    def test_over_tls_all_have_one_context(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        certificate = tmp_path / "certificate"
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
        names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
        files = ["-keyout", str(tmp_path / "key"), "-out", str(certificate)]
        command = ["openssl", *words.split(), *names, *files]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, tmp_path / "key")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        made: list[ssl.SSLContext] = []
        make = ssl.create_default_context

        def note() -> ssl.SSLContext:
            made.append(make())
            return made[-1]

        monkeypatch.setattr(ssl, "create_default_context", note)
        monkeypatch.setattr(connection, "AT_ONCE", 10.0)
        with serving(tls) as fake:
            fake.closes = True
            assert [sample.error for sample in self.ask_twice(fake)] == [None] * 2
            assert fake.connections == 2
        assert len(made) == 1


class TestStream:
    def test_events_may_come_in_any_pieces(self) -> None:
        stream = "".join(f"data: {event(n)}\r\n\r\n: still here\n\n" for n in range(1, 60))
        whole = f"{stream}data:{DONE}\n\n".encode()
        for size in (1, 7, 300, len(whole)):
            seen = Answer(Sample(0.0), time.perf_counter())
            for i in range(0, len(whole), size):
                seen.receive(whole[i : i + size])
            seen.read()
            assert (seen.events, seen.done, seen.sample.tokens) == (59, True, 59)
            assert seen.sample.times == sorted(seen.sample.times)

    def test_times_are_those_of_the_bytes(self) -> None:
        """And not of their reading, which is put off."""
        seen = Answer(Sample(0.0), time.perf_counter())
        for n in (1, 2):
            seen.receive(f"data: {event(n)}\n\n".encode())
            time.sleep(0.05)
        seen.read()
        assert seen.sample.times[0] < 0.05 <= seen.sample.times[1]

    def test_the_client_is_woken_by_little_else_than_events(self, fake: FakeServer) -> None:
        """Each time it takes a core from the server, whose caches it then has to fill again."""
        fake.script = partial(answer, pause=0.02)
        selector = Counting()
        load = Load(4, tokens=40, talks=1)
        record = Record(Run(load, Arm.CACHED, 1, talks(load, Arm.CACHED, 1, 0)))

        async def once() -> None:
            async with Client(fake.url, "fake") as client:
                await play(client, record)

        with asyncio.Runner(loop_factory=partial(asyncio.SelectorEventLoop, selector)) as runner:
            runner.run(once())
        assert record.events == 40
        assert record.lags
        assert selector.waits < 1.5 * record.events + 20

    @pytest.mark.parametrize("end", [30.0, RESET])
    def test_it_ends_with_done_whatever_comes_then(
        self, fake: FakeServer, end: float | bytes
    ) -> None:
        fake.script = lambda body: [*answer(body), end]
        begin = time.monotonic()
        sample, ids = measure(fake.url)
        assert (sample.error, ids) == (None, [201, 202, 203])
        assert time.monotonic() - begin < 15

    def test_the_line_of_done_need_not_end(self, fake: FakeServer) -> None:
        fake.script = lambda _: [event(3), b"data: [DONE]"]
        assert measure(fake.url)[0].error is None

    def test_interim_answers_are_none(self, fake: FakeServer) -> None:
        fake.interim = b"HTTP/1.1 100 -\r\n\r\nHTTP/1.1 103 -\r\nLink: </x>\r\n\r\n"
        sample, _ = measure(fake.url)
        assert (sample.error, sample.tokens) == (None, 3)


class Counting(selectors.DefaultSelector):
    """Counts how often it had to wait."""

    waits = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.waits += 1
        return super().select(timeout)


class TestFailures:
    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ([event(2), DONE], "2 tokens where 3"),
            ([event(3)], "without .DONE."),
            (["{", DONE], "not JSON"),
            (["[]", DONE], "no object"),
            (["{}", DONE], "no completion's"),
            (['{"choices": [3]}', DONE], "no completion's"),
            ([event(1), '{"error": {"message": "out of luck"}}'], "out of luck"),
            (['{"choices": [], "timings": "soon"}', DONE], "no completion's"),
            (['{"choices": [3], "usage": {"completion_tokens": 1e999}}', DONE], "no completion's"),
            (["[" * 100_000, DONE], "recursion"),
        ],
    )
    def test_a_bad_stream_is_a_failed_sample(
        self, fake: FakeServer, script: Script, reason: str
    ) -> None:
        fake.script = lambda _: script
        error = measure(fake.url)[0].error
        assert error is not None
        with pytest.raises(ServerError, match=reason):
            raise ServerError(error)

    @pytest.mark.parametrize("end", [30.0, RESET])
    def test_the_servers_words_count_whatever_comes_then(
        self, fake: FakeServer, end: float | bytes
    ) -> None:
        fake.script = lambda _: [event(1), b'data: {"err', 0.05, b'or": "no luck"}\n\n', end]
        begin = time.monotonic()
        assert measure(fake.url)[0].error == "no luck"
        assert time.monotonic() - begin < 15

    def test_what_came_before_a_failure_is_counted(self, fake: FakeServer) -> None:
        fake.script = lambda _: [event(1), event(2), 0.1, RESET]
        sample, _ = measure(fake.url)
        assert sample.error
        assert sample.tokens == 2

    def test_another_protocol_is_a_failed_sample(self, fake: FakeServer) -> None:
        fake.interim = b"HTTP/1.1 101 -\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
        assert measure(fake.url)[0].error == "the server changed to another protocol"

    def test_a_refusal_is_a_failed_sample(self, fake: FakeServer) -> None:
        fake.status = 429
        assert "429" in str(measure(fake.url)[0].error)

    def test_a_server_that_falls_silent(self, fake: FakeServer) -> None:
        fake.script = lambda _: [event(1), 5.0, event(3), DONE]

        async def once() -> Sample:
            async with Client(fake.url, "fake", timeout=0.2) as client:
                start = time.perf_counter()
                return (await client.measure(PROMPT, 3, Arm.CACHED, start, 0.0))[0]

        sample = asyncio.run(once())
        assert sample.error == "the server was silent for 0.2 seconds"
        assert 0.2 <= sample.end < 4

    def test_a_server_that_leaves(self, fake: FakeServer) -> None:
        def leaves(body: object) -> Script:
            raise ConnectionError

        fake.script = leaves
        assert measure(fake.url)[0].error

    def test_a_server_that_leaves_at_once(
        self, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "AT_ONCE", 10.0)
        fail_at(1, fake, monkeypatch, after=0.0)
        assert measure(fake.url)[0].error == "the server closed the connection at once"

    def test_an_answer_that_is_not_http(self, fake: FakeServer) -> None:
        fake.status = 4444444
        assert measure(fake.url)[0].error

    def test_nobody_there(self) -> None:
        with serving() as gone:
            pass
        assert measure(gone.url)[0].error
        with pytest.raises(ServerError):
            Target.at(gone.url)


class TestTarget:
    def test_one_arm_where_use_cache_is_not_known(self, fake: FakeServer) -> None:
        target = Target.at(fake.url)
        assert (target.model, target.window) == ("fake", 512)
        assert target.arms == (Arm.AS_SERVED,)
        assert target.device is None

    def test_both_arms_where_it_is(self, fake: FakeServer) -> None:
        fake.pages["/openapi.json"] = {"properties": {"use_cache": {"type": "boolean"}}}
        fake.pages["/v1/cache"] = {"device": "cpu", "dtype": "float32"}
        target = Target.at(fake.url)
        assert target.arms == (Arm.CACHED, Arm.UNCACHED)
        assert (target.device, target.dtype) == ("cpu", "float32")

    def test_no_window(self, fake: FakeServer) -> None:
        fake.pages["/v1/models"] = {"data": [{"id": "fake"}]}
        assert Target.at(fake.url).window is None

    @pytest.mark.parametrize("page", [{"data": []}, [], {"data": [3]}, "models"])
    def test_no_list_of_models(self, fake: FakeServer, page: object) -> None:
        fake.pages["/v1/models"] = page
        with pytest.raises(ServerError, match="not a list of models"):
            Target.at(fake.url)

    def test_one_arm_alone(self, fake: FakeServer) -> None:
        with pytest.raises(ServerError, match="does not know use_cache"):
            Target.at(fake.url).alone(Arm.CACHED)
        fake.pages["/openapi.json"] = {"properties": ["use_cache"]}
        assert Target.at(fake.url).alone(Arm.CACHED).arms == (Arm.CACHED,)
