"""From the engine's events to the JSON of an answer. Plain dicts: this is the hot path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from server.api.calls import Call
from server.api.sse import encode, event, quoted
from server.engine.sequence import Delta, Finish, Token
from server.engine.worker import Served
from server.logs import Facts

Json = dict[str, Any]
LOWEST = -9999.0  # stands for minus infinity, which JSON cannot say


class Answer:
    """The answer to one call as it grows: what has been generated so far, and what it took."""

    def __init__(self, call: Call, served: Served) -> None:
        self.call = call
        self.finished: dict[int, Finish] = {}
        self._names = served.token_names
        self._begun: set[int] = set()  # choices whose first delta has been given
        self._completion_tokens = [0] * len(call.requests)
        self._cached_tokens = [0] * len(call.requests)
        stream = call.stream
        numbered = call.logprobs or call.token_ids
        self._plain = not (numbered or (stream and stream.continuous_usage_stats))
        self._around: dict[int, list[str]] = {}  # by choice: its events before and after the text
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
    def seconds_per_token(self) -> list[float]:
        """Of each choice that has more than one token: the mean time from one to the next."""
        return [
            finish.timings.decode / (self._completion_tokens[index] - 1)
            for index, finish in self.finished.items()
            if self._completion_tokens[index] > 1
        ]

    @property
    def outcome(self) -> str:
        """How the call ended: `length` if any choice was cut."""
        reasons = {finish.reason.value for finish in self.finished.values()}
        return "length" if "length" in reasons else "stop"

    def whole(self, deltas: Iterable[Delta]) -> str:
        """The answer in one piece, from one delta per choice."""
        choices = [
            {**self.choice(delta), "index": index} for index, delta in enumerate(self._best(deltas))
        ]
        usage, timings = self.usage(), self.timings()
        return encode({**self._head, "choices": choices, "usage": usage, "timings": timings})

    def events(self, delta: Delta) -> str:
        """The events of a stream that one delta makes: itself, and the usage after the last one.
        Most differ by their text alone, so that the rest is kept: this is once per token.
        """
        self._note(delta)
        if not self._plain or delta.finish is not None:
            return "".join(map(event, self._chunks(delta)))
        around = self._around.get(delta.index)
        if around is None:
            (chunk,) = self._chunks(replace(delta, text=""))
            around = self._around[delta.index] = event(chunk).split('"text":""')
        before, after = around
        return f'{before}"text":{quoted(delta.text)}{after}'

    def _chunks(self, delta: Delta) -> list[Json]:
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

    def _best(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """The n best candidates of each prompt; in their own order if nothing was to be ranked.
        Take note of all: those that are not shown have been computed as well.
        """
        ordered = sorted(deltas, key=lambda delta: delta.index)
        for delta in ordered:
            self._note(delta)
        n, candidates = self.call.n, self.call.candidates
        for first in range(0, len(ordered), candidates):
            of_one_prompt = ordered[first : first + candidates]
            if n < candidates:
                of_one_prompt.sort(key=likelihood, reverse=True)
            yield from of_one_prompt[:n]

    def _note(self, delta: Delta) -> None:
        self._completion_tokens[delta.index] = delta.completion_tokens
        self._cached_tokens[delta.index] = delta.cached_tokens
        if delta.finish is not None:
            self.finished[delta.index] = delta.finish

    def choice(self, delta: Delta) -> Json:
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self.logprobs(delta.tokens) if self.call.logprobs else None,
            "finish_reason": delta.finish and delta.finish.reason.value,
        }
        if self.call.token_ids:
            ids = [token.id for token in delta.tokens]
            if delta.index not in self._begun:
                self._begun.add(delta.index)
                request = self.call.requests[delta.index]
                choice["prompt_token_ids"] = request.prompt
                if request.echo:
                    ids = ids[len(request.prompt) :]
            choice["token_ids"] = ids
        return choice

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
        first_copies = self._cached_tokens[:: self.call.candidates]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(first_copies)},
        }

    def facts(self) -> Facts:
        """What the log says of it: numbers alone."""
        usage = self.usage()
        facts: Facts = {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
        return facts | self.timings() if self.complete else facts

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


def likelihood(delta: Delta) -> float:
    """Log-probability per generated token of a whole choice: what candidates are ranked by."""
    n = delta.completion_tokens
    scores = [token.score for token in delta.tokens[len(delta.tokens) - n :]]
    return sum(score.logprob for score in scores if score) / max(n, 1)


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
