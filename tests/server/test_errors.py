"""Errors have one shape, and nothing is answered that is not checked first. Themes D and H."""

from __future__ import annotations

import json

import httpx2
import pytest
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.testclient import TestClient

from server.engine.worker import State, Unavailable
from tests.conftest import Serve
from tests.server.live import outcomes

PATHS = ("/v1/completions", "/tokenize", "/detokenize")
KEY = "sécret-key"


def error_of(response: httpx2.Response) -> dict[str, str | None]:
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, str | None] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert "\n" not in error["message"]
    assert response.headers["x-request-id"]
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": ',
        b"[]",
        b"null",
        b'"x"',
        b"1",
        b'{"prompt": "\xff\xfe"}',
        b"\xff",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "foo": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x"} trailing',
        b"[" * 5000,
        b'{"a":' * 5000,
        b'{"prompt": [' + b"9" * 5000 + b"]}",
        b"{'prompt': 'x'}",
    ],
)
def test_b091_bodies_that_are_no_json_object(client: TestClient, path: str, body: bytes) -> None:
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert len(response.content) < 500


def test_b060_a_number_beyond_all_bounds(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    for field in ("temperature", "seed", "max_tokens"):
        body = f'{{"{field}": 1e999}}'
        assert client.post("/v1/completions", content=body, headers=headers).status_code == 400


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "x"])
def test_b126_only_json_is_accepted(client: TestClient, path: str, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    response = client.post(path, content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 415
    assert error_of(response)["code"] == "unsupported_media_type"


def test_a_charset_does_no_harm(client: TestClient) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert client.post("/tokenize", content=b'{"prompt":"x"}', headers=headers).status_code == 200


def test_b126_no_cross_origin_headers(client: TestClient) -> None:
    origin = {"Origin": "https://evil.example"}
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    for response in (
        client.options("/v1/completions", headers=preflight),
        client.get("/v1/models", headers=origin),
    ):
        assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("GET", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/fake", "GET"),
        ("POST", "/health", "GET"),
        ("POST", "/metrics", "GET, HEAD"),
        ("POST", "/v1/cache", "GET"),
        ("PUT", "/v1/sessions", "GET, POST"),
        ("OPTIONS", "/v1/sessions/a", "DELETE, GET"),
        ("GET", "/v1/completions/a/cancel", "POST"),
    ],
)
def test_wrong_methods(client: TestClient, method: str, path: str, allow: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert sorted(response.headers["allow"].split(", ")) == allow.split(", ")
    assert error_of(response)["code"] == "method_not_allowed"


@pytest.mark.parametrize("path", ["/v1/nothing", "/docs/x", "/v1/models/../../etc", "/%0d%0aX: 1"])
def test_unknown_paths(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    error_of(response)


def test_the_path_is_not_repeated_at_length(client: TestClient) -> None:
    assert len(client.get("/" + "x" * 5000).content) < 300


def test_b091_huge_values_are_not_repeated(client: TestClient) -> None:
    for field in ("model", "temperature", "session_id", "prompt", "x" * 3000):
        for value in ("x" * 50_000, {"y" * 50_000: 1}, ["z" * 50_000] * 2 + [1]):
            response = client.post("/v1/completions", json={field: value, "n": 0})
            assert response.status_code in (400, 404)
            assert len(response.content) < 500
            error_of(response)


def test_internal_errors_keep_their_details_for_the_log(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client = serve()

    def explode(*_: object) -> None:
        raise RuntimeError("the password is 1234")

    monkeypatch.setattr("server.api.models.card", explode)
    response = client.get("/v1/models", headers={"X-Request-Id": "abc"})
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal_error"
    assert "1234" not in response.text
    assert "1234" in caplog.text
    assert "request abc failed" in caplog.text


def test_b054_no_middleware_hides_that_a_client_has_left(client: TestClient) -> None:
    """Starlette's function style does; the tests of disconnects run with all that there is."""
    stack = client.app.user_middleware  # type: ignore[attr-defined]
    assert len(stack) >= 4
    assert not [layer for layer in stack if issubclass(layer.cls, BaseHTTPMiddleware)]


def test_b028_questions_that_the_engine_will_not_answer_are_a_503(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails between the check of readiness and the question, or with the question."""
    worker = client.app.state.service.worker  # type: ignore[attr-defined]

    async def ask(question: object) -> None:
        worker.state = State.FAILED
        raise Unavailable(State.FAILED)

    monkeypatch.setattr(worker, "ask", ask)
    for path in ("/v1/sessions/a", "/v1/cache/rows"):
        worker.state = State.READY
        response = client.get(path)
        assert response.status_code == 503
        assert error_of(response)["code"] == "failed"


class TestRequestId:
    def test_a_sane_one_is_kept(self, client: TestClient) -> None:
        for given in ("abc", "A-1_b.c:d", "x" * 128):
            response = client.get("/v1/models", headers={"X-Request-Id": given})
            assert response.headers["x-request-id"] == given

    def test_any_other_is_replaced(self, client: TestClient) -> None:
        ids = set()
        for given in (b"", b"a b", b"x" * 129, b"\xe9", b"a\tb", b"<script>"):
            response = client.get("/health", headers={b"x-request-id": given})
            ids.add(response.headers["x-request-id"])
        assert len(ids) == 6
        assert all(name.startswith("req-") for name in ids)


class TestKey:
    @pytest.mark.parametrize(
        "sent",
        [None, "", "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", KEY, f"Bearer {KEY}x"],
    )
    def test_every_route_but_the_probes_needs_it(self, serve: Serve, sent: str | None) -> None:
        client = serve(api_key=KEY)
        headers = {} if sent is None else {b"authorization": sent.encode()}
        for method, path in (
            ("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/cache"),
            ("GET", "/metrics"), ("POST", "/tokenize"), ("GET", "/nothing"),
        ):  # fmt: skip
            response = client.request(method, path, headers=headers)
            assert response.status_code == 401, path
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["type"] == "authentication_error"
        for path in ("/health", "/ready", "/version", "/openapi.json"):
            assert client.get(path, headers=headers).status_code == 200

    @pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
    def test_who_has_it_comes_in(self, serve: Serve, scheme: str) -> None:
        client = serve(api_key=KEY)
        headers = {b"authorization": f"{scheme} {KEY}".encode()}
        assert client.get("/v1/models", headers=headers).status_code == 200

    def test_without_a_key_any_header_passes(self, client: TestClient) -> None:
        """lm-eval sends an empty bearer token."""
        for sent in ("Bearer ", "Bearer x", ""):
            headers = {"Authorization": sent}
            assert client.get("/v1/models", headers=headers).status_code == 200

    def test_b122_it_is_asked_for_before_the_body_is_looked_at(self, serve: Serve) -> None:
        client = serve(api_key=KEY, max_body=100)
        assert client.post("/tokenize", content=b"x" * 1000).status_code == 401


class TestBody:
    def test_b122_declared_size(self, serve: Serve) -> None:
        client = serve(max_body=1000)
        body = json.dumps({"prompt": "x" * 2000})
        response = client.post(
            "/tokenize", content=body, headers={"Content-Type": "application/json"}
        )
        assert response.status_code == 413
        assert error_of(response)["code"] == "body_too_large"
        assert "1000" in response.text

    def test_the_limit_itself_passes(self, serve: Serve) -> None:
        body = json.dumps({"prompt": "x" * 100}).encode()
        client = serve(max_body=len(body))
        headers = {"Content-Type": "application/json"}
        assert client.post("/tokenize", content=body, headers=headers).status_code == 200
        assert client.post("/tokenize", content=body + b" ", headers=headers).status_code == 413


def test_b110_outcomes_add_up_to_all_requests(serve: Serve) -> None:
    client = serve(max_body=500)
    json_type = {"Content-Type": "application/json"}
    assert client.post("/v1/completions", json={"max_tokens": 1}).status_code == 200
    assert client.post(
        "/v1/completions", json={"stop_token_ids": [97], "logit_bias": {"97": 100}}
    ).is_success
    assert client.post("/v1/completions", json={"max_tokens": 2, "stream": True}).is_success
    for body in (b"", b"{", b"x" * 600, b'{"n": 0}', b'{"model": "x"}'):
        assert client.post("/v1/completions", content=body, headers=json_type).is_client_error
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/v1/models").is_success
    assert outcomes(client.get("/metrics").text) == {"length": 2, "stop": 1, "refused": 5}
