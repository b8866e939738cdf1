"""The log on stderr: each line with its request and sandbox, and none without bounds."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

from forkd.daemon.repeats import BoundedHandler

_MAX_MESSAGE = 8 * 1024
_MAX_EXCEPTION = 32 * 1024

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
sandbox_id: ContextVar[str | None] = ContextVar("sandbox_id", default=None)


class ContextFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.about = {"request_id": request_id.get(), "sandbox_id": sandbox_id.get()}
        return True


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{render_time(record.created)} {record.levelname.lower()} {record.name}: {_message(record)}"
        line += "".join(f" {name}={value}" for name, value in _about(record).items())
        return f"{line}\n{self.formatException(record.exc_info)[-_MAX_EXCEPTION:]}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "ts": render_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_about(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)[-_MAX_EXCEPTION:]
        return json.dumps(entry)


def _message(record: logging.LogRecord) -> str:
    return record.getMessage()[:_MAX_MESSAGE]


def _about(record: logging.LogRecord) -> dict[str, str]:
    return {name: value for name, value in getattr(record, "about", {}).items() if value}


def set_up_logs(form: str, level: str) -> None:
    """For the whole process: the daemon owns its stderr."""
    handler = BoundedHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    handler.addFilter(ContextFilter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("forkd").setLevel(level.upper())
    # It warns of every client that does not speak HTTP.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)


def render_time(unix: float) -> str:
    """RFC 3339, in UTC, with milliseconds."""
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
