"""A base: a Firecracker that holds a snapshot and stands still, of which all forkable ones are forks.

It starts without its own filters, as forks install them for themselves; so nothing of a guest ever runs in it. It has a
cell of forkd's instead of a jail: all in a jail's pid namespace would end with it, its forks too. While it loads the
snapshot what it asks of KVM is recorded.

    <directory>/console.log, memory, nic    as of every VM
    <directory>/kvm.json                    the record
    <directory>/cell/                       its own: what it makes; seen by it as /vm
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from forkd.engines.base import MEMORY_FILE, STATE_FILE, Frozen, Phases
from forkd.engines.firecracker.api import Api
from forkd.engines.firecracker.jail import API_SOCKET, NIC_MARK, RECORD, SAVES, VMM_LOG, Slot, render_arguments
from forkd.engines.firecracker.machine import FirecrackerMachine
from forkd.engines.firecracker.plan import ROOT, render_load
from forkd.engines.machine import CONSOLE, grouped, made_directory
from forkd.errors import EngineFailed
from forkd.host.cell_plan import CellPlan
from forkd.host.firecracker import Binaries
from forkd.host.kvmfork.recorder import Recorder
from forkd.host.marked import render_environment
from forkd.host.process import spawn
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.seed import plant
from forkd.host.tap import find_tap_number, make_tap
from forkd.host.threads import in_thread
from forkd.host.user_ids import UserIds, held_users
from forkd.model.machine import NO_LIMITS

# How a base sees its directory.
_INSIDE = "/vm"
_RECORD_DEADLINE_S = 30.0


async def start_base(
    binaries: Binaries, frozen: Frozen, directory: Path, users: UserIds, *, network: bool, max_file_bytes: int
) -> FirecrackerMachine:
    """Loaded, recorded, with a seed. Killed when any of that fails."""
    phases = Phases(time.monotonic())
    files = {ROOT: frozen.boot.root, STATE_FILE: frozen.directory / STATE_FILE, MEMORY_FILE: frozen.memory_file}
    slot = Slot(directory, None, inside=True)
    with (
        made_directory(directory),
        held_users(users, (), claim=True) as lineage,
        grouped(directory, NO_LIMITS, list(files.values()), always=True) as group,
    ):
        user = lineage[-1]
        slot.root.mkdir(mode=0o700)
        (slot.root / VMM_LOG).touch()
        for path in (slot.root, slot.root / VMM_LOG):
            os.chown(path, user, user)
        (directory / MEMORY_FILE).symlink_to(frozen.memory_file.absolute())
        program = str(binaries.firecracker)
        plan = CellPlan(
            user,
            [program, *(str(path.absolute()) for path in files.values())],
            writable=[str(slot.root)],
            devices=["/dev/kvm", *(["/dev/net/tun"] if network else [])],
            names={
                str(slot.root): _INSIDE,
                **{str(path.absolute()): f"{_INSIDE}/{name}" for name, path in files.items()},
            },
            empty=[SAVES],
            directory=_INSIDE,
        )
        process = spawn(
            plan.render_command([program, *render_arguments(directory), "--no-seccomp"], os.getpid()),
            output=directory / CONSOLE,
            env=render_environment(directory, room=True),
            max_file_bytes=max_file_bytes,
            group=group,
        )
        machine = FirecrackerMachine(slot, process, phases, Api(slot.root / API_SOCKET), group=group, paused=True)
        machine.keep_users(users, lineage)
    try:
        await machine.reach_api()
        if network:
            await in_thread(lambda: make_tap(slot.own_tap, process.pid, user))
        await _load(machine, slot.own_tap if network else None)
        machine.stands_still()
        if network:
            await in_thread(lambda: _note_tap(machine))
        if frozen.runs:
            await in_thread(lambda: machine.write(frozen.runs))
        await in_thread(lambda: plant(process.pid, POLLS))
    except BaseException:
        await machine.kill()
        raise
    return machine


async def _load(machine: FirecrackerMachine, tap: str | None) -> None:
    recorder = Recorder(machine.pid)
    await in_thread(recorder.start)
    try:
        await machine.ask(render_load(STATE_FILE, MEMORY_FILE, tap, resume=False))
    except BaseException:
        await in_thread(lambda: recorder.close(_RECORD_DEADLINE_S))
        raise
    record = await in_thread(lambda: recorder.finish(_RECORD_DEADLINE_S))
    record.check()
    try:
        (machine.directory / RECORD).write_text(record.to_json())
    except OSError as error:
        raise EngineFailed(f"What Firecracker asked of KVM cannot be kept: {error.strerror}") from error


def _note_tap(machine: FirecrackerMachine) -> None:
    """For its forks, which may have something else in that place."""
    number = find_tap_number(machine.pid)
    if number is None:
        raise EngineFailed("Firecracker did not open its network interface")
    (machine.directory / NIC_MARK).write_text(str(number))
