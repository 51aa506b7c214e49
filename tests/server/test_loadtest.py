"""The load tester against a server of a few lines, whose timing and faults are chosen."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from server.loadtest import report
from server.loadtest.client import Client, Sample, ServerError
from server.loadtest.measurement import Measurement, measure
from server.loadtest.workload import Trial, trials

DONE = "[DONE]"
TRIAL = Trial(context=4, use_cache=True, repeat=1, tokens=3, prompt=(1, 2, 3, 4))


def event(tokens: int, cached: int = 0) -> str:
    usage = {"completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}
    return json.dumps({"choices": [{"text": "x"}], "usage": usage})


class FakeServer:
    """Answers every completion with `script`: events, and pauses in seconds between them."""

    def __init__(self) -> None:
        self.script: list[str | float] = []
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.models = b'{"data": [{"id": "stories", "max_model_len": 512}]}'
        self.url = ""


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serving() as server:
        yield server


@contextmanager
def serving() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(fake.models)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            fake.bodies.append(json.loads(self.rfile.read(length)))
            fake.headers.append(dict(self.headers))
            self.send_response(fake.status)
            self.end_headers()
            for part in fake.script:
                if isinstance(part, float):
                    time.sleep(part)
                else:
                    self.wfile.write(f"data: {part}\n\n".encode())
                    self.wfile.flush()

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield fake
        finally:
            server.shutdown()
            thread.join()


class TestWorkload:
    def test_arms_take_turns_and_get_equal_work(self) -> None:
        plan = trials((8, 16), tokens=5, repeats=2, seed=0)
        assert [(t.context, t.use_cache) for t in plan if t.repeat == 1] == [
            (8, True), (8, False), (16, True), (16, False),
        ]  # fmt: skip
        assert [t.use_cache for t in plan if t.repeat == 2] == [False, True, False, True]
        assert all(len(t.prompt) == t.context and t.tokens == 5 for t in plan)

    def test_every_prompt_is_new(self) -> None:
        plan = trials((8,), tokens=5, repeats=20, seed=0)
        assert len({t.prompt for t in plan}) == len(plan) == 2 * 21

    def test_a_seed_is_a_workload(self) -> None:
        assert trials((8,), 5, 2, seed=1) == trials((8,), 5, 2, seed=1)
        assert trials((8,), 5, 2, seed=1) != trials((8,), 5, 2, seed=2)


class TestClient:
    def test_times_tokens_and_not_events(self, fake: FakeServer) -> None:
        # The second token was held back: three tokens in two events, 0.2 s apart.
        fake.script = [0.1, event(1, cached=2), 0.2, event(3, cached=2), DONE]
        with Client(fake.url) as client:
            sample = client.measure(TRIAL)
        assert sample.error is None
        assert 0.1 <= sample.ttft < 1
        assert 0.09 < sample.per_token < 0.2  # over two events it would be 0.2 at least
        assert sample.cached_tokens == 2

    def test_an_event_without_new_tokens_is_no_token(self, fake: FakeServer) -> None:
        fake.script = [event(0), event(1), event(3), 1.0, event(3), DONE]
        with Client(fake.url) as client:
            assert client.measure(TRIAL).per_token < 0.4

    def test_asks_for_exactly_the_tokens(self, fake: FakeServer) -> None:
        fake.script = [event(3), DONE]
        with Client(fake.url, api_key="secret") as client:
            client.measure(TRIAL)
        [body], [headers] = fake.bodies, fake.headers
        assert body["prompt"] == [1, 2, 3, 4]
        assert body["max_tokens"] == 3
        assert body["ignore_eos"] is True
        assert body["use_cache"] is True
        assert headers["Authorization"] == "Bearer secret"

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ([event(2), DONE], "2 tokens where 3"),
            ([event(3)], "without .DONE."),
            (["{", DONE], "not JSON"),
            (['{"choices": []}', DONE], "without usage"),
            ([event(1), '{"error": {"message": "out of luck"}}'], "out of luck"),
        ],
    )
    def test_a_bad_stream_is_a_failed_sample(
        self, fake: FakeServer, script: list[str | float], reason: str
    ) -> None:
        fake.script = script
        with Client(fake.url) as client:
            sample = client.measure(TRIAL)
        assert sample.error is not None
        with pytest.raises(ServerError, match=reason):
            raise ServerError(sample.error)

    def test_a_refusal_is_a_failed_sample(self, fake: FakeServer) -> None:
        fake.status = 429
        with Client(fake.url) as client:
            assert "429" in str(client.measure(TRIAL).error)

    def test_nobody_there(self) -> None:
        with serving() as gone:
            pass
        with Client(gone.url) as client:
            assert client.measure(TRIAL).error
            with pytest.raises(ServerError):
                client.model()

    def test_model(self, fake: FakeServer) -> None:
        with Client(fake.url) as client:
            assert client.model() == ("stories", 512)
            fake.models = b'{"data": []}'
            with pytest.raises(ServerError, match="not a list of models"):
                client.model()


class TestMeasurement:
    def test_warm_up_is_left_out(self, fake: FakeServer) -> None:
        fake.script = [event(3), DONE]
        with Client(fake.url) as client:
            measurement = measure(client, trials((4,), tokens=3, repeats=2, seed=0))
        assert [s.repeat for s in measurement.samples] == [1, 1, 2, 2]
        assert not measurement.failures
        assert not measurement.interrupted

    def test_a_failed_warm_up_is_kept(self, fake: FakeServer) -> None:
        fake.status = 500
        with Client(fake.url) as client:
            measurement = measure(client, trials((4,), tokens=3, repeats=0, seed=0))
        assert len(measurement.failures) == 2

    def test_an_interrupt_keeps_what_is_known(self) -> None:
        class Interrupted(Client):
            n = 0

            def measure(self, trial: Trial) -> Sample:
                self.n += 1
                if self.n == 3:
                    raise KeyboardInterrupt
                return Sample(trial.context, trial.use_cache, trial.repeat)

        plan = [t for t in trials((4,), tokens=3, repeats=2, seed=0) if t.repeat]
        with Interrupted("http://127.0.0.1:1") as client:
            measurement = measure(client, plan)
        assert measurement.interrupted
        assert len(measurement.samples) == 2


SAMPLES = [
    Sample(32, True, 1, ttft=0.010, per_token=0.002),
    Sample(32, True, 2, ttft=0.020, per_token=0.004),
    Sample(32, True, 3, ttft=0.012, per_token=0.003),
    Sample(32, False, 1, ttft=0.010, per_token=0.030),
    Sample(480, True, 1, ttft=0.050, per_token=0.0045),
    Sample(480, False, 1, error="lost"),
]


class TestReport:
    def test_comparison(self) -> None:
        short, long = report.compare(SAMPLES)
        assert short.cached == report.Spread(median=3.0, least=2.0, greatest=4.0)
        assert short.ratio == 10.0
        assert long.uncached is None
        assert long.ratio is None

    def test_summary_is_json(self) -> None:
        summary = report.summary(Measurement(SAMPLES), {"seed": 0})
        assert json.loads(json.dumps(summary)) == summary
        assert summary["failures"] == 1
        assert summary["growth"] == 1.5
        assert summary["contexts"][0]["ratio"] == 10.0

    def test_nothing_measured(self) -> None:
        summary = report.summary(Measurement(interrupted=True), {})
        assert summary["contexts"] == []
        assert summary["growth"] is None

    def test_table(self) -> None:
        console = Console(width=120, file=io.StringIO(), record=True)
        console.print(report.table(report.compare(SAMPLES), "title"))
        text = console.export_text()
        assert "3.00 (2.00-4.00)" in text
        assert "12.0" in text
        assert "10.0" in text
