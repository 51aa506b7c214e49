"""A server of the load tester's own: started for a run and stopped after it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2

import server
from server.loadtest.client import ServerError

START_SECONDS = 120.0
STOP_SECONDS = 60.0


@contextmanager
def own_server(arguments: Sequence[str]) -> Iterator[str]:
    """Run `onerow serve` with these arguments; yields its address once it is ready."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    # The child must be this very code, whatever folder we are in, with no settings but these.
    # Ctrl-C is ours to handle, so it gets a session of its own.
    home = str(Path(server.__file__).parent.parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ONEROW_")}
    command = [sys.executable, "-P", "-m", "server", "serve", "--host=127.0.0.1", f"--port={port}"]
    command.append("--log-level=error")  # so that its last words are the reason
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [*command, *arguments],
            env={**kept, "PYTHONPATH": home},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        with interruptible():
            try:
                if not _ready(url, process):
                    output.seek(0)
                    lines = output.read().strip().splitlines() or ["it said nothing"]
                    raise ServerError(f"the server did not start: {lines[-1]}")
                yield url
            finally:
                _stop(process)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C and not at once, so that nothing that was started is left."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    with httpx2.Client(base_url=url, timeout=5.0, trust_env=False) as http:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if http.get("/ready").status_code == httpx2.codes.OK:
                    return True
            except httpx2.HTTPError:
                pass  # nobody listens there yet
            time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
