"""Every answer that is an error: one body, and a status that follows from the code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from forkd.errors import ForkdError, InvalidInput, NoCapacity

STATUS: Mapping[str, int] = {
    "invalid_input": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "untrusted": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "not_running": 409,
    "limit_reached": 409,
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
    "network_failed": 502,
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
CALL = "forkd.call"  # the key of the Call in the ASGI scope
RETRY_AFTER_S = 5
_MAX_TEXT = 16 * 1024

# A wrong shape is 422; a value of the right shape that can never work is 400. These are wrong shapes.
_SHAPE_ERRORS = ("missing", "literal_error", "int_from_float", "union_tag_invalid", "extra_forbidden")


class Forbidden(ForkdError):
    code = "forbidden"


class MethodNotAllowed(ForkdError):
    code = "method_not_allowed"


class Internal(ForkdError):
    """A fault of the daemon. The cause is in its log, and only there."""

    def __init__(self) -> None:
        super().__init__("The daemon failed to answer this request", hint="Its log says why, under this request's id")


class Stopping(NoCapacity):
    def __init__(self) -> None:
        super().__init__("The daemon is stopping", hint="Ask again when it is back")


class ClientGone(ForkdError):
    """The client disconnected. It reads this only when it closed just its writing side."""

    code = "invalid_input"

    def __init__(self) -> None:
        super().__init__(
            "The client closed the connection before the answer; the work was ended",
            hint="Keep the connection open, for writing too, until the answer is there",
        )


def status_of(error: ForkdError) -> int:
    """The error's own, when it has one, else the one of its code."""
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


def error_of_validation(error: ValidationError, where: str = "") -> InvalidInput:
    """Of a body, or of the parameter `where`. The input is not repeated: it may hold secrets."""
    first = error.errors(include_url=False)[0]
    place = ".".join([where, *map(str, first["loc"])]).strip(".")
    made = InvalidInput(
        f"{ascii(place)[1:-1][:200] or 'The body'}: {first['msg'][:300]}", hint="See /openapi.json for what it takes"
    )
    made.status = 422 if _is_shape(first["type"], first.get("input")) and not where else 400
    return made


def _is_shape(kind: str, given: object) -> bool:
    if kind == "greater_than_equal" and isinstance(given, int) and given < 0:
        return True  # forkd's integers have no sign
    return kind.endswith(("_type", "_parsing")) or kind in _SHAPE_ERRORS
