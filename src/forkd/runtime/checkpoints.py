"""Moving a sandbox in time: checkpoints of it, going back to one, and taking the place of a fork that did better.

The sandbox keeps its id, address, limits and deadline; only its VM is another one. That is forked and has kept the
contract before anything changes: until then a failure leaves the sandbox as it was.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from forkd.engines.base import Machine
from forkd.errors import InvalidInput, NotFound
from forkd.host.faults import fault_point
from forkd.model.names import SnapshotTag, new_identity, parse_name, parse_tag
from forkd.model.sandbox import State
from forkd.runtime.branch_files import BranchRequest
from forkd.runtime.branches import Branches
from forkd.runtime.child import Child, LiveSandbox
from forkd.runtime.fork import fork_one
from forkd.runtime.leases import is_leased, names_of
from forkd.runtime.origin import Origin
from forkd.runtime.registry import SandboxRecord
from forkd.runtime.sandboxes import Sandboxes, not_running
from forkd.runtime.snapshot_view import SnapshotView, find_checkpoint, find_instant
from forkd.runtime.snapshots import Snapshots

MAX_NAME = 32
_GENERATED = re.compile(r"c([0-9]{1,9})")


@dataclass(frozen=True)
class Checkpoint:
    name: str
    view: SnapshotView


class Checkpoints:
    def __init__(self, sandboxes: Sandboxes, snapshots: Snapshots, branches: Branches) -> None:
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._branches = branches

    def list(self, sandbox_id: str) -> list[Checkpoint]:
        """The oldest first."""
        record = self._sandboxes.get(sandbox_id)
        found = [
            Checkpoint(name, view) for view in self._snapshots.list() if (name := find_checkpoint(view, record.id))
        ]
        return sorted(found, key=lambda each: find_instant(each.view))

    async def create(self, sandbox_id: str, name: str | None = None) -> Checkpoint:
        """Returns when it can be gone back to; it is written to disk behind that."""
        record = self._sandboxes.get(sandbox_id)
        chosen = choose_name([each.name for each in self.list(record.id)]) if name is None else name
        tag = checkpoint_tag(record.id, chosen)
        await self._branches.branch(record.id, BranchRequest(tag, checkpoint=chosen, auto=True))
        return Checkpoint(chosen, self._snapshots.get(tag))

    async def remove(self, sandbox_id: str, name: str) -> None:
        record = self._sandboxes.get(sandbox_id)
        try:
            await self._snapshots.remove(checkpoint_tag(record.id, name))
        except NotFound:
            raise _absent(record.id, name) from None

    async def rewind(self, sandbox_id: str, to: str | None = None) -> SandboxRecord:
        """Back to a checkpoint, or to the newest one."""
        return await self._sandboxes.finished(self._rewind(sandbox_id, to))

    async def promote(self, parent_id: str, child_id: str) -> SandboxRecord:
        """The sandbox goes on where its child is; the child and its siblings end."""
        return await self._sandboxes.finished(self._promote(parent_id, child_id))

    async def _rewind(self, sandbox_id: str, to: str | None) -> SandboxRecord:
        record, live = self._sandboxes.get(sandbox_id), self._sandboxes.held(sandbox_id)
        name = self.newest(record.id) if to is None else to
        try:
            async with self._snapshots.held(checkpoint_tag(record.id, name)) as origin, live.lock:
                await self._move(live, record, origin)
        except NotFound:
            raise _absent(record.id, name) from None
        self._sandboxes.events.emit("sandbox.rewound", sandbox_id=record.id, data={"to": name})
        return self._sandboxes.get(record.id)

    def newest(self, sandbox_id: str) -> str:
        found = self.list(sandbox_id)
        if not found:
            raise NotFound(
                f"Sandbox {sandbox_id} has no checkpoint", hint=f"Make one with: forkd checkpoint {sandbox_id}"
            )
        return found[-1].name

    async def _promote(self, parent_id: str, child_id: str) -> SandboxRecord:
        record, live = self._sandboxes.get(parent_id), self._sandboxes.held(parent_id)
        child = self._sandboxes.get(child_id)
        if child.parent_id != record.id:
            raise InvalidInput(
                f"Sandbox {child.id} was not forked from {record.id}", hint="forkd tree shows who came from whom"
            )
        async with self._branches.captured(child.id) as origin, live.lock:
            await self._move(live, record, origin)
        fault_point("promote.moved")
        self._sandboxes.events.emit("sandbox.promoted", sandbox_id=record.id, data={"child": child.id})
        await self._sandboxes.kill_these(
            each.id for each in self._sandboxes.registry.list_sandboxes() if each.parent_id == record.id
        )
        return self._sandboxes.get(record.id)

    async def _move(self, live: LiveSandbox, record: SandboxRecord, origin: Origin) -> None:
        """Under the lock of the sandbox."""
        if live.state not in (State.RUNNING, State.PAUSED):
            raise not_running(self._sandboxes.get(record.id))
        record = self._sandboxes.get(record.id)  # its network may have changed since
        child = await self._fork(record, origin)
        fault_point("rewind.forked")
        registry = self._sandboxes.registry
        try:
            with registry.transaction(durable=True):
                changes = {"vm": child.vm, "pid": child.machine.pid, "way": child.machine.phases.way}
                registry.change(record.id, **changes)
                if live.state is State.PAUSED:
                    registry.move([record.id], State.RUNNING)
        except BaseException:
            await child.kill()
            await self._sandboxes.leases.release(child.vm)
            raise
        fault_point("rewind.recorded")
        left = live.move_to(child.machine, child.agent)
        live.state = State.RUNNING
        self._sandboxes.watch(live)
        # Beside us: nothing waits for its end, and it is a stray to the next daemon.
        self._sandboxes.own(self._end(left, record.vm))

    async def _end(self, machine: Machine, vm: str) -> None:
        await machine.kill()
        await self._sandboxes.leases.release(vm)

    async def _fork(self, record: SandboxRecord, origin: Origin) -> Child:
        engine, home = self._sandboxes.engine, self._sandboxes.home
        if origin.frozen is not None:
            engine.check(origin.frozen)
        name = f"{record.id}-{secrets.token_hex(3)}"
        identity = new_identity(record.id)
        leases, lease = self._sandboxes.leases, None
        if is_leased(record):
            lease = leases.take(name, record.network, names_of(record), sandbox_id=record.id)
        async with leases.given(lease) as nic:
            return await fork_one(
                engine,
                origin.frozen,
                identity,
                home.vms,
                record.limits,
                origin.template,
                name=name,
                nic=nic,
                network=not record.network.off,
            )


def checkpoint_tag(sandbox_id: str, name: str) -> SnapshotTag:
    """Names of checkpoints are legal tags, and shorter."""
    if len(parse_name(name, "checkpoint name")) > MAX_NAME:
        raise InvalidInput(f"A checkpoint name has at most {MAX_NAME} characters, got {len(name)}")
    return parse_tag(f"{sandbox_id}-{name}")


def choose_name(taken: list[str]) -> str:
    """The next of c1, c2, ..."""
    numbers = [int(found[1]) for name in taken if (found := _GENERATED.fullmatch(name))]
    return f"c{max(numbers, default=0) + 1}"


def _absent(sandbox_id: str, name: str) -> NotFound:
    return NotFound(
        f"Sandbox {sandbox_id} has no checkpoint {ascii(name)[1:-1][:70]}",
        hint=f"List them with: forkd checkpoint {sandbox_id} --ls",
    )
