"""Workspaces: sandboxes with a name that can be suspended and resumed, also after a reboot.

A workspace has at most one sandbox, the newest row that bears its name; its status is what that sandbox is doing. A
suspended one has none, only its state: a layer over its source. The state is complete on disk before the sandbox ends,
and stays until the next one is.
Changes of one workspace wait for each other, and go on to their end when their caller does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from forkd.errors import Conflict, InvalidInput, NotFound
from forkd.host.faults import fault_point
from forkd.model.machine import NO_LIMITS, Limits
from forkd.model.names import SnapshotTag, parse_name, parse_tag
from forkd.model.network import Network
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime.branch_files import BranchRequest
from forkd.runtime.branches import Branches
from forkd.runtime.registry import Registry, SandboxRecord, WorkspaceRow
from forkd.runtime.sandboxes import Sandboxes
from forkd.runtime.snapshot_view import SnapshotView
from forkd.runtime.snapshots import Snapshots
from forkd.runtime.spawn import Spawned

T = TypeVar("T")

ID_PREFIX = "ws-"
RUNNING, SUSPENDED, STALE = "running", "suspended", "stale"


@dataclass(frozen=True)
class WorkspaceRecord:
    id: str
    name: str
    source_snapshot_tag: SnapshotTag
    status: str
    live_sandbox_id: str | None
    created_at_unix: int
    last_active_unix: int
    current_state_tag: SnapshotTag | None = None


class Workspaces:
    def __init__(
        self,
        registry: Registry,
        sandboxes: Sandboxes,
        snapshots: Snapshots,
        branches: Branches,
        spawn: Callable[[SandboxSpec], Awaitable[Spawned]],
    ) -> None:
        self._snapshots = snapshots
        self._branches = branches
        self._registry = registry
        self._sandboxes = sandboxes
        self._spawn_sandboxes = spawn
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def list(self) -> list[WorkspaceRecord]:
        return [self._seen(row) for row in self._registry.list_workspaces()]

    def get(self, name: str) -> WorkspaceRecord:
        return self._seen(self._row(name))

    async def create(
        self, name: str, snapshot_tag: str, limits: Limits = NO_LIMITS, network: Network | None = None
    ) -> WorkspaceRecord:
        now = time.time()
        parsed, tag = parse_name(name, "workspace name"), parse_tag(snapshot_tag)
        # The row first: it holds the name. Without a sandbox it says "stale", which a crash now makes true.
        row = WorkspaceRow(parsed, f"{ID_PREFIX}{secrets.token_hex(8)}", tag, limits, now, now, network=network)
        return await self._alone(parsed, lambda: self._create(row))

    async def suspend(self, name: str) -> WorkspaceRecord:
        return await self._alone(name, lambda: self._suspend(name))

    async def resume(self, name: str) -> WorkspaceRecord:
        return await self._alone(name, lambda: self._resume(name))

    async def remove(self, name: str) -> None:
        await self._alone(name, lambda: self._remove(name))

    async def _alone(self, name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def locked() -> T:
            async with self._locks.setdefault(name, asyncio.Lock()):
                return await work()

        return await self._sandboxes.finished(locked())

    async def _create(self, row: WorkspaceRow) -> WorkspaceRecord:
        self._registry.insert_workspace(row)
        try:
            await self._spawn(row)
        except BaseException:
            self._registry.remove_workspace(row.name)
            raise
        return self.get(row.name)

    async def _suspend(self, name: str) -> WorkspaceRecord:
        workspace = self.get(name)
        if workspace.status != RUNNING or workspace.live_sandbox_id is None:
            raise InvalidInput(f"Workspace {workspace.name} is {workspace.status}, not running")
        row, sandbox_id = self._row(name), workspace.live_sandbox_id
        parent = row.source_snapshot_tag if self._snapshots.store.has(row.source_snapshot_tag) else None
        request = BranchRequest(new_state_tag(row.id), parent_tag=parent, auto=True, eager=True)
        branch = await self._branches.branch(sandbox_id, request)
        await self._branches.written(branch)
        fault_point("suspend.written")
        self._registry.set_workspace_state(row.name, branch.tag)
        fault_point("suspend.recorded")
        await self._end_sandboxes(row.name)
        await self._drop_state(row.current_state_tag)
        return self._touched(row.name)

    async def _resume(self, name: str) -> WorkspaceRecord:
        row, workspace = self._row(name), self.get(name)
        if workspace.status == RUNNING:
            raise InvalidInput(f"Workspace {row.name} runs already")
        if workspace.status == SUSPENDED and workspace.live_sandbox_id is not None:
            await self._sandboxes.resume(workspace.live_sandbox_id)  # it was paused, by hand or by its deadline
        else:
            await self._end_sandboxes(row.name)
            await self._spawn(row)
        return self._touched(row.name)

    async def _remove(self, name: str) -> None:
        row = self._row(name)
        await self._end_sandboxes(row.name)
        self._registry.remove_workspace(row.name)
        await self._drop_state(row.current_state_tag)

    async def _spawn(self, row: WorkspaceRow) -> None:
        tag = row.current_state_tag or row.source_snapshot_tag
        # Its state knows what its sandbox had in the end.
        network = row.network if row.current_state_tag is None else None
        await self._spawn_sandboxes(SandboxSpec(tag, limits=row.limits, workspace=row.name, network=network))

    async def _drop_state(self, tag: SnapshotTag | None) -> None:
        """The state before; unless somebody made something of it meanwhile."""
        if tag is not None:
            with contextlib.suppress(Conflict, NotFound):
                await self._snapshots.remove(tag)

    async def recover(self) -> None:
        """After a crash: states that no workspace has, as they were replaced or never recorded."""
        kept = {row.current_state_tag for row in self._registry.list_workspaces()}
        for view in self._snapshots.list():
            if is_state(view) and view.tag not in kept:
                await self._drop_state(view.tag)

    async def _end_sandboxes(self, name: str) -> None:
        """One, as a rule: what it replaced may still be on its way out."""
        for record in self._registry.list_in_workspace(name):
            try:
                await self._sandboxes.kill(record.id)
            except NotFound:
                pass  # it went by itself meanwhile

    def _touched(self, name: str) -> WorkspaceRecord:
        self._registry.touch_workspace(name, time.time())
        return self.get(name)

    def _row(self, name: str) -> WorkspaceRow:
        row = self._registry.find_workspace(parse_name(name, "workspace name"))
        if row is None:
            raise NotFound(f"There is no workspace {name}", hint="List them with: forkd workspace ls")
        return row

    def _seen(self, row: WorkspaceRow) -> WorkspaceRecord:
        record = next(iter(self._registry.list_in_workspace(row.name)), None)
        status = find_status(record, row.current_state_tag)
        return WorkspaceRecord(
            id=row.id,
            name=row.name,
            source_snapshot_tag=row.source_snapshot_tag,
            status=status,
            live_sandbox_id=record.id if record is not None and is_alive(record) else None,
            created_at_unix=int(row.created_at_unix),
            last_active_unix=int(row.last_active_unix),
            current_state_tag=row.current_state_tag,
        )


def new_state_tag(workspace_id: str) -> SnapshotTag:
    return parse_tag(f"{workspace_id}-{secrets.token_hex(4)}")


def is_state(view: SnapshotView) -> bool:
    origin = view.manifest.origin if view.manifest else None
    return origin is not None and origin.auto and view.tag.startswith(ID_PREFIX)


def is_alive(record: SandboxRecord) -> bool:
    return record.state not in (State.DEAD, State.STOPPING)


def find_status(record: SandboxRecord | None, state_tag: str | None) -> str:
    if record is None or not is_alive(record):
        return STALE if state_tag is None else SUSPENDED
    return SUSPENDED if record.state is State.PAUSED else RUNNING
