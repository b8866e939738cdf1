"""Carrying out the plan of a daemon's first look around."""

from __future__ import annotations

import asyncio
import logging
import shutil

from forkd.errors import Conflict, ForkdError
from forkd.host.cgroup import find_group, remove_groups
from forkd.host.files import sweep_staging
from forkd.host.marked import Marked, find_marked
from forkd.host.threads import in_thread
from forkd.model.sandbox import SandboxRecord, State
from forkd.runtime.live import LiveSandbox
from forkd.runtime.recovery import Plan, make_plan
from forkd.runtime.roster import Roster, describe_out_of_memory, end_processes

_log = logging.getLogger(__name__)

_ADOPTIONS_AT_ONCE = 16


async def recover(roster: Roster) -> Plan:
    """Adopt what belongs, bury what died, end and forget the rest. Afterwards rows, processes and files agree."""
    records = roster.registry.list_sandboxes()
    _check_engine(roster, records)
    found = await in_thread(lambda: find_marked(roster.home.vms))
    leaders = {path.relative_to(roster.home.vms).parts[0]: leader for path, leader in found.items()}
    on_disk = {path.name for path in roster.home.vms.iterdir()}
    plan = make_plan(records, leaders.keys(), leaders.keys() | on_disk)
    for name in [*(record.id for record in plan.drop), *sorted(plan.strays)]:
        await _end(roster, name)
    with roster.registry.transaction():
        roster.registry.remove_sandboxes(record.id for record in plan.drop)
        for record in plan.drop:
            roster.events.emit("sandbox.removed", sandbox_id=record.id, data={"reason": "recovered"})
        roster.registry.forget_lost_spawns()
    for record in plan.keep:
        await _end_processes(roster, record.id)
    for record in plan.bury:
        roster.bury(record.id, _why_gone(roster, record))
    gate = asyncio.Semaphore(_ADOPTIONS_AT_ONCE)
    await asyncio.gather(*(_adopt(roster, record, leaders[record.id], gate) for record in plan.adopt))
    await in_thread(lambda: remove_groups(roster.home.vms, keep=roster.live.keys()))
    await in_thread(lambda: sweep_staging(roster.home.snapshots))
    if records or plan.strays:
        _log.info(
            "Recovered: %d adopted, %d dead, %d rolled back, %d strays ended",
            len(plan.adopt),
            len(plan.bury),
            len(plan.drop),
            len(plan.strays),
        )
    return plan


def _check_engine(roster: Roster, records: list[SandboxRecord]) -> None:
    others = {record.engine for record in records if record.state in (State.RUNNING, State.PAUSED)}
    others.discard(roster.engine.name)
    if others:
        raise Conflict(
            f"Sandboxes of engine {', '.join(sorted(others))} are running, and this daemon was started with "
            f"{roster.engine.name}",
            hint=f"Start it with --engine {min(others)}, end them with forkd down, and start it again",
        )


def _why_gone(roster: Roster, record: SandboxRecord) -> str:
    group = find_group(roster.directory(record.id))
    if group is not None and group.out_of_memory():
        return describe_out_of_memory(record.limits)
    return "The VM was gone when the daemon started"


async def _end(roster: Roster, name: str) -> None:
    await _end_processes(roster, name)
    await in_thread(lambda: shutil.rmtree(roster.home.vms / name, ignore_errors=True))


async def _end_processes(roster: Roster, name: str) -> None:
    await in_thread(lambda: end_processes(roster.home.vms / name))


async def _adopt(roster: Roster, record: SandboxRecord, leader: Marked, gate: asyncio.Semaphore) -> None:
    async with gate:
        try:
            machine = await roster.engine.adopt(roster.directory(record.id), leader)
        except ForkdError as error:
            _log.warning("Sandbox %s cannot be adopted: %s", record.id, error.message)
            await _end(roster, record.id)
            roster.bury(record.id, f"It could not be adopted: {error.message}")
            return
    state = State.PAUSED if machine.paused else State.RUNNING
    # Stopped by a daemon that died before it could say so, or while it forked it: nobody was told of a pause.
    interrupted = machine.paused and record.state is State.RUNNING
    port = _open_port(roster, record)
    with roster.registry.transaction():
        if state is not record.state:
            # A daemon died between the act and the record of it; what is, counts.
            roster.registry.move([record.id], state)
        roster.registry.change(record.id, agent_port=port, pid=machine.pid)
        roster.events.emit("sandbox.adopted", sandbox_id=record.id)
    roster.hold(LiveSandbox(record.id, machine, None, state))
    if interrupted:
        await _go_on(roster, record.id)


async def _go_on(roster: Roster, sandbox_id: str) -> None:
    try:
        await roster.resume(sandbox_id)
    except ForkdError as error:
        _log.warning("Sandbox %s was stopped when the last daemon died, and stays so: %s", sandbox_id, error.message)


def _open_port(roster: Roster, record: SandboxRecord) -> int:
    try:
        return roster.ports.open(record.id, record.agent_port)
    except Conflict:
        return roster.ports.open(record.id, None)
