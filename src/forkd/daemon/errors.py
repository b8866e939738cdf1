"""Every answer that is no success: one body, and a status that follows from the code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkd.errors import ForkdError, InvalidInput, NotFound

STATUS: Mapping[str, int] = {
    "invalid_input": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "not_running": 409,
    "guest_died": 502,
    "snapshot_damaged": 409,
    "snapshot_incompatible": 409,
    "command_not_started": 422,
    "warmup_failed": 422,
    "denied": 403,
    "is_dir": 400,
    "not_dir": 400,
    "no_space": 409,
    "busy": 429,
    "too_many": 429,
    "agent_error": 502,
    "protocol_error": 502,
    "channel_closed": 502,
    "io": 502,
    "no_capacity": 503,
    "guest_timeout": 504,
    "unsupported": 501,
    "host_lacks": 500,
    "build_failed": 500,
    "engine_failed": 500,
    "not_forkable": 500,
    "contract_broken": 500,
    "internal": 500,
}
CALL = "forkd.call"  # the key in the ASGI scope of what a request carries with it
RETRY_AFTER_S = 5
_MAX_TEXT = 16 * 1024

# A wrong shape is 422; what has the right shape and can never work is 400. These are of the first kind.
_SHAPE_ERRORS = ("missing", "literal_error", "int_from_float", "union_tag_invalid", "extra_forbidden")


class Forbidden(ForkdError):
    code = "forbidden"


class MethodNotAllowed(ForkdError):
    code = "method_not_allowed"


class Internal(ForkdError):
    """Our own mistake. What it was is in the log, and only there."""

    def __init__(self) -> None:
        super().__init__("The daemon failed to answer this", hint="Its log says why, under this request's id")


class ClientGone(ForkdError):
    """Whoever asked has closed their side; most often nobody reads this."""

    code = "invalid_input"

    def __init__(self) -> None:
        super().__init__(
            "The connection was closed before the answer, and what was asked for was ended",
            hint="Keep the connection open, for writing too, until the answer is there",
        )


def status_of(error: ForkdError) -> int:
    """Of the error itself when it says so, else by its code."""
    if error.status is not None:
        return error.status
    return STATUS.get(error.code, 500)


def with_status(error: ForkdError, status: int) -> ForkdError:
    error.status = status
    return error


def error_body(error: ForkdError, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"error": error.message[:_MAX_TEXT], "code": error.code, "hint": error.hint}
    if error.details:
        body["details"] = error.details[-_MAX_TEXT:]
    return body | dict(more or {})


class ErrorResponse(Response):
    media_type = "application/json"

    def __init__(
        self, error: ForkdError, more: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        self.code = error.code
        status = status_of(error)
        added = dict(headers or {})
        if status == 503:
            added.setdefault("Retry-After", str(RETRY_AFTER_S))
        super().__init__(json.dumps(error_body(error, more)).encode(), status, added)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CALL].code = self.code
        await super().__call__(scope, receive, send)


def error_of_http(error: HTTPException) -> ForkdError:
    """What the framework found wrong, as one of ours."""
    if error.status_code == 404:
        return NotFound("There is no such route", hint="See /openapi.json for all of them")
    if error.status_code == 405:
        return MethodNotAllowed("This route has no such method", hint="See /openapi.json for those it has")
    if error.status_code >= 500:
        return Internal()
    made = InvalidInput(str(error.detail) or HTTPStatus(error.status_code).phrase)
    return with_status(made, error.status_code)


def error_of_validation(error: ValidationError) -> InvalidInput:
    """Of a body. The input is not repeated: it may hold secrets."""
    return error_of_problems([dict(problem) for problem in error.errors(include_url=False)])


def error_of_problems(problems: list[dict[str, Any]]) -> InvalidInput:
    first = problems[0]
    where = ".".join(str(part) for part in first["loc"])
    made = InvalidInput(
        f"{ascii(where)[1:-1][:200] or 'The body'}: {str(first['msg'])[:300]}",
        hint="See /openapi.json for what it takes",
    )
    made.status = 422 if _is_shape(str(first["type"]), first.get("input")) else 400
    return made


def _is_shape(kind: str, given: object) -> bool:
    if kind == "greater_than_equal" and isinstance(given, int) and given < 0:
        return True  # forkd's integers have no sign
    return kind.endswith(("_type", "_parsing")) or kind in _SHAPE_ERRORS
