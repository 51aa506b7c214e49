"""Who uses this machine's processors and memory, from Linux' /proc; elsewhere nobody knows."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
LOOK = 0.3  # seconds
BUSY = 0.15  # cores that others may use beside a run that counts
TICKS = 3  # of the system's clock, which is no finer: less is noise


def tick() -> float:
    return 1 / os.sysconf("SC_CLK_TCK")


def busy() -> float | None:
    """Seconds of all processors, since the system's start, that were not idle."""
    try:
        counts = [int(n) for n in (PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    return (sum(counts) - counts[3] - counts[4]) * tick()  # idle, and waiting for a disk


def used(pid: int) -> float:
    """Seconds of processors that a process and its children have used."""
    seconds = 0.0
    for process in tree(pid):
        with suppress(OSError, IndexError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) * tick()
    return seconds


def resident(pid: int, *, peak: bool = False) -> float | None:
    """Memory of a process and its children, in MB."""
    name, total = "VmHWM:" if peak else "VmRSS:", 0.0
    for process in tree(pid):
        with suppress(OSError):
            for line in (process / "status").read_text().splitlines():
                if line.startswith(name):
                    total += int(line.split()[1]) * 1024 / 1e6
    return round(total, 1) or None


def tree(pid: int) -> Iterator[Path]:
    yield PROC / str(pid)
    with suppress(OSError):
        for thread in (PROC / str(pid) / "task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from tree(int(child))


def wait_until_quiet(patience: float) -> float:
    """Wait, for `patience` seconds at most, until nobody computes. Returns the seconds left."""
    while patience > 0:
        before = busy()
        if before is None:
            return patience
        time.sleep(LOOK)
        after = busy()
        if after is None or after - before <= max(BUSY * LOOK, TICKS * tick()):
            return patience
        patience -= LOOK
    return 0.0
