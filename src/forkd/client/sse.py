"""Server-sent events out of bytes, however they were cut. Pure; both shells use it."""

from __future__ import annotations

import re
from dataclasses import dataclass

# The largest honest line: the result of an eval with 8 MiB of output each way, escaped for JSON.
MAX_EVENT_BYTES = 128 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class SseError(Exception):
    """What comes is no stream of events."""


@dataclass(frozen=True)
class SseEvent:
    event: str
    data: str
    id: str | None


class SseParser:
    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._limit = max_event_bytes
        self._pieces: list[bytes] = []  # of a line that is not complete
        self._held = 0
        self._after_cr = False
        self._first = True
        self._event = ""
        self._data: list[bytes] = []
        self._size = 0
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[SseEvent]:
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the second half of a line end that was cut in two
        self._after_cr = chunk.endswith(b"\r") if chunk else False
        found: list[SseEvent] = []
        *lines, rest = _LINE_END.split(chunk)
        for line in lines:
            self._take(self._whole(line), found)
        if rest:
            self._pieces.append(rest)
            self._held += len(rest)
            self._check()
        return found

    def _whole(self, end: bytes) -> bytes:
        line = b"".join([*self._pieces, end])
        self._pieces.clear()
        self._held = 0
        if self._first:
            self._first = False
            line = line.removeprefix(_BOM)
        return line

    def _take(self, line: bytes, found: list[SseEvent]) -> None:
        if not line:
            self._dispatch(found)
            return
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            self._data.append(value)
            self._size += len(value)
            self._check()
        elif name == b"event":
            self._event = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        # Comments have an empty name; `retry` and unknown fields mean nothing to us.

    def _dispatch(self, found: list[SseEvent]) -> None:
        if self._data:
            data = b"\n".join(self._data).decode("utf-8", "replace")
            found.append(SseEvent(self._event or "message", data, self._id))
        self._event, self._size = "", 0
        self._data.clear()

    def _check(self) -> None:
        if self._held + self._size > self._limit:
            raise SseError(f"An event is larger than {self._limit} bytes")
