"""The process: signals, exit codes, one clear line for what stops a start. Themes E and I."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.server.live import events, wait_until

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys, threading, time
from server.app import serve
from server.settings import Settings
from tests.fakes import FakeModel, loads
given = json.loads(sys.argv[1])
model = FakeModel(delay=given.pop("delay", 0.0), holds_at=given.pop("holds_at", None))
threading.Thread(target=lambda: os.read(0, 1) or model.may_run.set(), daemon=True).start()
load = loads(model)
fault = given.pop("fault", None)
def load_engine(settings):
    if fault == "load":
        raise ValueError("config.json: n_layer: Field required")
    if fault == "slow":
        time.sleep(3600)
    engine = load(settings)
    if fault == "engine":
        model.run = None
        engine.step = engine.step if model.runs == 0 else None
        real = type(engine).step
        def step():
            if model.runs:
                raise RuntimeError("a fault in the engine")
            del model.run
            return real(engine)
        engine.step = step
    return engine
settings = dict(port=0, max_running=4, step_tokens=16)
sys.exit(serve(Settings.load(**{**settings, **given}), load_engine))
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, **given: object) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(given)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.open = ExitStack()

    def port(self) -> int:
        """The port from the line that says that it listens."""
        assert self.child.stderr
        for line in self.child.stderr:
            self.lines.append(line)
            if found := re.search(r"listening on http://127\.0\.0\.1:(\d+)", line):
                return int(found[1])
        raise AssertionError(self.lines)

    def client(self, port: int | None = None) -> httpx2.Client:
        """A client, once the server is ready."""
        url = f"http://127.0.0.1:{port or self.port()}"
        client = httpx2.Client(base_url=url, trust_env=False, timeout=60)
        self.open.enter_context(client)
        wait_until(lambda: client.get("/ready").is_success)
        return client

    def go_on(self) -> None:
        """Let the model run that was held."""
        assert self.child.stdin
        self.child.stdin.close()
        self.child.stdin = None

    def end(self) -> tuple[int, str]:
        """Its exit code, and all that it said."""
        rest = self.child.communicate(timeout=40)[1]
        return self.child.returncode, "".join(self.lines) + rest


Start = Callable[..., Process]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(**given: object) -> Process:
            process = Process(**given)
            stack.callback(process.child.communicate)
            stack.callback(process.child.kill)
            stack.callback(process.open.close)
            return process

        yield begin


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_b104_drain_lets_running_requests_end(start: Start, number: signal.Signals) -> None:
    process = start(holds_at=5)
    client = process.client()
    body = {"prompt": "ab", "max_tokens": 30, "temperature": 0, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        parts = response.iter_text()
        first = next(parts)
        process.child.send_signal(number)
        wait_until(lambda: client.get("/health").json() == {"status": "draining"})
        refused = client.post("/v1/completions", json={"prompt": "ab"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "draining"
        assert client.get("/ready").status_code == 503
        process.go_on()
        seen = events(first + "".join(parts))
    assert seen[-1] == "[DONE]"
    assert len(seen) == 31
    code, log = process.end()
    assert code == 0, log
    assert "Traceback" not in log


def test_b104_what_takes_longer_than_the_grace_time_is_ended(start: Start) -> None:
    process = start(delay=0.1, grace=0.5)
    client = process.client()
    body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        parts = response.iter_text()
        first = next(parts)
        process.child.send_signal(signal.SIGTERM)
        *_, last = events(first + "".join(parts))
    assert last["error"]["code"] == "shutting_down"
    code, log = process.end()
    assert code == 0, log
    assert "Traceback" not in log


def test_b104_a_whole_answer_that_takes_longer_is_a_503(start: Start) -> None:
    process = start(delay=0.1, grace=0.5)
    client = process.client()
    body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(client.post, "/v1/completions", json=body)
        wait_until(lambda: "requests_running 1" in client.get("/metrics").text)
        process.child.send_signal(signal.SIGTERM)
        response = answer.result()
    assert response.status_code == 503
    assert response.headers["retry-after"]
    assert response.json()["error"]["code"] == "shutting_down"
    code, log = process.end()
    assert code == 0, log
    assert "Traceback" not in log


def test_b104_a_second_signal_ends_it_at_once(start: Start) -> None:
    process = start(delay=0.1, grace=60)
    client = process.client()
    body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_text())
        process.child.send_signal(signal.SIGTERM)
        wait_until(lambda: client.get("/health").json() == {"status": "draining"})
        process.child.send_signal(signal.SIGINT)
        assert process.end()[0] == 128 + signal.SIGINT


def test_b104_no_thread_keeps_it_alive(start: Start) -> None:
    """A load that takes an hour ignores every wish to stop."""
    process = start(fault="slow")
    process.port()
    process.child.send_signal(signal.SIGTERM)
    code, log = process.end()
    assert code == 0, log


def test_a_stalled_reader_does_not_hold_the_shutdown(start: Start) -> None:
    process = start(delay=0.1, grace=0.3, max_running=32, step_tokens=512)
    port = process.port()
    client = process.client(port)
    body = json.dumps(
        {"n": 60, "max_tokens": 60, "logprobs": 20, "stream": True, "ignore_eos": True}
    )
    head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.connect(("127.0.0.1", port))
        connection.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{body}".encode())
        wait_until(lambda: "requests_running 32" in client.get("/metrics").text)
        process.child.send_signal(signal.SIGTERM)
        code, log = process.end()
    assert code == 0, log


def test_b133_a_failed_load_is_one_line_and_a_code(start: Start) -> None:
    code, log = start(fault="load").end()
    assert code == 1
    assert log.count("cannot start: config.json: n_layer: Field required") == 1
    assert "Traceback" not in log


def test_b028_a_fault_of_the_engine_ends_the_process(start: Start) -> None:
    process = start(fault="engine")
    client = process.client()
    response = client.post("/v1/completions", json={"prompt": "ab"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "engine_error"
    code, log = process.end()
    assert code == 1
    assert "a fault in the engine" in log


def test_a_taken_port_is_one_line(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, log = start(port=port).end()
    assert code == 1
    assert log.count("\n") == 1
    assert f"cannot listen on 127.0.0.1:{port}: " in log


def test_the_log_has_one_line_per_request_and_no_text(start: Start) -> None:
    process = start()
    client = process.client()
    client.post("/v1/completions", json={"prompt": "a secret"}, headers={"X-Request-Id": "r-1"})
    client.get("/%0aforged")
    process.child.send_signal(signal.SIGTERM)
    _, log = process.end()
    (line,) = [line for line in log.splitlines() if "request=r-1" in line]
    assert re.search(
        r"INFO POST /v1/completions 200 request=r-1 ms=[\d.]+ outcome=length call=cmpl-\w+ "
        r"prompt_tokens=8 completion_tokens=16 cached_tokens=0 queue_ms=[\d.]+ prefill_ms=[\d.]+ "
        r"decode_ms=[\d.]+ rows_computed=23 rows_reused=0$",
        line,
    )
    assert "secret" not in log
    assert "\nforged" not in log
    assert "/health" not in log


def test_sighup_reads_the_keys_again_and_ends_nothing(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: ann-key-0123456789\n")
    process = start(delay=0.02, api_key_file=str(file))
    client = process.client()
    ann, eve = ({"Authorization": f"Bearer {name}-key-0123456789"} for name in ("ann", "eve"))
    body = {"prompt": "ab", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, headers=ann) as response:
        parts = response.iter_text()
        first = next(parts)
        for text in ("nonsense\n", "eve: eve-key-0123456789\n"):
            assert client.get("/v1/models", headers=ann).is_success
            file.write_text(text)
            process.child.send_signal(signal.SIGHUP)
        wait_until(lambda: client.get("/v1/models", headers=eve).is_success)
        assert client.get("/v1/models", headers=ann).status_code == 401
        assert events(first + "".join(parts))[-1] == "[DONE]"
    process.child.send_signal(signal.SIGTERM)
    code, log = process.end()
    assert code == 0, log
    assert "key-0123" not in log


def test_a_broken_key_file_stops_the_start_in_one_line(start: Start, tmp_path: Path) -> None:
    code, log = start(api_key_file=str(tmp_path / "none")).end()
    assert code == 1
    assert f"cannot start: api_key_file: {tmp_path / 'none'}: No such file" in log
    assert log.count("\n") == 1
