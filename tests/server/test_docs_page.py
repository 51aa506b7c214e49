"""GET /docs: all of it comes from this server. Theme H."""

from __future__ import annotations

import re

from starlette.testclient import TestClient

from server.api.docs import FILES
from tests.conftest import Serve


def test_the_page_and_all_that_it_names_are_here(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(named) == 5
    for name in named:
        if name != "data:,":
            assert "//" not in name
            assert client.get(f"/{name}").status_code == 200
    start = client.get("/docs/start.js").text
    assert "//" not in re.sub(r"// .*", "", start)
    assert "validatorUrl: null" in start


def test_nothing_may_be_fetched_from_elsewhere(client: TestClient) -> None:
    """The browser sees to it, whatever is written in Swagger UI's megabyte."""
    for path in FILES:
        policy = client.get(path).headers["content-security-policy"]
        sources = {word for part in policy.split("; ") for word in part.split()[1:]}
        assert sources == {"'none'", "'self'", "'unsafe-inline'", "data:"}
        assert policy.startswith("default-src 'none'; script-src 'self'; ")


def test_it_is_open_and_says_nothing_of_the_server(serve: Serve) -> None:
    client = serve(api_key="k")
    for path in (*FILES, "/openapi.json"):
        assert client.get(path).status_code == 200
    assert client.get("/docs/../pyproject.toml").status_code in (401, 404)


class TestDocument:
    def test_every_route_says_what_it_is_for(self, client: TestClient) -> None:
        document = client.get("/openapi.json").json()
        assert document["info"]["description"]
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                assert operation["summary"], (method, path)
                assert operation["tags"], (method, path)
                if method == "post":
                    body = operation.get("requestBody", {}).get("content", {})
                    assert all("example" in kind for kind in body.values()), path

    def test_every_field_is_described_and_extras_are_marked(self, client: TestClient) -> None:
        schema = client.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]
        fields = schema["properties"]
        assert all(field.get("description") for field in fields.values())
        openai = {
            "model", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n",
            "best_of", "stop", "stream", "stream_options", "echo", "logprobs", "logit_bias",
            "presence_penalty", "frequency_penalty", "seed", "user",
        }  # fmt: skip
        marked = re.compile(r"\((vLLM|onerow)\)$")
        extras = {name for name, field in fields.items() if marked.search(field["description"])}
        assert extras == fields.keys() - openai

    def test_examples_are_true(self, client: TestClient) -> None:
        document = client.get("/openapi.json").json()
        for path, operations in document["paths"].items():
            body = operations.get("post", {}).get("requestBody")
            if body and "{" not in path:
                example = body["content"]["application/json"]["example"]
                response = client.post(path, json=example)
                assert response.is_success, (path, response.text)
