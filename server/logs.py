"""The log: one line for each thing that happens, as text or as JSON. No caller can forge a line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

Facts = dict[str, str | int | float]
Form = Literal["text", "json"]

# What ends a line or moves the cursor, in ASCII and beyond, as its escape.
CONTROLS = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160))}
CONTROLS |= {0x2028: "\\u2028", 0x2029: "\\u2029"}


def set_up(level: str, form: Form) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if form == "json" else Text())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    for noisy in ("uvicorn", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def facts_of(record: logging.LogRecord) -> Facts:
    """What a record says beside its message: `log.info(..., extra={"facts": {...}})`."""
    return getattr(record, "facts", {})


class Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {name}={value}" for name, value in facts_of(record).items())
        return (super().formatMessage(record) + facts).translate(CONTROLS)


class Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **facts_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
