"""One request as a value: what to send, what the answer is, and whether sending it twice does harm."""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncIterable, Iterable, Mapping
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_origin
from urllib.parse import quote

from forkd.errors import InvalidInput, Unreachable

if TYPE_CHECKING:
    import httpx

API = "v1"
CONNECT_S = 10.0
PROBE_S = 5.0
SLACK_S = 75.0  # an answer may come this long after what was asked for took its own time; the daemon gives a guest 60 s
STREAM_SILENCE_S = 45.0  # the daemon sends a comment every 15 s
MAX_CONNECTIONS = 200
# Shorter than servers keep idle connections, so that a call does not go out on one that is being closed.
KEEPALIVE_S = 4.0

T = TypeVar("T")
Content = bytes | Iterable[bytes] | AsyncIterable[bytes]
Query = tuple[tuple[str, str], ...]


class Again(enum.Enum):
    """When the same call may be sent a second time."""

    UNSENT = "only when nothing of it can have arrived"
    SAFE = "also when the connection was lost: twice is the same as once"


@dataclass(frozen=True)
class Call(Generic[T]):
    answer: type[T]  # JSON of this type; else str, bytes or None. Of a stream: the type of one event
    method: str
    parts: tuple[str, ...]
    query: Query = ()
    body: Mapping[str, Any] | None = None  # JSON
    content: Content | None = None  # raw
    headers: Mapping[str, str] = field(default_factory=dict)
    again: Again = Again.UNSENT
    gone_is_done: bool = False  # a 404 after an attempt whose fate is unknown: that attempt did it
    takes_s: float = 0.0  # what the daemon may need for it by design, beyond an ordinary answer
    probe: bool = False  # asked to learn whether the daemon is there: one attempt, a short wait


def get(answer: type[T], *parts: str, query: Query = ()) -> Call[T]:
    return Call(answer, "GET", (API, *parts), query, again=Again.SAFE)


def post(
    answer: type[T],
    *parts: str,
    query: Query = (),
    body: Mapping[str, Any] | None = None,
    content: bytes | None = None,
    key: str | None = None,
    again: Again = Again.UNSENT,
    takes_s: float = 0.0,
) -> Call[T]:
    """`key` makes a second attempt harmless."""
    headers = {} if key is None else {"Idempotency-Key": key}
    return Call(answer, "POST", (API, *parts), query, body, content, headers, again=again, takes_s=takes_s)


def delete(*parts: str, query: Query = ()) -> Call[None]:
    return Call(NoneType, "DELETE", (API, *parts), query, again=Again.SAFE, gone_is_done=True)


def query_of(**fields: str | int | None) -> Query:
    return tuple((name, str(value)) for name, value in fields.items() if value is not None)


def render_target(call: Call[Any]) -> str:
    """Path and query in ASCII. No part can become another path: not by slashes, not by dots, not by being empty."""
    path = "".join(f"/{_escape_part(part)}" for part in call.parts)
    if not call.query:
        return path
    return path + "?" + "&".join(f"{name}={_escape(value)}" for name, value in call.query)


def _escape(text: str) -> str:
    """Lone surrogates stand for bytes that are not UTF-8, in names of files."""
    try:
        return quote(text.encode("utf-8", "surrogateescape"), safe="")
    except UnicodeEncodeError:
        raise InvalidInput(f"Cannot send {ascii(text)[:80]}: not valid text") from None


def _escape_part(part: str) -> str:
    if not isinstance(part, str):
        raise InvalidInput(f"A name must be text, got {ascii(part)[:80]}")
    if not part:
        raise InvalidInput("A name must not be empty")
    escaped = _escape(part)
    return escaped.replace(".", "%2E") if part in (".", "..") else escaped


def render_body(call: Call[Any]) -> tuple[Content | None, dict[str, str]]:
    headers = dict(call.headers)
    if call.body is None:
        if call.content is not None:
            headers["Content-Type"] = "application/octet-stream"
        return call.content, headers
    headers["Content-Type"] = "application/json"
    try:
        # Escaped to ASCII, so that lone surrogates pass; NaN is not JSON.
        return json.dumps(call.body, allow_nan=False).encode(), headers
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"The request cannot be written as JSON: {error}") from None


def connection_limits() -> httpx.Limits:
    import httpx

    return httpx.Limits(
        max_connections=MAX_CONNECTIONS, max_keepalive_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE_S
    )


def choose_timeout(call: Call[Any], timeout_s: float) -> httpx.Timeout:
    import httpx

    if call.probe:
        return httpx.Timeout(min(PROBE_S, timeout_s))
    read_s = max(timeout_s, call.takes_s + SLACK_S) if call.takes_s else timeout_s
    return httpx.Timeout(connect=min(CONNECT_S, timeout_s), read=read_s, write=timeout_s, pool=read_s)


def choose_stream_timeout(timeout_s: float) -> httpx.Timeout:
    import httpx

    return httpx.Timeout(
        connect=min(CONNECT_S, timeout_s), read=max(STREAM_SILENCE_S, timeout_s), write=timeout_s, pool=timeout_s
    )


def read_answer(call: Call[T], response: httpx.Response) -> T:
    kind = get_origin(call.answer) or call.answer
    value: object
    if kind is NoneType:
        value = None
    elif kind is bytes:
        value = response.content
    elif kind is str:
        value = response.content.decode("utf-8", "replace")
    else:
        value = _read_json(response, list if kind is list else dict)
    return cast(T, value)


def _read_json(response: httpx.Response, kind: type) -> object:
    """A server that answers 200 with anything else is not our daemon."""
    try:
        value = json.loads(response.content)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, kind):
        return value
    expected = "a JSON list" if kind is list else "a JSON object"
    error = Unreachable(
        f"The server at {response.url} is not a forkd daemon: expected {expected}, got {response.content[:80]!r}",
        hint="Check FORKD_URL",
    )
    error.status, error.url = response.status_code, str(response.url)
    error.body = response.content.decode("utf-8", "replace")[:2000]
    raise error
