"""A new VM out of a live one: QEMU's process is forked, and the source stands still for no longer than that takes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forkd.engines.base import Phases, Way
from forkd.engines.machine import AGENT_SOCKET, connect_to, grouped, made_directory
from forkd.engines.qemu.ends import AGENT, Ends, find_roles, opened_ends, render_choice
from forkd.engines.qemu.machine import SAVED_STATE, QemuMachine
from forkd.engines.qemu.monitor import Monitor
from forkd.errors import EngineFailed, NotForkable
from forkd.host.cgroup import Group
from forkd.host.marked import find_mark_place
from forkd.host.process import WatchedProcess
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Child, Holder
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.system import read_stat
from forkd.host.threads import finished
from forkd.model.machine import NO_LIMITS, Limits

T = TypeVar("T")
OnHeld = Callable[[], None]

# How long a QEMU that stands still is kept at rest for its next fork.
_LINGER_S = 0.1
_MADVISE, _GETPPID, _PRCTL = 28, 110, 157
_MADV_NOHUGEPAGE = 15
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
# Among its arguments: it may make no process, and is killed when it tries.
_DENIED = b",spawn=deny,"
_CODE_BUFFER = re.compile("^([0-9a-f]+)-([0-9a-f]+) rwxp 0+ 00:00 0 *$", re.MULTILINE)
# What is before and behind the VM's name among its arguments, and so the room for another one.
_BEFORE_NAME, _BEHIND_NAME = b"\0-name\0", b"\0-nodefaults\0"


async def finished_or_killed(forking: Coroutine[Any, Any, QemuMachine]) -> QemuMachine:
    """A fork whose caller was cancelled is finished, and its child ended."""
    task = asyncio.ensure_future(forking)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None:
            await task.result().kill()
        raise


async def fork_machine(
    source: QemuMachine, directory: Path, limits: Limits, *, paused: bool, outlive: bool
) -> QemuMachine:
    """See Engine.fork_live."""
    phases = Phases(time.monotonic(), way=Way.FORK)
    await source.running()
    async with source.forking:
        if source.death.done():  # its pid may be another's by now
            raise NotForkable(f"The VM to fork has ended: {source.death.result().reason.value}")
        files = find_files(source.pid, source.directory) if limits != NO_LIMITS else []
        thread = _fork_thread(source)
        # One that does not run is only there to be forked, by us. Of a VM that was adopted another is the parent.
        dies = not outlive or (paused and parent_of(source.pid) == os.getpid())
        served = await thread.prepare(os.getpid() if dies else None)
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
            if paused:
                _copy_saved(source.directory, directory)
            work = thread.fork(directory, ends, group, linger=source.paused, on_held=_from_thread(held))
            made = await (work if source.paused else _fork_running(source, work, held, phases))
            phases.steps.update(made.steps)
            process = WatchedProcess(made.pid, made.pidfd)
            channel = ends.channel
            if served and AGENT not in made.took:  # the agent's client left just then, and another one is served
                channel = await _connected_again(process, ends.channel, directory / AGENT_SOCKET)
    machine = QemuMachine(directory, process, phases, monitor, channel=channel, group=group, paused=True)
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


def _fork_thread(source: QemuMachine) -> ForkThread:
    if source.fork_thread is None:
        source.fork_thread = ForkThread(source.pid, source.directory)
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

    Once it is held it is told to go on, which it finds when it is let go: no thread has to wake up first.
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
            made = work.result()  # a fork of a VM that is gone is not wanted
            await WatchedProcess(made.pid, made.pidfd).kill()
        raise


def find_files(pid: int, directory: Path) -> list[Path]:
    """What it reads of disks, its own directory aside."""
    try:
        links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError as error:
        raise NotForkable(f"The files of process {pid} cannot be looked at: {error.strerror}") from error
    return sorted({link for link in links if link.is_file() and directory not in link.parents})


@dataclass(frozen=True)
class Made:
    pid: int
    pidfd: int
    took: frozenset[str]  # which of its ends it has
    steps: dict[str, float] = field(default_factory=dict)


class ForkThread:
    """Forks one QEMU, in a thread of its own: a tracer is a thread.

    A QEMU that stands still anyway is kept at rest for a moment after a fork, as the next one often follows at once.
    """

    def __init__(self, pid: int, directory: Path) -> None:
        self._pid = pid
        self._directory = directory
        self._dies_with: int | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"fork-{directory.name}")
        self._holder: Holder | None = None
        self._held = False
        self._linger: asyncio.TimerHandle | None = None
        self._served = False

    async def prepare(self, dies_with: int | None) -> bool:
        """All that can be done while the QEMU still runs; whether its agent has a client.

        `dies_with`: the parent that the fork may not outlive.
        """
        if dies_with != self._dies_with:
            await self.let_go()
            self._dies_with = dies_with
        await self._run(self._prepare)
        return self._served

    async def fork(self, directory: Path, ends: Ends, group: Group | None, *, linger: bool, on_held: OnHeld) -> Made:
        """Raises NotForkable, and there is no child then. A cancelled caller waits."""
        if self._linger is not None:
            self._linger.cancel()
        try:
            return await self._run(lambda: self._fork(directory, ends, group, keep=linger, on_held=on_held))
        finally:
            if linger:
                self._linger = asyncio.get_running_loop().call_later(_LINGER_S, self._thread.submit, self._release)

    async def let_go(self) -> None:
        """Of the QEMU, should it be kept at rest: it has a command to answer."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
            await self._run(self._release)

    async def close(self) -> None:
        """The QEMU goes on, unless it was killed."""
        if self._linger is not None:
            self._linger.cancel()
        await self._run(self._release)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        return await finished(asyncio.wrap_future(self._thread.submit(work)))

    def _release(self) -> None:
        if self._holder is not None:
            holder, self._holder, self._held = self._holder, None, False
            holder.release()

    def _prepare(self) -> None:
        if not self._held:  # else it still has what it had
            check_may_fork(self._pid)
            roles = find_roles(self._pid)
            self._served = AGENT in roles.values()
            maps = _look_at(self._pid, "maps").decode("utf-8", "replace")
            set_up = [*render_set_up(self._dies_with), *render_small_pages(maps)]
            self._holder = Holder(self._pid, ForkPlan(render_choice(self._directory, roles), set_up, POLLS))

    def _fork(self, directory: Path, ends: Ends, group: Group | None, *, keep: bool, on_held: OnHeld) -> Made:
        if self._holder is None:  # it was let go since it was prepared
            self._prepare()
        assert self._holder is not None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._release)
            with self._holder.forked(ends.by_name(), keep=keep, on_held=on_held) as child:
                _make_its_own(child, directory, group)
                pidfd = os.pidfd_open(child.pid)
                on_failure.callback(os.close, pidfd)
            on_failure.pop_all()
        self._held = keep
        if not keep:
            self._holder = None
        return Made(child.pid, pidfd, child.took, child.times.steps)


def check_may_fork(pid: int) -> None:
    """Raise NotForkable for a VM started with QEMU's own filter: it kills the process instead of refusing a call."""
    if _DENIED in _look_at(pid, "cmdline"):
        raise NotForkable("The VM was started where live VMs could not be forked", hint="Fork its snapshot instead")


def _look_at(pid: int, name: str) -> bytes:
    """What /proc has of a process. Raises NotForkable."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError as error:
        raise NotForkable(f"Process {pid} cannot be looked at: {error.strerror}") from error


def parent_of(pid: int) -> int | None:
    """None: it has ended."""
    try:
        return int(read_stat(pid)[1])
    except OSError:
        return None


def render_set_up(dies_with: int | None) -> list[Call]:
    """The seccomp filter is inherited."""
    if dies_with is None:
        return []
    return [
        Call(_PRCTL, (_PR_SET_PDEATHSIG, _SIGKILL), what="set the death signal"),
        # Had its parent died before, the signal would never come.
        Call(_GETPPID, (), returns=dies_with, what="look for its parent"),
    ]


def render_small_pages(maps: str) -> list[Call]:
    """QEMU asks for huge pages for translated code: a fork's first new code, a few KiB, could take it 2 MiB."""
    found = _CODE_BUFFER.finditer(maps)
    ranges = [(int(each[1], 16), int(each[2], 16) - int(each[1], 16)) for each in found]
    return [Call(_MADVISE, (*each, _MADV_NOHUGEPAGE), what="ask for small pages") for each in ranges]


def _make_its_own(child: Child, directory: Path, group: Group | None) -> None:
    if group is not None:
        group.add(child.pid)
    place = find_mark_place(child.pid)
    if place is None:
        raise NotForkable("The process to fork carries no mark")
    child.write_memory(place.address, place.render(directory))
    if name := find_name_place(child.pid):
        address, room = name
        child.write_memory(address, f"forkd-{directory.name}".encode()[:room].ljust(room, b"\0"))


def find_name_place(pid: int) -> tuple[int, int] | None:
    """Where the VM's name is among the arguments of its process, and how many bytes it may have."""
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
    start = arguments.find(_BEFORE_NAME) + len(_BEFORE_NAME)
    end = arguments.find(_BEHIND_NAME)
    if start < len(_BEFORE_NAME) or end < start:
        return None
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[45]) + start, end - start
