"""What the OpenAPI document says beyond what FastAPI finds out: bodies we read ourselves, raw answers, errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from forkd import __version__
from forkd.daemon import bodies, schemas, sse

Responses = dict[int | str, dict[str, Any]]

_REFS = "#/components/schemas/{model}"
_BODIES: tuple[type[BaseModel], ...] = (
    bodies.SpawnBody,
    bodies.SnapshotBody,
    bodies.CompactBody,
    bodies.ExecBody,
    bodies.ProcessBody,
    bodies.EvalBody,
    bodies.BranchBody,
    bodies.TimeoutBody,
    bodies.SignalBody,
    bodies.PtyBody,
    bodies.MkdirBody,
    bodies.RenameBody,
    bodies.WorkspaceBody,
    bodies.SuspendBody,
)
# What one event of a stream is; `data` holds JSON.
STREAM: dict[str, Any] = {
    sse.MEDIA_TYPE: {
        "schema": {
            "type": "object",
            "properties": {"event": {"type": "string"}, "data": {"type": "string"}, "id": {"type": "string"}},
            "required": ["event", "data"],
        }
    }
}
_EVERYWHERE = (400, 401, 403, 500, 503)
NAMED = (404, 409)
BODY = (413, 415, 422)
GUEST = (404, 409, 422, 429, 502, 504)
_ABOUT = {
    400: "It can never work as asked",
    401: "No token, or one the daemon does not know",
    403: "A page of a browser, or the guest's file system refused",
    404: "There is no such thing",
    409: "Not in the state it is in",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    422: "A wrong type or a missing field, or a command that cannot start",
    429: "The guest has too much to do",
    500: "The daemon or the host failed",
    501: "Not built yet",
    502: "The guest gave no proper answer",
    503: "No capacity now; Retry-After says when to ask again",
    504: "The guest did not answer in time",
}


def errors(*more: int) -> Responses:
    statuses = sorted({*_EVERYWHERE, *more})
    return {status: {"model": schemas.Error, "description": _ABOUT[status]} for status in statuses}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route with a JSON body."""
    content = {"application/json": {"schema": {"$ref": _REFS.format(model=model.__name__)}}}
    return {"requestBody": {"required": True, "content": content}}


def takes_raw() -> dict[str, Any]:
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {"requestBody": {"required": True, "content": content}}


def takes_query(name: str, schema: dict[str, Any], *, required: bool) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": required, "schema": schema}


def gives(media_type: str, about: str, *, binary: bool = False) -> Responses:
    """A success that is no JSON."""
    schema = {"type": "string", "format": "binary"} if binary else {"type": "string"}
    return {200: {"description": about, "content": {media_type: {"schema": schema}}}}


def gives_events(about: str) -> Responses:
    return {200: {"description": about, "content": STREAM}}


def with_header(name: str, about: str) -> dict[str, Any]:
    return {"headers": {name: {"description": about, "schema": {"type": "string"}}}}


def render_openapi(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="forkd", version=__version__, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    _, definitions = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REFS)
    components.update(definitions.get("$defs", {}))
    for unused in ("HTTPValidationError", "ValidationError"):
        components.pop(unused, None)
    for model in components.values():
        _drop_absent_defaults(model)
    for operations in document["paths"].values():
        for operation in operations.values():
            _drop_framework_error(operation["responses"])
            for parameter in operation.get("parameters", ()):
                _drop_null(parameter["schema"])
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}, {}]
    return document


def _drop_framework_error(responses: dict[str, Any]) -> None:
    if "HTTPValidationError" in str(responses.get("422")):
        del responses["422"]


def _drop_null(schema: dict[str, Any]) -> None:
    """A parameter is absent, never null."""
    given = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(given) == 1:
        del schema["anyOf"]
        schema.update(given[0])


def _drop_absent_defaults(model: dict[str, Any]) -> None:
    """A key that may be absent is not null when it is there."""
    for schema in model.get("properties", {}).values():
        if schema.get("default", 0) is None and "anyOf" not in schema:
            del schema["default"]
