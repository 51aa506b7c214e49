"""From the engine's events to the JSON of an answer. Plain dicts: this is the hot path."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from server.api.calls import Call
from server.engine.sequence import Delta, Finish, Token
from server.engine.worker import Served

Json = dict[str, Any]
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


class Answer:
    """The answer to one call as it grows: what has been generated so far, and what it took."""

    def __init__(self, call: Call, served: Served) -> None:
        self.call = call
        self.finished: dict[int, Finish] = {}
        self._names = served.token_names
        self._logprobs = call.requests[0].sampling.logprobs is not None
        self._completion_tokens = [0] * len(call.requests)
        self._cached_tokens = [0] * len(call.requests)
        self._head = {
            "id": call.id,
            "object": "text_completion",
            "created": call.created,
            "model": call.model,
        }

    @property
    def complete(self) -> bool:
        return len(self.finished) == len(self.call.requests)

    @property
    def completion_tokens(self) -> int:
        return sum(self._completion_tokens)

    @property
    def outcome(self) -> str:
        """How the call ended: `length` if any choice was cut."""
        reasons = {finish.reason.value for finish in self.finished.values()}
        return "length" if "length" in reasons else "stop"

    def whole(self, deltas: Iterable[Delta]) -> str:
        """The answer in one piece, from one delta per choice."""
        choices = [self.choice(delta) for delta in sorted(deltas, key=lambda delta: delta.index)]
        usage, timings = self.usage(), self.timings()
        return encode({**self._head, "choices": choices, "usage": usage, "timings": timings})

    def chunks(self, delta: Delta) -> list[Json]:
        """The chunks of a stream that one delta makes: itself, and the usage after the last one."""
        stream = self.call.stream
        assert stream is not None
        chunk: Json = {**self._head, "choices": [self.choice(delta)]}
        if stream.continuous_usage_stats:
            chunk["usage"] = self.usage()
        elif stream.include_usage:
            chunk["usage"] = None
        if not self.complete:
            return [chunk]
        if not stream.include_usage:
            return [{**chunk, "timings": self.timings()}]
        last = {**self._head, "choices": [], "usage": self.usage(), "timings": self.timings()}
        return [chunk, last]

    def choice(self, delta: Delta) -> Json:
        """Take note of a delta, and give it as a choice."""
        self._completion_tokens[delta.index] = delta.completion_tokens
        self._cached_tokens[delta.index] = delta.cached_tokens
        if delta.finish is not None:
            self.finished[delta.index] = delta.finish
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self.logprobs(delta.tokens) if self._logprobs else None,
            "finish_reason": delta.finish and delta.finish.reason.value,
        }

    def logprobs(self, tokens: Sequence[Token]) -> Json:
        """The legacy layout: four arrays with one entry per token, end-of-text included."""
        scores = [token.score for token in tokens]
        return {
            "tokens": [self._names[token.id] for token in tokens],
            "token_logprobs": [score and max(score.logprob, LOWEST) for score in scores],
            "top_logprobs": [
                score
                and {
                    self._names[token]: max(logprob, LOWEST)
                    # The chosen token is among the best; if it is none of them, it comes last.
                    for token, logprob in (*score.top, (score.token, score.logprob))
                }
                for score in scores
            ],
            "text_offset": [token.offset for token in tokens],
        }

    def usage(self) -> Json:
        prompt, completion = self.call.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens[:: self.call.n])},
        }

    def timings(self) -> Json:
        """Choices run side by side: the longest times, and all rows."""
        timings = [finish.timings for finish in self.finished.values()]
        return {
            "queue_ms": milliseconds(max(t.queue for t in timings)),
            "prefill_ms": milliseconds(max(t.prefill for t in timings)),
            "decode_ms": milliseconds(max(t.decode for t in timings)),
            "rows_computed": sum(t.rows_computed for t in timings),
            "rows_reused": sum(t.rows_reused for t in timings),
        }


# ASCII only: some clients split a stream at U+0085 or U+2028, which JSON may leave as they are.
encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
