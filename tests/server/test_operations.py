"""Models, tokens, cache, probes, metrics, the OpenAPI document. Themes D, F and I."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from server.version import VERSION
from tests.conftest import Serve
from tests.fakes import BYTES, END, N_CTX, ROW_BYTES, FakeModel
from tests.server.live import outcomes, wait_until


def samples(client: TestClient) -> dict[str, float]:
    """Every sample of /metrics by its name and labels."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found
            found[key] = sample.value
    return found


def complete(client: TestClient, **body: object) -> dict[str, Any]:
    response = client.post("/v1/completions", json={"temperature": 0, "prompt": "abcd", **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


class TestModels:
    def test_the_card(self, client: TestClient) -> None:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert card == client.get("/v1/models/fake").json()
        assert {**card, "created": 0} == {
            "id": "fake", "object": "model", "created": 0, "owned_by": "onerow",
            "root": "/models/fake", "max_model_len": N_CTX,
        }  # fmt: skip
        assert isinstance(card["created"], int)

    def test_other_names_are_404(self, client: TestClient) -> None:
        for name in ("no-such", "x/y", "x" * 500):
            response = client.get(f"/v1/models/{name}")
            assert response.status_code == 404
            assert "'fake'" in response.json()["error"]["message"]


class TestTokens:
    def test_there_and_back(self, client: TestClient) -> None:
        answer = client.post(
            "/tokenize", json={"prompt": "aé😀", "add_special_tokens": False}
        ).json()
        assert answer == {
            "count": 7, "max_model_len": N_CTX, "tokens": list("aé😀".encode()), "token_strs": None,
        }  # fmt: skip
        answer = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert answer == {"prompt": "aé😀"}

    def test_texts_of_tokens(self, client: TestClient) -> None:
        answer = client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
        assert answer["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]

    def test_b082_the_special_token(self, client: TestClient) -> None:
        def tokens(**body: object) -> list[int]:
            answer = client.post("/tokenize", json={"prompt": "<|endoftext|>", **body}).json()
            ids: list[int] = answer["tokens"]
            return ids

        assert tokens() == [END]
        assert tokens(parse_special=True) == [END]
        assert tokens(parse_special=False) == list(b"<|endoftext|>")

    def test_text_may_be_longer_than_the_window(self, client: TestClient) -> None:
        for prompt in ("ab" * 50_000, ""):
            answer = client.post("/tokenize", json={"prompt": prompt}).json()
            assert answer["count"] == len(prompt)

    def test_faults(self, client: TestClient) -> None:
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": ["a"]}),
            ("/detokenize", {}),
            ("/detokenize", {"tokens": [257]}),
            ("/detokenize", {"tokens": [-1]}),
            ("/detokenize", {"tokens": "a"}),
        ):
            response = client.post(path, json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] in ("prompt", "tokens")
        assert client.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404

    def test_b123_a_panic_of_the_tokenizer_is_a_400(
        self, client: TestClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class PanicException(BaseException):
            """What pyo3 raises; no Exception."""

        class Panics:
            def encode_ordinary(self, text: str) -> list[int]:
                raise PanicException

            def encode(self, text: str, **_: object) -> list[int]:
                raise PanicException

        monkeypatch.setattr(BYTES, "encoding", Panics())
        for path in ("/tokenize", "/v1/completions"):
            response = client.post(path, json={"prompt": "a"})
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prompt"

    def test_tokenizer_info(self, client: TestClient) -> None:
        info = client.get("/tokenizer_info").json()
        assert info["eos_token"] == "<|endoftext|>"
        assert info["eos_token_id"] == END
        assert info["vocab_size"] == 257
        assert info["model_max_length"] == N_CTX


class TestProbes:
    def test_ready(self, client: TestClient) -> None:
        assert client.get("/health").json() == {"status": "ready"}
        assert client.get("/ready").json() == {"status": "ready"}
        assert client.get("/version").json() == {"version": VERSION}

    def test_b133_b134_loading(self, serve: Serve) -> None:
        model = FakeModel()
        model.may_run.clear()
        client = serve(model, wait=False)
        assert client.get("/health").json() == {"status": "loading"}
        assert client.get("/version").status_code == 200
        assert client.get("/metrics").status_code == 200
        for method, path in (
            ("GET", "/ready"), ("GET", "/v1/models"), ("POST", "/v1/completions"),
            ("POST", "/tokenize"), ("GET", "/v1/cache"), ("GET", "/nothing"),
        ):  # fmt: skip
            response = client.request(method, path)
            assert response.status_code == 503, path
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "loading"
        model.may_run.set()
        wait_until(lambda: client.get("/ready").status_code == 200)
        assert complete(client)

    def test_b133_a_failed_load_is_not_healthy(self, serve: Serve) -> None:
        client = serve(FakeModel(raises_at=1))
        for path in ("/health", "/ready", "/v1/models"):
            response = client.get(path)
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "failed"

    def test_draining(self, serve: Serve) -> None:
        client = serve()
        client.app.state.service.worker.drain()  # type: ignore[attr-defined]
        assert client.get("/health").json() == {"status": "draining"}
        for path in ("/ready", "/v1/models"):
            response = client.get(path)
            assert response.status_code == 503
            assert response.headers["retry-after"]
            assert response.json()["error"]["code"] == "draining"


class TestCache:
    def test_words_of_the_design(self, client: TestClient) -> None:
        empty = client.get("/v1/cache").json()
        assert empty["rows"] == {"total": 4096, "free": 4096, "running": 0, "idle": 0, "shared": 0}
        assert set(empty["totals"].values()) == {0}, "the test generation has left no trace"
        first = complete(client, session_id="s", max_tokens=3)["usage"]
        again = complete(client, max_tokens=2)["usage"]
        uncached = complete(client, max_tokens=2, use_cache=False)["usage"]
        now = client.get("/v1/cache").json()
        rows, totals = now["rows"], now["totals"]
        assert rows["total"] == rows["free"] + rows["running"] + rows["idle"]
        assert now["bytes"] == rows["idle"] * ROW_BYTES
        assert (now["row_bytes"], now["device"]) == (ROW_BYTES, "cpu")
        assert (now["dtype"], now["rows_dtype"]) == ("float32", "float32")
        usages = (first, again, uncached)
        assert totals["prompt_tokens"] == sum(u["prompt_tokens"] for u in usages)
        assert totals["generated_tokens"] == sum(u["completion_tokens"] for u in usages)
        assert totals["rows_reused"] == sum(
            u["prompt_tokens_details"]["cached_tokens"] for u in usages
        )
        (session,) = now["sessions"]
        assert session["id"] == "s"
        assert session["tokens"] == 7
        assert session["bytes"] == session["rows"] * ROW_BYTES
        assert session["created"] <= session["last_used"]

    def test_b107_metrics_say_the_same(self, client: TestClient) -> None:
        complete(client)
        complete(client)
        now, seen = client.get("/v1/cache").json(), samples(client)
        for state in ("free", "running", "idle"):
            assert seen[f"onerow_rows{{state={state}}}"] == now["rows"][state]
        names = {"rows_reused": "cached_tokens", "generated_tokens": "generation_tokens"}
        for name, value in now["totals"].items():
            assert seen[f"onerow_{names.get(name, name)}_total"] == value
        assert seen["onerow_cached_tokens_total"] == 3

    def test_b108_rates_are_left_to_the_query(self, client: TestClient) -> None:
        """Two counters; no gauge claims a rate over a time that nobody chose."""
        complete(client)
        before = samples(client)
        complete(client, prompt="xyzw")
        complete(client, prompt="xyzw")
        after = samples(client)
        hits, queries = (
            after[name] - before[name]
            for name in ("onerow_cached_tokens_total", "onerow_prompt_tokens_total")
        )
        assert (hits, queries) == (3, 8)
        assert not [name for name in after if name.endswith(("_rate", "_ratio"))]


class TestMetrics:
    def test_form(self, client: TestClient) -> None:
        response = client.get("/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert response.text.endswith("\n")
        head = client.head("/metrics")
        assert head.status_code == 200
        assert head.content == b""
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        assert client.get("/metrics", headers=accept).text.endswith("# EOF\n")
        assert all(name.startswith(("onerow_", "process_")) for name in samples(client))

    def test_b112_one_observation_for_each_request_that_made_a_token(self, serve: Serve) -> None:
        model = FakeModel(delay=0.02)
        client = serve(model)
        complete(client, max_tokens=1)
        complete(client, max_tokens=0)
        complete(client, max_tokens=3, n=2)
        complete_stream = {"max_tokens": 2, "stream": True}
        assert client.post("/v1/completions", json=complete_stream).is_success
        seen = samples(client)
        assert seen["onerow_time_to_first_token_seconds_count"] == 3
        took = seen["onerow_request_duration_seconds_sum"]
        assert 0.06 <= seen["onerow_time_to_first_token_seconds_sum"] < took
        for name in ("request_duration_seconds", "queue_seconds", "request_prompt_tokens"):
            assert seen[f"onerow_{name}_count"] == 4
        assert seen["onerow_request_prompt_tokens_sum"] == 13
        assert seen["onerow_request_generation_tokens_sum"] == 9
        assert seen["onerow_generation_tokens_total"] == 9

    def test_time_per_output_token_is_that_between_two(self, serve: Serve) -> None:
        client = serve(FakeModel(delay=0.02))
        complete(client, max_tokens=1)
        complete(client, max_tokens=4, n=2)
        seen = samples(client)
        assert seen["onerow_time_per_output_token_seconds_count"] == 2, "one for each choice"
        # Two of the four tokens' five steps; it would be more than all of them in sum, not in mean.
        took = seen["onerow_request_duration_seconds_sum"]
        assert 0.04 <= seen["onerow_time_per_output_token_seconds_sum"] < took

    def test_steps_and_what_is_computed_in_them(self, client: TestClient) -> None:
        complete(client, max_tokens=5)
        complete(client, max_tokens=5, use_cache=False)
        seen = samples(client)
        for name in ("step_seconds", "step_tokens"):
            assert seen[f"onerow_{name}_count"] == seen["onerow_steps_total"] == 10
        assert seen["onerow_step_tokens_sum"] == seen["onerow_rows_computed_total"]

    def test_b112_also_when_it_did_not_end_well(self, serve: Serve) -> None:
        client = serve(FakeModel(delay=0.02, n_ctx=4096), request_timeout=0.6)
        for stream in (False, True):
            client.post("/v1/completions", json={"max_tokens": 4000, "stream": stream})
        seen = samples(client)
        assert seen["onerow_requests_total{outcome=timeout}"] == 2
        assert seen["onerow_time_to_first_token_seconds_count"] == 2
        assert seen["onerow_request_duration_seconds_count"] == 0

    def test_failures_are_counted(self, serve: Serve) -> None:
        model = FakeModel()
        client = serve(model)
        for stream in (False, True):
            model.break_next()
            client.post("/v1/completions", json={"stream": stream})
        assert outcomes(client.get("/metrics").text) == {"error": 2}

    def test_labels_are_bounded(self, client: TestClient) -> None:
        before = samples(client).keys()
        for i in range(20):
            client.get(f"/v1/none-{i}")
            client.post("/v1/completions", json={"model": f"none-{i}", f"field-{i}": 1})
        assert samples(client).keys() == before


class TestDocument:
    def test_it_says_what_is_sent(self, client: TestClient) -> None:
        document = client.get("/openapi.json").json()
        operation = document["paths"]["/v1/completions"]["post"]
        responses = operation["responses"]
        assert set(responses) == {
            "200", "400", "401", "404", "408", "413", "415", "429", "499", "500",
            "503", "504",
        }  # fmt: skip
        stream = responses["200"]["content"]["text/event-stream"]["schema"]
        assert stream["type"] == "object"
        assert stream["properties"]["data"]["type"] == "string"
        for operations in document["paths"].values():
            for other in operations.values():
                assert "422" not in other["responses"]
        reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = document["components"]["schemas"][reference.rpartition("/")[2]]
        for name, field in schema["properties"].items():
            assert {"type": "null"} in field["anyOf"], name
        assert schema["properties"]["temperature"]["default"] == 1.0

    def test_every_reference_leads_somewhere(self, client: TestClient) -> None:
        document = client.get("/openapi.json").json()
        schemas = document["components"]["schemas"]

        def follow(part: object) -> None:
            if isinstance(part, dict):
                if "$ref" in part:
                    assert part["$ref"].removeprefix("#/components/schemas/") in schemas
                for inner in part.values():
                    follow(inner)
            elif isinstance(part, list):
                for inner in part:
                    follow(inner)

        follow(document)


def test_http_imports_no_torch() -> None:
    code = "import sys, server.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
