"""Parts of paths and queries that several routes take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote_to_bytes

from fastapi import Path, Query
from pydantic import BeforeValidator, Field
from starlette.requests import Request

from forkd.daemon.bodies import TAG_PATTERN
from forkd.daemon.openapi import takes_query
from forkd.errors import InvalidInput
from forkd.guest.files import check_path

MAX_LIMIT = 1000
MAX_ID = (1 << 63) - 1

T = TypeVar("T")


def _parse_flag(value: object) -> object:
    """true and false, as in JSON, and none of the other ways to say it."""
    if value in ("true", "false"):
        return value == "true"
    if isinstance(value, bool):
        return value
    raise ValueError("it is true or false")


def _parse_number(value: object) -> object:
    if isinstance(value, str) and not (value.isascii() and value.isdigit() and len(value) < 20):
        raise ValueError("it is a whole number")
    return value


_Pid = Annotated[int, Field(ge=1, le=(1 << 31) - 1), BeforeValidator(_parse_number)]
_Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT), BeforeValidator(_parse_number)]
_Number = Annotated[int, Field(ge=0, le=MAX_ID), BeforeValidator(_parse_number)]

Id = Annotated[str, Path(json_schema_extra={"pattern": "^sb-[0-9a-f]{10}$"})]
Tag = Annotated[str, Path(json_schema_extra={"pattern": TAG_PATTERN})]
Name = Annotated[str, Path(json_schema_extra={"pattern": TAG_PATTERN})]
Pid = Annotated[_Pid, Path()]
Flag = Annotated[bool, BeforeValidator(_parse_flag), Query()]
Limit = Annotated[_Limit | None, Query()]
PageToken = Annotated[str | None, Query(max_length=128)]
Number = Annotated[_Number, Query()]
OptionalNumber = Annotated[_Number | None, Query()]

_PATH = {"type": "string", "minLength": 1, "maxLength": 4095, "pattern": "^/"}


def takes_path() -> dict[str, Any]:
    return {"parameters": [takes_query("path", _PATH, required=True)]}


def parse_path(request: Request) -> str:
    """`?path=`, whose bytes need not be UTF-8: they come as lone surrogates, as in all of Python."""
    for pair in request.scope["query_string"].split(b"&"):
        name, _, value = pair.partition(b"=")
        if name == b"path":
            return check_path(unquote_to_bytes(value.replace(b"+", b" ")).decode("utf-8", "surrogateescape"))
    raise InvalidInput("The parameter path is missing", hint="Add ?path=/some/file")


def parse_mode(text: str | None) -> int | None:
    return None if text is None else int(text, 8)


def take_page(
    named: Sequence[tuple[str, T]], limit: int | None, page_token: str | None
) -> tuple[list[T], dict[str, str]]:
    """One page of what is sorted by name, and the header that leads to the next."""
    rest = [(name, item) for name, item in named if page_token is None or name > page_token]
    page = rest if limit is None else rest[:limit]
    return [item for _, item in page], next_page(page[-1][0] if len(rest) > len(page) else None)


def next_page(token: str | int | None) -> dict[str, str]:
    return {} if token is None else {"X-Next-Token": str(token)}
