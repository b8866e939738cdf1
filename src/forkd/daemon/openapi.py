"""The OpenAPI document and the table of docs/reference/rest.md, both from the declared routes. Pure."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic.json_schema import models_json_schema

from forkd import __version__
from forkd.daemon.route import Param, Raw, RawBody, Route
from forkd.daemon.streams import BYTES, EVENTS, LINES
from forkd.wire.api import ErrorBody, required_keys

Schema = dict[str, Any]

_REFS = "#/components/schemas/{model}"
_MOST_FIELDS = 7
_ABOUT = {
    400: "A value that is not allowed",
    401: "No token, or one the daemon does not know",
    403: "Asked by a web page of another origin, or refused by the guest's file system",
    404: "Not found",
    409: "Not possible in its present state",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    416: "There are no such bytes",
    422: "A wrong type or a missing field, or a command that cannot start",
    429: "Too many requests for this guest",
    500: "The daemon or the host failed",
    501: "Not built yet",
    502: "The guest gave no proper answer",
    503: "No capacity now; Retry-After says when to ask again",
    504: "The guest did not answer in time",
}
_TEXT: Schema = {"type": "string"}
_BINARY: Schema = {"type": "string", "format": "binary"}
# One event of a stream; `data` holds JSON.
_EVENT: Schema = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}, "id": {"type": "string"}},
    "required": ["event", "data"],
}
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def render_openapi(routes: Iterable[Route]) -> Schema:
    bodies = dict.fromkeys(each.takes for each in routes if isinstance(each.takes, type))
    _, definitions = models_json_schema([(body, "validation") for body in bodies], ref_template=_REFS)
    schemas, paths = dict(definitions["$defs"]), Schema()
    for each in routes:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "forkd", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{"token": []}, {}],
    }


def _operation(route: Route, schemas: Schema) -> Schema:
    name = route.handler.__name__
    made: Schema = {
        "summary": name.replace("_", " ").title(),
        "operationId": re.sub(r"\W", "_", f"{name}{route.path}") + f"_{route.method.lower()}",
        "description": route.about,
        "responses": _responses(route, schemas),
    }
    if route.params:
        made["parameters"] = [_parameter(param) for param in route.params]
    if isinstance(route.takes, RawBody):
        made["requestBody"] = {"required": True, "content": {BYTES: {"schema": _BINARY}}}
    elif route.takes is not None:
        schema = {"$ref": _REFS.format(model=route.takes.__name__)}
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return made


def _responses(route: Route, schemas: Schema) -> Schema:
    made: Schema = {}
    if route.gives is not NoReturn:
        about = getattr(route.streams or route.gives, "about", "Successful Response")
        content = {} if route.gives is None else {"content": _content(route, schemas)}
        made = {
            str(status): {"description": text, **content}
            for status, text in {route.status: about, **route.also}.items()
        }
    for key, text in route.headers.items():
        made[str(route.status)].setdefault("headers", {})[key] = {"description": text, "schema": _TEXT}
    error = {"application/json": {"schema": render_schema(ErrorBody, schemas)}}
    return made | {
        str(status): {"description": _ABOUT[status], "content": error} for status in sorted(set(route.errors))
    }


def _content(route: Route, schemas: Schema) -> Schema:
    made: Schema = {}
    if not isinstance(route.gives, Raw):
        made["application/json"] = {"schema": render_schema(route.gives, schemas)}
    for raw in (route.gives, route.streams):
        if isinstance(raw, Raw):
            schema = dict({EVENTS: _EVENT, BYTES: _BINARY}.get(raw.media_type, _TEXT))
            if raw.lines:
                schema["x-lines"] = {"anyOf": [render_schema(each, schemas) for each in raw.lines]}
            made[raw.media_type.partition(";")[0]] = {"schema": schema}
    return made


def _parameter(param: Param) -> Schema:
    schema = param.adapter.json_schema()
    if not param.required and param.default is not None:
        schema["default"] = param.default
    return {"name": param.key, "in": param.place, "required": param.required, "schema": schema}


def render_schema(hint: Any, schemas: Schema) -> Schema:
    """Of a type of wire/api.py; each TypedDict is put into `schemas`.

    Not by pydantic: before Python 3.12 it takes TypedDicts of typing_extensions only, which clients do not have.
    """
    if is_typeddict(hint):
        if hint.__name__ not in schemas:
            made = schemas[hint.__name__] = {"title": hint.__name__, "type": "object", "required": required_keys(hint)}
            made["properties"] = {key: render_schema(each, schemas) for key, each in get_type_hints(hint).items()}
        return {"$ref": _REFS.format(model=hint.__name__)}
    origin, parts = get_origin(hint), get_args(hint)
    if origin is list:
        return {"type": "array", "items": render_schema(parts[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": render_schema(parts[1], schemas)}
    if origin is Literal:
        return {"type": "string", "enum": list(parts)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [render_schema(each, schemas) for each in parts]}
    return {} if hint is Any else {"type": _SCALARS[hint]}


def render_table(routes: Iterable[Route]) -> str:
    """Markdown, for docs/reference/rest.md."""
    lines = ["| method and path | takes | success | |", "|---|---|---|---|"]
    for each in routes:
        plus = " **+**" if each.plus else ""
        takes = ", ".join(_takes(each))
        lines.append(f"| {each.method} `{each.path}`{plus} | {takes} | {_success(each)} | {each.about} |")
    return "\n".join(lines) + "\n"


def _takes(route: Route) -> Iterable[str]:
    for param in route.params:
        if param.place != "path":
            yield f"`?{param.key}=`" if param.place == "query" else f"`{param.key.title()}`"
    if isinstance(route.takes, RawBody):
        yield "a raw body"
    elif route.takes is not None:
        fields = route.takes.model_fields
        yield "JSON, below" if len(fields) > _MOST_FIELDS else f"JSON: `{'`, `'.join(fields)}`"


def _success(route: Route) -> str:
    if route.gives is NoReturn:
        return "501"
    statuses = ", ".join(map(str, sorted({route.status, *route.also})))
    if route.gives is None:
        return statuses
    if isinstance(route.gives, Raw):
        return f"{statuses} " + {EVENTS: "SSE", BYTES: "raw", LINES: "JSON lines"}.get(route.gives.media_type, "text")
    many = get_origin(route.gives) is list
    kind = f"list of {get_args(route.gives)[0].__name__}" if many else route.gives.__name__
    return f"{statuses} {kind}" + (" or SSE" if route.streams is not None else "")
