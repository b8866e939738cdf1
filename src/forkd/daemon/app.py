"""The application: routes, errors, and what is around every request."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from forkd.daemon.access import Access
from forkd.daemon.envelope import Envelope
from forkd.daemon.errors import ErrorResponse, Internal, error_of_http, error_of_problems
from forkd.daemon.openapi import render_openapi
from forkd.daemon.render import Json
from forkd.daemon.routes import files, guest, processes, sandboxes, snapshots, system, workspaces
from forkd.daemon.state import Daemon
from forkd.daemon.tokens import Keyring
from forkd.errors import ForkdError, NotFound


def make_app(daemon: Daemon, keyring: Keyring, *, only_loopback: bool) -> ASGIApp:
    """`only_loopback`: nobody else can reach us by TCP, so that without tokens we may answer."""
    api = make_api()
    return Envelope(Access(api, keyring, only_loopback=only_loopback), daemon)


def make_api() -> FastAPI:
    api = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False, exception_handlers=_HANDLERS)
    # Those asked most often first: routes are looked through in their order.
    for module in (guest, sandboxes, processes, files, snapshots, workspaces, system):
        # Not included: FastAPI goes through included routers at every request, at three times the price.
        api.router.routes.extend(module.router.routes)

    @functools.cache
    def document() -> bytes:
        return bytes(Json(render_openapi(api)).body)

    async def answer_openapi(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    api.add_route("/openapi.json", answer_openapi, methods=["GET"], include_in_schema=False)
    return api


async def _on_forkd_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ForkdError)
    return ErrorResponse(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(_find_methods(request)))
    return ErrorResponse(error_of_http(error), headers=headers)


def _find_methods(request: Request) -> set[str]:
    """Of all routes of a path: the framework knows the first one's only."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    return {method for route in routes for method in route.methods}


async def _on_illegal_parameter(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [dict(problem) for problem in error.errors()]
    if problems[0]["loc"][0] == "path":
        return ErrorResponse(NotFound("There is no such thing", hint="See /openapi.json for what names look like"))
    made = error_of_problems(problems)
    made.status = 400
    return ErrorResponse(made)


async def _on_mistake(request: Request, error: Exception) -> Response:
    return ErrorResponse(Internal())  # logged in Envelope, where it arrives next


_HANDLERS: dict[int | type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    Exception: _on_mistake,
    ForkdError: _on_forkd_error,
    HTTPException: _on_http_error,
    RequestValidationError: _on_illegal_parameter,
}
