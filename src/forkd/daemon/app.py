"""The application: who may ask (over TCP the holders of a token, once there are tokens), and the route that answers."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forkd.daemon.call import Call, Daemon
from forkd.daemon.connection import LINK
from forkd.daemon.envelope import Envelope
from forkd.daemon.errors import CALL, ErrorResponse, Forbidden, MethodNotAllowed
from forkd.daemon.openapi import render_openapi
from forkd.daemon.route import Json, Raw, Route, route
from forkd.daemon.routes import files, guest, processes, sandboxes, snapshots, system
from forkd.daemon.tokens import Keyring
from forkd.errors import ForkdError, NotFound, Unauthorized

_MODULES: tuple[ModuleType, ...] = (system, snapshots, sandboxes, guest, processes, files)
ROUTES = tuple(each for module in _MODULES for each in vars(module).values() if isinstance(each, Route))
DOCUMENT = "/openapi.json"
_ANY = "{}"
EXEMPT = frozenset({"/healthz", "/readyz"})
_SCHEME = "Bearer "


@route("GET", DOCUMENT, gives=Raw("application/json", "OpenAPI"), plus=True)
async def answer_document(call: Call) -> bytes:
    return _render_document()


@functools.cache
def _render_document() -> bytes:
    return bytes(Json(render_openapi(ROUTES)).body)


def make_app(daemon: Daemon, keyring: Keyring, *, only_loopback: bool) -> ASGIApp:
    """`only_loopback`: TCP reaches this machine only, so that without tokens we may answer."""
    router = Router((*ROUTES, answer_document))
    return Envelope(Access(router, keyring, only_loopback=only_loopback), daemon)


@dataclass
class _Node:
    path: str = ""
    parts: dict[str, _Node] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)  # by method


class Router:
    """A tree by the parts of paths: finding a route takes as long with fifty as with five."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._root = _Node()
        for each in routes:
            node = self._root
            for part in each.path.split("/"):
                node = node.parts.setdefault(_ANY if part.startswith("{") else part, _Node())
            node.path = each.path
            node.routes[each.method] = each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._answer(scope[CALL], scope["method"], scope["path"])
        except ForkdError as error:
            response = ErrorResponse(error)
        await response(scope, receive, send)

    async def _answer(self, call: Call, method: str, path: str) -> Response:
        parts = path.split("/")
        node = self._find(parts)
        if node is None or not node.routes:
            raise NotFound("Unknown path", hint=f"{DOCUMENT} lists all routes")
        call.route = node.path
        named = zip(node.path.split("/"), parts, strict=True)
        call.params = {name[1:-1]: part for name, part in named if name.startswith("{")}
        found = node.routes.get(method)
        if found is None:
            error = MethodNotAllowed("This route has no such method", hint=f"See {DOCUMENT} for those it has")
            return ErrorResponse(error, headers={"Allow": ", ".join(sorted(node.routes))})
        return await found.answer(call)

    def _find(self, parts: list[str]) -> _Node | None:
        node: _Node | None = self._root
        for part in parts:
            if node is None:
                return None
            node = node.parts.get(part) or (node.parts.get(_ANY) if part else None)
        return node


class Access:
    """Comes before routing, so that without a token nobody can find out which paths exist."""

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
            return Unauthorized("This needs a valid token", hint="Send it as: Authorization: Bearer <token>")
        return None


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
