"""A streaming client, and what it sees of each completion."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

from server.loadtest.connection import Address, Connection, Unanswered
from server.loadtest.workload import Arm

DONE = b"[DONE]"
PILE = 32  # parts of an answer that may lie unread


class ServerError(Exception):
    """The server is not there, or its answer is not what the protocol says."""


@dataclass(slots=True)
class Sample:
    """What one request measured, in seconds of its run; or why it failed.

    A latency begins when the request was due, not when the client got round to it: whoever waits
    in the client waits, too.
    """

    due: float
    sent: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)  # of the events that brought new tokens
    counts: list[int] = field(default_factory=list)  # tokens so far, at those times
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    timings: dict[str, float] | None = None  # the server's own, in its words
    error: str | None = None

    @property
    def ttft(self) -> float | None:
        return self.times[0] - self.due if self.times else None

    @property
    def itl(self) -> list[float]:
        """The pauses that a reader sees. One may bring more than one token: text that is not yet
        a whole character is held back.
        """
        return [b - a for a, b in pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """Time per token after the first event; without a second one there is none."""
        if len(self.times) < 2 or self.tokens <= self.counts[0]:
            return None
        return (self.times[-1] - self.times[0]) / (self.tokens - self.counts[0])

    @property
    def e2e(self) -> float:
        return self.end - self.due

    @property
    def service(self) -> float:
        """The time that the server had it."""
        return self.end - self.sent

    @property
    def lateness(self) -> float:
        return self.sent - self.due


class Client:
    """Sends completions and times their events. Connections are as many as there are requests."""

    def __init__(
        self, url: str, model: str, api_key: str | None = None, timeout: float = 300.0
    ) -> None:
        self.model = model
        self.timeout = timeout  # seconds of silence
        self.events = 0
        self._address = Address.of(url, "/v1/completions", api_key)
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._idle:
            connection.close()
        await asyncio.sleep(0)  # they are closed in the loop's next turn

    async def measure(
        self, prompt: Sequence[int], tokens: int, arm: Arm, start: float, due: float
    ) -> tuple[Sample, list[int]]:
        """Ask for exactly `tokens`; returns what was seen, and their ids where the server tells
        them. A failure is part of the measurement, not an exception.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if arm is not Arm.AS_SERVED:
            body["use_cache"] = arm is Arm.CACHED
        request = self._address.request(json.dumps(body).encode())
        answer = Answer(Sample(due), start)
        sample = answer.sample
        sample.sent = time.perf_counter() - start
        try:
            status, refusal = await self._ask(request, answer)
            if status != HTTPStatus.OK:
                raise ServerError(f"status {status}: {refusal.decode(errors='replace')[:200]}")
            answer.read()
            if not answer.done:
                raise ServerError("the stream ended without [DONE]")
            if sample.tokens != tokens:
                raise ServerError(f"{sample.tokens} tokens where {tokens} were asked for")
        except Exception as error:  # whatever a server sends or does not
            with suppress(Exception):
                answer.read()
            sample.error = str(error) or type(error).__name__
            sample.end = time.perf_counter() - start
        finally:
            self.events += answer.events
        return sample, answer.ids

    async def _ask(self, request: bytes, answer: Answer) -> tuple[int, bytes]:
        """On a connection that is open, if there is one, or on a new one."""
        while True:
            used = bool(self._idle)
            connection = self._idle.pop() if used else await self._connect()
            try:
                reply = await connection.ask(request, answer.receive, self.timeout)
            except Unanswered:
                if used:  # the server has closed it meanwhile
                    continue
                raise
            self._idle.append(connection)
            return reply

    async def _connect(self) -> Connection:
        async with asyncio.timeout(self.timeout):
            return await Connection.to(self._address)


class Answer:
    """An event stream. What arrives is noted with its time, and read later, many parts at once:
    one by one, each would find the processor's caches filled with the model again.
    """

    def __init__(self, sample: Sample, start: float) -> None:
        self.sample = sample
        self.ids: list[int] = []
        self.events = 0
        self.done = False
        self._start = start
        self._arrived: list[tuple[float, bytes]] = []
        self._line = b""  # what has come of one that has not ended

    def receive(self, data: bytes) -> bool:
        """Whether it was the last part. What is not the usual event is read at once: it may be the
        end, or an error. Raises ServerError as `read` does.
        """
        self._arrived.append((time.perf_counter() - self._start, data))
        usual = data.endswith(b"}\n\n") and b'"error"' not in data and not self._line
        if not usual or len(self._arrived) == PILE:
            self.read()
        return self.done

    def read(self) -> None:
        """All that has arrived. Raises ServerError for what is no completion."""
        arrived, self._arrived = self._arrived, []
        for now, data in arrived:
            *lines, self._line = (self._line + data).split(b"\n")
            if self._line.removeprefix(b"data:").strip() == DONE:  # whose line need not end
                lines.append(self._line)
            for line in lines:
                if line.startswith(b"data:") and not self.done:
                    self._event(line.removeprefix(b"data:").strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.done, self.sample.end = True, now
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ServerError("an event that is not JSON") from error
        if not isinstance(event, dict):
            raise ServerError("an event that is no object")
        if "error" in event:
            raise ServerError(str(event["error"]))
        self.events += 1
        self._note(event, now)

    def _note(self, event: dict[str, Any], now: float) -> None:
        """Take from one event what it says. Tokens are counted by the server; where it tells
        their number only at the end, an event with text is one until then.
        """
        sample = self.sample
        try:
            usage, choices = event.get("usage"), event["choices"]
            if usage:
                n = int(usage["completion_tokens"])
                sample.prompt_tokens = int(usage["prompt_tokens"])
                details = usage.get("prompt_tokens_details") or {}
                sample.cached_tokens = int(details.get("cached_tokens") or 0)
            else:
                n = sample.tokens + bool(choices and choices[0]["text"])
            if choices and n > sample.tokens:
                sample.times.append(now)
                sample.counts.append(n)
            sample.tokens = n
            if timings := event.get("timings"):
                sample.timings = {name: float(ms) for name, ms in timings.items()}
            if choices:
                self.ids += choices[0].get("token_ids") or ()
        except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise ServerError("an event that is no completion's") from error
