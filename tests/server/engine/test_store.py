"""Sessions on disk: durable turns, rows as a cache that is never trusted too far."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from server.engine.store import Saved, SavedRows, Store, StoreError

SESSION = Saved("tenant", "name", np.array([3, 1, 2], np.int32), (2, 3), 2, 1, 10.0, 20.0)
ROWS = SavedRows(SESSION.tokens, np.arange(12, dtype=np.uint8).reshape(3, 4))


def open_store(folder: Path, model: str = "m", tokenizer: str = "t") -> Store:
    return Store(folder, model=model, tokenizer=tokenizer)


def flat(saved: Saved) -> tuple[object, ...]:
    return (*(getattr(saved, f) for f in Saved.__slots__ if f != "tokens"), saved.tokens.tolist())


def test_a_session_comes_back_as_it_was(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(SESSION)
    store.save(replace(SESSION, name="other", last_used=5.0))
    store.close()
    found = list(open_store(tmp_path).sessions())
    assert [s.name for s in found] == ["other", "name"]  # least recently used first
    assert flat(found[1]) == flat(SESSION)


def test_the_last_turn_replaces_the_one_before_and_forgetting_removes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save(SESSION)
    store.save(replace(SESSION, turn_ends=(2, 3, 9)))
    assert [s.turn_ends for s in store.sessions()] == [(2, 3, 9)]
    store.forget("tenant", "name")
    assert list(store.sessions()) == []


def test_a_committed_turn_survives_kill_9(tmp_path: Path) -> None:
    script = (
        "import sys, time, numpy as np; from pathlib import Path\n"
        "from server.engine.store import Saved, Store\n"
        "store = Store(Path(sys.argv[1]), model='m', tokenizer='t')\n"
        "for i in range(10**9):\n"
        "    store.save(Saved('', 's', np.arange(i, dtype=np.int32), (i,), 1, 0, 0.0, 0.0))\n"
        "    store.commit(); print(i, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(20)]
    os.kill(process.pid, signal.SIGKILL)
    told = [int(line) for line in [*lines, *process.stdout.read().splitlines()] if line.strip()]
    process.wait()
    process.stdout.close()
    (session,) = open_store(tmp_path).sessions()
    assert len(session.tokens) == session.turn_ends[0] >= max(told)


def test_one_server_per_folder(tmp_path: Path) -> None:
    first = open_store(tmp_path)
    first.save(SESSION)
    with pytest.raises(StoreError, match="locked"):
        open_store(tmp_path)
    first.close()


def test_sessions_of_another_tokenizer_are_set_aside_not_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    store.save(SESSION)
    store.close()
    other = open_store(tmp_path, tokenizer="u")
    with caplog.at_level(logging.WARNING):
        assert list(other.sessions()) == []
    assert "another tokenizer" in caplog.text
    other.close()
    assert len(list(open_store(tmp_path).sessions())) == 1


def test_rows_come_back_once_with_their_tokens(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.save_rows({("tenant", "name"): ROWS})
    store.close()
    store = open_store(tmp_path)
    saved = store.rows("tenant", "name")
    assert saved is not None
    assert np.array_equal(saved.rows, ROWS.rows)
    assert np.array_equal(saved.tokens, ROWS.tokens)
    assert store.rows("tenant", "name") is None
    assert store.rows("tenant", "unknown") is None


@pytest.mark.parametrize("damage", ["another model", "cut", "empty"])
def test_rows_that_cannot_be_trusted_are_dropped_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = open_store(tmp_path)
    store.save(SESSION)
    store.save_rows({("tenant", "name"): ROWS})
    store.close()
    file = tmp_path / "rows.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-3])
    elif damage == "empty":
        file.write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        store = open_store(tmp_path, model="n" if damage == "another model" else "m")
        assert store.rows("tenant", "name") is None
    assert "rows.safetensors" in caplog.text
    assert len(list(store.sessions())) == 1


def test_a_folder_that_is_no_state_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="state_dir"):
        open_store(tmp_path / "file")
    (tmp_path / "sessions.sqlite3").write_text("this is not a database, but long enough" * 40)
    with pytest.raises(StoreError, match="state_dir"):
        open_store(tmp_path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "sessions.sqlite3") as database:
        database.execute("pragma user_version = 99")
    database.close()
    for _ in range(2):  # it is left as it was
        with pytest.raises(StoreError, match="another version"):
            open_store(tmp_path)
