"""What the daemon streams: server-sent events, and in them the output of commands or what happens in the daemon."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from forkd.client.failures import broken_off, error_of_body
from forkd.errors import Unreachable
from forkd.wire.api import Event

_OUTPUT = ("stdout", "stderr")
_LAST = ("exit", "result")
_KINDS = (*_OUTPUT, *_LAST, "start", "gap")

# The largest honest line: the result of an eval with 8 MiB of output each way, escaped for JSON.
MAX_EVENT_BYTES = 128 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"

E = TypeVar("E")


class SseError(Exception):
    """The bytes are not a stream of events."""


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
        # Comments have an empty name; `retry` and unknown fields are ignored.

    def _dispatch(self, found: list[SseEvent]) -> None:
        if self._data:
            data = b"\n".join(self._data).decode("utf-8", "replace")
            found.append(SseEvent(self._event or "message", data, self._id))
        self._event, self._size = "", 0
        self._data.clear()

    def _check(self) -> None:
        if self._held + self._size > self._limit:
            raise SseError(f"An event is larger than {self._limit} bytes")


@dataclass(frozen=True)
class StreamEvent:
    """`kind` is start, stdout, stderr, gap, exit or result; `data` the bytes of output, `body` what the others say."""

    kind: str
    data: bytes = b""
    body: dict[str, Any] = field(default_factory=dict)


class Reader(Generic[E]):
    """The bytes of a stream as events; raises what an `error` event says."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._parser = SseParser()

    def feed(self, chunk: bytes) -> Iterator[E]:
        try:
            events = self._parser.feed(chunk)
        except SseError as error:
            raise self._garbled() from error
        for event in events:
            body = self._object(event)
            if event.event == "error":
                raise error_of_body(body, status=None, url=self._url)
            if (found := self._read(event.event, body)) is not None:
                yield found

    def finish(self) -> None:
        """Raises when the stream may not end here."""
        raise broken_off(self._url)

    def _read(self, kind: str, body: dict[str, Any]) -> E | None:
        raise NotImplementedError

    def _object(self, event: SseEvent) -> dict[str, Any]:
        try:
            body = json.loads(event.data)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise self._garbled()
        return body

    def _garbled(self) -> Unreachable:
        error = Unreachable(
            "The daemon streamed something other than events; the outcome is unknown", hint="Check FORKD_URL"
        )
        error.url = self._url
        return error


class OutputReader(Reader[StreamEvent]):
    """The output of a command or of code. Its last event is the exit or the result."""

    _ended = False

    def finish(self) -> None:
        if not self._ended:
            super().finish()

    def _read(self, kind: str, body: dict[str, Any]) -> StreamEvent | None:
        if kind not in _KINDS:
            return None
        self._ended = self._ended or kind in _LAST
        if kind not in _OUTPUT:
            return StreamEvent(kind, b"", body)
        try:
            return StreamEvent(kind, base64.b64decode(body["data"], validate=True))
        except (KeyError, TypeError, ValueError):
            raise self._garbled() from None


class EventReader(Reader[Event]):
    """`/v1/events?follow=true`. The stream has no end; when the daemon ends it, that is an error."""

    def _read(self, kind: str, body: dict[str, Any]) -> Event:
        return cast(Event, body)
