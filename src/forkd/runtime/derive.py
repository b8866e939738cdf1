"""Deriving a snapshot: a sandbox of one runs something, an install for example, and only the difference is saved."""

from __future__ import annotations

from dataclasses import dataclass

from forkd.errors import InvalidInput
from forkd.host.faults import fault_point
from forkd.model.names import SnapshotTag
from forkd.model.network import Network
from forkd.model.sandbox import SandboxSpec
from forkd.runtime.branch_files import BranchRequest, Mode
from forkd.runtime.branches import Branches
from forkd.runtime.freeze import Warmup, warm_up
from forkd.runtime.sandboxes import Sandboxes
from forkd.runtime.snapshot_view import SnapshotView
from forkd.runtime.snapshots import Snapshots
from forkd.runtime.spawn import Spawner

# Of the sandbox that it runs in; the value is the tag to be.
LABEL = "forkd/derives"


@dataclass(frozen=True)
class DeriveRequest:
    tag: SnapshotTag
    source: SnapshotTag
    warmup: Warmup
    network: Network | None = None  # None: that of the source

    def __post_init__(self) -> None:
        if self.warmup.code is None and self.warmup.command is None:
            raise InvalidInput("A derived snapshot needs something to run", hint="Give a command, or Python code")


class Deriver:
    def __init__(self, sandboxes: Sandboxes, snapshots: Snapshots, branches: Branches, spawner: Spawner) -> None:
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._branches = branches
        self._spawner = spawner

    async def derive(self, request: DeriveRequest, owner: str | None = None) -> SnapshotView:
        """Goes on to its end, or to nothing, when its caller does not wait."""
        return await self._sandboxes.finished(self._derive(request, owner))

    async def recover(self) -> None:
        """After a crash: sandboxes that something was run in, and that nobody waits for."""
        records = self._sandboxes.registry.list_sandboxes()
        await self._sandboxes.kill_these(record.id for record in records if LABEL in record.labels)

    async def _derive(self, request: DeriveRequest, owner: str | None) -> SnapshotView:
        self._snapshots.check_free(request.tag)
        labels = {LABEL: request.tag}
        spawned = await self._spawner.spawn(
            SandboxSpec(request.source, labels=labels, owner=owner, network=request.network)
        )
        sandbox_id = spawned.records[0].id
        try:
            async with self._sandboxes.use(sandbox_id) as live:
                await warm_up(live.agent, request.warmup)
            fault_point("derive.ran")
            asked = BranchRequest(request.tag, Mode.DIFF, settled=True, eager=True)
            branch = await self._branches.branch(sandbox_id, asked)
            return await self._branches.written(branch)
        finally:
            await self._sandboxes.kill(sandbox_id)
