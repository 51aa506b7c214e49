"""A peer whose times and faults are chosen: `fake_peer.py FAULT MS`. Needs nothing but Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SCRIPT = str(Path(__file__))


def command(fault: str = "none", ms: float = 2.0) -> list[str]:
    return [sys.executable, SCRIPT, fault, str(ms)]


def say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    fault, ms = sys.argv[1], float(sys.argv[2])
    if fault == "absent":
        raise ModuleNotFoundError("No module named 'peer'")
    ready = {"ready": "fake 1.0", "load_s": 0.1, "uncached": fault == "obeys"}
    say("loading ..." if fault == "noisy" else json.dumps(ready))
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        times = [ms * (10 + i) / 1000 for i in range(asked["new"])]
        answer: dict[str, Any] = {"ts": times, "toks": [sum(asked["prompts"][0]), len(line)]}
        if fault == "fails":
            answer = {"error": "RuntimeError: too long\nfor me"}
        elif fault == "dies" and number:
            sys.exit("Killed")
        elif fault == "short":
            answer["ts"] = times[:-1] + times[-1:] * 3
        elif fault == "backwards":
            answer["ts"] = times[::-1]
        elif fault == "still":
            answer["ts"] = [0.0] * len(times)
        elif fault == "silent":
            continue
        elif fault == "timeless":
            del answer["ts"]
        elif fault == "obeys" and not asked.get("use_cache", True):
            answer["ts"] = [10 * time for time in times]
        say("{ts: [0.1" if fault == "nonsense" else json.dumps(answer))


if __name__ == "__main__":
    main()
