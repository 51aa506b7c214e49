"""The page and what is behind it, without a browser: files, headers, POST /v1/inspect."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from server.api.page import FILES
from tests.conftest import Serve, ServeLive
from tests.fakes import END, FakeModel
from tests.server.live import wait_until

FOLDER = Path(__file__).parent.parent.parent / "server" / "page"
KEY = "a-key-of-the-tests"


class TestFiles:
    def test_every_file_is_served_with_its_type(self, client: TestClient) -> None:
        types = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
        names = {path.name for path in FOLDER.iterdir() if path.name != "index.html"}
        assert set(FILES) == {"/", *(f"/page/{name}" for name in names)}
        for path in FILES:
            response = client.get(path)
            assert response.status_code == 200
            kind = types.get(path.rpartition(".")[2] if path != "/" else "html", "image/svg+xml")
            assert response.headers["content-type"].startswith(kind)
            assert response.headers["x-content-type-options"] == "nosniff"
            assert client.head(path).content == b""

    def test_nothing_else_is(self, client: TestClient) -> None:
        for path in (
            "/page",
            "/page/",
            "/page/index.html",
            "/page/../app.py",
            "/page/%2e%2e/app.py",
        ):
            assert client.get(path).status_code == 404, path
        assert client.post("/").status_code == 405

    def test_it_is_asked_for_again_and_sent_once(self, client: TestClient) -> None:
        first = client.get("/")
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"old", {tag}'):
            again = client.get("/", headers={"If-None-Match": known})
            assert (again.status_code, again.content) == (304, b"")
            assert again.headers["etag"] == tag
            assert "content-security-policy" in again.headers
        assert client.get("/", headers={"If-None-Match": '"old"'}).status_code == 200
        assert tag != client.get("/page/app.js").headers["etag"]

    def test_it_is_small(self) -> None:
        assert sum(len(file.content) for file in FILES.values()) < 80_000

    def test_it_needs_no_key(self, serve: Serve) -> None:
        client = serve(api_key=KEY)
        for path in FILES:
            assert client.get(path).status_code == 200
        assert client.post("/v1/inspect", json={"prompt": "a"}).status_code == 401

    def test_it_is_there_while_the_model_loads(self, serve: Serve) -> None:
        client = serve()
        worker = client.app.state.service.worker  # type: ignore[attr-defined]
        worker.state = type(worker.state)("loading")
        assert client.get("/").status_code == 200
        assert client.post("/v1/inspect", json={"prompt": "a"}).status_code == 503
        worker.state = type(worker.state)("ready")


class Inline(HTMLParser):
    """Everything that a strict policy forbids, and every address."""

    def __init__(self) -> None:
        super().__init__()
        self.forbidden: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = dict(attrs)
        self.forbidden += [name for name in names if name == "style" or name.startswith("on")]
        if tag == "style" or (tag == "script" and "src" not in names):
            self.forbidden.append(tag)
        self.addresses += [value for n in ("src", "href") if (value := names.get(n)) is not None]


class TestPolicy:
    def test_only_its_own_files(self, client: TestClient) -> None:
        header = client.get("/").headers["content-security-policy"]
        policy = dict(part.strip().partition(" ")[::2] for part in header.split(";"))
        assert policy["default-src"] == "'none'"
        for kind in ("script-src", "style-src", "connect-src", "img-src"):
            assert policy[kind] == "'self'"
        for kind in ("base-uri", "form-action", "frame-ancestors"):
            assert policy[kind] == "'none'"
        assert policy["require-trusted-types-for"] == "'script'"
        assert "unsafe" not in header

    def test_nothing_inline_and_every_address_leads_somewhere(self, client: TestClient) -> None:
        page = Inline()
        page.feed(FILES["/"].content.decode())
        assert page.forbidden == []
        for address in page.addresses:
            if not address.startswith("#"):
                assert client.get(address).status_code == 200, address

    def test_modules_find_each_other_and_no_other_host(self) -> None:
        for path, file in FILES.items():
            text = file.content.decode()
            for module in re.findall(r"(?:from|import\()\s*[\"'](.+?)[\"']", text):
                assert module in FILES, f"{path}: {module}"
            hosts = set(re.findall(r"(?:https?:)?//([\w-]+\.[\w.-]+)", text))
            assert hosts <= {"www.w3.org"}, path  # the name of SVG, which nobody fetches
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
            )
            assert not re.search(r"localStorage|sessionStorage|indexedDB|\.cookie", text)


class TestInspect:
    def test_the_answer(self, client: TestClient) -> None:
        answer = client.post("/v1/inspect", json={"prompt": "abé", "layer": 2, "head": 1}).json()
        third = round(1 / 3, 6)
        assert answer == {
            "tokens": list("abé".encode()),
            "token_strs": ["a", "b", "bytes:\\xc3", "bytes:\\xa9"],
            "layer": 2, "head": 1, "n_layer": 3, "n_head": 2,
            "scores": [[21.0] * n for n in (1, 2, 3, 4)],
            "weights": [[1.0], [0.5] * 2, [third] * 3, [0.25] * 4],
            "row": [0.25] * 4,
            "shapes": [{"name": "Q", "meaning": "", "uncached": [4, 4], "cached": [1, 4]}],
        }  # fmt: skip

    def test_ids_and_nothing_at_all(self, client: TestClient) -> None:
        answer = client.post("/v1/inspect", json={"prompt": [97, END]}).json()
        assert answer["tokens"] == [97, END]
        nothing: tuple[object, ...] = ("", [])
        for prompt in nothing:
            assert client.post("/v1/inspect", json={"prompt": prompt}).json()["tokens"] == [END]

    def test_faults(self, client: TestClient) -> None:
        for param, body in {
            "prompt": {},
            "prompt ": {"prompt": ["a"]},
            "prompt  ": {"prompt": [END + 1]},
            "prompt   ": {"prompt": "a" * 65},
            "prompt    ": {"prompt": "a" * 100_000},
            "prompt     ": {"prompt": [97] * 65},
            "layer": {"prompt": "a", "layer": 3},
            "head": {"prompt": "a", "head": 2},
            "head ": {"prompt": "a", "head": -1},
        }.items():
            response = client.post("/v1/inspect", json=body)
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == param.strip()
        other = client.post("/v1/inspect", json={"prompt": "a", "model": "x"})
        assert other.status_code == 404

    def test_it_is_bounded_in_a_large_window(self, serve: Serve) -> None:
        client = serve(FakeModel(n_ctx=1000))
        assert client.post("/v1/inspect", json={"prompt": "a" * 128}).status_code == 200
        refused = client.post("/v1/inspect", json={"prompt": "a" * 129})
        assert "up to 128" in refused.json()["error"]["message"]

    def test_it_leaves_no_trace(self, client: TestClient) -> None:
        before = client.get("/v1/cache").json()
        client.post("/v1/inspect", json={"prompt": "abcd"})
        assert client.get("/v1/cache").json() == before

    def test_steps_go_on_between_two_of_them(self, serve_live: ServeLive) -> None:
        """However many ask, a running completion gets its steps, and the same text."""
        alone = serve_live().complete(prompt="abcd", max_tokens=40, temperature=0).json()

        class Slow(FakeModel):
            inspections: list[int] = []  # noqa: RUF012  # steps done when each was asked for

            def inspect(self, *args: object) -> object:  # type: ignore[override]
                self.inspections.append(self.runs)
                return super().inspect(*args)  # type: ignore[arg-type]

        model = Slow()
        live = serve_live(model)
        model.hold_at(model.runs + 2)
        with ThreadPoolExecutor(8) as pool:
            running = pool.submit(live.complete, prompt="abcd", max_tokens=40, temperature=0)
            wait_until(lambda: model.runs == model.holds_at)
            asked = [
                pool.submit(live.client.post, "/v1/inspect", json={"prompt": "abcd"})
                for _ in range(20)
            ]
            model.delay = 0.005  # so that some come while it runs
            model.may_run.set()
            assert all(answer.result().status_code == 200 for answer in asked)
            text = running.result().json()["choices"][0]["text"]
        assert text == alone["choices"][0]["text"]
        steps = [n for n in model.inspections if n < 41]
        assert len(set(steps)) == len(steps), "two of them between two steps"

    @pytest.mark.parametrize("body", ["[]", "{", ""])
    def test_a_body_that_is_none(self, client: TestClient, body: str) -> None:
        headers = {"Content-Type": "application/json"}
        response = client.post("/v1/inspect", content=body, headers=headers)
        assert response.status_code == 400
