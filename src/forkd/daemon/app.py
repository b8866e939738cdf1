"""The application: the way of a request from the envelope through the check of access to the route that answers."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from forkd.daemon.access import Access
from forkd.daemon.call import Call, Daemon
from forkd.daemon.envelope import Envelope
from forkd.daemon.errors import CALL, ErrorResponse, MethodNotAllowed
from forkd.daemon.openapi import render_openapi
from forkd.daemon.route import Json, Raw, Route, route
from forkd.daemon.routes import branches, files, guest, networks, packs, processes, sandboxes, snapshots, system
from forkd.errors import ForkdError, NotFound

_MODULES: tuple[ModuleType, ...] = (system, snapshots, packs, sandboxes, networks, branches, guest, processes, files)
ROUTES = tuple(each for module in _MODULES for each in vars(module).values() if isinstance(each, Route))
DOCUMENT = "/openapi.json"
_ANY = "{}"


@route("GET", DOCUMENT, gives=Raw("application/json", "OpenAPI"), plus=True)
async def answer_document(call: Call) -> bytes:
    return _render_document()


@functools.cache
def _render_document() -> bytes:
    return bytes(Json(render_openapi(ROUTES)).body)


def make_app(daemon: Daemon) -> ASGIApp:
    return Envelope(Access(Router((*ROUTES, answer_document)), daemon.tcp), daemon)


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
