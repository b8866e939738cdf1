"""One Firecracker: its process and who keeps it, its API, its console."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import stat
import time
import weakref
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forkd.engines.base import MEMORY_FILE, ExitReason, Machine, Nic, Phases, tail_of
from forkd.engines.firecracker.api import Api, open_stream
from forkd.engines.firecracker.jail import SAVES, VMM_LOG, Slot
from forkd.engines.firecracker.plan import (
    AGENT_VSOCK_PORT,
    Call,
    is_saved,
    parse_paused,
    render_look,
    render_pause,
    render_resume,
    render_save,
)
from forkd.engines.machine import AGENT_SOCKET, ProcessMachine, is_dying, parse_exit
from forkd.engines.runs import write_runs
from forkd.errors import EngineFailed, GuestDied, Unsupported
from forkd.host.cgroup import Group
from forkd.host.marked import kill_marked
from forkd.host.pages import LiveMemory, find_alone, find_memory
from forkd.host.process import KILL_DEADLINE_S, Exited, ExitStatus, WatchedProcess, children_of, take_over
from forkd.host.system import start_time_ticks
from forkd.host.tap import get_tap_name, make_tap, take_tap
from forkd.host.threads import in_thread
from forkd.host.trees import remove_directory
from forkd.model.memory import Run

# How a shell tells that what it ran was ended by a signal.
_SIGNALLED = 128
# How long a guest may take to listen: from its boot on, or when it only has to wake up.
_BOOT_PATIENCE_S = 180.0
_PATIENCE_S = 30.0
_HANG_UP_DEADLINE_S = 5.0

# What a VM that is saved is written to, in a root that is Firecracker's own.
_SAVED = "saved"
_MAX_STATE_BYTES = 16 * 1024 * 1024
# Of a fork that wrote more than this before its first answer, the next ones may have no use.
_MOST_COPIED_BYTES = 16 * 1024 * 1024
_AS_ROOT = "Run forkd as root, with Firecracker's jailer"

T = TypeVar("T")
# The answer to a call that a VM goes on.
Resuming = asyncio.Future[Any]


class FirecrackerMachine(ProcessMachine):
    filters = 1  # its own, which is an allow-list

    def __init__(
        self,
        slot: Slot,
        process: WatchedProcess,
        phases: Phases,
        api: Api,
        *,
        group: Group | None,
        parent: bool = False,
        template: bool = False,
        paused: bool = False,
    ) -> None:
        """`process` is the keeper of a jail, or Firecracker. `parent`: it boots, and is to be frozen.

        `template`: it is there to be forked, once it stands still.
        """
        super().__init__(slot.directory, process, phases, group=group, paused=paused)
        self._slot = slot
        self._api = api
        self._parent = parent
        self._template = template
        self._first: WatchedProcess | None = None  # in the pid namespace of a jail: what ends it ends all
        self._vmm_pid: int | None = None
        self._stream: socket.socket | None = None  # of a parent: what was handed out, ours too
        self._handed_out: weakref.ref[socket.socket] | None = None  # what was, as long as its owner has it
        self._saved = False  # since it stands still
        self._still_since_ns: int | None = None
        # Spans of its memory that each of its forks writes first of all.
        self.first_written: Sequence[tuple[int, int]] = ()

    @property
    def pid(self) -> int:
        """Firecracker's, once it was seen; before that its keeper's."""
        return super().pid if self._vmm_pid is None else self._vmm_pid

    def start(self, calls: Sequence[Call], tap: str | None, runs: Sequence[Run] = ()) -> None:
        """`tap`: made before it is asked for. `runs`: what is written into its memory before it goes on."""
        self._begin(self._start(calls, tap, runs))

    async def _start(self, calls: Sequence[Call], tap: str | None, runs: Sequence[Run]) -> None:
        await self.reach_api()
        self.phases.mark("process start", time.monotonic())
        if tap is not None:
            user = self._slot.user
            assert user is not None  # where there is no jail there is no tap
            await in_thread(lambda: make_tap(tap, self.pid, user))
        for call in calls:
            await self.ask(call)
        if runs:
            self.phases.mark("state load", time.monotonic())
            await in_thread(lambda: self.write(runs))
            await self.ask(render_resume())
        if not self._parent:
            self.phases.mark("resume", time.monotonic())

    def go_on(self, resuming: Resuming | None) -> None:
        """Of a fork, which was told so before it ran, or is to wait."""
        self._begin(self._go_on(resuming))

    async def _go_on(self, resuming: Resuming | None) -> None:
        if resuming is None:
            await self.reach_api()
            return
        await self._answered(str(render_resume()), resuming)
        self._paused = False
        self.phases.mark("resume", time.monotonic())

    async def reach_api(self) -> None:
        """Raises GuestDied, EngineFailed."""
        await self._answered("its start", self._api.connect())
        if self._slot.jailed:
            await self._answered("its start", self._find_inside())

    async def take_up(self) -> None:
        """Go on with one that another process started. Raises GuestDied, EngineFailed."""
        await self.reach_api()
        self._paused = parse_paused(await self.ask(render_look()))
        try:
            found = stat.S_ISSOCK((self._slot.root / AGENT_SOCKET).lstat().st_mode)
        except OSError:
            found = False
        if not found:
            raise EngineFailed(f"There is no {AGENT_SOCKET} of {self._directory.name}")

    async def ask(self, call: Call, expected: Callable[[str], bool] = lambda _: False) -> object:
        """Raises GuestDied when Firecracker dies of it, EngineFailed when it refuses; both with its last lines.

        `expected`: a refusal that it does not die of.
        """
        return await self._answered(f"{call.method} {call.path}", self._api.call(call), expected)

    async def pause(self) -> None:
        if self._template:
            await self.hang_up()
        async with self._commanded():  # a fork stops it, and has it go on
            await self.ask(render_pause())
            self._paused = True
            self.stands_still()

    def stands_still(self) -> None:
        """From now on, or a little longer already."""
        self._still_since_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)

    def stood_ns(self) -> int:
        """For how long its guest stood still, and the kernel's clocks of it went on."""
        since = self._still_since_ns
        return 0 if since is None else time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - since

    async def resume(self) -> None:
        async with self._commanded():
            await self.ask(render_resume())
            self._paused = False
            self._still_since_ns = None
        if self._saved:
            self._saved = False
            self._cut_stream()

    async def learn_from(self, fork: Machine) -> None:
        assert isinstance(fork, FirecrackerMachine)
        spans = await in_thread(lambda: find_alone(fork._find_memory()))
        if sum(end - begin for begin, end in spans) <= _MOST_COPIED_BYTES:
            self.first_written = spans
        if self.fork_thread is not None:
            await self.fork_thread.let_go()  # what it has drawn for its next fork is without them

    async def plug(self, nic: Nic | None) -> None:
        await self.running()
        if nic is None and not await in_thread(self._has_network):
            return
        raise Unsupported(
            "Firecracker cannot change the network interface of a VM that runs",
            hint="Fork another one with the network it is to have, or use the engine qemu",
        )

    def find_tap(self) -> int | None:
        """Not the one that leads nowhere."""
        try:
            with contextlib.ExitStack() as unwanted:
                tap = take_tap(self.pid)
                if tap is None:
                    return None
                unwanted.callback(os.close, tap)
                if get_tap_name(tap) == self._slot.own_tap:
                    return None
                unwanted.pop_all()
                return tap
        except OSError as error:
            raise EngineFailed(f"The network interface of {self._directory.name} cannot be looked at") from error

    def _has_network(self) -> bool:
        tap = self.find_tap()
        if tap is not None:
            os.close(tap)
        return tap is not None

    async def save(self) -> tuple[bytes, LiveMemory]:
        """The device state of a paused VM, and where its memory is.

        Firecracker tells the guest, when that goes on, that all its streams are lost; so is ours.
        """
        await self.running()
        if not self._paused:
            raise EngineFailed("Only a paused VM can be saved", hint="Pause it first")
        async with self._commanded():
            memory = await in_thread(self._find_memory)
            place, name = self._slot.root / _SAVED, _SAVED
            if self._slot.forked:
                place, name = Path(f"/proc/{self.pid}/root{SAVES}/{_SAVED}"), f"{SAVES}/{_SAVED}"
            await in_thread(lambda: remove_saved(place))
            self._saved = True
            try:
                await self.ask(render_save(name), is_saved)
                raise EngineFailed("Firecracker wrote memory that it was not given a place for")
            except EngineFailed as error:
                if not is_saved(error.message):
                    raise
            try:
                return await in_thread(lambda: read_saved(place)), memory
            finally:
                await in_thread(lambda: remove_saved(place))

    def _find_memory(self) -> LiveMemory:
        try:
            return find_memory(self.pid, (self._directory / MEMORY_FILE).readlink())
        except OSError as error:
            raise EngineFailed("The VM was started where it could not be saved", hint="Fork it again") from error

    def write(self, runs: Sequence[Run]) -> None:
        try:
            write_runs(self._find_memory(), runs)
        except PermissionError as error:
            raise Unsupported("Firecracker's memory cannot be written here, as for a layer", hint=_AS_ROOT) from error
        except OSError as error:
            raise EngineFailed(f"A layer could not be read: {error.strerror}") from error

    async def release(self) -> None:
        await super().release()
        await self._let_go()

    async def hang_up(self) -> None:
        """End the stream to the agent from our side, and wait until the agent has done so from its own.

        A guest that is frozen then waits for a client, and each of its children need not first lose one.
        """
        if self._stream is not None:
            with contextlib.suppress(OSError, TimeoutError):  # it is lost already, or will be in every child
                self._stream.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(_HANG_UP_DEADLINE_S):
                    while await asyncio.get_running_loop().sock_recv(self._stream, 4096):
                        pass

    async def _reach_agent(self) -> socket.socket:
        if not self._slot.forked:  # a fork takes connections before it runs
            await self.running()
        patience_s = _BOOT_PATIENCE_S if self._parent else _PATIENCE_S
        opening = open_stream(self._slot.root / AGENT_SOCKET, AGENT_VSOCK_PORT, patience_s)
        sock = await self._answered("connecting to the agent", opening)
        if self._parent or self._template:
            self._forget_stream()
            self._stream = sock.dup()
        self._handed_out = weakref.ref(sock)
        return sock

    def _cut_stream(self) -> None:
        """Who reads it would else wait for a guest that knows nothing of it any more."""
        sock = self._handed_out() if self._handed_out else None
        if sock is not None:
            with contextlib.suppress(OSError):  # it is closed
                sock.shutdown(socket.SHUT_RDWR)

    def _forget_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _answered(self, step: str, answer: Awaitable[T], expected: Callable[[str], bool] = lambda _: False) -> T:
        """The answer, unless Firecracker ends first."""
        try:
            return await self._process.unless_it_exits(answer)
        except EngineFailed as error:
            if expected(error.message) or not await is_dying(self._process):
                raise EngineFailed(error.message, hint=error.hint, details=self._last_words()) from error
        except Exited:
            pass
        status = self._status(self._process.exited.result())
        raise GuestDied(
            f"Firecracker ended during {step}: {self._reason_of(status).value} ({status})", details=self._last_words()
        )

    async def _find_inside(self) -> None:
        """Once its API is there, all processes of a jail are."""
        first = next(iter(children_of(self._process.pid)), None)
        inside = children_of(first) if first is not None else []
        started = start_time_ticks(first) if first is not None else None
        if first is None or started is None or not inside:
            raise EngineFailed("The processes in the jail cannot be seen", hint="forkd reads them in /proc")
        self._first, self._vmm_pid = take_over(first, started), inside[0]

    async def _end_process(self) -> None:
        if self._first is not None:
            # From inside to outside: its keeper's end then says that all is over.
            self._first.send_signal(signal.SIGKILL)
            async with asyncio.timeout(KILL_DEADLINE_S):
                await asyncio.shield(self._first.exited)
        await super()._end_process()
        if self._slot.jailed and self._first is None:
            await in_thread(lambda: kill_marked(self._directory))
        await self._let_go()

    async def _let_go(self) -> None:
        if self._first is not None:
            self._first.release()
        self._forget_stream()
        await self._api.close()

    def _status(self, status: ExitStatus) -> ExitStatus:
        if self._slot.jailed and status.code is not None and status.code > _SIGNALLED:
            return ExitStatus(None, status.code - _SIGNALLED)
        return status

    def _reason(self, status: ExitStatus) -> ExitReason:
        return parse_exit(status, self.console_tail())

    def _vmm_output(self) -> str:
        return tail_of(self._slot.root / VMM_LOG)

    def _last_words(self) -> str | None:
        """Of Firecracker, or of what failed before there was one; that is among what the guest wrote."""
        return "\n".join(part for part in (self._vmm_output(), self.console_tail().strip()) if part) or None


def read_saved(path: Path) -> bytes:
    """What Firecracker, which may have been broken into, wrote in its own root: no link, no pipe, no more than that."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
            data = file.read(_MAX_STATE_BYTES + 1) if is_file else b""
    except OSError as error:
        raise EngineFailed(f"What Firecracker saved cannot be read: {error.strerror}") from error
    if not data or len(data) > _MAX_STATE_BYTES:
        raise EngineFailed(f"What Firecracker saved is not a file of up to {_MAX_STATE_BYTES} bytes")
    return data


def remove_saved(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        remove_directory(path)
