"""A process that generates: it reads a command a line and answers with a line of JSON.

First it says `{"ready": version, "load_s": seconds}`. A command is `{"prompts": [[id, ...], ...],
"new": N}`; its answer `{"ts": [...], "toks": [...]}` tells after how many seconds all prompts had
their first, second, ... token, and the first tokens of the first answer, or `{"error": words}`.
One that says `"uncached": true` when it is ready obeys `"use_cache": false` in a command, too.
"""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

from server.loadtest.engine import cores

START_SECONDS = 600.0
ANSWER_SECONDS = 600.0
STOP_SECONDS = 20.0
LONGEST = 200  # characters of a reason


class ProcessError(Exception):
    """The process cannot go on: one line that says why."""


class AnswerError(Exception):
    """The process cannot do this one thing: one line that says why."""


class Process:
    """Started by `command` with these variables. Raises ProcessError if it does not get ready."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # see close
        try:
            self._process = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._output,
                text=True,
                errors="replace",
                process_group=0,  # Ctrl-C is ours to handle
            )
        except OSError as error:
            self._output.close()
            raise ProcessError(f"{command[0]}: {error.strerror}") from error
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.ready = self._read(START_SECONDS)
            if "ready" not in self.ready:
                raise ProcessError(f"it did not get ready: {_short(self.ready)}")
        except ProcessError:
            self.close()
            raise
        self.loaded_mb = cores.resident(self._process.pid)

    @property
    def uncached(self) -> bool:
        return self.ready.get("uncached") is True

    @property
    def cpu_seconds(self) -> float:
        return cores.used(self._process.pid)

    @property
    def peak_mb(self) -> float | None:
        return cores.resident(self._process.pid, peak=True)

    def generate(
        self, prompts: Sequence[Sequence[int]], new: int, *, use_cache: bool = True
    ) -> tuple[list[float], list[int]]:
        """Seconds after which all had their first, second, ... token; tokens of the first answer.

        Raises AnswerError where it says that it cannot, or tells no time for each token, and
        ProcessError.
        """
        command: dict[str, Any] = {"prompts": prompts, "new": new}
        if not use_cache:
            command["use_cache"] = False
        assert self._process.stdin
        with suppress(OSError):  # it has ended: reading will say why
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        answer = self._read(ANSWER_SECONDS)
        if "error" in answer:
            raise AnswerError(_short(answer["error"]))
        times = answer.get("ts")
        if not isinstance(times, list) or not all(isinstance(t, int | float) for t in times):
            raise ProcessError(f"an answer without times: {_short(answer)}")
        if len(times) != new:
            raise AnswerError(f"{len(times)} times for {new} tokens")
        steps = [b - a for a, b in pairwise([0.0, *times])]
        if (
            not all(step >= 0 for step in steps)
            or not times[0]
            or (new > 1 and times[-1] == times[0])
        ):
            raise AnswerError("its clock does not go forward")
        tokens = answer.get("toks")
        return times, tokens if isinstance(tokens, list) else []

    def close(self) -> None:
        """Let it end by itself, or end it."""
        assert self._process.stdin
        with suppress(OSError):  # it has ended, with a command unread
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _listen(self) -> None:
        assert self._process.stdout
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put(None)

    def _read(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._process.kill()
            raise ProcessError(f"no answer for {seconds:g} s") from None
        if line is None:
            self._lines.put(None)  # so it is for whoever asks again
            raise ProcessError(f"it ended: {self._last_words()}")
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ProcessError(f"it answered {_short(line)}")
        return answer

    def _last_words(self) -> str:
        self._output.seek(0)
        lines = [line for line in self._output.read().splitlines() if line.strip()]
        return _short(lines[-1]) if lines else "it said nothing"


def _short(words: object) -> str:
    return " ".join(str(words).split())[:LONGEST]
