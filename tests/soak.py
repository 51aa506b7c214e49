"""A soak: clients of all kinds, polite and rude, for as long as one likes, and then a reckoning.

    python -m tests.soak --minutes 10

starts `onerow serve` with a small pool and also watches its memory. The suite runs it for some
seconds (test_soak.py).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from tests.server.live import events, outcomes, wait_until

JSON = dict[str, Any]
GROWTH = 30 * 2**20  # bytes of memory from minute 2 to the end
WARM = 120.0  # seconds


@dataclass
class Soak:
    """Clients in threads against the server at `url`. Whatever is not as it should be raises."""

    url: str
    clients: int = 6
    pid: int | None = None  # of the server, if its memory is to be watched
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[BaseException] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # seconds, bytes

    def __post_init__(self) -> None:
        self.http = httpx2.Client(base_url=self.url, trust_env=False, timeout=60)
        self.n_ctx: int = self.http.get("/v1/models").json()["data"][0]["max_model_len"]
        self.lock = threading.Lock()
        self.leave = threading.Event()
        self.texts = [
            f"{mark} {'once upon a time ' * n}"[: self.n_ctx // 4]
            for mark, n in ((f"marker{i}x", 1 + i % 4) for i in range(self.clients))
        ]
        self.before = self.outcomes()
        # What each prompt gives alone and without a cache.
        self.expected = [
            self.complete(self.http, prompt=text, use_cache=False)["choices"][0]["text"]
            for text in self.texts
        ]

    def run(self, seconds: float, each: int = 0) -> None:
        """For so long, and until every action was taken `each` times."""
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(self.clients)]
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while not self.faults:
            now = time.monotonic() - began
            if now > seconds and min(self.counts[a.__name__] for a in ACTIONS) >= each:
                break
            self.look()
            if self.pid is not None:
                self.memory.append((now, resident(self.pid)))
            time.sleep(0.5)
        self.leave.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a client hangs"
        if self.faults:
            raise self.faults[0]
        self.reckon()

    def look(self) -> None:
        """The numbers add up at any time."""
        cache = self.http.get("/v1/cache").json()
        rows = cache["rows"]
        assert rows["total"] == rows["free"] + rows["running"] + rows["idle"]
        assert cache["bytes"] == (rows["total"] - rows["free"]) * cache["row_bytes"]
        for session in cache["sessions"]:
            assert 0 <= session["rows"] <= session["tokens"] <= self.n_ctx
            assert session["bytes"] == session["rows"] * cache["row_bytes"]
        assert self.http.get("/health").is_success

    def reckon(self) -> None:
        """Everything has been given back, and every request was counted once."""
        wait_until(self._quiet, 30)
        sent, now = self.counts["requests"], self.outcomes()
        assert sum(now.values()) - sum(self.before.values()) == sent, (now, self.counts)
        assert now["error"] == self.before["error"], "no failure of the server itself"
        tokens = self._tokens()
        usages = [self.complete(self.http, prompt=text)["usage"] for text in self.texts]
        assert self._tokens() - tokens == Counter(
            prompt=sum(u["prompt_tokens"] for u in usages),
            generation=sum(u["completion_tokens"] for u in usages),
            cached=sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages),
        )
        for session in self.http.get("/v1/sessions").json()["data"]:
            assert self.http.delete(f"/v1/sessions/{session['id']}").is_success
        assert self.http.post("/v1/cache/reset").is_success
        wait_until(lambda: self._rows()["free"] == self._rows()["total"])
        late = [size for at, size in self.memory if at > WARM]
        if late:
            growth = sum(late[-10:]) / len(late[-10:]) - sum(late[:10]) / len(late[:10])
            self.counts["growth in KiB"] = int(growth / 1024)
            assert growth < GROWTH, f"it grew by {growth / 2**20:.1f} MiB"
        self.http.close()

    def outcomes(self) -> Counter[str]:
        return Counter(outcomes(self.http.get("/metrics").text))

    def _quiet(self) -> bool:
        metrics = self.http.get("/metrics").text
        words = ("requests_running 0.0", "requests_waiting 0.0", 'rows{state="running"} 0.0')
        return all(f"onerow_{word}" in metrics for word in words)

    def _tokens(self) -> Counter[str]:
        metrics = self.http.get("/metrics").text
        found = re.findall(r"^onerow_(prompt|generation|cached)_tokens_total (\S+)", metrics, re.M)
        return Counter({name: int(float(value)) for name, value in found})

    def _rows(self) -> dict[str, int]:
        rows: dict[str, int] = self.http.get("/v1/cache").json()["rows"]
        return rows

    def count(self, name: str) -> None:
        with self.lock:
            self.counts[name] += 1

    def complete(self, http: httpx2.Client, **body: object) -> JSON:
        """A polite request that must be answered."""
        self.count("requests")
        fields = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **body}
        response = http.post("/v1/completions", json=fields)
        while response.status_code == 429:
            time.sleep(0.1)
            self.count("requests")
            response = http.post("/v1/completions", json=fields)
        assert response.status_code == 200, response.text
        if body.get("stream"):
            return joined(response.text)
        answer: JSON = response.json()
        return answer

    def _client(self, number: int) -> None:
        lot = random.Random(number)
        try:
            with httpx2.Client(base_url=self.url, trust_env=False, timeout=60) as http:
                client = Client(self, number, http, lot)
                while not self.leave.is_set():
                    action = lot.choice(ACTIONS)
                    action(client)
                    self.count(action.__name__)
        except BaseException as fault:
            self.faults.append(fault)


@dataclass
class Client:
    soak: Soak
    number: int
    http: httpx2.Client
    lot: random.Random
    turns: int = 0

    @property
    def text(self) -> str:
        return self.soak.texts[self.number]

    @property
    def session_id(self) -> str:
        return f"s{self.number}"

    def check(self, text: str) -> None:
        """An answer to the own prompt is the one of the server alone, and nobody else's."""
        assert text == self.soak.expected[self.number], (text, self.soak.expected[self.number])

    def check_marks(self, text: str) -> None:
        assert set(re.findall(r"marker\d+x", text)) <= {f"marker{self.number}x"}, text

    def whole(self) -> None:
        answer = self.soak.complete(
            self.http, prompt=self.text, logprobs=self.lot.choice([None, 2])
        )
        self.check(answer["choices"][0]["text"])

    def stream(self) -> None:
        options = {"include_usage": True}
        answer = self.soak.complete(
            self.http, prompt=self.text, stream=True, echo=True, stream_options=options
        )
        text = answer["choices"][0]["text"]
        assert text.startswith(self.text)
        self.check(text.removeprefix(self.text))
        assert answer["usage"]["completion_tokens"] == 12

    def uncached(self) -> None:
        answer = self.soak.complete(self.http, prompt=self.text, use_cache=False, max_tokens=4)
        assert self.soak.expected[self.number].startswith(
            answer["choices"][0]["text"].rstrip("\ufffd")
        )
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def batch(self) -> None:
        answer = self.soak.complete(self.http, prompt=[self.text] * 2, n=2)
        for choice in answer["choices"]:
            self.check(choice["text"])

    def sampled(self) -> None:
        body = {"prompt": self.text, "temperature": 1, "echo": True, "n": 2, "best_of": 3}
        for choice in self.soak.complete(self.http, **body)["choices"]:
            self.check_marks(choice["text"])

    def session(self) -> None:
        """Turns that build on each other, and now and then a look back."""
        self.turns += 1
        if self.turns % 5 == 0:
            self.http.post(f"/v1/sessions/{self.session_id}/rewind", json={"turn": 0})
        if self.turns % 7 == 0:
            self.http.delete(f"/v1/sessions/{self.session_id}")
        self.soak.count("requests")
        body = {"prompt": f" marker{self.number}x", "session_id": self.session_id,
                "session_mode": "append", "max_tokens": 6}  # fmt: skip
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code in (200, 400, 429), response.text  # 400: the window is full
        if response.status_code == 400:
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert self.http.delete(f"/v1/sessions/{self.session_id}").is_success
        seen = self.http.get(f"/v1/sessions/{self.session_id}")
        if seen.is_success:
            self.check_marks(seen.json()["text"])

    def fork(self) -> None:
        name = f"{self.session_id}-fork"
        self.http.delete(f"/v1/sessions/{name}")
        forked = self.http.post(f"/v1/sessions/{self.session_id}/fork", json={"id": name})
        assert forked.status_code in (201, 404, 429), forked.text
        if forked.status_code == 201:
            self.check_marks(forked.json()["text"])

    def leave(self) -> None:
        """Hang up at once, after the head, in mid-stream, or without a look at the answer."""
        body = {"prompt": self.text, "max_tokens": self.soak.n_ctx // 2, "ignore_eos": True,
                "stream": self.lot.random() < 0.7}  # fmt: skip
        if self.lot.random() < 0.3:
            body["session_id"] = self.session_id
        phase = self.lot.choice(["", "HTTP", "data: ", "stall", "[DONE]"])
        if phase == "[DONE]":
            body["max_tokens"] = 2
        with self._send(json.dumps(body).encode()) as connection:
            self.soak.count("requests")
            if phase == "stall":
                time.sleep(self.lot.random() / 4)
            elif phase and body["stream"]:
                seen = b""
                while phase.encode() not in seen:
                    part = connection.recv(65536)
                    if not part:
                        break
                    seen += part
                    if b" 429 " in seen:
                        break

    def leave_a_body(self) -> None:
        with self._send(b'{"prompt": ', missing=50):
            self.soak.count("requests")
            time.sleep(self.lot.random() / 50)

    def cancel(self) -> None:
        name = f"c-{self.number}-{self.lot.getrandbits(40)}"
        body = {"prompt": self.text, "max_tokens": self.soak.n_ctx // 2, "ignore_eos": True,
                "stream": True}  # fmt: skip
        self.soak.count("requests")
        with self.http.stream(
            "POST", "/v1/completions", json=body, headers={"X-Request-Id": name}
        ) as response:
            if response.status_code != 429:
                time.sleep(self.lot.random() / 20)
                assert self.http.post(f"/v1/completions/{name}/cancel").is_success
            with suppress(httpx2.StreamConsumed):
                response.read()

    def bad(self) -> None:
        body: Any = self.lot.choice(
            [
                {"prompt": [-1]}, {"prompt": "a" * 300_000}, {"n": 0}, {"prompt": [[]] * 1000},
                {"temperature": "hot"}, [], {"prompt": [0] * (self.soak.n_ctx + 1)}, None,
                {"logit_bias": {"x": 1}}, {"session_id": "../x"}, {"model": "no-such"},
            ]
        )  # fmt: skip
        self.soak.count("requests")
        response = self.http.post("/v1/completions", json=body)
        assert response.status_code in (400, 404, 415), response.text

    def reset(self) -> None:
        if self.lot.random() < 0.1:
            assert self.http.post("/v1/cache/reset").is_success

    @contextmanager
    def _send(self, body: bytes, missing: int = 0) -> Iterator[socket.socket]:
        at = urlsplit(self.soak.url)
        with socket.create_connection((at.hostname, at.port), timeout=30) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body) + missing}\r\n\r\n"
            connection.sendall(head.encode() + body)
            yield connection


ACTIONS: list[Callable[[Client], None]] = [
    Client.whole, Client.stream, Client.stream, Client.uncached, Client.batch, Client.leave,
    Client.leave, Client.leave_a_body, Client.cancel, Client.bad, Client.session,
    Client.session, Client.fork, Client.sampled, Client.reset,
]  # fmt: skip


def joined(stream: str) -> JSON:
    """What the chunks of a stream add up to."""
    *chunks, last, done = events(stream)
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    return {"choices": [{"text": text}], "usage": last["usage"]}


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=12)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "server", "serve", "--port=0", "--threads=1"]
    # Room for two windows, so that it evicts and preempts all the time.
    command += ["--kv-cache-memory=13MiB", "--max-running=8", "--max-queue=8", "--max-sessions=8"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr
        port = next(
            found[1] for line in server.stderr if (found := re.search(r"127\.0\.0\.1:(\d+)$", line))
        )
        threading.Thread(target=server.stderr.read, daemon=True).start()
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: httpx2.get(f"{url}/ready", trust_env=False).is_success, 60)
        soak = Soak(url, arguments.clients, server.pid)
        soak.run(60 * arguments.minutes)
    finally:
        server.terminate()
        code = server.wait(30)
    sys.stdout.write(json.dumps({**soak.counts, "exit code": code}, indent=2) + "\n")
    assert code == 0


if __name__ == "__main__":
    main()
