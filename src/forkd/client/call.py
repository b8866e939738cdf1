"""One request as a value: what to send, how to read the answer, and whether sending it twice does harm."""

from __future__ import annotations

import enum
import json
from collections.abc import AsyncIterable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from forkd.errors import InvalidInput, Unreachable

T = TypeVar("T", covariant=True)
Content = bytes | Iterable[bytes] | AsyncIterable[bytes]


class Again(enum.Enum):
    """When the same call may be sent a second time."""

    UNSENT = "only when nothing of it can have arrived"
    SAFE = "also when the connection was lost: twice is the same as once"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]  # any case of a name finds it
    url: str


@dataclass(frozen=True)
class Call(Generic[T]):
    method: str
    parts: tuple[str, ...]
    read: Callable[[Answer], T]
    query: tuple[tuple[str, str], ...] = ()
    body: Mapping[str, Any] | None = None  # JSON
    content: Content | None = None  # raw
    headers: Mapping[str, str] = field(default_factory=dict)
    again: Again = Again.UNSENT
    gone_is_done: bool = False  # a 404 after an attempt whose fate is unknown: that attempt did it
    takes_s: float = 0.0  # what the daemon may need for it by design, beyond an ordinary answer
    probe: bool = False  # asked to learn whether the daemon is there: one attempt, a short wait


Plan = Generator[Call[Any], Any, T]  # several calls, one after the other; answers are sent into it


def render_target(call: Call[Any]) -> str:
    """Path and query in ASCII. No part can become another path: not by slashes, not by dots, not by being empty."""
    path = "".join(f"/{_escape_part(part)}" for part in call.parts)
    if not call.query:
        return path
    return path + "?" + "&".join(f"{name}={escape(value)}" for name, value in call.query)


def escape(text: str) -> str:
    """Lone surrogates stand for bytes that are no UTF-8, in names of files."""
    try:
        return quote(text.encode("utf-8", "surrogateescape"), safe="")
    except UnicodeEncodeError:
        raise InvalidInput(f"{ascii(text)[:80]} cannot be sent: it is no text") from None


def _escape_part(part: str) -> str:
    if not isinstance(part, str):
        raise InvalidInput(f"{ascii(part)[:80]} is not a name: it is no text")
    if not part:
        raise InvalidInput("A name is empty")
    escaped = escape(part)
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


def drop_unset(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def query_of(**fields: str | int | None) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(value)) for name, value in fields.items() if value is not None)


def as_json(answer: Answer) -> Any:
    """The body, None when empty. Something that answers 200 and no JSON is not our daemon."""
    if not answer.body:
        return None
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        raise not_ours(answer) from None


def as_text(answer: Answer) -> str:
    return answer.body.decode("utf-8", "replace")


def as_bytes(answer: Answer) -> bytes:
    return answer.body


def as_nothing(answer: Answer) -> None:
    return None


def not_ours(answer: Answer) -> Unreachable:
    error = Unreachable(
        f"What answers at {answer.url} is not a forkd daemon: {answer.status} and no JSON",
        hint="Check FORKD_URL",
    )
    error.status, error.url, error.body = answer.status, answer.url, as_text(answer)[:2000]
    return error
