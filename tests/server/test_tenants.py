"""Several callers with keys of their own: nothing of one is to be seen by another. Theme H."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from server.api.keys import KeyFileError, Keys, read_keys
from server.settings import Settings
from tests.conftest import Serve
from tests.fakes import FakeModel

ANN, BOB, OPERATOR = "ann-key-0123456789", "bob-kéy-0123456789", "operator"
PROMPT = "the secret plan of ann"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who may call\n\nann: {ANN}\n  bob   {BOB}  \n", "utf-8")
    return path


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": b"Bearer " + key.encode()}


def complete(client: TestClient, key: str, **body: object) -> httpx2.Response:
    fields = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, **body}
    return client.post("/v1/completions", json=fields, headers=bearer(key))


def cached(response: httpx2.Response) -> int:
    assert response.status_code == 200, response.text
    hits: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return hits


class TestFile:
    def test_each_key_is_a_tenant(self, file: Path) -> None:
        keys = Keys(Settings.load(api_key_file=file))
        for key, tenant in ((ANN, "ann"), (BOB, "bob")):
            assert keys.tenant(b"Bearer " + key.encode()) == tenant
            assert keys.tenant(b"bearer  " + key.encode() + b" ") == tenant
        for sent in ("", "Bearer", "Bearer ", ANN, f"Basic {ANN}", f"Bearer {ANN}x", "Bearer ann"):
            assert keys.tenant(sent.encode()) is None

    def test_the_unnamed_key_is_one_more(self, file: Path) -> None:
        keys = Keys(Settings.load(api_key_file=file, api_key=OPERATOR))
        assert keys.tenant(f"Bearer {OPERATOR}".encode()) == ""
        assert keys.tenant(f"Bearer {ANN}".encode()) == "ann"

    @pytest.mark.parametrize(
        ("text", "where", "words"),
        [
            ("", "", "there is no key in it"),
            ("# nobody\n", "", "there is no key in it"),
            ("ann\n", ":1", "a line is"),
            ("ann:\n", ":1", "a line is"),
            ("\n# x\n: abcdefghijklmnopq\n", ":3", "a line is"),
            ("ann: abcdefghijklmnop qrst\n", ":1", "a line is"),
            ("../x: abcdefghijklmnopq\n", ":1", "names are letters"),
            (f"{'n' * 65}: abcdefghijklmnopq\n", ":1", "a line is"),
            ("ann: abcdefghijklmno\n", ":1", "the key of ann is shorter than 16 characters"),
            (f"ann: {ANN}\nann: {BOB}\n", ":2", "there is a key of ann already"),
            (f"ann: {ANN}\nbob: {ANN}\n", ":2", "the key of bob is another one's, too"),
        ],
    )
    def test_a_broken_one_is_refused_with_the_line(
        self, tmp_path: Path, text: str, where: str, words: str
    ) -> None:
        path = tmp_path / "keys"
        path.write_text(text, "utf-8")
        with pytest.raises(KeyFileError) as caught:
            read_keys(path, {})
        message = str(caught.value)
        assert message.startswith(f"{path}{where}: ")
        assert words in message
        assert "abcdefgh" not in message, "a key is never shown"

    def test_one_that_cannot_be_read(self, tmp_path: Path) -> None:
        for path in (tmp_path / "none", tmp_path):
            with pytest.raises(KeyFileError, match=str(path)):
                read_keys(path, {})
        latin = tmp_path / "latin"
        latin.write_bytes(b"ann: \xe9bcdefghijklmnopq")
        with pytest.raises(KeyFileError, match="UTF-8"):
            read_keys(latin, {})

    def test_a_key_that_is_the_unnamed_one_is_refused(self, file: Path) -> None:
        with pytest.raises(KeyFileError, match="keys:3: the key of ann is another one's"):
            Keys(Settings.load(api_key_file=file, api_key=ANN))

    def test_a_mark_at_its_beginning_does_no_harm(self, tmp_path: Path) -> None:
        path = tmp_path / "keys"
        path.write_text(f"ann: {ANN}\r\n", "utf-8-sig")
        assert set(read_keys(path, {}).values()) == {"ann"}


class TestReload:
    def test_new_keys_count_and_old_ones_do_not(self, file: Path) -> None:
        keys = Keys(Settings.load(api_key_file=file))
        file.write_text(f"eve: {ANN}\n", "utf-8")
        assert keys.tenant(f"Bearer {ANN}".encode()) == "ann"
        keys.reload()
        assert keys.tenant(f"Bearer {ANN}".encode()) == "eve"
        assert keys.tenant(f"Bearer {BOB}".encode()) is None

    def test_a_broken_file_changes_nothing_but_the_log(
        self, file: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        keys = Keys(Settings.load(api_key_file=file))
        with caplog.at_level(logging.ERROR, "onerow"):
            file.write_text("ann: short\n")
            keys.reload()
            file.unlink()
            keys.reload()
        assert keys.tenant(f"Bearer {ANN}".encode()) == "ann"
        assert len(caplog.records) == 2
        assert all("stay as they are" in r.getMessage() for r in caplog.records)


class TestIsolation:
    @pytest.fixture
    def client(self, serve: Serve, file: Path) -> TestClient:
        return serve(api_key_file=file, api_key=OPERATOR)

    def test_b121_a_prefix_is_shared_within_a_key_and_not_across(self, client: TestClient) -> None:
        assert cached(complete(client, ANN)) == 0
        assert cached(complete(client, ANN)) == len(PROMPT) - 1
        assert cached(complete(client, BOB)) == 0
        assert cached(complete(client, OPERATOR)) == 0
        assert cached(complete(client, BOB)) == len(PROMPT) - 1

    def test_b121_nor_while_the_other_is_running(self, serve: Serve, file: Path) -> None:
        model = FakeModel(delay=0.01)
        client = serve(model, api_key_file=file)
        with client.stream(
            "POST", "/v1/completions", headers=bearer(ANN),
            json={"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream": True},
        ) as response:  # fmt: skip
            next(response.iter_text())
            assert cached(complete(client, BOB)) == 0
            assert cached(complete(client, ANN)) == len(PROMPT) - 1

    def test_b121_the_work_is_the_same_whatever_others_have(self, client: TestClient) -> None:
        """Time follows the rows that are computed; a clock would only measure the machine."""
        complete(client, ANN)
        known = complete(client, BOB).json()["timings"]["rows_computed"]
        fresh = complete(client, BOB, prompt=PROMPT[::-1]).json()["timings"]["rows_computed"]
        assert known == fresh == len(PROMPT) + 1

    def test_b121_a_session_name_is_each_ones_own(self, client: TestClient) -> None:
        complete(client, ANN, session_id="s")
        assert cached(complete(client, BOB, session_id="s")) == 0

        def sessions(key: str) -> list[tuple[str, int]]:
            listed = client.get("/v1/cache", headers=bearer(key)).json()["sessions"]
            return [(s["id"], s["turns"]) for s in listed]

        complete(client, ANN, session_id="s2")
        assert sessions(ANN) == [("s", 1), ("s2", 1)]
        assert sessions(BOB) == [("s", 1)]
        assert sessions(OPERATOR) == []

    def test_b121_numbers_are_each_ones_own(self, client: TestClient) -> None:
        def cache(key: str) -> dict[str, Any]:
            answer: dict[str, Any] = client.get("/v1/cache", headers=bearer(key)).json()
            return answer

        untouched = cache(BOB)
        complete(client, ANN, session_id="s")
        assert cache(BOB) == untouched, "nothing that ann does is to be seen"
        own = cache(ANN)
        assert own["totals"] is None
        assert own["rows"]["idle"] == own["sessions"][0]["rows"] == len(PROMPT) + 1
        assert own["rows"]["free"] == own["rows"]["total"] - own["rows"]["idle"]
        assert own["bytes"] == own["rows"]["idle"] * own["row_bytes"]

    def test_b121_rows_and_reset_are_each_ones_own(self, client: TestClient) -> None:
        complete(client, ANN, session_id="s")
        runs = client.get("/v1/cache/rows", headers=bearer(BOB)).json()["runs"]
        assert {run["state"] for run in runs} == {"free"}
        assert {run["owner"] for run in runs} == {None}
        dropped = client.post("/v1/cache/reset", headers=bearer(BOB)).json()
        assert dropped["rows_freed"] == 0
        assert cached(complete(client, ANN)) == len(PROMPT) - 1

    def test_b121_anothers_session_looks_like_a_missing_one(self, client: TestClient) -> None:
        complete(client, ANN, session_id="real")
        for method, path, body in (
            ("GET", "", None), ("DELETE", "", None), ("POST", "/fork", {"id": "x"}),
            ("POST", "/rewind", {"turn": 0}),
        ):  # fmt: skip
            theirs, none = (
                client.request(method, f"/v1/sessions/{name}{path}", json=body, headers=bearer(BOB))
                for name in ("real", "none")
            )
            assert theirs.status_code == none.status_code == 404
            assert theirs.text.replace("real", "none") == none.text
        assert client.get("/v1/sessions", headers=bearer(BOB)).json()["data"] == []
        mine = client.get("/v1/sessions/real", headers=bearer(ANN)).json()
        assert mine["turns"] == 1

    def test_metrics_are_for_the_operator(self, client: TestClient) -> None:
        for key in (ANN, BOB):
            response = client.get("/metrics", headers=bearer(key))
            assert response.status_code == 403
            assert response.json()["error"]["type"] == "permission_error"
        assert client.get("/metrics", headers=bearer(OPERATOR)).status_code == 200
        assert client.get("/metrics").status_code == 401

    def test_callers_are_told_apart_only_with_a_file(
        self, client: TestClient, serve: Serve
    ) -> None:
        for app, keyed in ((client.app, True), (serve().app, False)):
            assert app.state.service.keyed is keyed  # type: ignore[attr-defined]
