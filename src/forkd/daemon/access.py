"""Who may ask: everybody who can open the unix socket; over TCP whoever has a token, once there are tokens."""

from __future__ import annotations

import functools
import ipaddress

from starlette.types import ASGIApp, Receive, Scope, Send

from forkd.daemon.connection import LINK
from forkd.daemon.errors import CALL, ErrorResponse, Forbidden
from forkd.daemon.tokens import Keyring
from forkd.errors import ForkdError, Unauthorized

EXEMPT = frozenset({"/healthz", "/readyz"})
_SCHEME = "Bearer "


class Access:
    """Comes before routing, so that a stranger cannot tell a path that exists from one that does not."""

    def __init__(self, app: ASGIApp, keyring: Keyring, *, only_loopback: bool) -> None:
        self._app = app
        self._keyring = keyring
        self._only_loopback = only_loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope[LINK].local and scope["path"] not in EXEMPT:
            refusal = self._refusal(scope)
            if refusal is not None:
                headers = {"WWW-Authenticate": "Bearer"} if isinstance(refusal, Unauthorized) else {}
                await ErrorResponse(refusal, headers=headers)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ForkdError | None:
        if not self._keyring.needed and self._only_loopback:
            return refuse_page(scope["headers"])
        call = scope[CALL]
        presented = parse_bearer(call.headers.get(b"authorization"))
        call.token = None if presented is None else self._keyring.identify(presented)
        if call.token is None:
            return Unauthorized("A valid token is needed", hint="Send it as: Authorization: Bearer <token>")
        return None


def parse_bearer(header: bytes | None) -> str | None:
    if header is None:
        return None
    text = header.decode("latin-1")
    return text[len(_SCHEME) :].strip() or None if text.startswith(_SCHEME) else None


def refuse_page(headers: list[tuple[bytes, bytes]]) -> ForkdError | None:
    """Without tokens, loopback is open to programs of this machine, but not to the pages its browsers show."""
    for name, value in headers:
        if name == b"origin" or (name == b"sec-fetch-site" and value != b"none"):
            return Forbidden("Requests of web pages are refused", hint="Make a token first: forkd token create")
        if name == b"host" and not is_plain_host(value.decode("latin-1")):
            return Forbidden(
                "The Host of this request is neither localhost nor an address",
                hint="Use the address, or make a token first: forkd token create",
            )
    return None


@functools.lru_cache(maxsize=256)
def is_plain_host(host: str) -> bool:
    """A page may make its own name mean 127.0.0.1, but cannot take the names that always do."""
    name, bracket, _ = host.partition("]")
    name = name[1:] if bracket else host.partition(":")[0]
    if name.lower() in ("localhost", "localhost."):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
