"""Who is let in: over the unix socket everyone who can open it, over TCP the holders of a token, once there are tokens.

What was let in is looked at again while it lasts: a request whose token is revoked is broken off.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
from collections.abc import Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from forkd.daemon.connection import LINK, Link
from forkd.daemon.errors import CALL, ErrorResponse, Forbidden
from forkd.daemon.tokens import Keyring
from forkd.errors import ForkdError, Unauthorized
from forkd.wire.api import TcpState

EXEMPT = frozenset({"/healthz", "/readyz"})
RECHECK_S = 1.0
_SCHEME = "Bearer "


class TcpAccess:
    """Who is let in over TCP, as the tokens are now."""

    def __init__(self, keyring: Keyring, *, listens: bool, only_loopback: bool) -> None:
        """`only_loopback`: TCP reaches this machine only, so that without tokens we may answer."""
        self._keyring = keyring
        self._listens = listens
        self._only_loopback = only_loopback

    @property
    def state(self) -> TcpState:
        if not self._listens:
            return "off"
        if self.open:
            return "open"
        return "token" if self._keyring.has_any else "locked"

    @property
    def open(self) -> bool:
        return self._only_loopback and not self._keyring.needed

    @property
    def generation(self) -> object:
        """Differs when tokens were made or revoked."""
        return self._keyring.generation

    def identify(self, presented: str | None) -> str | None:
        return None if presented is None else self._keyring.identify(presented)

    def admits(self, presented: str | None) -> bool:
        return self.open or self.identify(presented) is not None


class Access:
    """Comes before routing, so that without a token nobody can find out which paths exist."""

    def __init__(self, app: ASGIApp, tcp: TcpAccess) -> None:
        self._app = app
        self._tcp = tcp
        self._watch = Watch(tcp)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        link: Link = scope[LINK]
        call = scope[CALL]
        presented = None if link.local else parse_bearer(call.headers.get(b"authorization"))
        refusal = None if link.local else self._refusal(scope, presented)
        if refusal is None:
            call.allowed = True
            link.let_in()
        elif scope["path"] not in EXEMPT:
            headers = {"WWW-Authenticate": "Bearer"} if isinstance(refusal, Unauthorized) else {}
            await ErrorResponse(refusal, headers=headers)(scope, receive, send)
            return
        if link.local or refusal is not None:
            await self._app(scope, receive, send)
            return
        with self._watch.kept(link, presented):
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, presented: str | None) -> ForkdError | None:
        if self._tcp.open:
            return refuse_page(scope["headers"])
        scope[CALL].token = self._tcp.identify(presented)
        if scope[CALL].token is not None:
            return None
        if self._tcp.state == "locked":
            return Unauthorized(
                "No token is left, so that nobody is let in over TCP",
                hint="Make one on the daemon's machine: forkd token create NAME",
            )
        return Unauthorized("This needs a valid token", hint="Send it as: Authorization: Bearer <token>")


class Watch:
    """Over requests under way. One that would not be let in any more loses its connection, and with that its work."""

    def __init__(self, tcp: TcpAccess) -> None:
        self._tcp = tcp
        self._kept: dict[Link, str | None] = {}  # with the token each presented
        self._generation = tcp.generation
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def kept(self, link: Link, presented: str | None) -> Iterator[None]:
        self._kept[link] = presented
        if self._timer is None:
            self._look_later()
        try:
            yield
        finally:
            self._kept.pop(link, None)

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(RECHECK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        generation = self._tcp.generation
        if generation != self._generation:
            self._generation = generation
            for link, presented in list(self._kept.items()):
                if not self._tcp.admits(presented):
                    link.abort()
        if self._kept:
            self._look_later()


def parse_bearer(header: bytes | None) -> str | None:
    if header is None:
        return None
    text = header.decode("latin-1")
    return text[len(_SCHEME) :].strip() or None if text.startswith(_SCHEME) else None


def refuse_page(headers: list[tuple[bytes, bytes]]) -> ForkdError | None:
    """Without tokens, loopback is open to programs of this machine, but not to pages in its browsers."""
    for name, value in headers:
        if name == b"origin" or (name == b"sec-fetch-site" and value != b"none"):
            return Forbidden("Requests from web pages are refused", hint="Make a token first: forkd token create")
        if name == b"host" and not is_plain_host(value.decode("latin-1")):
            return Forbidden(
                "The Host header must be localhost or an address",
                hint="Use the address, or make a token first: forkd token create",
            )
    return None


@functools.lru_cache(maxsize=256)
def is_plain_host(host: str) -> bool:
    """A page can point its own name at 127.0.0.1, but cannot use these names."""
    name, bracket, _ = host.partition("]")
    name = name[1:] if bracket else host.partition(":")[0]
    if name.lower() in ("localhost", "localhost."):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
