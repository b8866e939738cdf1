"""Logs on stderr, each line with its request and sandbox; and the audit log: one JSON line per request, rotated."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

AUDIT_BYTES = 16 * 1024 * 1024
AUDIT_KEPT = 5
_MAX_UA = 200

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
sandbox_id: ContextVar[str | None] = ContextVar("sandbox_id", default=None)
log = logging.getLogger("forkd.audit")


class ContextFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.about = {"request_id": request_id.get(), "sandbox_id": sandbox_id.get()}
        return True


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = f"{render_time(record.created)} {record.levelname.lower()} {record.name}: {record.getMessage()}"
        line += "".join(f" {name}={value}" for name, value in _about(record).items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "ts": render_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_about(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def _about(record: logging.LogRecord) -> dict[str, str]:
    return {name: value for name, value in getattr(record, "about", {}).items() if value}


def set_up_logs(form: str, level: str) -> None:
    """For the whole process: the daemon owns its stderr."""
    handler = logging.StreamHandler(sys.stderr)
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


@dataclass(frozen=True)
class AuditEntry:
    """`path` is without its query, which may name files; `ts` is RFC 3339 with milliseconds."""

    ts: str
    request_id: str
    peer: str
    token: str | None
    method: str
    path: str
    status: int
    latency_us: int
    sandboxes: list[str]
    ua: str | None


class AuditLog:
    """A disk that fails breaks no request: the log says so once, and each failure is counted."""

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int = AUDIT_BYTES,
        kept: int = AUDIT_KEPT,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._kept = kept
        self._on_failure = on_failure
        self._failing = False
        self._fd: int | None = None
        self._size = 0

    def write(self, entry: AuditEntry) -> None:
        line = render_entry(entry)
        try:
            if self._fd is None:
                self._open()
            elif self._size + len(line) > self._max_bytes:
                self._rotate()
            self._append(line)
            self._failing = False
        except OSError as error:
            self._on_failure()
            if not self._failing:
                log.error("Requests are not audited: %s: %s", self._path, error.strerror)
            self._failing = True
            self.close()

    def close(self) -> None:
        """The next entry opens it again, under its name: the file may have been moved away."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._fd).st_size
        if self._size >= self._max_bytes:
            self._rotate()

    def _rotate(self) -> None:
        self.close()
        for number in range(self._kept - 1, 0, -1):
            older = self._numbered(number)
            if older.exists():
                older.rename(self._numbered(number + 1))
        self._path.rename(self._numbered(1))
        self._open()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")

    def _append(self, line: bytes) -> None:
        assert self._fd is not None
        written = os.write(self._fd, line)
        self._size += written
        if written < len(line):
            # A full disk took a part. End the line, if that still fits: the next entry stays whole.
            os.write(self._fd, b"\n")
            raise OSError(28, "No space left on device")


def render_entry(entry: AuditEntry) -> bytes:
    fields = vars(entry) | {"ua": entry.ua[:_MAX_UA] if entry.ua is not None else None}
    return json.dumps(fields).encode() + b"\n"
