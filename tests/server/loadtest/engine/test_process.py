"""The protocol, with a peer that keeps to it and with such as do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from server.loadtest.engine import process as module
from server.loadtest.engine.process import AnswerError, Process, ProcessError
from tests.server.loadtest.engine.fake_peer import command


@contextmanager
def started(fault: str = "none") -> Iterator[Process]:
    process = Process(command(fault), os.environ)
    try:
        yield process
    finally:
        process.close()


class TestAnswers:
    def test_times_and_tokens(self) -> None:
        with started() as process:
            assert process.ready["ready"] == "fake 1.0"
            assert not process.uncached
            times, tokens = process.generate([[1, 2], [3, 4]], 3)
            assert times == pytest.approx([0.020, 0.022, 0.024])
            assert tokens[0] == 3

    def test_one_that_can_do_without_the_cache_is_told_to(self) -> None:
        with started("obeys") as process:
            assert process.uncached
            kept, _ = process.generate([[1]], 2)
            afresh, _ = process.generate([[1]], 2, use_cache=False)
            assert afresh == pytest.approx([10 * time for time in kept])

    def test_what_it_uses(self) -> None:
        with started() as process:
            assert process.loaded_mb is not None
            assert process.peak_mb is not None
            assert 1 < process.loaded_mb <= process.peak_mb < 500
            assert 0 <= process.cpu_seconds < 60


class TestFaults:
    @pytest.mark.parametrize(
        ("fault", "words"),
        [
            ("fails", "RuntimeError: too long for me"),
            ("short", "4 times for 2 tokens"),
            ("backwards", "its clock does not go forward"),
            ("still", "its clock does not go forward"),
        ],
    )
    def test_of_one_answer(self, fault: str, words: str) -> None:
        """It can be asked again: the others of its answers may be good."""
        with started(fault) as process:
            for _ in range(2):
                with pytest.raises(AnswerError, match=f"^{words}$"):
                    process.generate([[1]], 2)

    @pytest.mark.parametrize(
        ("fault", "words"),
        [("nonsense", r"it answered \{ts: "), ("timeless", "an answer without times: ")],
    )
    def test_of_the_process(self, fault: str, words: str) -> None:
        with started(fault) as process, pytest.raises(ProcessError, match=f"^{words}"):
            process.generate([[1]], 2)

    def test_it_dies(self) -> None:
        with started("dies") as process:
            process.generate([[1]], 2)
            for _ in range(2):
                with pytest.raises(ProcessError, match=r"^it ended: Killed$"):
                    process.generate([[1]], 2)

    def test_it_is_killed(self) -> None:
        with started() as process:
            os.kill(process._process.pid, signal.SIGKILL)
            with pytest.raises(ProcessError, match=r"^it ended: it said nothing$"):
                process.generate([[1]], 2)

    def test_it_takes_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.0)
        silent = started("silent")
        with silent as process, pytest.raises(ProcessError, match=r"^no answer for 0 s$"):
            process.generate([[1]], 2)


class TestStart:
    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (["/no/such/python"], "^/no/such/python: No such file or directory$"),
            (command("absent"), "^it ended: ModuleNotFoundError: No module named 'peer'$"),
            (command("noisy"), r"^it answered loading \.\.\.$"),
        ],
    )
    def test_of_what_is_not_there(self, words: list[str], reason: str) -> None:
        with pytest.raises(ProcessError, match=reason):
            Process(words, os.environ)
