"""The log: one line for each event whatever is in it, as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from server.logs import Json, Text, facts_of
from tests.conftest import Serve
from tests.fakes import FakeModel


def record(message: str, facts: dict[str, object] | None = None) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": message, "levelname": "INFO", "created": 1.5})
    made.facts = facts or {}
    return made


@pytest.mark.parametrize("control", ["\n", "\r", "\x1b[2J", "\x85", "\u2028", "\u2029", "\x0b"])
def test_no_line_can_be_forged(control: str) -> None:
    for form in (Text(), Json()):
        line = form.format(record(f"a{control}b", {"name": f"c{control}d"}))
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line


def test_text() -> None:
    line = Text().format(record("GET /x 200", {"request": "r", "ms": 1.5}))
    assert line.endswith(" INFO GET /x 200 request=r ms=1.5")


def test_json() -> None:
    line = json.loads(Json().format(record("GET /x 200", {"request": "r", "ms": 1.5})))
    assert line == {
        "time": "1970-01-01T00:00:01.500+00:00", "level": "info", "message": "GET /x 200",
        "request": "r", "ms": 1.5,
    }  # fmt: skip


def test_a_fault_is_told_whole_in_both() -> None:
    try:
        raise ValueError("the reason")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    assert "\nValueError: the reason" in Text().format(failed)
    assert "the reason" in json.loads(Json().format(failed))["exception"]


def last(caplog: pytest.LogCaptureFixture) -> dict[str, object]:
    *_, line = [r for r in caplog.records if "/v1/completions" in r.getMessage()]
    return dict(facts_of(line))


def ask(client: TestClient, **fields: object) -> None:
    headers = {"X-Request-Id": "r-1", "Authorization": "Bearer ann-key-0123456789"}
    body = {"prompt": "abcd", "max_tokens": 3, "temperature": 0, **fields}
    client.post("/v1/completions", json=body, headers=headers)


def test_every_request_leaves_its_facts(
    serve: Serve, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: ann-key-0123456789\n")
    model = FakeModel()
    client = serve(model, api_key_file=file)
    caplog.set_level(logging.INFO, "onerow")
    for stream in (False, True):
        ask(client, stream=stream)
        facts = last(caplog)
        assert (facts["request"], facts["tenant"], facts["outcome"]) == ("r-1", "ann", "length")
        assert (facts["prompt_tokens"], facts["completion_tokens"]) == (4, 3)
        assert facts["cached_tokens"] == (3 if stream else 0)
        assert {"ms", "call", "queue_ms", "prefill_ms", "decode_ms"} <= facts.keys()
    ask(client, n=0)
    assert last(caplog)["outcome"] == "refused"
    model.raises_at = model.runs + 2
    ask(client, stream=True)
    assert last(caplog)["outcome"] == "error"
    assert last(caplog)["completion_tokens"] == 1


def test_no_text_of_a_caller_is_logged(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for body in (
        {"prompt": "marker7"}, {"prompt": "a", "user": "marker7", "stop": "marker7"},
        {"prompt": ["marker7", 1]}, {"temperature": "marker7"}, {"prompt": "a", "echo": "marker7"},
    ):  # fmt: skip
        client.post("/v1/completions", json=body)
    client.post("/tokenize", json={"prompt": "marker7"})
    assert "marker7" not in caplog.text
