"""From what the runtime knows to what clients see. Pure; docs/reference/rest.md says when each key is there."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TypeVar, cast

from forkd.daemon.route import Answer
from forkd.daemon.streams import render_event
from forkd.engines.base import Phases
from forkd.guest.changes import Change, Clocks
from forkd.guest.files import FileInfo as GuestFile
from forkd.guest.results import CommandResult, EvalResult
from forkd.host.cell import Cell
from forkd.model.network import Network
from forkd.runtime.checkpoints import Checkpoint
from forkd.runtime.database import flatten
from forkd.runtime.events import EventRecord
from forkd.runtime.exposed import Exposed
from forkd.runtime.networks import NetworkView, parse_ports
from forkd.runtime.origin import TemplateView
from forkd.runtime.processes import Exit, GuestProcess
from forkd.runtime.registry import SandboxRecord
from forkd.runtime.snapshot_view import SnapshotDetail, SnapshotView
from forkd.runtime.spawn import Spawned
from forkd.runtime.workspaces import WorkspaceRecord
from forkd.wire.api import (
    CellInfo,
    ChangesHead,
    CheckpointInfo,
    Event,
    FileInfo,
    LineageSandbox,
    LineageSnapshot,
    NetworkInfo,
    NetworkUsage,
    PortInfo,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
    SnapshotInfoDetail,
    TemplateInfo,
    WorkspaceInfo,
    required_keys,
)

T = TypeVar("T")
D = TypeVar("D", bound=Mapping[str, object])


def render_sandbox(record: SandboxRecord, seen: NetworkView | None = None, cell: Cell | None = None) -> SandboxInfo:
    """`seen`: what its network is doing; `cell`: what keeps its process in."""
    network = render_network(record.network)
    if seen is not None:
        network["usage"] = _render_same(NetworkUsage, seen.usage)
        network["address"] = seen.address
    other: dict[str, object] = {
        "network": network,
        "ports": [render_port(each) for each in parse_ports(record)],
        "netns": None,
        "guest_addr": f"127.0.0.1:{record.agent_port}",
        "created_at_unix": int(record.created_at_unix),
        "has_branched": record.branch_count > 0,
        "last_branch_memory_path": None,
    }
    info = _render_same(SandboxInfo, record, **flatten(record) | other)
    if cell is not None:
        lists = {"namespaces": list(cell.namespaces), "lacks": list(cell.lacks)}
        info["cell"] = _render_same(CellInfo, cell, **lists)
    return info


def render_network(network: Network) -> NetworkInfo:
    lists = {"allow": list(network.allow), "deny": list(network.deny)}
    return _render_same(NetworkInfo, network, mode=network.mode.value, **lists)


def render_port(exposed: Exposed) -> PortInfo:
    return _render_same(PortInfo, exposed)


def _render_same(kind: Callable[..., T], record: object, **other: object) -> T:
    """The keys of `kind` that are always there, in their order: those in `other`, else the record's own fields."""
    made = {key: other[key] if key in other else getattr(record, key) for key in _required_keys(kind)}
    return cast(T, made)


_required_keys = functools.cache(required_keys)


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
    info = {
        "tag": view.tag,
        "dir": str(view.directory),
        "created_at_unix": view.created_at_unix,
        "status": view.status,
        "bootable": view.status == "ready",
        "usable": view.usable,
    }
    more: dict[str, object] = {"warning": view.warning, "code": view.code, "progress": view.progress}
    more |= _render_branch(view)
    if view.manifest is not None:
        machine = view.manifest.machine
        more |= {
            "image_id": view.manifest.image_id,
            "engine": view.manifest.engine,
            "memory_mib": machine.memory_mib,
            "vcpus": machine.vcpus,
            "cpu_template": machine.cpu_template,
            "warm": view.manifest.warm,
            "rehearsal": view.manifest.rehearsal,
            "network": render_network(view.manifest.network),
        }
    return cast(SnapshotInfo, info | {key: value for key, value in more.items() if value is not None})


def _render_branch(view: SnapshotView) -> dict[str, object]:
    """Of a snapshot that is, or is to be, a branch; what was made of others has only its parent."""
    if (branch := view.branch) is not None:
        return {
            "parent_tag": branch.parent_tag,
            "branched_from": branch.ancestry.parent_id,
            "pause_ms": round(branch.pause_s * 1000),
            "checkpoint": branch.checkpoint,
            "auto": branch.auto,
        }
    manifest = view.manifest
    if manifest is None:
        return {}
    found: dict[str, object] = {"parent_tag": manifest.parent.tag if manifest.parent else None}
    if (origin := manifest.origin) is not None:
        found |= {"branched_from": origin.branched_from, "pause_ms": origin.pause_ms, "diff_ms": origin.diff_ms}
        found |= {"checkpoint": origin.checkpoint, "auto": origin.auto}
        found |= {
            "diff_physical_bytes": origin.bytes_written,
            "diff_dirty_bytes": origin.bytes_dirty,
            "diff_logical_bytes": manifest.machine.memory_mib * 2**20,
        }
    return found


def render_checkpoint(checkpoint: Checkpoint) -> CheckpointInfo:
    info = render_snapshot(checkpoint.view)
    made: CheckpointInfo = {
        "name": checkpoint.name,
        "tag": info["tag"],
        "created_at_unix": info["created_at_unix"],
        "status": info["status"],
        "pause_ms": info.get("pause_ms", 0),
    }
    if "diff_dirty_bytes" in info:
        made["bytes_dirty"] = info["diff_dirty_bytes"]
    return made


def render_template(view: TemplateView) -> TemplateInfo:
    made_in_s, created_at_unix = round(view.made_in_s, 3), int(view.created_at_unix)
    return _render_same(TemplateInfo, view, made_in_seconds=made_in_s, created_at_unix=created_at_unix)


def render_snapshot_detail(detail: SnapshotDetail) -> SnapshotInfoDetail:
    view = detail.view
    info: SnapshotInfoDetail = {
        "tag": view.tag,
        "dir": str(view.directory),
        "created_at_unix": view.created_at_unix,
        "memory_logical_bytes": detail.memory_logical_bytes,
        "memory_physical_bytes": detail.memory_physical_bytes,
        "vmstate_bytes": detail.vmstate_bytes,
        "chain_depth": len(detail.ancestors),
        "dependents": list(detail.dependents),
        "ancestors": list(detail.ancestors),
        "unique_bytes": detail.unique_bytes,
    }
    if view.manifest is not None and (parent := view.manifest.parent) is not None:
        info["parent_tag"], info["parent_content_hash"] = parent.tag, parent.hash
    return info


def render_lineage(detail: SnapshotDetail, sandboxes: list[LineageSandbox]) -> LineageSnapshot:
    info, branch = render_snapshot(detail.view), _render_branch(detail.view)
    return {
        "tag": info["tag"],
        "parent_tag": cast("str | None", branch.get("parent_tag")),
        "branched_from": cast("str | None", branch.get("branched_from")),
        "checkpoint": cast("str | None", branch.get("checkpoint")),
        "auto": bool(branch.get("auto")),
        "status": info["status"],
        "created_at_unix": info["created_at_unix"],
        "depth": len(detail.ancestors),
        "unique_bytes": detail.unique_bytes,
        "sandboxes": sandboxes,
    }


def render_workspace(record: WorkspaceRecord) -> WorkspaceInfo:
    info = _render_same(WorkspaceInfo, record)
    if record.live_sandbox_id is not None:
        info["live_sandbox_id"] = record.live_sandbox_id
    if record.current_state_tag is not None:
        info["current_state_tag"] = record.current_state_tag
    return info


# The next three are for LargeJson: output is still bytes. As JSON they are ExecResponse, EvalResponse and more of an
# ErrorBody; a test compares the keys.
Rendered = dict[str, object]


def render_exec(result: CommandResult) -> Rendered:
    return {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "exit_code": result.returncode,
        "truncated": result.output_truncated,
    }


def render_eval(result: EvalResult) -> Rendered:
    error = result.error
    return {
        "result": result.repr,
        "error": None if error is None else f"{error.type}: {error.message}" if error.message else error.type,
        "exit_code": 0 if error is None else 1,
        "value": result.value if result.has_value else None,
        "has_value": result.has_value,
        "stdout": result.stdout,
        "stderr": result.stderr,
        "traceback": None if error is None else error.traceback,
        "truncated": result.output_truncated or result.truncated,
    }


def render_timeout(result: CommandResult | EvalResult) -> Rendered:
    """What came of it until its deadline."""
    more: Rendered = {
        "stdout": result.stdout,
        "stderr": result.stderr,
        "truncated": result.output_truncated,
        "timed_out": True,
    }
    if isinstance(result, EvalResult):
        more["interpreter_restarted"] = result.interpreter_restarted
    return more


def render_process(command: GuestProcess) -> ProcessInfo:
    shell, end = isinstance(command.spec.command, str), command.exit
    return _render_same(
        ProcessInfo,
        command,
        args=None if shell else list(command.spec.command),
        shell=command.spec.command if shell else None,
        pty=command.spec.pty is not None,
        exit_code=None if end is None else end.exit_code,
        signal=None if end is None else end.signal,
        timed_out=end is not None and end.timed_out,
    )


def render_file(info: GuestFile, path: str) -> FileInfo:
    return _render_same(FileInfo, info, path=path)


def render_clocks(clocks: Clocks) -> bytes:
    return render_line(_render_same(ChangesHead, clocks, **asdict(clocks.glance)))


def render_change(change: Change) -> bytes:
    return render_line(asdict(change))


def render_line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value).encode() + b"\n"


def render_event_record(record: EventRecord) -> Event:
    return _render_same(Event, record)


def render_data(kind: str, data: bytes) -> bytes:
    return render_event(kind, {"data": base64.b64encode(data).decode("ascii")})


def render_exit(end: CommandResult | Exit) -> bytes:
    return render_event("exit", {"exit_code": end.exit_code, "signal": end.signal, "timed_out": end.timed_out})


def take_page(items: Sequence[D], key: str, limit: int | None, page_token: str | None) -> Answer[list[D]]:
    """One page of items that are sorted by `key`, with the header that leads to the next."""
    rest = [item for item in items if page_token is None or str(item[key]) > page_token]
    page = rest if limit is None else rest[:limit]
    return Answer(page, headers=next_page(str(page[-1][key]) if len(rest) > len(page) else None))


def next_page(token: str | int | None) -> dict[str, str]:
    return {} if token is None else {"X-Next-Token": str(token)}
