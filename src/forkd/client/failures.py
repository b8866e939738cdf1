"""Answers and broken connections as the errors of forkd.errors."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from forkd import errors
from forkd.client.retry import Fate, fate_of

if TYPE_CHECKING:
    import httpx

    from forkd.client.retry import Outcome

_BODY_SHOWN = 200


def _walk(base: type[errors.ForkdError]) -> dict[str, type[errors.ForkdError]]:
    found = {base.code: base}
    for child in base.__subclasses__():
        if child.__module__ == errors.__name__:
            found.update(_walk(child))
    return found


BY_CODE: Mapping[str, type[errors.ForkdError]] = {
    **_walk(errors.ForkdError),
    **dict.fromkeys(errors.AGENT_CODES, errors.AgentError),
}

# For answers without a code: those of proxies, and of the daemon this API comes from.
_BY_STATUS: Mapping[int, type[errors.ForkdError]] = {
    400: errors.InvalidInput,
    401: errors.Unauthorized,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.InvalidInput,
    415: errors.InvalidInput,
    422: errors.InvalidInput,
    501: errors.Unsupported,
}
_TLS_HINT = "Name the file of the authority that signed the daemon's certificate in SSL_CERT_FILE"
# What the daemon says of a token or of a document is for those who write HTTP themselves.
_HINTS = {"unauthorized": "Set FORKD_TOKEN to a token made with: forkd token create"}
_FOR_HTTP, FOR_CALLERS = "/openapi.json", "Correct the value that is named"


def error_of(outcome: Outcome, *, name: str, url: str) -> errors.ForkdError:
    import httpx

    if isinstance(outcome, httpx.Response):
        return error_of_answer(outcome)
    return error_of_transport(outcome, name=name, url=url)


def error_of_answer(response: httpx.Response) -> errors.ForkdError:
    body, status, url = _parse(response.content), response.status_code, str(response.url)
    if isinstance(body, dict) and isinstance(body.get("error"), str):
        return error_of_body(body, status=status, url=url)
    error = _BY_STATUS.get(status, errors.ForkdError)(
        f"{url} answered {status}{_shown(body)}",
        hint="A forkd daemon does not answer like this; check FORKD_URL, and proxies on the way to it",
    )
    error.status, error.body, error.url = status, body, url
    return error


def error_of_body(body: Mapping[str, object], *, status: int | None, url: str) -> errors.ForkdError:
    """From `{"error", "code", "hint", "details"}`, each of which may be missing or of a wrong type."""
    code, hint, details = (_text(body.get(key)) for key in ("code", "hint", "details"))
    kind = BY_CODE.get(code, errors.ForkdError) if code else _BY_STATUS.get(status or 0, errors.ForkdError)
    hint = FOR_CALLERS if hint and _FOR_HTTP in hint else _HINTS.get(code or "", hint)
    error = kind(_text(body.get("error")) or "No reason given", hint=hint, details=details)
    if code:
        error.code = code
    error.status, error.body, error.url = status, dict(body), url
    return error


def error_of_transport(error: httpx.HTTPError, *, name: str, url: str) -> errors.Unreachable:
    """`name` is the daemon's address for people."""
    import httpx

    if isinstance(error, httpx.PoolTimeout):
        found = errors.Unreachable(
            f"No connection to {name} came free in time; nothing was sent",
            hint="There are too many calls at once, or streams that are never closed",
        )
    elif fate_of(error) is Fate.UNSENT:
        found = errors.Unreachable(
            f"No forkd daemon answers at {name}: {_reason(error)}; nothing was sent",
            hint=_TLS_HINT if "CERTIFICATE" in str(error) else "Start one with: forkd up. Or set FORKD_URL",
        )
    elif fate_of(error) is Fate.SLOW:
        found = errors.Unreachable(
            f"The daemon at {name} did not answer in time; whether it did what was asked is unknown",
            hint="Look with: forkd ls. The Controller's timeout= can be raised",
        )
    else:
        found = errors.Unreachable(
            f"The connection to {name} was lost: {_reason(error)}; whether the daemon did what was asked is unknown",
            hint="Look whether it runs with: forkd status",
        )
    found.url, found.sent = url, fate_of(error) is not Fate.UNSENT
    return found


def bad_certificates(error: OSError) -> errors.InvalidInput:
    """What OpenSSL makes of SSL_CERT_FILE or SSL_CERT_DIR; its own words name neither the file nor the variable."""
    name = next((each for each in ("SSL_CERT_FILE", "SSL_CERT_DIR") if os.environ.get(each)), None)
    source = "The certificates of this system" if name is None else f"{name} ({os.environ[name]})"
    reason = error.strerror if error.errno and error.strerror else _reason(error)
    return errors.InvalidInput(
        f"{source} cannot be used to check the daemon's certificate: {reason}",
        hint=_TLS_HINT if name is None else f"Unset {name}, or let it name certificates in PEM form",
    )


def broken_off(url: str) -> errors.Unreachable:
    """A stream that ended without its last event."""
    error = errors.Unreachable(
        "The daemon ended the stream before its last event; the outcome is unknown",
        hint="It may be stopping. Look with: forkd status",
    )
    error.url = url
    return error


def _parse(body: bytes) -> object:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode("utf-8", "replace")


def _shown(body: object) -> str:
    text = " ".join(str(body).split())[:_BODY_SHOWN]
    return f": {text}" if text else ""


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


def close_refused(error: BaseException) -> None:
    """httpcore (1.0) leaves the socket of a refused unix connection to the garbage collector. Close it now."""
    failed: BaseException | None = error
    while failed is not None:
        trace = failed.__traceback__
        while trace is not None:
            made = trace.tb_frame.f_locals.get("sock")
            if isinstance(made, socket.socket) and trace.tb_frame.f_globals["__name__"].startswith("httpcore."):
                made.close()
            trace = trace.tb_next
        failed = failed.__cause__ or failed.__context__
