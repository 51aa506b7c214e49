"""Under what conditions something was measured."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from server.version import VERSION

CPU = Path("/proc/cpuinfo")  # on Linux


def conditions(**own: Any) -> dict[str, Any]:  # noqa: ANN401  # whatever can be shown
    """Those of every measurement here, and between them its `own`."""
    return {
        "date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "machine": f"{processor()}, {os.cpu_count()} CPUs",
        **own,
        "onerow": VERSION,
        "python": platform.python_version(),
        "torch": version("torch"),
        "system": platform.platform(),
    }


def processor() -> str:
    """What the processor calls itself."""
    with suppress(OSError):
        for line in CPU.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
