"""The audit log: one JSON line per request, in files that rotate by size.

What outsiders ask goes to files of its own: however much they ask, they push out only each other's lines.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

AUDIT_BYTES = 16 * 1024 * 1024
AUDIT_KEPT = 5
OUTSIDE_SUFFIX = ".refused"
OUTSIDE_BYTES = 2 * 1024 * 1024
OUTSIDE_KEPT = 1
_MAX_UA = 200
_MAX_PATH = 512
_MAX_NAME = 128
_MAX_SANDBOXES = 1000  # as many as one request can make

log = logging.getLogger("forkd.audit")


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


class AuditFile:
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
    """Bounded, whatever was asked."""
    bounded = {
        "path": entry.path if len(entry.path) <= _MAX_PATH else f"{entry.path[:_MAX_PATH]}...",
        "sandboxes": [name[:_MAX_NAME] for name in entry.sandboxes[:_MAX_SANDBOXES]],
        "ua": None if entry.ua is None else entry.ua[:_MAX_UA],
    }
    return json.dumps(vars(entry) | bounded).encode() + b"\n"


class AuditLog:
    """Two files: what was allowed, and what outsiders asked."""

    def __init__(self, path: Path, *, on_failure: Callable[[], None] = lambda: None) -> None:
        self._inside = AuditFile(path, on_failure=on_failure)
        self._outside = AuditFile(
            path.with_name(path.name + OUTSIDE_SUFFIX),
            max_bytes=OUTSIDE_BYTES,
            kept=OUTSIDE_KEPT,
            on_failure=on_failure,
        )

    def write(self, entry: AuditEntry, *, allowed: bool) -> None:
        (self._inside if allowed else self._outside).write(entry)

    def close(self) -> None:
        """The next entries open them again, under their names: the files may have been moved away."""
        self._inside.close()
        self._outside.close()
