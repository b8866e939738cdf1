"""The bodies of wire/api.py as models, for the OpenAPI document alone: answers are rendered, not serialized."""

from __future__ import annotations

import functools
import operator
import types
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from pydantic import BaseModel, create_model

from forkd.wire import api

_made: dict[type, type[BaseModel]] = {}


def model_of(body: Any) -> type[BaseModel]:
    """One model per body, made once."""
    if body not in _made:
        fields: dict[str, Any] = {}
        for key, hint in get_type_hints(body, include_extras=True).items():
            if get_origin(hint) is NotRequired:
                fields[key] = (_with_models(get_args(hint)[0]), _ABSENT)
            else:
                fields[key] = (_with_models(hint), ...)
        _made[body] = create_model(body.__name__, **fields)
    return _made[body]


# Stands for "the key is not there"; it is no value, and is not in the document.
_ABSENT: Any = None


def _with_models(hint: Any) -> Any:
    if is_typeddict(hint):
        return model_of(hint)
    origin, parts = get_origin(hint), tuple(map(_with_models, get_args(hint)))
    if origin is list:
        return list[parts[0]]  # type: ignore[valid-type]
    if origin is dict:
        return dict[parts[0], parts[1]]  # type: ignore[valid-type]
    if origin in (Union, types.UnionType):
        return functools.reduce(operator.or_, parts)
    return hint


def list_of(model: type[BaseModel]) -> Any:
    return list[model]  # type: ignore[valid-type]


Error = model_of(api.ErrorBody)
Sandbox = model_of(api.SandboxInfo)
Snapshot = model_of(api.SnapshotInfo)
SnapshotDetail = model_of(api.SnapshotInfoDetail)
Template = model_of(api.TemplateInfo)
Workspace = model_of(api.WorkspaceInfo)
Exec = model_of(api.ExecResponse)
Eval = model_of(api.EvalResponse)
Ping = model_of(api.PingResponse)
Version = model_of(api.VersionResponse)
Process = model_of(api.ProcessInfo)
File = model_of(api.FileInfo)
FileListing = model_of(api.FileListing)
Event = model_of(api.Event)
Lineage = model_of(api.Lineage)


class Health(BaseModel):
    ok: bool


class Readiness(BaseModel):
    ready: bool


class Written(BaseModel):
    path: str
    size: int
