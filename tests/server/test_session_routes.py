"""Sessions over HTTP: reading, forking, rewinding, going on, waiting in line, surviving."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.conftest import Serve, ServeLive
from tests.fakes import N_CTX, FakeModel
from tests.server.live import Live, events, wait_until

Json = dict[str, Any]


def turn(
    client: TestClient, prompt: str, n: int = 3, session: str = "s", **options: object
) -> Json:
    body = {"prompt": prompt, "max_tokens": n, "temperature": 0, "session_id": session, **options}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


def text(answer: Json) -> str:
    found: str = answer["choices"][0]["text"]
    return found


def append(client: TestClient, prompt: str, n: int = 3, **options: object) -> Json:
    return turn(client, prompt, n, "s", session_mode="append", **options)


def read(client: TestClient, session: str = "s") -> Json:
    response = client.get(f"/v1/sessions/{session}")
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


class TestRead:
    def test_a_session_is_what_was_sent_and_generated(self, client: TestClient) -> None:
        answer = text(turn(client, "abc"))
        session = read(client)
        assert session["text"] == "abc" + answer
        assert session["token_ids"] == list(session["text"].encode())
        assert session["tokens"] == 6
        assert session["rows"] == 5  # the last token was drawn, not computed
        assert session["bytes"] == 5 * client.get("/v1/cache").json()["row_bytes"]
        assert session["turns"] == 1
        assert session["turn_ends"] == [6]
        assert session["expires"] is None
        assert client.get("/v1/sessions").json()["data"] == [
            {k: v for k, v in session.items() if k not in ("text", "token_ids", "turn_ends")}
        ]

    def test_b011_the_stop_string_is_not_part_of_it(self, client: TestClient) -> None:
        whole = text(turn(client, "abc", 8, session="whole"))
        answer = text(turn(client, "abc", 8, stop=whole[3:5]))
        assert read(client)["text"] == "abc" + answer == "abc" + whole[:3]

    def test_creating_gives_an_empty_one_and_never_takes_a_name_twice(
        self, client: TestClient
    ) -> None:
        made = client.post("/v1/sessions", json={"id": "mine"})
        assert (made.status_code, made.json()["id"], made.json()["text"]) == (201, "mine", "")
        again = client.post("/v1/sessions", json={"id": "mine"})
        assert (again.status_code, again.json()["error"]["code"]) == (409, "session_exists")
        assert again.headers["x-should-retry"] == "false"
        names = {client.post("/v1/sessions", json={}).json()["id"] for _ in range(3)}
        assert len(names) == 3

    @pytest.mark.parametrize("name", ["none", "a%2Fb", "..", "a" * 300])
    @pytest.mark.parametrize(
        ("method", "path", "body"),
        [
            ("GET", "", None),
            ("DELETE", "", None),
            ("POST", "/fork", {}),
            ("POST", "/rewind", {"turn": 0}),
        ],
    )
    def test_what_is_not_there_is_a_404(
        self, client: TestClient, name: str, method: str, path: str, body: Json | None
    ) -> None:
        response = client.request(method, f"/v1/sessions/{name}{path}", json=body)
        assert response.status_code in ((404, 405) if name == ".." else (404,))
        assert response.json()["error"]["message"]


class TestDelete:
    def test_rows_and_tokens_are_gone(self, client: TestClient) -> None:
        turn(client, "abc")
        assert client.delete("/v1/sessions/s").json() == {"id": "s", "deleted": True}
        assert client.get("/v1/sessions/s").status_code == 404
        assert client.delete("/v1/sessions/s").status_code == 404
        rows = client.get("/v1/cache").json()["rows"]
        assert rows["free"] == rows["total"]

    def test_it_ends_the_turn_that_runs(self, serve_live: ServeLive) -> None:
        live = serve_live(FakeModel(delay=0.02, n_ctx=4096))
        answers: list[Any] = []

        def run() -> None:
            answers.append(live.complete(prompt="abc", max_tokens=4000, session_id="s"))

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: live.snapshot.running == 1)
        assert live.client.delete("/v1/sessions/s").json()["deleted"] is True
        thread.join(60)
        assert answers[0].json()["error"]["code"] == "request_cancelled"
        assert live.snapshot.running == 0
        assert live.client.get("/v1/sessions/s").status_code == 404


class TestFork:
    def test_rows_are_shared_not_copied(self, client: TestClient) -> None:
        turn(client, "abc", 5)
        before = client.get("/v1/cache").json()
        fork = client.post("/v1/sessions/s/fork", json={"id": "t"})
        assert fork.status_code == 201
        after = client.get("/v1/cache").json()
        assert after["rows"]["idle"] == before["rows"]["idle"]
        assert after["rows"]["shared"] == fork.json()["rows"] == fork.json()["shared_rows"] == 7
        assert read(client)["shared_rows"] == 7
        assert {k: fork.json()[k] for k in ("text", "turn_ends", "bytes")} == {
            k: read(client)[k] for k in ("text", "turn_ends", "bytes")
        }

    def test_both_go_on_by_themselves(self, client: TestClient) -> None:
        turn(client, "abc", 5)
        client.post("/v1/sessions/s/fork", json={"id": "t"})
        left = append(client, "X")
        assert left["usage"]["prompt_tokens_details"]["cached_tokens"] == 7
        assert read(client, "t")["turns"] == 1
        right = turn(client, "Y", session="t", session_mode="append")
        # Row 8, of the last token before the fork, was computed in the turn just before.
        assert right["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
        assert read(client)["text"].endswith("X" + text(left))
        assert read(client, "t")["text"].endswith("Y" + text(right))

    def test_a_name_that_is_taken_is_refused_and_kept(self, client: TestClient) -> None:
        turn(client, "abc")
        turn(client, "xyz", session="t")
        before = read(client, "t")
        assert client.post("/v1/sessions/s/fork", json={"id": "t"}).status_code == 409
        assert read(client, "t")["text"] == before["text"]


class TestRewind:
    def test_to_a_turn(self, client: TestClient) -> None:
        first = text(turn(client, "abc"))
        append(client, "de")
        append(client, "f")
        assert read(client)["turn_ends"] == [6, 11, 15]
        cut = client.post("/v1/sessions/s/rewind", json={"turn": 1}).json()
        assert (cut["text"], cut["turn_ends"], cut["rows"]) == ("abc" + first, [6], 6)
        again = append(client, "de")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 6
        assert read(client)["turn_ends"] == [6, 11]

    def test_to_a_token_and_to_nothing(self, client: TestClient) -> None:
        turn(client, "abcdef")
        assert client.post("/v1/sessions/s/rewind", json={"tokens": 4}).json()["text"] == "abcd"
        empty = client.post("/v1/sessions/s/rewind", json={"tokens": 0}).json()
        assert (empty["text"], empty["rows"], empty["turn_ends"]) == ("", 0, [])

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "tokens"),
            ({"turn": 1, "tokens": 1}, "tokens"),
            ({"tokens": 7}, "tokens"),
            ({"turn": 2}, "turn"),
            ({"turn": -1}, "turn"),
            ({"tokens": "1"}, "tokens"),
        ],
    )
    def test_what_is_not_possible_changes_nothing(
        self, client: TestClient, body: Json, param: str
    ) -> None:
        turn(client, "abc")
        refused = client.post("/v1/sessions/s/rewind", json=body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == param
        assert read(client)["tokens"] == 6


class TestAppend:
    def test_only_the_new_tokens_are_computed(self, client: TestClient) -> None:
        first = text(turn(client, "abc", 5))
        second = append(client, "xy", 4)
        usage = second["usage"]
        assert usage["prompt_tokens"] == 10  # the whole context
        assert usage["prompt_tokens_details"]["cached_tokens"] == 7
        whole = client.post(
            "/v1/completions",
            json={"prompt": f"abc{first}xy", "max_tokens": 4, "temperature": 0, "use_cache": False},
        )
        assert text(second) == text(whole.json())
        assert read(client)["text"] == f"abc{first}xy{text(second)}"

    def test_an_empty_prompt_goes_on(self, client: TestClient) -> None:
        parts = [text(turn(client, "abc")), text(append(client, "")), text(append(client, ""))]
        assert "".join(parts) == text(turn(client, "abc", 9, session="t"))

    def test_a_new_session_starts_with_its_prompt(self, client: TestClient) -> None:
        assert text(append(client, "abc")) == text(turn(client, "abc", session="t"))

    def test_the_window_holds_for_the_whole_context(self, client: TestClient) -> None:
        turn(client, "a" * (N_CTX - 8), 2)
        before = read(client)
        body = {"prompt": "bcd", "max_tokens": 4, "session_id": "s", "session_mode": "append"}
        for stream in (False, True):
            refused = client.post("/v1/completions", json={**body, "stream": stream})
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert {**read(client), "last_used": 0} == {**before, "last_used": 0}  # B015
        assert append(client, "bc", 4)["usage"]["total_tokens"] == N_CTX

    def test_it_needs_a_session(self, client: TestClient) -> None:
        refused = client.post("/v1/completions", json={"prompt": "a", "session_mode": "append"})
        assert refused.json()["error"]["param"] == "session_mode"

    def test_uncached_its_tokens_grow_and_its_rows_go(self, client: TestClient) -> None:
        turn(client, "abc")
        answer = append(client, "x", use_cache=False)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (read(client)["tokens"], read(client)["rows"]) == (10, 0)


class TestLine:
    def test_b018_turns_at_once_are_turns_in_a_row(self, serve_live: ServeLive) -> None:
        live = serve_live(FakeModel(delay=0.002))
        letters = "abcdefgh"
        threads = [
            threading.Thread(
                target=live.complete,
                kwargs={
                    "prompt": letter.upper(),
                    "max_tokens": 2,
                    "session_id": "s",
                    "session_mode": "append",
                    "temperature": 0,
                },
            )
            for letter in letters
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        session = live.client.get("/v1/sessions/s").json()
        assert session["turns"] == 8
        assert sorted(c for c in session["text"] if c.isupper()) == sorted(letters.upper())
        assert all(session["text"][i].isupper() for i in range(0, 24, 3))

    def test_b014_a_lost_turn_is_rolled_back_and_the_next_one_waits_for_that(
        self, serve_live: ServeLive
    ) -> None:
        live = serve_live(FakeModel(delay=0.001))
        live.complete(prompt="abc", max_tokens=2, temperature=0, session_id="s")
        before = live.client.get("/v1/sessions/s").json()["text"]
        for i in range(20):
            lost = live.send(
                prompt="x", max_tokens=40, stream=True, session_id="s", session_mode="append"
            )
            if i % 4:
                lost.recv(1 + 400 * (i % 3))
            lost.close()
            peek = live.client.post("/v1/sessions/s/rewind", json={"tokens": len(before)})
            assert peek.json()["text"] == before
        answer = live.complete(
            prompt="y", max_tokens=2, temperature=0, session_id="s", session_mode="append"
        )
        alone = live.complete(prompt=before + "y", max_tokens=2, temperature=0, use_cache=False)
        assert answer.json()["choices"][0]["text"] == alone.json()["choices"][0]["text"]
        assert live.snapshot.running == 0

    def test_who_leaves_the_line_is_not_waited_for(self, serve_live: ServeLive) -> None:
        model = FakeModel()
        live = serve_live(model)
        model.may_run.clear()
        first = live.send(prompt="a", max_tokens=2, session_id="s")
        assert model.running.wait(60)
        gone = live.send(prompt="b", max_tokens=60, session_id="s")
        lines = live.app.state.service.lines
        wait_until(lambda: lines.waiting == 1)
        gone.close()
        wait_until(lambda: lines.waiting == 0)
        model.may_run.set()
        assert b"200 OK" in first.recv(4096)
        first.close()
        assert live.complete(prompt="c", max_tokens=1, session_id="s").status_code == 200
        assert live.snapshot.generated_tokens_total == 3

    def test_the_line_is_bounded(self, serve_live: ServeLive) -> None:
        model = FakeModel()
        live = serve_live(model, max_queue=2)
        model.may_run.clear()
        waiting = [live.send(prompt="a", max_tokens=1, session_id="s") for _ in range(3)]
        wait_until(lambda: live.app.state.service.lines.waiting == 2)
        refused = live.complete(prompt="a", max_tokens=1, session_id="s")
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        model.may_run.set()
        for connection in waiting:
            assert b"200 OK" in connection.recv(4096)
            connection.close()

    def test_the_deadline_counts_in_line_too(self, serve_live: ServeLive) -> None:
        """Its time ends soon after that of the one before it, not as long after."""
        limit = 2.0
        live = serve_live(FakeModel(delay=0.05, n_ctx=4096), request_timeout=limit)
        started = time.monotonic()
        slow = live.send(prompt="a", max_tokens=4000, session_id="s")
        wait_until(lambda: live.snapshot.running == 1)
        assert live.complete(prompt="a", max_tokens=4000, session_id="s").status_code == 504
        assert time.monotonic() - started < 2 * limit
        slow.close()


class TestExpiry:
    def test_b023_a_session_slides_and_then_expires_and_is_counted(
        self, serve: Serve, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = SimpleNamespace(now=1000.0)
        clock.time = lambda: clock.now
        monkeypatch.setattr("server.engine.sessions.time", clock)
        client = serve(session_ttl=0.5)
        turn(client, "abcdef")
        for _ in range(4):
            clock.now += 0.25
            answer = append(client, "x", 1)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert read(client)["expires"] == clock.now + 0.5
        clock.now += 0.5
        wait_until(lambda: client.get("/v1/sessions").json()["data"] == [])
        now = client.get("/v1/cache").json()
        assert now["rows"]["free"] == now["rows"]["total"]
        assert now["totals"]["sessions_expired"] == 1
        assert client.get("/v1/sessions/s").status_code == 404
        again = turn(client, "abcdef")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def test_too_many_sessions_are_counted_too(self, serve: Serve) -> None:
        client = serve(max_sessions=2)
        for name in ("a", "b", "c"):
            turn(client, "xyz", session=name)
        now = client.get("/v1/cache").json()
        assert [session["id"] for session in now["sessions"]] == ["b", "c"]
        assert now["totals"]["sessions_evicted"] == 1


class TestSaving:
    def test_a_session_survives_a_clean_restart_with_its_rows(
        self, serve: Serve, tmp_path: Path
    ) -> None:
        live = Live(FakeModel(), state_dir=tmp_path)
        with live:
            body = {"prompt": "abc", "max_tokens": 5, "temperature": 0, "session_id": "s"}
            live.complete(**body)
            before = live.client.get("/v1/sessions/s").json()
        client = serve(state_dir=tmp_path)
        after = read(client)
        assert after["rows"] == 0  # until it is used
        assert {**after, "rows": 0, "bytes": 0} == {**before, "rows": 0, "bytes": 0}
        answer = append(client, "x")
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 7  # B031

    def test_what_was_told_is_there_whatever_happens_next(
        self, serve: Serve, tmp_path: Path
    ) -> None:
        client = serve(state_dir=tmp_path)
        answer = text(turn(client, "abc"))
        found = (tmp_path / "sessions.sqlite3-wal").read_bytes()
        assert ("abc" + answer).encode("utf-32-le") in found

    def test_forks_and_rewinds_and_deletions_too(self, serve: Serve, tmp_path: Path) -> None:
        with Live(FakeModel(), state_dir=tmp_path) as live:
            for name in ("s", "gone"):
                live.complete(prompt="abc", max_tokens=5, session_id=name)
            live.client.post("/v1/sessions/s/fork", json={"id": "t"})
            live.client.post("/v1/sessions/s/rewind", json={"tokens": 2})
            live.client.delete("/v1/sessions/gone")
        client = serve(state_dir=tmp_path)
        found = {s["id"]: s["tokens"] for s in client.get("/v1/sessions").json()["data"]}
        assert found == {"s": 2, "t": 8}


class TestCache:
    def test_rows_are_listed_without_a_gap_and_add_up(self, client: TestClient) -> None:
        turn(client, "abc", 5)
        client.post("/v1/sessions/s/fork", json={"id": "t"})
        client.post("/v1/completions", json={"prompt": "zz", "max_tokens": 3})
        rows, now = client.get("/v1/cache/rows").json(), client.get("/v1/cache").json()["rows"]
        runs = rows["runs"]
        assert rows["total"] == now["total"]
        ends = [run["start"] + run["n"] for run in runs]
        assert [run["start"] for run in runs] == [0, *ends[:-1]]
        by_state = {
            state: sum(run["n"] for run in runs if run["state"] == state)
            for state in ("free", "idle", "running")
        }
        assert by_state == {state: now[state] for state in by_state}
        assert sum(run["n"] for run in runs if run["holders"] > 1) == now["shared"] == 7
        assert {run["owner"] for run in runs if run["state"] == "idle"} == {"t", None}

    def test_reset_says_what_it_dropped(self, client: TestClient) -> None:
        turn(client, "abc", 5)
        client.post("/v1/completions", json={"prompt": "zz", "max_tokens": 3})
        idle = client.get("/v1/cache").json()["rows"]["idle"]
        dropped = client.post("/v1/cache/reset").json()
        assert dropped == {"rows_freed": idle, "sequences_forgotten": 1, "sessions_kept": 1}
        assert client.get("/v1/cache").json()["rows"]["idle"] == 0
        assert read(client)["tokens"] == 8
        nothing = client.post("/v1/cache/reset").json()
        assert nothing == {"rows_freed": 0, "sequences_forgotten": 0, "sessions_kept": 0}
        assert append(client, "x")["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def test_events_tell_what_changed_and_only_to_listeners(self, serve_live: ServeLive) -> None:
        live = serve_live(FakeModel())
        listeners = live.app.state.service.listeners
        free = listeners._value
        with live.client.stream("GET", "/v1/cache/events") as response:
            lines = response.iter_lines()
            (first,) = events(next(lines) + "\n\n")
            assert sum(run["n"] for run in first["runs"]) == first["rows"]["total"]
            assert listeners._value == free - 1
            live.complete(prompt="abc", max_tokens=5, session_id="s")
            second = next(e for line in lines if line for e in events(line + "\n\n"))
            assert second["rows"]["idle"] == 7
            assert {run["owner"] for run in second["runs"]} == {"s", None}
        wait_until(lambda: listeners._value == free)
