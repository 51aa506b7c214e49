"""Under what conditions something was measured."""

from __future__ import annotations

import os
import platform
from datetime import datetime
from importlib.metadata import version
from typing import Any

from server.loadtest.engine.cores import processor
from server.version import VERSION


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
