"""Sandboxes: forking, looking, ending, pausing; and workspaces, which keep one under a name."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from forkd.daemon.call import Call
from forkd.daemon.errors import with_status
from forkd.daemon.inputs import (
    MAX_ID,
    Body,
    ChildrenBody,
    Flag,
    ForkBody,
    Limit,
    PageToken,
    SandboxId,
    ShortText,
    SpawnBody,
    SuspendBody,
    Tag,
    TagInPath,
    TimeoutBody,
    WorkspaceBody,
)
from forkd.daemon.render import next_page, render_sandbox, render_spawned, render_workspace, take_page
from forkd.daemon.route import Answer, InHeader, Raw, route
from forkd.errors import InvalidInput, Unsupported
from forkd.model.names import SnapshotTag, parse_tag
from forkd.model.sandbox import OnTimeout, SandboxSpec, State, check_pairs
from forkd.runtime.registry import IdempotencyKey, SandboxQuery
from forkd.runtime.spawn import Spawned
from forkd.runtime.workspaces import WorkspaceRecord
from forkd.wire.api import SandboxInfo, SpawnCancelled, WorkspaceInfo

MAX_KEY = 200
_KEY = re.compile(r"[\x20-\x7e]{1,200}")
_STATES = "|".join(state.value for state in State)


@route("GET", "/v1/sandboxes")
async def list_sandboxes(
    call: Call,
    state: Annotated[str, Field(pattern=f"^({_STATES})$")] | None = None,
    snapshot_tag: ShortText | None = None,
    label: list[str] | None = None,
    metadata: list[str] | None = None,
    limit: Limit | None = None,
    page_token: PageToken | None = None,
) -> Answer[list[SandboxInfo]]:
    """Oldest first. **+** `?label=k=v` and `?metadata=k=v` may be repeated; all must match."""
    query = SandboxQuery(
        states=frozenset() if state is None else frozenset({State(state)}),
        snapshot_tag=None if snapshot_tag is None else parse_tag(snapshot_tag),
        labels=parse_pairs(label or (), "label"),
        metadata=parse_pairs(metadata or (), "metadata"),
        after=parse_page(page_token),
        limit=limit,
    )
    records, after = call.runtime.sandboxes.find(query)
    return Answer([render_sandbox(record) for record in records], headers=next_page(after))


@route(
    "POST",
    "/v1/sandboxes",
    status=201,
    headers={"X-Forkd-Failed": "How many did not come up, with allow_partial"},
    errors=(404, 409, 501, 502, 504),
)
async def spawn_sandboxes(
    call: Call,
    body: SpawnBody,
    phases: Flag = False,
    idempotency_key: Annotated[str, Field(max_length=MAX_KEY), InHeader()] | None = None,
) -> Answer[list[SandboxInfo]]:
    """Fork `n`."""
    spec = parse_spec(body, call.token)
    key = None if idempotency_key is None else parse_key(idempotency_key, call.token or "", call.json)
    begun = time.perf_counter()
    spawned = await call.runtime.spawn(spec, key=key)
    if spawned.fork_s:  # else the same request made these before
        call.daemon.metrics.spawn_s.observe(time.perf_counter() - begun)
    count_spawn(call, spawned)
    headers = {"X-Forkd-Failed": str(spawned.failed)} if spawned.failed else {}
    return Answer(render_spawned(spawned, phases=phases), headers=headers)


def count_spawn(call: Call, spawned: Spawned) -> None:
    metrics = call.daemon.metrics
    if spawned.fork_s:
        metrics.spawned.inc(len(spawned.records))
    for way in spawned.ways:
        metrics.forks.labels(way.value).inc()
    for took_s in spawned.contract_s:
        metrics.identity_s.observe(took_s)
    call.sandboxes += [record.id for record in spawned.records]


@route("DELETE", "/v1/spawns", plus=True)
async def cancel_spawn(
    call: Call, idempotency_key: Annotated[str, Field(max_length=MAX_KEY), InHeader()]
) -> SpawnCancelled:
    """Remove what the spawn of this `Idempotency-Key` made, and refuse the key from now on. Never spawns."""
    check_key(idempotency_key)
    call.sandboxes += (removed := await call.runtime.cancel_spawn(call.token or "", idempotency_key))
    return {"removed": removed}


@route("GET", "/v1/sandboxes/{id}")
async def get_sandbox(call: Call, id: SandboxId, cell: Flag = False) -> SandboxInfo:
    """Also a dead one, for ten minutes. Its `network` has `usage` and `address` only here, and with `cell=true` it has
    `cell`: what keeps its VM in.
    """
    record = call.runtime.sandboxes.get(id)
    network = await call.runtime.networks.look_at(record)
    return render_sandbox(record, network, await call.runtime.sandboxes.look_at_cell(record.id) if cell else None)


@route("DELETE", "/v1/sandboxes/{id}", errors=(409,))
async def kill_sandbox(call: Call, id: SandboxId) -> None:
    """Kill and forget it; the second time 404."""
    await call.runtime.sandboxes.kill(id)


@route("POST", "/v1/sandboxes/{id}/pause", errors=(409, 502, 504), plus=True)
async def pause_sandbox(call: Call, id: SandboxId) -> SandboxInfo:
    """May be repeated."""
    return render_sandbox(await call.runtime.sandboxes.pause(id))


@route("POST", "/v1/sandboxes/{id}/resume", errors=(409, 502, 504), plus=True)
async def resume_sandbox(call: Call, id: SandboxId) -> SandboxInfo:
    """May be repeated."""
    return render_sandbox(await call.runtime.sandboxes.resume(id))


@route("POST", "/v1/sandboxes/{id}/timeout", errors=(409,), plus=True)
async def set_sandbox_timeout(call: Call, id: SandboxId, body: TimeoutBody) -> SandboxInfo:
    """A number of seconds from now, or null: none; then `kill` or `pause`. `extend`: never makes a life shorter."""
    on_timeout = None if body.on_timeout is None else OnTimeout(body.on_timeout)
    sandboxes = call.runtime.sandboxes
    return render_sandbox(sandboxes.set_timeout(id, body.timeout_secs, on_timeout, extend=body.extend))


class NameBody(Body):
    name: Tag | None


@route("POST", "/v1/sandboxes/{id}/rename", errors=(409,), plus=True)
async def rename_sandbox(call: Call, id: SandboxId, body: NameBody) -> SandboxInfo:
    """A name that can be used in place of the id, or null: none. It is unique in this home."""
    return render_sandbox(call.runtime.sandboxes.rename(id, body.name))


@route(
    "GET",
    "/v1/sandboxes/{id}/console",
    gives=Raw("text/plain; charset=utf-8", "The end of the guest's console"),
    plus=True,
)
async def read_console(call: Call, id: SandboxId) -> bytes:
    """The last 1 MiB of the guest's console; also of a dead one."""
    return (await call.runtime.sandboxes.console(id)).encode("utf-8", "replace")


@route("GET", "/v1/workspaces")
async def list_workspaces(
    call: Call, limit: Limit | None = None, page_token: PageToken | None = None
) -> Answer[list[WorkspaceInfo]]:
    """By name."""
    page = [render_workspace(record) for record in call.runtime.workspaces.list()]
    return take_page(sorted(page, key=lambda info: info["name"]), "name", limit, page_token)


@route("POST", "/v1/workspaces", status=201, errors=(404, 409, 501, 502, 504))
async def create_workspace(call: Call, body: WorkspaceBody) -> WorkspaceInfo:
    """**+** takes all limits of [a spawn](#post-v1sandboxes), and `network`."""
    made = await call.runtime.workspaces.create(body.name, body.snapshot_tag, body.limits(), body.network)
    return _render_workspace(call, made)


@route("GET", "/v1/workspaces/{name}")
async def get_workspace(call: Call, name: TagInPath) -> WorkspaceInfo:
    """With its sandbox, when it has one."""
    return _render_workspace(call, call.runtime.workspaces.get(name))


@route("DELETE", "/v1/workspaces/{name}", errors=(409,))
async def delete_workspace(call: Call, name: TagInPath) -> None:
    """With its sandbox."""
    await call.runtime.workspaces.remove(name)


@route("POST", "/v1/workspaces/{name}/suspend", errors=(409, 502, 504))
async def suspend_workspace(call: Call, name: TagInPath, body: SuspendBody) -> WorkspaceInfo:
    """`{}` is enough. Its state is written to disk, and its VM ends."""
    return _render_workspace(call, await call.runtime.workspaces.suspend(name))


@route("POST", "/v1/workspaces/{name}/resume", errors=(409, 501, 502, 504))
async def resume_workspace(call: Call, name: TagInPath) -> WorkspaceInfo:
    """Goes on from its state; a stale one starts again from its source."""
    return _render_workspace(call, await call.runtime.workspaces.resume(name))


def _render_workspace(call: Call, record: WorkspaceRecord) -> WorkspaceInfo:
    if record.live_sandbox_id is not None:
        call.sandboxes.append(record.live_sandbox_id)
    return render_workspace(record)


def parse_spec(body: SpawnBody, owner: str | None) -> SandboxSpec:
    """`live_fork` is for forkd, where a branch needs it; here every sandbox can be branched."""
    if body.hugepages:
        error = Unsupported("hugepages is not built yet", hint="Ask without it: forks share memory as they are")
        raise with_status(error, 400)
    return SandboxSpec(
        snapshot_tag=parse_tag(body.snapshot_tag),
        n=body.n,
        **_common(body, owner),
        agent_port=body.agent_port,
        allow_partial=body.allow_partial,
    )


def parse_fork_spec(body: ForkBody, tag: SnapshotTag, owner: str | None) -> SandboxSpec:
    return SandboxSpec(snapshot_tag=tag, n=body.count, **_common(body, owner))


def _common(body: ChildrenBody, owner: str | None) -> dict[str, Any]:
    return {
        "limits": body.limits(),
        "timeout_s": body.timeout_secs,
        "on_timeout": OnTimeout(body.on_timeout),
        "env": body.env,
        "labels": body.labels,
        "metadata": body.metadata,
        "owner": owner,
        "network": body.network,
    }


def check_key(key: str) -> None:
    if _KEY.fullmatch(key) is None:
        raise InvalidInput(f"Idempotency-Key must be 1 to {MAX_KEY} printable ASCII characters")


def parse_key(key: str, owner: str, raw: Any) -> IdempotencyKey:
    check_key(key)
    canonical = json.dumps(raw, sort_keys=True, separators=(",", ":"))
    return IdempotencyKey(key, owner, hashlib.sha256(canonical.encode()).hexdigest())


def parse_page(token: str | None) -> int:
    if token is None:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) < 20 and int(token) <= MAX_ID):
        raise InvalidInput("Invalid page_token: not issued by this daemon", hint="Take it from the header X-Next-Token")
    return int(token)


def parse_pairs(texts: Sequence[str], what: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(f"?{what}= takes NAME=VALUE, got {ascii(text)[:70]}")
        pairs[name] = value
    check_pairs(pairs, what)
    return pairs
