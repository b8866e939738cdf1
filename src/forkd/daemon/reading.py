"""Request bodies: read within limits and deadlines, parsed strictly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message

from forkd.daemon.errors import ClientGone, error_of_validation, with_status
from forkd.daemon.state import call_of
from forkd.errors import ForkdError, InvalidInput

MAX_JSON_BYTES = 2 * 1024 * 1024
GAP_S = 30.0  # between two pieces of a body
JSON_S = 120.0  # for all of a body that has to be there before anything is done

M = TypeVar("M", bound=BaseModel)


async def read_model(request: Request, model: type[M]) -> M:
    return parse_model(await read_json(request), model)


def parse_model(value: object, model: type[M]) -> M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise error_of_validation(error) from None


async def read_json(request: Request) -> Any:
    check_json_type(request)
    return parse_json(await read_body(request, MAX_JSON_BYTES))


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """All of it; 413 as soon as it is known to be too much."""
    declared = call_of(request).headers.get(b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    message = await _receive(request)
    body = bytearray(message.get("body", b""))
    latest = asyncio.get_running_loop().time() + JSON_S
    while len(body) <= limit_bytes:
        if not message.get("more_body", False):
            return bytes(body)
        if asyncio.get_running_loop().time() > latest:
            raise InvalidInput(f"The body did not arrive within {JSON_S:g} s")
        message = await _receive(request)
        body += message.get("body", b"")
    raise _too_large(limit_bytes)


async def iterate_body(request: Request) -> AsyncGenerator[bytes, None]:
    """As it comes."""
    more = True
    while more:
        message = await _receive(request)
        more = message.get("more_body", False)
        if data := message.get("body", b""):
            yield data


async def _receive(request: Request) -> Message:
    """The next piece. Raises when there is none for too long, and when the client has broken off."""
    try:
        async with asyncio.timeout(GAP_S):
            message = await request.receive()
    except TimeoutError:
        raise InvalidInput(f"Nothing more of the body arrived within {GAP_S:g} s") from None
    if message["type"] == "http.disconnect":
        raise ClientGone
    if call_of(request).link.cut:
        raise InvalidInput("The body ended before its end", hint="Send as much as Content-Length says")
    return message


def check_json_type(request: Request) -> None:
    given = call_of(request).headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if given != b"application/json" and not (given.startswith(b"application/") and given.endswith(b"+json")):
        raise with_status(
            InvalidInput("The body is not declared as JSON", hint="Send Content-Type: application/json"), 415
        )


def parse_json(body: bytes) -> Any:
    """JSON and nothing else: no NaN, no other encoding, no nesting beyond all bounds."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
        if b"\\u" in body:
            # Bytes of a file name come as lone surrogates; any other lone surrogate is nothing at all.
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")
        return value
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise InvalidInput(f"The body is not JSON: {ascii(why)[1:-1][:200]}") from None


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _too_large(limit_bytes: int) -> ForkdError:
    return with_status(
        InvalidInput(f"The body has more than {limit_bytes} bytes", hint="Write large content to a file of the guest"),
        413,
    )
