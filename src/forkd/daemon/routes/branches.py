"""Branches of running sandboxes: new tags, forks, checkpoints, rewind; and chains of snapshots."""

from __future__ import annotations

import shlex
from typing import Annotated

from pydantic import Field

from forkd.daemon.call import Call
from forkd.daemon.inputs import (
    BranchBody,
    CheckpointBody,
    CompactBody,
    DeriveBody,
    ForkBody,
    PromoteBody,
    PruneBody,
    RewindBody,
    SandboxId,
    TagInPath,
)
from forkd.daemon.render import render_checkpoint, render_sandbox, render_snapshot, render_spawned
from forkd.daemon.route import Answer, InHeader, route
from forkd.daemon.routes.sandboxes import MAX_KEY, count_spawn, parse_fork_spec, parse_key
from forkd.errors import InvalidInput
from forkd.host.threads import in_thread
from forkd.model.names import parse_tag
from forkd.runtime.branch_files import BranchRequest, Mode
from forkd.runtime.derive import DeriveRequest
from forkd.runtime.freeze import Warmup
from forkd.store.retention import Policy as RetentionPolicy
from forkd.wire.api import CheckpointInfo, PruneResult, SandboxInfo, SnapshotInfo, VerifyResult

_PAUSE = {"X-Forkd-Pause-Ms": "How long the source stood still"}


@route(
    "POST",
    "/v1/sandboxes/{id}/branch",
    status=201,
    also={202: "It is being written, and can be forked from already"},
    errors=(409, 501, 502, 504),
)
async def branch_sandbox(call: Call, id: SandboxId, body: BranchBody) -> Answer[SnapshotInfo]:
    """Freeze it where it is, under `tag` (else one is made up). `full`: the snapshot needs no other; `diff`, `live`: a
    layer over what the sandbox was forked from. With `wait` false 202, and the tag can be forked from at once."""
    call.runtime.branches.check_turn(None if body.tag is None else parse_tag(body.tag))
    check_branch(body)
    live, diff = body.live or body.mode == "live", body.diff or body.mode == "diff"
    mode = Mode.LIVE if live else Mode.DIFF if diff else Mode.FULL
    tags = [None if tag is None else parse_tag(tag) for tag in (body.tag, body.parent_tag)]
    branch = await call.runtime.branches.branch(id, BranchRequest(tags[0], mode, tags[1], eager=body.wait))
    if not body.wait:
        return Answer(render_snapshot(call.runtime.snapshots.get(branch.tag)), 202)
    async with call.while_connected():
        return Answer(render_snapshot(await call.runtime.branches.written(branch)))


@route(
    "POST",
    "/v1/sandboxes/{id}/fork",
    status=201,
    headers=_PAUSE,
    errors=(409, 501, 502, 504),
    plus=True,
)
async def fork_sandbox(
    call: Call,
    id: SandboxId,
    body: ForkBody,
    idempotency_key: Annotated[str, Field(max_length=MAX_KEY), InHeader()] | None = None,
) -> Answer[list[SandboxInfo]]:
    """`count` sandboxes that start where this one is, all or none. With `tag` the branch is kept under it. Limits are
    those of the source, unless given."""
    record = call.runtime.sandboxes.get(id)
    spec = parse_fork_spec(body, record.snapshot_tag, call.token)
    key = None if idempotency_key is None else parse_key(idempotency_key, call.token or "", [record.id, call.json])
    tag = None if body.tag is None else parse_tag(body.tag)
    spawned = await call.runtime.fork(id, spec, key=key, tag=tag)
    count_spawn(call, spawned)
    return Answer(render_spawned(spawned, phases=False), headers={"X-Forkd-Pause-Ms": f"{spawned.pause_s * 1000:.1f}"})


@route("POST", "/v1/sandboxes/{id}/checkpoints", status=201, errors=(409, 501, 502, 504), plus=True)
async def create_checkpoint(call: Call, id: SandboxId, body: CheckpointBody) -> CheckpointInfo:
    """A moment to go back to; without `name` the next of c1, c2, ... It ends with its sandbox."""
    return render_checkpoint(await call.runtime.checkpoints.create(id, body.name))


@route("GET", "/v1/sandboxes/{id}/checkpoints", plus=True)
async def list_checkpoints(call: Call, id: SandboxId) -> list[CheckpointInfo]:
    """Oldest first."""
    return [render_checkpoint(each) for each in call.runtime.checkpoints.list(id)]


@route("DELETE", "/v1/sandboxes/{id}/checkpoints/{name}", errors=(409,), plus=True)
async def delete_checkpoint(call: Call, id: SandboxId, name: TagInPath) -> None:
    """409 where another snapshot stands on it."""
    await call.runtime.checkpoints.remove(id, name)


@route("POST", "/v1/sandboxes/{id}/rewind", errors=(409, 501, 502, 504), plus=True)
async def rewind_sandbox(call: Call, id: SandboxId, body: RewindBody) -> SandboxInfo:
    """Back to the checkpoint `to`, or the newest. Id, address, limits and deadline stay; commands under way end. A
    rewind that fails leaves it as it was. `discard`: the checkpoint is removed afterwards."""
    checkpoints = call.runtime.checkpoints
    name = body.to or checkpoints.newest(id)
    record = await checkpoints.rewind(id, name)
    if body.discard:
        await checkpoints.remove(id, name)
    return render_sandbox(record)


@route("POST", "/v1/sandboxes/{id}/promote", errors=(409, 501, 502, 504), plus=True)
async def promote_sandbox(call: Call, id: SandboxId, body: PromoteBody) -> SandboxInfo:
    """It goes on where its fork `child` is; that one and its siblings are removed."""
    call.sandboxes.append(body.child)
    return render_sandbox(await call.runtime.checkpoints.promote(id, body.child))


@route("POST", "/v1/snapshots/{tag}/derive", status=201, errors=(409, 501, 502, 504), plus=True)
async def derive_snapshot(call: Call, tag: TagInPath, body: DeriveBody) -> SnapshotInfo:
    """Fork it, run Python (`code`) and a command (`args` or `shell`), save only the difference under the new `tag`."""
    if body.args is not None and body.shell is not None:
        raise InvalidInput("args and shell exclude each other")
    command = body.shell if body.args is None else shlex.join(body.args)
    warmup = Warmup(body.code, command, body.timeout_secs)
    request = DeriveRequest(parse_tag(body.tag), parse_tag(tag), warmup, body.network)
    return render_snapshot(await call.runtime.derive(request, call.token))


@route("POST", "/v1/snapshots/{tag}/compact", errors=(409,))
async def compact_snapshot(call: Call, tag: TagInPath, body: CompactBody) -> SnapshotInfo:
    """The same under `to`, as a snapshot that needs no other."""
    source, to = parse_tag(tag), parse_tag(body.to)
    if source == to:
        raise InvalidInput("A snapshot cannot be compacted into itself")
    return render_snapshot(await call.runtime.snapshots.compact(source, to))


@route("POST", "/v1/snapshots/{tag}/verify", errors=(409,), plus=True)
async def verify_snapshot(call: Call, tag: TagInPath) -> VerifyResult:
    """Read all of it, and of the snapshots below it. 409 `snapshot_damaged` names file and chunk."""
    found = await in_thread(lambda: call.runtime.snapshots.store.verify(parse_tag(tag)))
    return {"tag": tag, "files": found.files, "bytes": found.bytes, "chain": list(found.chain)}


@route("POST", "/v1/snapshots/prune", errors=(409,), plus=True)
async def prune_snapshots(call: Call, body: PruneBody) -> PruneResult:
    """Remove branches by rules, which all count: a snapshot goes when one says so and none keeps it. Never one that a
    sandbox or another snapshot needs, or that no branch made. `dry_run`: only tell."""
    policy = RetentionPolicy(body.keep_last, body.keep_tagged, body.max_age_secs, body.max_bytes)
    pruned = await call.runtime.prune(policy, dry_run=body.dry_run)
    removed = [{"tag": each.tag, "bytes": each.bytes, "why": each.why} for each in pruned.removed]
    return {"removed": removed, "kept": pruned.kept, "dry_run": body.dry_run}  # type: ignore[typeddict-item]


def check_branch(body: BranchBody) -> None:
    """What can never be asked for, in the order of forkd's own checks."""
    for tag in (body.tag, body.parent_tag):
        if tag is not None:
            parse_tag(tag)
    if body.mode is not None and (body.diff or body.live):
        raise InvalidInput("mode excludes diff and live")
    if body.measure_diff + (body.diff or body.mode == "diff") + (body.live or body.mode == "live") > 1:
        raise InvalidInput("measure_diff, diff and live exclude each other")
    if not body.wait and not (body.live or body.mode == "live"):
        raise InvalidInput("wait=false needs a live branch")
    if body.parent_tag is not None and not (body.diff or body.mode == "diff"):
        raise InvalidInput("parent_tag needs a diff")
