"""A route is declared once: method, path, parameters, body, answer, errors. Its handler's signature says most of it.

From that come the router (app.py), the parsing (here), the OpenAPI document and the table of docs/reference/rest.md
(openapi.py). It stands on Starlette, not on FastAPI: we read bodies ourselves (limits, deadlines, 400 apart from 422,
lone surrogates) and answer ready bytes, so FastAPI only matched paths and rendered a document that we had to repair.
"""

from __future__ import annotations

import inspect
import json
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qs

from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.responses import Response

from forkd.daemon.call import Call
from forkd.daemon.errors import error_of_validation
from forkd.daemon.streams import BYTES, EVENTS, LINES, EventStream, start_content, start_events
from forkd.errors import InvalidInput, NotFound

T = TypeVar("T")
Handler = Callable[..., Awaitable[Any] | AsyncGenerator[bytes, None]]

_PAGE = {"X-Next-Token": "page_token of the next page; absent on the last"}
COMMON_ERRORS = (400, 401, 403, 500, 503)
GUEST_ERRORS = (409, 422, 429, 502, 504)


@dataclass(frozen=True)
class Answer(Generic[T]):
    """A value with a status other than the declared one, or with headers."""

    value: T
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class InHeader:
    """Marks a parameter that comes in a header: Annotated[str, InHeader()]."""


@dataclass(frozen=True)
class RawBody:
    """Bytes as they are: at most `limit_bytes` as one value, or, without a limit, an iterator over the pieces."""

    limit_bytes: int | None = None


@dataclass(frozen=True)
class Raw:
    """An answer that is not JSON: bytes, or the pieces of events and files. An `endless` one ends with the daemon.

    `lines` are the types of the lines, where each is JSON.
    """

    media_type: str
    about: str
    endless: bool = False
    lines: tuple[Any, ...] = ()


class Json(Response):
    """Ready bytes. Lone surrogates are escaped as JSON can, so every text of the guest comes through."""

    media_type = "application/json"

    def __init__(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json.dumps(value, allow_nan=False).encode("ascii"), status, headers)


class Param:
    """One parameter of a path, a query or a header."""

    def __init__(self, name: str, hint: Any, default: Any, path: str) -> None:
        self.name = name
        self.type = without(type(None), hint)
        self.default = default
        in_header = any(isinstance(each, InHeader) for each in getattr(self.type, "__metadata__", ()))
        self.place: Literal["path", "query", "header"]
        self.place = "path" if f"{{{name}}}" in path else "header" if in_header else "query"
        self.key = name.replace("_", "-") if in_header else name
        self.adapter: TypeAdapter[Any] = TypeAdapter(self.type)
        self._header = self.key.encode()
        self._many = get_origin(self.type) is list

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def read(self, call: Call, query: Mapping[str, list[str]]) -> Any:
        given = self._find(call, query)
        if given is None:
            if self.required:
                hint = f"Send the header {self.key}" if self.place == "header" else f"Add ?{self.key}= to the URL"
                raise InvalidInput(f"The parameter {self.key} is missing", hint=hint)
            return self.default
        try:
            return self.adapter.validate_python(given)
        except ValidationError as error:
            if self.place == "path":
                hint = "See /openapi.json for what names look like"
                raise NotFound(f"Invalid {self.key} in the path", hint=hint) from None
            raise error_of_validation(error, self.key) from None

    def _find(self, call: Call, query: Mapping[str, list[str]]) -> str | list[str] | None:
        if self.place == "path":
            return call.params[self.name]
        if self.place == "header":
            value = call.headers.get(self._header)
            return None if value is None else value.decode("latin-1")
        values = query.get(self.name)
        return values if values is None or self._many else values[-1]


@dataclass(frozen=True)
class Route:
    """Made by `route`. `about` is the handler's docstring, in Markdown: the docs' table shows it."""

    method: str
    path: str
    handler: Handler
    params: tuple[Param, ...]
    takes: type[BaseModel] | RawBody | None
    gives: Any  # a type that is JSON, None (204), NoReturn (always an error), or Raw
    streams: Raw | None
    status: int
    errors: tuple[int, ...]
    headers: Mapping[str, str]
    also: Mapping[int, str]
    plus: bool

    @property
    def about(self) -> str:
        return " ".join((inspect.getdoc(self.handler) or "").split())

    async def answer(self, call: Call) -> Response:
        query = parse_query(call.query) if call.query else {}
        values = {param.name: param.read(call, query) for param in self.params}
        if self.takes is not None:
            values["body"] = await _read_body(call, self.takes)
        value = self.handler(call, **values)
        if not isinstance(value, AsyncGenerator):
            value = await value
        if isinstance(value, Response):
            return value
        if self.gives is None:
            return Response(status_code=self.status)
        if isinstance(self.gives, Raw):
            return await _answer_raw(call, self.gives, value)
        if isinstance(value, Answer):
            return Json(value.value, value.status or self.status, value.headers)
        return Json(value, self.status)


def route(
    method: str,
    path: str,
    *,
    takes: RawBody | None = None,
    gives: Raw | None = None,
    streams: Raw | None = None,
    status: int | None = None,
    errors: tuple[int, ...] = (),
    headers: Mapping[str, str] | None = None,
    also: Mapping[int, str] | None = None,
    guest: bool = False,
    common: bool = True,
    plus: bool = False,
) -> Callable[[Handler], Route]:
    """Make a route of an async function, or generator, that gets the call, the parameters and `body`, by their names.

    Parameters are of the path where it names them, else of the query; their types are in inputs.py. A JSON body and a
    JSON answer are the types of `body` and of the result; `takes` and `gives` are for the others, `streams` for an
    answer that is JSON or events. `errors` are those of this route only: the common ones (`common=False`: it has none),
    404 of a name in the path, those of a body and those of the `guest` are added.
    `headers` are those of the answer, `also` other statuses of success. `plus`: the route is not in forkd.
    """

    def declare(handler: Handler) -> Route:
        hints = get_type_hints(handler, include_extras=True)
        found = [each for each in inspect.signature(handler).parameters.values() if each.name not in ("call", "body")]
        params = tuple(Param(each.name, hints[each.name], each.default, path) for each in found)
        body = takes or hints.get("body")
        answer = gives or _answer_type(hints["return"])
        return Route(
            method=method,
            path=path,
            handler=handler,
            params=params,
            takes=body,
            gives=answer,
            streams=streams,
            status=status or (204 if answer is None else 200),
            errors=(*(COMMON_ERRORS if common else ()), *_implied(path, body, guest), *errors),
            headers=headers or (_PAGE if "page_token" in hints else {}),
            also=also or {},
            plus=plus,
        )

    return declare


def parse_query(query: bytes) -> dict[str, list[str]]:
    """Bytes of a path need not be UTF-8: they come as lone surrogates, as in all of Python."""
    return parse_qs(query.decode("latin-1"), keep_blank_values=True, errors="surrogateescape")


def without(kind: Any, hint: Any) -> Any:
    """A union without one of its members."""
    if get_origin(hint) in (Union, types.UnionType):
        return Union[tuple(each for each in get_args(hint) if each is not kind)]  # noqa: UP007 - known only now
    return hint


def _answer_type(hint: Any) -> Any:
    hint = without(Response, hint)
    if hint in (type(None), NoReturn):
        return None if hint is not NoReturn else NoReturn
    return get_args(hint)[0] if get_origin(hint) is Answer else hint


def _implied(path: str, body: Any, guest: bool) -> tuple[int, ...]:
    found = [404] if "{" in path else []
    if isinstance(body, RawBody):
        found += [] if body.limit_bytes is None else [413]
    elif body is not None:
        found += [413, 415, 422]
    return (*found, *(GUEST_ERRORS if guest else ()))


async def _answer_raw(call: Call, kind: Raw, value: Any) -> Response:
    if kind.media_type == EVENTS:
        return EventStream(value, endless=True) if kind.endless else await start_events(call, value)
    if kind.media_type in (BYTES, LINES):
        return await start_content(call, value, kind.media_type)
    return Response(value, media_type=kind.media_type)


async def _read_body(call: Call, takes: type[BaseModel] | RawBody) -> Any:
    if isinstance(takes, RawBody):
        return call.iterate_body() if takes.limit_bytes is None else await call.read_body(takes.limit_bytes)
    value = await call.read_json()
    try:
        return takes.model_validate(value)
    except ValidationError as error:
        raise error_of_validation(error) from None
