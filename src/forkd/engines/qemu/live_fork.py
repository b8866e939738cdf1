"""A new VM out of a live one: QEMU's process is forked, and the source stands still for no longer than that takes."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Nic, Phases, Way
from forkd.engines.fork_thread import (
    ForkThread,
    Prepared,
    Wish,
    find_files,
    find_roles,
    fork_running,
    from_thread,
    look_at,
    render_death,
    wish_for,
)
from forkd.engines.machine import AGENT_SOCKET, connect_to, grouped, made_directory
from forkd.engines.qemu.ends import AGENT, ROLES, opened_ends, render_choice
from forkd.engines.qemu.machine import SAVED_STATE, QemuMachine
from forkd.engines.qemu.monitor import Monitor
from forkd.engines.qemu.nic import find_tap_number
from forkd.errors import EngineFailed, NotForkable
from forkd.host.fork_cell import find_source_cell, render_leave, render_rights
from forkd.host.id_maps import UserRange
from forkd.host.process import WatchedProcess
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.user_ids import UserIds, held_users
from forkd.model.machine import NO_LIMITS, Limits

_MADVISE = 28
_MADV_NOHUGEPAGE = 15
# Among its arguments: it may make no process, or not change its user, and is killed when it tries.
_DENIED = (b",spawn=deny,", b",elevateprivileges=deny,")
_CODE_BUFFER = re.compile("^([0-9a-f]+)-([0-9a-f]+) rwxp 0+ 00:00 0 *$", re.MULTILINE)
# What is before and behind the VM's name among its arguments, and so the room for another one.
_BEFORE_NAME, _BEHIND_NAME = b"\0-name\0", b"\0-nodefaults\0"


async def fork_machine(
    source: QemuMachine,
    directory: Path,
    limits: Limits,
    users: UserIds,
    nic: Nic | None = None,
    *,
    paused: bool,
    outlive: bool,
) -> QemuMachine:
    """See Engine.fork_live."""
    phases = Phases(time.monotonic(), way=Way.FORK)
    await source.running()
    async with source.forking:
        if source.death.done():  # its pid may be another's by now
            raise NotForkable(f"The VM to fork has ended: {source.death.result().reason.value}")
        files = find_files(source.pid, source.directory) if limits != NO_LIMITS else []
        if source.fork_thread is None:
            source.fork_thread = new_fork_thread(source.pid, source.directory, users.users)
        thread = source.fork_thread
        # One that does not run has no more rights than its source, in whose cell it may stay.
        served = await thread.prepare(wish_for(source.pid, outlive=outlive, paused=paused))
        with (
            made_directory(directory),
            held_users(users, source.lineage, claim=thread.gives_users) as lineage,
            grouped(directory, limits, files, always=True) as group,
            opened_ends(directory, nic, served=served) as ends,
        ):
            monitor = Monitor(ends.control)
            monitor.inherit()
            if not paused:
                monitor.tell_cont()
            held = asyncio.Event()
            if paused:
                _copy_saved(source.directory, directory)
            user = lineage[-1] if thread.gives_users else None
            work = thread.fork(directory, ends.by_name(), group, user, linger=source.paused, on_held=from_thread(held))
            made = await (work if source.paused else fork_running(_Stopping(source), work, held, phases))
            phases.steps.update(made.steps)
            process = WatchedProcess(made.pid, made.pidfd)
            channel = ends.channel
            if served and AGENT not in made.took:  # the agent's client left just then, and another one is served
                channel = await _connected_again(process, ends.channel, directory / AGENT_SOCKET)
    machine = QemuMachine(directory, process, phases, monitor, channel=channel, group=group, paused=True)
    machine.keep_users(users, lineage)
    machine.go_on(paused=paused)
    return machine


def _copy_saved(source: Path, directory: Path) -> None:
    """A fork of a VM that was saved and still stands still can be saved by the same bytes only, as its source can."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source / SAVED_STATE, directory / SAVED_STATE)


async def _connected_again(process: WatchedProcess, channel: socket.socket, path: Path) -> socket.socket:
    """In place of a channel that the fork does not have; without one the fork is not wanted."""
    channel.close()
    try:
        return await connect_to(path)
    except BaseException:
        await process.kill()
        raise


@dataclass(frozen=True)
class _Stopping:
    source: QemuMachine

    async def stop(self) -> None:
        try:
            await self.source.monitor.execute("stop")
        except EngineFailed:
            # Had it been told, and only not answered in time, it would stop whenever it can.
            with contextlib.suppress(EngineFailed):
                await self.source.monitor.execute("cont")
            raise

    async def go_on(self) -> float:
        return await self.source.monitor.go_on()


def new_fork_thread(pid: int, directory: Path, users: UserRange) -> ForkThread:
    return ForkThread(
        pid, directory.name, lambda wish: prepare(pid, directory, users, wish), _BEFORE_NAME, _BEHIND_NAME
    )


def prepare(pid: int, directory: Path, users: UserRange, wish: Wish) -> Prepared:
    """How a QEMU is forked. Raises NotForkable."""
    check_may_fork(pid)
    roles = find_roles(pid, ROLES)
    maps = look_at(pid, "maps").decode("utf-8", "replace")
    cell = find_source_cell(pid, users) if wish.own_cell else None
    first = render_leave(cell) if cell else []
    rights = render_rights(cell) if cell else []
    set_up = [*rights, *render_death(wish.dies_with), *render_small_pages(maps)]
    choice = render_choice(directory, roles, find_tap_number(pid))
    return Prepared(ForkPlan(choice, first, lambda _: set_up, POLLS), cell, AGENT in roles.values())


def check_may_fork(pid: int) -> None:
    """Raise NotForkable for a VM started with QEMU's own filter: it kills the process instead of refusing a call."""
    arguments = look_at(pid, "cmdline")
    if any(denied in arguments for denied in _DENIED):
        raise NotForkable("The VM was started where live VMs could not be forked", hint="Fork its snapshot instead")


def render_small_pages(maps: str) -> list[Call]:
    """QEMU asks for huge pages for translated code: a fork's first new code, a few KiB, could take it 2 MiB."""
    found = _CODE_BUFFER.finditer(maps)
    ranges = [(int(each[1], 16), int(each[2], 16) - int(each[1], 16)) for each in found]
    return [Call(_MADVISE, (*each, _MADV_NOHUGEPAGE), what="ask for small pages") for each in ranges]
