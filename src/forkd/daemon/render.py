"""From what the runtime knows to what clients see. Pure; docs/rest.md says when each key is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

from starlette.responses import Response

from forkd.engines.base import Phases
from forkd.guest.files import FileInfo as GuestFile
from forkd.guest.results import CommandResult, EvalResult
from forkd.model.sandbox import SandboxRecord
from forkd.runtime.events import EventRecord
from forkd.runtime.processes import Command
from forkd.runtime.snapshots import SnapshotDetail, SnapshotView
from forkd.runtime.spawning import Spawned
from forkd.runtime.templates import TemplateView
from forkd.runtime.workspaces import WorkspaceRecord
from forkd.wire.api import (
    EvalResponse,
    Event,
    ExecResponse,
    FileInfo,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
    SnapshotInfoDetail,
    TemplateInfo,
    WorkspaceInfo,
)

SnapshotStatus = Literal["writing", "ready", "failed"]
WorkspaceStatus = Literal["running", "suspended", "stale"]


class Json(Response):
    """Ready bytes. Lone surrogates are escaped as JSON can, so every text the guest has comes through."""

    media_type = "application/json"

    def __init__(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(json.dumps(value, allow_nan=False).encode("ascii"), status, headers)


def render_sandbox(record: SandboxRecord) -> SandboxInfo:
    return {
        "id": record.id,
        "snapshot_tag": record.snapshot_tag,
        "netns": None,
        "guest_addr": f"127.0.0.1:{record.agent_port}",
        "created_at_unix": int(record.created_at_unix),
        "pid": record.pid,
        "memory_limit_mib": record.limits.memory_mib,
        "cpu_limit": record.limits.cpus,
        "pids_limit": record.limits.pids,
        "io_limit_mib_s": record.limits.io_mib_s,
        "has_branched": False,
        "last_branch_memory_path": None,
        "branch_count": 0,
        "state": record.state.value,
        "cause": record.cause,
        "engine": record.engine,
        "isolation": record.isolation,
        "deadline_unix": record.deadline_unix,
        "on_timeout": record.on_timeout.value,
        "labels": dict(record.labels),
        "metadata": dict(record.metadata),
        "workspace": record.workspace,
        "way": None if record.way is None else record.way.value,
    }


def render_spawned(spawned: Spawned, *, phases: bool) -> list[SandboxInfo]:
    """With `phases` also how long each step took, unless the same request had made them before."""
    infos = [render_sandbox(record) for record in spawned.records]
    if phases and spawned.phases:
        for info, seen in zip(infos, spawned.phases, strict=True):
            info["phases_ms"] = render_phases(seen)
    return infos


def render_phases(phases: Phases) -> dict[str, float]:
    """Milliseconds from the end of the step before to its own, in the order in which they ended."""
    taken, before = {}, phases.begun
    for step, at in sorted(phases.steps.items(), key=lambda item: item[1]):
        taken[step.replace(" ", "_")] = round((at - before) * 1000, 3)
        before = at
    return taken


def render_snapshot(view: SnapshotView) -> SnapshotInfo:
    info: SnapshotInfo = {
        "tag": view.tag,
        "dir": str(view.directory),
        "created_at_unix": view.created_at_unix,
        "status": cast(SnapshotStatus, view.status),
        "bootable": view.status == "ready",
    }
    if view.warning is not None:
        info["warning"] = view.warning
    if view.code is not None:
        info["code"] = view.code
    if view.progress is not None:
        info["progress"] = view.progress
    if view.manifest is not None:
        info["image_id"] = view.manifest.image_id
        info["engine"] = view.manifest.engine
        info["memory_mib"] = view.manifest.machine.memory_mib
        info["vcpus"] = view.manifest.machine.vcpus
        if view.manifest.machine.cpu_template is not None:
            info["cpu_template"] = view.manifest.machine.cpu_template
        info["warm"] = view.manifest.warm
        if view.manifest.rehearsal is not None:
            info["rehearsal"] = view.manifest.rehearsal
    return info


def render_template(view: TemplateView) -> TemplateInfo:
    return {
        "tag": view.tag,
        "pid": view.pid,
        "memory_bytes": view.memory_bytes,
        "made_in_seconds": round(view.made_in_s, 3),
        "created_at_unix": int(view.created_at_unix),
        "forks": view.forks,
    }


def render_snapshot_detail(detail: SnapshotDetail) -> SnapshotInfoDetail:
    return {
        "tag": detail.view.tag,
        "dir": str(detail.view.directory),
        "created_at_unix": detail.view.created_at_unix,
        "memory_logical_bytes": detail.memory_logical_bytes,
        "memory_physical_bytes": detail.memory_physical_bytes,
        "vmstate_bytes": detail.vmstate_bytes,
        "chain_depth": 0,
        "dependents": [],
        "ancestors": [],
    }


def render_workspace(record: WorkspaceRecord) -> WorkspaceInfo:
    info: WorkspaceInfo = {
        "id": record.id,
        "name": record.name,
        "source_snapshot_tag": record.source_snapshot_tag,
        "status": cast(WorkspaceStatus, record.status),
        "created_at_unix": record.created_at_unix,
        "last_active_unix": record.last_active_unix,
    }
    if record.live_sandbox_id is not None:
        info["live_sandbox_id"] = record.live_sandbox_id
    return info


def render_exec(result: CommandResult) -> ExecResponse:
    return {
        "stdout": render_output(result.stdout),
        "stderr": render_output(result.stderr),
        "exit_code": result.returncode,
        "truncated": result.output_truncated,
    }


def render_eval(result: EvalResult) -> EvalResponse:
    error = result.error
    return {
        "result": result.repr,
        "error": None if error is None else f"{error.type}: {error.message}" if error.message else error.type,
        "exit_code": 0 if error is None else 1,
        "value": result.value if result.has_value else None,
        "has_value": result.has_value,
        "stdout": render_output(result.stdout),
        "stderr": render_output(result.stderr),
        "traceback": None if error is None else error.traceback,
        "truncated": result.output_truncated or result.truncated,
    }


def render_output(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def render_process(command: Command) -> ProcessInfo:
    spec, end = command.spec, command.exit
    return {
        "pid": command.pid,
        "args": None if isinstance(spec.command, str) else list(spec.command),
        "shell": spec.command if isinstance(spec.command, str) else None,
        "pty": spec.pty is not None,
        "running": command.running,
        "exit_code": None if end is None else end.exit_code,
        "signal": None if end is None else end.signal,
        "timed_out": end is not None and end.timed_out,
        "started_at_unix": command.started_at_unix,
    }


def render_file(info: GuestFile, path: str) -> FileInfo:
    kind: Any = info.type
    return {
        "name": info.name,
        "path": path,
        "type": kind,
        "size": info.size,
        "mode": info.mode,
        "uid": info.uid,
        "gid": info.gid,
        "mtime_ns": info.mtime_ns,
        "target": info.target,
    }


def render_event_record(record: EventRecord) -> Event:
    return {
        "id": record.id,
        "ts_unix": record.ts_unix,
        "type": record.type,
        "sandbox_id": record.sandbox_id,
        "snapshot_tag": record.snapshot_tag,
        "data": record.data,
    }
