"""A daemon's first look around: what should exist against what does, and making both agree."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from forkd.errors import Conflict, ForkdError
from forkd.host.cgroup import find_group, remove_groups
from forkd.host.files import sweep_staging
from forkd.host.marked import Marked, find_marked
from forkd.host.system import steady_s
from forkd.host.threads import in_thread
from forkd.model.sandbox import State
from forkd.runtime.child import LiveSandbox
from forkd.runtime.networks import SandboxNetworks
from forkd.runtime.registry import SandboxRecord
from forkd.runtime.sandboxes import Sandboxes, describe_out_of_memory, end_processes

_ADOPTIONS_AT_ONCE = 16


@dataclass(frozen=True)
class Plan:
    adopt: tuple[SandboxRecord, ...]  # it runs, and should
    bury: tuple[SandboxRecord, ...]  # it should run, and does not: dead, for its owner to see
    drop: tuple[SandboxRecord, ...]  # half started or half removed: ended and forgotten
    keep: tuple[SandboxRecord, ...]  # dead already, not yet forgotten
    strays: frozenset[str]  # processes or directories that no row owns


def make_plan(records: Iterable[SandboxRecord], running: Collection[str], seen: Iterable[str]) -> Plan:
    """Pure. `running`: names of directories with a live VM process; `seen`: of all directories and processes."""
    by_state: dict[State, list[SandboxRecord]] = {state: [] for state in State}
    for record in records:
        by_state[record.state].append(record)
    meant_to_run = by_state[State.RUNNING] + by_state[State.PAUSED]
    owned = {record.vm for kept in by_state.values() for record in kept}
    return Plan(
        adopt=tuple(record for record in meant_to_run if record.vm in running),
        bury=tuple(record for record in meant_to_run if record.vm not in running),
        drop=tuple(by_state[State.STARTING] + by_state[State.STOPPING]),
        keep=tuple(by_state[State.DEAD]),
        strays=frozenset(seen) - owned,
    )


_log = logging.getLogger(__name__)


async def recover(sandboxes: Sandboxes, networks: SandboxNetworks) -> Plan:
    """Adopt what belongs, bury what died, end and forget the rest. Afterwards rows, processes and files agree."""
    records = sandboxes.registry.list_sandboxes()
    _check_engine(sandboxes, records)
    found = await in_thread(lambda: find_marked(sandboxes.home.vms))
    # A process may have marked itself, or what it started, with another path: only a VM's directory counts.
    leaders = {path.name: leader for path, leader in found.items() if path.parent == sandboxes.home.vms}
    on_disk = {path.name for path in sandboxes.home.vms.iterdir()}
    plan = make_plan(records, leaders.keys(), leaders.keys() | on_disk)
    for record in plan.drop:
        await _end(sandboxes, record.vm)
    for name in sorted(plan.strays):
        try:
            await _end(sandboxes, name)
        except (ForkdError, OSError) as error:
            _log.warning("%s in %s belongs to no sandbox, and cannot be ended: %s", name, sandboxes.home.vms, error)
    with sandboxes.registry.transaction():
        sandboxes.registry.forget_unfinished_spawns()
        sandboxes.registry.remove_sandboxes(record.id for record in plan.drop)
        for record in plan.drop:
            sandboxes.events.emit("sandbox.removed", sandbox_id=record.id, data={"reason": "recovered"})
    for record in plan.keep:
        await _end_processes(sandboxes, record.vm)
    for record in plan.bury:
        sandboxes.bury(record.id, _why_gone(sandboxes, record))
    gate = asyncio.Semaphore(_ADOPTIONS_AT_ONCE)
    await asyncio.gather(*(_adopt(sandboxes, networks, record, leaders[record.vm], gate) for record in plan.adopt))
    kept = {sandboxes.get(each).vm for each in sandboxes.live}
    await in_thread(lambda: remove_groups(sandboxes.home.vms, keep=kept))
    await in_thread(lambda: sweep_staging(sandboxes.home.snapshots))
    if records or plan.strays:
        _log.info(
            "Recovered: %d adopted, %d dead, %d rolled back, %d strays ended",
            len(plan.adopt),
            len(plan.bury),
            len(plan.drop),
            len(plan.strays),
        )
    return plan


def _check_engine(sandboxes: Sandboxes, records: list[SandboxRecord]) -> None:
    others = {record.engine for record in records if record.state in (State.RUNNING, State.PAUSED)}
    others.discard(sandboxes.engine.name)
    if others:
        raise Conflict(
            f"Sandboxes of engine {', '.join(sorted(others))} are running, and this daemon was started with "
            f"{sandboxes.engine.name}",
            hint=f"Start it with --engine {min(others)}, end them with forkd down, and start it again",
        )


def _why_gone(sandboxes: Sandboxes, record: SandboxRecord) -> str:
    group = find_group(sandboxes.directory(record))
    if group is not None and group.out_of_memory():
        return describe_out_of_memory(record.limits)
    return "The VM was gone when the daemon started"


async def _end(sandboxes: Sandboxes, name: str) -> None:
    await _end_processes(sandboxes, name)
    await in_thread(lambda: shutil.rmtree(sandboxes.home.vms / name, ignore_errors=True))


async def _end_processes(sandboxes: Sandboxes, name: str) -> None:
    await in_thread(lambda: end_processes(sandboxes.home.vms / name))


async def _adopt(
    sandboxes: Sandboxes, networks: SandboxNetworks, record: SandboxRecord, leader: Marked, gate: asyncio.Semaphore
) -> None:
    async with gate:
        try:
            machine = await sandboxes.engine.adopt(sandboxes.directory(record), leader)
        except ForkdError as error:
            _log.warning("Sandbox %s cannot be adopted: %s", record.id, error.message)
            await _end(sandboxes, record.vm)
            sandboxes.bury(record.id, f"It could not be adopted: {error.message}")
            return
        await networks.adopt(record, machine)
    state = State.PAUSED if machine.paused else State.RUNNING
    # Stopped by a daemon that died before it could say so, or while it forked it: no client was told of a pause.
    interrupted = machine.paused and record.state is State.RUNNING
    port = _open_port(sandboxes, record)
    with sandboxes.registry.transaction():
        if state is not record.state:
            # A daemon died between the act and the record of it; what is, counts.
            sandboxes.registry.move([record.id], state)
        sandboxes.registry.change(record.id, agent_port=port, pid=machine.pid)
        sandboxes.events.emit("sandbox.adopted", sandbox_id=record.id)
    live = LiveSandbox(record.id, machine, None, state)
    live.owed_network = not sandboxes.get(record.id).network.off
    if record.deadline_unix is not None:
        live.deadline_s = steady_s() + record.deadline_unix - time.time()
    sandboxes.hold(live)
    if interrupted:
        await _go_on(sandboxes, record.id)


async def _go_on(sandboxes: Sandboxes, sandbox_id: str) -> None:
    try:
        await sandboxes.resume(sandbox_id)
    except ForkdError as error:
        _log.warning("Sandbox %s was stopped when the last daemon died, and stays so: %s", sandbox_id, error.message)


def _open_port(sandboxes: Sandboxes, record: SandboxRecord) -> int:
    try:
        return sandboxes.ports.open(record.id, record.agent_port)
    except Conflict:
        return sandboxes.ports.open(record.id, None)
