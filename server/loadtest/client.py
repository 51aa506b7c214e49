"""One streaming client, and what it sees of each completion."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import httpx2

from server.loadtest.workload import Trial


class ServerError(Exception):
    """The server is not there, or its answer is not what the protocol says."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one trial measured, in seconds; or why it failed."""

    context: int
    use_cache: bool
    repeat: int
    ttft: float = 0.0  # request sent to first token
    per_token: float = 0.0  # first token to last, over the tokens after the first
    cached_tokens: int = 0
    error: str | None = None


class Client:
    """Sends completions to a server, one at a time, and times their events."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 120.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx2.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.http.close()

    def model(self) -> tuple[str, int]:
        """Name and window of the model that is served."""
        try:
            reply = self.http.get("/v1/models").raise_for_status()
            card = reply.json()["data"][0]
            return str(card["id"]), int(card["max_model_len"])
        except httpx2.HTTPError as error:
            raise ServerError(f"{self.http.base_url}: {error}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self.http.base_url}/v1/models: not a list of models") from error

    def measure(self, trial: Trial) -> Sample:
        """Run one trial. A failure is part of the measurement, not an exception."""
        try:
            ttft, per_token, cached = self._stream(trial)
        except (httpx2.HTTPError, ServerError) as error:
            reason = str(error) or type(error).__name__
            return Sample(trial.context, trial.use_cache, trial.repeat, error=reason)
        return Sample(trial.context, trial.use_cache, trial.repeat, ttft, per_token, cached)

    def _stream(self, trial: Trial) -> tuple[float, float, int]:
        body = {
            "prompt": trial.prompt,
            "max_tokens": trial.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "use_cache": trial.use_cache,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        first = last = 0.0
        n_first = n_last = cached = 0
        sent = time.perf_counter()
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            if reply.status_code != httpx2.codes.OK:
                raise ServerError(f"status {reply.status_code}: {reply.read().decode()[:200]}")
            for event in _events(reply):
                now = time.perf_counter()
                try:
                    usage = event["usage"]
                    n, details = usage["completion_tokens"], usage["prompt_tokens_details"]
                    cached = details["cached_tokens"]
                except (LookupError, TypeError) as error:
                    raise ServerError("an event without usage") from error
                if n > n_last:
                    if not n_last:
                        first, n_first = now, n
                    last, n_last = now, n
        if n_last != trial.tokens:
            raise ServerError(f"{n_last} tokens where {trial.tokens} were asked for")
        # Text that is not yet a whole character is held back, so an event may carry two tokens.
        return first - sent, (last - first) / max(1, n_last - n_first), cached


def _events(reply: httpx2.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of an event stream, up to `[DONE]`, which must come."""
    for line in reply.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ServerError("an event that is not JSON") from error
        if "error" in event:
            raise ServerError(str(event["error"].get("message")))
        yield event
    raise ServerError("the stream ended without [DONE]")
