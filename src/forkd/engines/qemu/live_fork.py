"""A new VM out of a live one: QEMU's process is forked, and the source stands still for no longer than that takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from forkd.engines.base import Phases, Way
from forkd.engines.machine import grouped, made_directory
from forkd.engines.qemu.ends import AGENT, opened_ends
from forkd.engines.qemu.fork_thread import ForkThread, Made, OnHeld
from forkd.engines.qemu.machine import QemuMachine
from forkd.engines.qemu.monitor import Monitor
from forkd.engines.sockets import AGENT_SOCKET, reach
from forkd.errors import EngineFailed, NotForkable
from forkd.host.process import WatchedProcess
from forkd.model.limits import NO_LIMITS, Limits


async def finished_or_killed(forking: Coroutine[Any, Any, QemuMachine]) -> QemuMachine:
    """A fork that nobody waits for any more is finished, and its child ended."""
    task = asyncio.ensure_future(forking)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None:
            await task.result().kill()
        raise


async def fork_machine(
    source: QemuMachine, directory: Path, limits: Limits, *, settled: bool, paused: bool, outlive: bool
) -> QemuMachine:
    """See Engine.fork_live."""
    phases = Phases(time.monotonic(), way=Way.FORK)
    await source.running()
    async with source.forking:
        if source.death.done():  # its pid may be another's by now
            raise NotForkable(f"The VM to fork has ended: {source.death.result().reason.value}")
        files = find_files(source.pid, source.directory) if limits != NO_LIMITS else []
        thread = _fork_thread(source, dies_with=None if outlive else os.getpid())
        served = await thread.prepare()
        with (
            made_directory(directory),
            grouped(directory, limits, files) as group,
            opened_ends(directory, served=served) as ends,
        ):
            monitor = Monitor(ends.control)
            monitor.inherit()
            if not paused:
                monitor.tell_cont()
            held = asyncio.Event()
            work = thread.fork(directory, ends, group, linger=settled, on_held=_from_thread(held))
            made = await (work if source.paused else _fork_running(source, work, held, phases))
            phases.steps.update(made.steps)
            process = WatchedProcess(made.pid, made.pidfd)
    channel = ends.channel
    if served and AGENT not in made.took:  # the agent's client left just then, and another one is served
        channel.close()
        channel = await reach(directory / AGENT_SOCKET)
    machine = QemuMachine(directory, process, phases, monitor, channel=channel, group=group, paused=True)
    machine.go_on(paused=paused)
    return machine


def _fork_thread(source: QemuMachine, *, dies_with: int | None) -> ForkThread:
    if source.fork_thread is None:
        source.fork_thread = ForkThread(source.pid, source.directory, dies_with=dies_with)
    return source.fork_thread


def _from_thread(event: asyncio.Event) -> OnHeld:
    loop = asyncio.get_running_loop()

    def tell() -> None:
        loop.call_soon_threadsafe(event.set)

    return tell


async def _fork_running(
    source: QemuMachine, forking: Coroutine[Any, Any, Made], held: asyncio.Event, phases: Phases
) -> Made:
    """The source stands still only until it is forked; its fork is completed while it runs again.

    Once it is held it is told to go on, which it finds when it is let go: nobody has to wake up first.
    """
    begun = time.monotonic()
    try:
        await source.monitor.execute("stop")
    except EngineFailed:
        forking.close()
        # Had it been told, and only not answered in time, it would stop whenever it can.
        with contextlib.suppress(EngineFailed):
            await source.monitor.execute("cont")
        raise
    work, waiting = asyncio.ensure_future(forking), asyncio.ensure_future(held.wait())
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        seen_late_s = await source.monitor.go_on()
        phases.pause_s = max(0.0, time.monotonic() - begun - seen_late_s)
        return await work
    except BaseException:
        await asyncio.wait([work])
        if work.exception() is None:
            made = work.result()  # nobody wants a fork of what is gone
            await WatchedProcess(made.pid, made.pidfd).kill()
        raise


def find_files(pid: int, directory: Path) -> list[Path]:
    """What it reads of disks, its own directory aside."""
    try:
        links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError as error:
        raise NotForkable(f"The files of process {pid} cannot be looked at: {error.strerror}") from error
    return sorted({link for link in links if link.is_file() and directory not in link.parents})
