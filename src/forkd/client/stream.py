"""What the daemon streams: output of commands and evaluations, and what happens in it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from forkd.client.failures import broken_off, error_of_body
from forkd.client.sse import SseError, SseEvent, SseParser
from forkd.errors import Unreachable
from forkd.wire.api import Event

_OUTPUT = ("stdout", "stderr")
_LAST = ("exit", "result")
_KINDS = (*_OUTPUT, *_LAST, "start", "gap")


@dataclass(frozen=True)
class StreamEvent:
    """`kind` is start, stdout, stderr, gap, exit or result; `data` the bytes of output, `body` what the others say."""

    kind: str
    data: bytes = b""
    body: dict[str, Any] = field(default_factory=dict)


class OutputReader:
    """Bytes of one output stream to events; raises what an `error` event says, and when the end is missing."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._parser = SseParser()
        self._ended = False

    def feed(self, chunk: bytes) -> Iterator[StreamEvent]:
        for event in _fed(self._parser, chunk, self._url):
            body = _object(event, self._url)
            if event.event == "error":
                raise error_of_body(body, status=None, url=self._url)
            if event.event not in _KINDS:
                continue
            self._ended = self._ended or event.event in _LAST
            yield self._read(event.event, body)

    def finish(self) -> None:
        if not self._ended:
            raise broken_off(self._url)

    def _read(self, kind: str, body: dict[str, Any]) -> StreamEvent:
        if kind not in _OUTPUT:
            return StreamEvent(kind, b"", body)
        try:
            return StreamEvent(kind, base64.b64decode(body["data"], validate=True))
        except (KeyError, TypeError, ValueError):
            raise _garbled(self._url) from None


class EventReader:
    """Bytes of `/v1/events?follow=true` to events. The stream has no end; the daemon's end is an error."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._parser = SseParser()

    def feed(self, chunk: bytes) -> Iterator[Event]:
        for event in _fed(self._parser, chunk, self._url):
            body = _object(event, self._url)
            if event.event == "error":
                raise error_of_body(body, status=None, url=self._url)
            yield cast(Event, body)

    def finish(self) -> None:
        raise broken_off(self._url)


def _fed(parser: SseParser, chunk: bytes, url: str) -> list[SseEvent]:
    try:
        return parser.feed(chunk)
    except SseError as error:
        raise _garbled(url) from error


def _object(event: SseEvent, url: str) -> dict[str, Any]:
    try:
        body = json.loads(event.data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise _garbled(url)
    return body


def _garbled(url: str) -> Unreachable:
    error = Unreachable("What the daemon streamed is no event; the outcome is unknown", hint="Check FORKD_URL")
    error.url = url
    return error
