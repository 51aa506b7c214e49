"""A streaming client, and what it sees of each completion."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import httpx2

from server.loadtest.workload import Arm


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
        self.http = httpx2.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout,
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        self.events = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.http.aclose()

    async def measure(
        self, prompt: Sequence[int], tokens: int, arm: Arm, start: float, due: float
    ) -> tuple[Sample, list[int]]:
        """Ask for exactly `tokens`; returns what was seen, and their ids where the server tells
        them. A failure is part of the measurement, not an exception.
        """
        sample, ids = Sample(due), []
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
        sample.sent = time.perf_counter() - start
        try:
            async with self.http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != httpx2.codes.OK:
                    reason = (await reply.aread()).decode(errors="replace")[:200]
                    raise ServerError(f"status {reply.status_code}: {reason}")
                async for event in _events(reply):
                    self.events += 1
                    ids += _note(sample, event, time.perf_counter() - start)
            if sample.tokens != tokens:
                raise ServerError(f"{sample.tokens} tokens where {tokens} were asked for")
        except (httpx2.HTTPError, httpx2.InvalidURL, ServerError) as error:
            sample.error = str(error) or type(error).__name__
        sample.end = time.perf_counter() - start
        return sample, ids


def _note(sample: Sample, event: dict[str, Any], now: float) -> list[int]:
    """Take from one event what it says; returns the ids in it. Tokens are counted by the server;
    where it tells their number only at the end, an event with text is one until then.
    """
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
        sample.timings = event.get("timings") or sample.timings
        return list(choices[0].get("token_ids") or ()) if choices else []
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError("an event that is no completion's") from error


async def _events(reply: httpx2.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an event stream, up to `[DONE]`, which must come."""
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ServerError("an event that is not JSON") from error
        if not isinstance(event, dict):
            raise ServerError("an event that is no object")
        if "error" in event:
            raise ServerError(str(event["error"]))
        yield event
    raise ServerError("the stream ended without [DONE]")
