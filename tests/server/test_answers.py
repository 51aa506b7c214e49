"""The events of a stream, most of which are made from what they have in common."""

from __future__ import annotations

import json

import pytest

from server.api.answers import Answer
from server.api.calls import Call
from server.api.schemas import StreamOptions
from server.engine.sequence import Delta, Finish, FinishReason, Request, Timings, Token
from server.engine.worker import Served
from tests.fakes import BYTES, N_CTX

TEXTS = ["a", "", 'say "x"', '"text":""', "\\", "\u2028\u0085\n", "é 日 😀", "</script>", "\ud800"]
SERVED = Served("fake", "/models/fake", N_CTX, BYTES.n_vocab, BYTES, "cpu", "float32", "float32")
OPTIONS = {
    "plain": StreamOptions(),
    "usage": StreamOptions(include_usage=True),
    "usage throughout": StreamOptions(include_usage=True, continuous_usage_stats=True),
}


def call(stream: StreamOptions, *, token_ids: bool, name: str) -> Call:
    requests = [Request("cmpl-1", i, (97, 98), 50) for i in range(2)]
    return Call(
        id="cmpl-1",
        created=1,
        model=name,
        n=2,
        candidates=2,
        requests=requests,
        stream=stream,
        logprobs=False,
        token_ids=token_ids,
        numbers=0,
    )


def delta(index: int, text: str, n: int, finish: Finish | None = None) -> Delta:
    return Delta("cmpl-1", index, text, (Token(97, n, None),), 2, n, 0, finish)


@pytest.mark.parametrize("name", ["fake", 'a "text":"" b'])
@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_event_is_the_chunk_that_it_stands_for(
    options: str, token_ids: bool, name: str
) -> None:
    stream = OPTIONS[options]
    answer = Answer(call(stream, token_ids=token_ids, name=name), SERVED)
    end = Finish(FinishReason.LENGTH, Timings(0.1, 0.2, 0.3, 4, 5))
    deltas = [delta(i % 2, text, i // 2 + 1) for i, text in enumerate([*TEXTS, "last"])]
    deltas += [delta(0, "x", 9, end), delta(1, "y", 9, end)]
    events = [e for d in deltas for e in answer.events(d).split("\n\n")[:-1]]
    assert all(event.isascii() and event.startswith("data: {") for event in events)
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    if stream.include_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 18)
    assert len(chunks) == len(deltas)
    for chunk, d in zip(chunks, deltas, strict=True):
        assert (chunk["id"], chunk["model"]) == ("cmpl-1", name)
        (choice,) = chunk["choices"]
        assert (choice["index"], choice["text"], choice["logprobs"]) == (d.index, d.text, None)
        assert choice["finish_reason"] == (d.finish and "length")
        assert choice.get("token_ids") == ([97] if token_ids else None)
        assert ("usage" in chunk) == stream.include_usage
        assert bool(chunk.get("usage")) == bool(stream.continuous_usage_stats)
