"""Forking the process of a live VM, whatever VMM it is: in a thread of its own, as a tracer is a thread.

What is to be forked how, an engine says by `Prepared`; see procfork for what a fork is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from forkd.engines.base import Phases
from forkd.engines.machine import ProcessMachine
from forkd.errors import NotForkable
from forkd.host.cgroup import Group
from forkd.host.fork_cell import SourceCell, write_user_maps
from forkd.host.id_maps import MapHelper
from forkd.host.marked import find_mark_place
from forkd.host.process import WatchedProcess
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Child, Holder, OnBegun
from forkd.host.procfork.program import Call
from forkd.host.procfork.ptrace import take_descriptor
from forkd.host.system import read_stat
from forkd.host.threads import finished

T = TypeVar("T")
M = TypeVar("M", bound=ProcessMachine)
OnHeld = Callable[[], None]

# How long a VMM that stands still is kept at rest for its next fork.
LINGER_S = 2.0
_GETPPID, _PRCTL = 110, 157
_SO_ACCEPTCONN = 30
# Behind the role of a socket that others connect to.
LISTENER = " listener"
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_ARGUMENTS_START = 45  # in /proc/<pid>/stat, counted from the state


@dataclass(frozen=True)
class Wish:
    """`dies_with`: the parent that a fork may not outlive. `own_cell`: it leaves the cell of its source."""

    dies_with: int | None
    own_cell: bool


@dataclass(frozen=True)
class Prepared:
    """`cell`: the one that forks leave. `served`: the source's agent has a client, in whose place a fork finds ours."""

    plan: ForkPlan
    cell: SourceCell | None
    served: bool = False


@dataclass(frozen=True)
class Made:
    pid: int
    pidfd: int
    took: frozenset[str]  # which of our descriptors it has
    steps: dict[str, float] = field(default_factory=dict)


async def finished_or_killed(forking: Coroutine[Any, Any, M]) -> M:
    """A fork whose caller was cancelled is finished, and its child ended."""
    task = asyncio.ensure_future(forking)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if task.exception() is None:
            await task.result().kill()
        raise


class Stopping(Protocol):
    """How a VM that runs is stopped, so that its process can be forked."""

    async def stop(self) -> None: ...

    async def go_on(self) -> float:
        """Told while the process is held, which finds it when it is let go. By how much that was seen late, in s."""


async def fork_running(
    source: Stopping, forking: Coroutine[Any, Any, Made], held: asyncio.Event, phases: Phases
) -> Made:
    """The source stands still only until it is forked; its fork is completed while it runs again.

    Once it is held it is told to go on, which it finds when it is let go: no thread has to wake up first.
    """
    begun = time.monotonic()
    try:
        await source.stop()
    except BaseException:
        forking.close()
        raise
    work, waiting = asyncio.ensure_future(forking), asyncio.ensure_future(held.wait())
    await asyncio.wait([work, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        seen_late_s = await source.go_on()
        phases.pause_s = max(0.0, time.monotonic() - begun - seen_late_s)
        return await work
    except BaseException:
        await asyncio.wait([work])
        if work.exception() is None:
            made = work.result()  # a fork of a VM that is gone is not wanted
            await WatchedProcess(made.pid, made.pidfd).kill()
        raise


class ForkThread:
    """Forks one VMM.

    One that stands still anyway is kept at rest for a moment after a fork, as the next one often follows at once.
    `prepare` is called in the thread. The VM's name is among the VMM's arguments, with something before and behind it:
    each child has its own name there, for those who list processes.
    """

    def __init__(
        self,
        pid: int,
        name: str,
        prepare: Callable[[Wish], Prepared],
        before_name: bytes,
        behind_name: bytes,
    ) -> None:
        self._pid = pid
        self._prepare_plan = prepare
        self._helper = MapHelper(pid)
        self._around_name = before_name, behind_name
        self._wish = Wish(None, True)
        self._prepared: Prepared | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"fork-{name}")
        self._holder: Holder | None = None
        self._held = False
        self._linger: asyncio.TimerHandle | None = None

    @property
    def gives_users(self) -> bool:
        """Whether each fork becomes a user of its own."""
        cell = self._prepared.cell if self._prepared else None
        return cell is not None and cell.user is not None

    async def prepare(self, wish: Wish) -> bool:
        """All that can be done while the VMM still runs; whether its agent has a client."""
        if wish != self._wish:
            await self.let_go()
            self._wish = wish
        prepared = await self._run(self._prepare)
        return prepared.served

    async def fork(
        self,
        directory: Path,
        ours: Mapping[str, int],
        group: Group | None,
        user: int | None,
        *,
        linger: bool,
        on_held: OnHeld,
    ) -> Made:
        """Raises NotForkable, and there is no child then. A cancelled caller waits."""
        if self._linger is not None:
            self._linger.cancel()
        try:
            return await self._run(lambda: self._fork(directory, ours, group, user, keep=linger, on_held=on_held))
        finally:
            if linger:
                self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._thread.submit, self._release)

    async def let_go(self) -> None:
        """Of the VMM, should it be kept at rest: it has a command to answer."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
            await self._run(self._release)

    async def close(self) -> None:
        """The VMM goes on, unless it was killed."""
        if self._linger is not None:
            self._linger.cancel()
        await self._run(self._release)
        await self._run(self._helper.close)
        self._thread.shutdown()

    async def _run(self, work: Callable[[], T]) -> T:
        return await finished(asyncio.wrap_future(self._thread.submit(work)))

    def _release(self) -> None:
        if self._holder is not None:
            holder, self._holder, self._held = self._holder, None, False
            holder.release()

    def _prepare(self) -> Prepared:
        if not self._held or self._prepared is None:  # else it still has what it had
            self._prepared = self._prepare_plan(self._wish)
            self._holder = Holder(self._pid, self._prepared.plan)
        return self._prepared

    def _fork(
        self,
        directory: Path,
        ours: Mapping[str, int],
        group: Group | None,
        user: int | None,
        *,
        keep: bool,
        on_held: OnHeld,
    ) -> Made:
        if self._holder is None:  # it was let go since it was prepared
            self._prepare()
        assert self._holder is not None
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._release)
            on_begun = self._give_user(user)
            with self._holder.forked(
                ours, keep=keep, on_held=on_held, on_cloned=lambda pid: _join(group, pid), on_begun=on_begun
            ) as child:
                _mark(child, directory)
                _rename(child, directory, *self._around_name)
                pidfd = os.pidfd_open(child.pid)
                on_failure.callback(os.close, pidfd)
            on_failure.pop_all()
        self._held = keep
        if not keep:
            self._holder = None
        return Made(child.pid, pidfd, child.took, child.times.steps)

    def _give_user(self, user: int | None) -> OnBegun | None:
        cell = self._prepared.cell if self._prepared else None
        return None if cell is None or user is None else lambda pid: write_user_maps(cell, self._helper, pid, user)


def from_thread(event: asyncio.Event) -> OnHeld:
    """What sets it, called in any thread."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        loop.call_soon_threadsafe(event.set)

    return tell


def wish_for(pid: int, *, outlive: bool, paused: bool) -> Wish:
    """One that does not run is only there to be forked, by us. Of a VM that was adopted another is the parent."""
    dies = not outlive or (paused and parent_of(pid) == os.getpid())
    return Wish(os.getpid() if dies else None, own_cell=not paused)


def parent_of(pid: int) -> int | None:
    """None: it has ended."""
    try:
        return int(read_stat(pid)[1])
    except OSError:
        return None


def list_open_files(pid: int) -> dict[int, os.stat_result]:
    """What is open, by number; what is closed meanwhile is left out. Raises OSError."""
    seen = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            seen[int(entry.name)] = entry.stat()
    return seen


def find_files(pid: int, directory: Path) -> list[Path]:
    """What it reads of disks, its own directory aside. Named by its descriptors: it may know files by other names."""
    try:
        own = {(each.st_dev, each.st_ino) for each in map(Path.lstat, directory.rglob("*"))}
        files = {
            (file.st_dev, file.st_ino): Path(f"/proc/{pid}/fd/{number}")
            for number, file in sorted(list_open_files(pid).items())
            if stat.S_ISREG(file.st_mode) and _is_read_only(pid, number)
        }
    except OSError as error:
        raise NotForkable(f"The files of process {pid} cannot be looked at: {error.strerror}") from error
    return [path for identity, path in files.items() if identity not in own]


def _is_read_only(pid: int, number: int) -> bool:
    """Raises OSError."""
    flags = next(line for line in Path(f"/proc/{pid}/fdinfo/{number}").read_text().splitlines() if "flags:" in line)
    return int(flags.split()[1], 8) & os.O_ACCMODE == os.O_RDONLY


def find_roles(pid: int, names: Mapping[str, str]) -> dict[str, str]:
    """What the unix sockets of a VMM are for, by the links under which /proc shows them. `names`: by file name.

    A connection that ends meanwhile has none.
    """
    roles: dict[str, str] = {}
    with contextlib.ExitStack() as opened:
        try:
            pidfd = os.pidfd_open(pid)
            opened.callback(os.close, pidfd)
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                if (found := _find_role(pidfd, entry, names)) is not None:
                    link, role = found
                    roles[link] = role
        except OSError as error:
            raise NotForkable(f"The sockets of process {pid} cannot be looked at: {error.strerror}") from error
    return roles


def _find_role(pidfd: int, entry: Path, names: Mapping[str, str]) -> tuple[str, str] | None:
    try:
        link = str(entry.readlink())
        if not link.startswith("socket:"):
            return None
        with socket.socket(fileno=take_descriptor(pidfd, int(entry.name))) as sock:
            role = _role(sock, names)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EBADF):
            raise
        return None
    return None if role is None else (link, role)


def _role(sock: socket.socket, names: Mapping[str, str]) -> str | None:
    if sock.family != socket.AF_UNIX:
        return None
    name = names.get(Path(os.fsdecode(sock.getsockname() or "")).name)
    return name + (LISTENER if sock.getsockopt(socket.SOL_SOCKET, _SO_ACCEPTCONN) else "") if name else None


def look_at(pid: int, name: str) -> bytes:
    """What /proc has of a process. Raises NotForkable."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError as error:
        raise NotForkable(f"Process {pid} cannot be looked at: {error.strerror}") from error


def render_death(dies_with: int | None) -> list[Call]:
    """For the last of its set-up: a process that becomes another user has no death signal."""
    if dies_with is None:
        return []
    return [
        Call(_PRCTL, (_PR_SET_PDEATHSIG, _SIGKILL), what="set the death signal"),
        # Had its parent died before, the signal would never come.
        Call(_GETPPID, (), returns=dies_with, what="look for its parent"),
    ]


def _join(group: Group | None, pid: int) -> None:
    """Before it does anything: what the kernel makes for it, as KVM makes threads, goes to the group it is in then."""
    if group is not None:
        group.add(pid)


def _mark(child: Child, directory: Path) -> None:
    place = find_mark_place(child.pid)
    if place is None:
        raise NotForkable("The process to fork carries no mark")
    child.write_memory(place.address, place.render(directory))


def _rename(child: Child, directory: Path, before: bytes, behind: bytes) -> None:
    if place := find_name_place(child.pid, before, behind):
        address, room = place
        child.write_memory(address, f"forkd-{directory.name}".encode()[:room].ljust(room, b"\0"))


def find_name_place(pid: int, before: bytes, behind: bytes) -> tuple[int, int] | None:
    """Where the VM's name is among the arguments of its process, and how many bytes it may have."""
    arguments = look_at(pid, "cmdline")
    start = arguments.find(before) + len(before)
    end = arguments.find(behind)
    if start < len(before) or end < start:
        return None
    return int(read_stat(pid)[_ARGUMENTS_START]) + start, end - start
