"""What VMs of every engine share: a process, a directory, and the sockets in it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import stat
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forkd.engines.base import Death, ExitReason, Machine, Nic, Phases, tail_of
from forkd.errors import EngineFailed, GuestDied, Unsupported
from forkd.host.cell import Cell, read_cell
from forkd.host.cgroup import Group, Place, find_place, make_group
from forkd.host.marked import Marked, find_marked
from forkd.host.process import SHORTAGES, ExitStatus, WatchedProcess, take_over
from forkd.host.threads import in_thread
from forkd.host.user_ids import Lineage, UserIds
from forkd.model.machine import NO_LIMITS, Limits

if TYPE_CHECKING:
    from forkd.engines.fork_thread import ForkThread

CONSOLE = "console.log"
_DEATH_DEADLINE_S = 1.0
# The unix sockets in a VM's directory: its process inherits them listening, and serves one client at a time.
AGENT_SOCKET = "agent.sock"
CONNECT_DEADLINE_S = 10.0
_RETRY_S = 0.02
# A client that is served, one that is about to replace it, and some that gave up before they were served.
_BACKLOG = 8


def listening_socket(path: Path) -> socket.socket:
    """Listening before its server is there, so that clients need not wait for it to appear."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def connected_socket(path: Path) -> socket.socket:
    """Raises OSError; BlockingIOError when too many wait already.

    Follows no link, which a VMM that was broken into may have put there; and the path may be of any length.
    """
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(place).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK), str(path))
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(f"/proc/self/fd/{place}")
        except BaseException:
            sock.close()
            raise
        return sock
    finally:
        os.close(place)


async def connect_to(path: Path) -> socket.socket:
    """Connect to a VM that runs already. Whether it will serve us only an answer can tell."""
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            while True:
                try:
                    return connected_socket(path)
                except BlockingIOError:
                    await asyncio.sleep(_RETRY_S)
    except ConnectionRefusedError as error:
        raise GuestDied(f"No process listens on {path.name} of {path.parent.name} any more") from error
    except TimeoutError as error:
        raise EngineFailed(f"{path.name} of {path.parent.name} does not accept connections") from error
    except OSError as error:
        raise EngineFailed(f"Could not connect to {path}: {error.strerror}") from error


class ProcessMachine:
    """Owns the process, its group, the channel until it is taken and the directory; `kill` or `release` ends that.

    `filters`: how many of seccomp make a whole cell.
    """

    filters = 2  # the VMM's own, and our allow-list

    def __init__(
        self,
        directory: Path,
        process: WatchedProcess,
        phases: Phases,
        *,
        channel: socket.socket | None = None,
        group: Group | None = None,
        paused: bool = False,
    ) -> None:
        self.phases = phases
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self._directory = directory
        self._process = process
        self._channel = channel
        self._group = group
        self._paused = paused
        self._killed = False
        self._users: UserIds | None = None
        self._lineage: Lineage = ()
        self._cell: Cell | None = None
        self._starting: asyncio.Task[None] | None = None
        self.forking = asyncio.Lock()
        self.fork_thread: ForkThread | None = None
        process.exited.add_done_callback(self._on_exit)

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def cell(self) -> Cell | None:
        """What keeps its process in; None: it ended before anybody looked."""
        cgroup = str(self._group.path) if self._group else None
        seen = read_cell(self.pid, cgroup=cgroup, filters=self.filters)
        self._cell = seen or self._cell
        return self._cell

    @property
    def lineage(self) -> Lineage:
        return self._lineage

    def keep_users(self, users: UserIds, lineage: Lineage) -> None:
        """Takes over user ids that are held for it; they are given back when it has ended."""
        self._users, self._lineage = users, lineage

    def _release_users(self) -> None:
        if self._users is not None:
            self._users.release(self._lineage)
            self._users = None

    async def running(self) -> None:
        if self._starting is not None:
            await asyncio.shield(self._starting)

    def _begin(self, start: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Go through the start in the background; `running` waits for it."""
        self._starting = asyncio.create_task(start, name=f"start {self._directory.name}")
        return self._starting

    async def connect(self) -> socket.socket:
        if self.death.done():
            raise GuestDied(f"The VM has ended: {self.death.result().reason.value}")
        if self._channel is not None:
            channel, self._channel = self._channel, None
            return channel
        return await self._reach_agent()

    async def _reach_agent(self) -> socket.socket:
        return await connect_to(self._directory / AGENT_SOCKET)

    async def plug(self, nic: Nic | None) -> None:
        if nic is not None:
            raise Unsupported("This engine cannot give a running VM a network")

    async def learn_from(self, fork: Machine) -> None:
        """Nothing."""

    def find_tap(self) -> int | None:
        return None

    async def kill(self) -> None:
        self._killed = True
        ending = asyncio.ensure_future(self._end())
        cancelled = False
        while not ending.done():
            try:
                await asyncio.wait([ending])
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        ending.result()

    @asynccontextmanager
    async def _commanded(self) -> AsyncIterator[None]:
        """While no fork is made of it, and it is not kept at rest for one."""
        await self.running()
        async with self.forking:
            if self.fork_thread is not None:
                await self.fork_thread.let_go()
            yield

    async def _close_fork_thread(self) -> None:
        if self.fork_thread is not None:
            thread, self.fork_thread = self.fork_thread, None
            await thread.close()

    async def _end(self) -> None:
        self._give_up_start()
        await self._end_process()
        self._close_channel()
        if self._group is not None:
            await in_thread(self._group.remove)
        self._release_users()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _end_process(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        # As long as a tracer has not looked at a dead process, that is not over.
        await self._close_fork_thread()
        await self._process.kill()
        if self._starting is not None:
            await asyncio.gather(self._starting, return_exceptions=True)

    async def release(self) -> None:
        await self._close_fork_thread()
        self._process.release()
        self._close_channel()
        self._give_up_start()

    def _give_up_start(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    def console_tail(self) -> str:
        return tail_of(self._directory / CONSOLE)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _on_exit(self, exited: asyncio.Future[ExitStatus]) -> None:
        status = self._status(exited.result())
        reason = ExitReason.KILLED if self._killed else self._reason_of(status)
        self.death.set_result(Death(reason, str(status), self._vmm_output()))

    def _status(self, status: ExitStatus) -> ExitStatus:
        """What a process's exit says about the VMM, where the process is not the VMM itself."""
        return status

    def _reason_of(self, status: ExitStatus) -> ExitReason:
        if self._group is not None and self._group.out_of_memory():
            return ExitReason.OUT_OF_MEMORY
        return self._reason(status)

    def _reason(self, status: ExitStatus) -> ExitReason:
        raise NotImplementedError

    def _vmm_output(self) -> str:
        return ""


def parse_exit(status: ExitStatus, console: str) -> ExitReason:
    """Why a VMM that was not killed has ended. It exits with 0 when the guest shut down, and on a panic's reboot."""
    unknown = status.code is None and status.signal is None
    if status.code != 0 and not unknown:
        return ExitReason.CRASHED
    if "Kernel panic" in console:
        return ExitReason.PANICKED
    shut_down = "Power down" in console or "Restarting system" in console
    return ExitReason.UNKNOWN if unknown and not shut_down else ExitReason.POWERED_OFF


@contextmanager
def made_directory(directory: Path) -> Iterator[None]:
    """The directory of a VM that is started in the block; gone again when it is not."""
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise EngineFailed(f"Could not make the directory {directory}: {error.strerror}") from error
    try:
        yield
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise EngineFailed(
            f"Could not prepare a VM in {directory}: {error.strerror}", hint=SHORTAGES.get(error.errno or 0)
        ) from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


@contextmanager
def grouped(directory: Path, limits: Limits, files: Sequence[Path], *, always: bool = False) -> Iterator[Group | None]:
    """The control group of a VM that is started in the block, gone again when it is not.

    Without limits there is no group, unless `always` asks for one and this host can make it.
    """
    if limits == NO_LIMITS and not (always and isinstance(find_place(), Place)):
        yield None
        return
    group = make_group(directory, limits, files)
    try:
        yield group
    except BaseException:
        group.remove()
        raise


async def is_dying(process: WatchedProcess) -> bool:
    """Of one whose sockets broke: its exit, if it comes, follows within moments."""
    await asyncio.wait([process.exited], timeout=_DEATH_DEADLINE_S)
    return process.exited.done()


@asynccontextmanager
async def found_process(directory: Path, leader: Marked | None) -> AsyncIterator[WatchedProcess]:
    """The process of a VM that was left in `directory`; let go again when the block fails. Raises GuestDied."""
    leader = leader or find_marked(directory).get(directory)
    process = take_over(leader.pid, leader.start_ticks) if leader else None
    if process is None:
        raise GuestDied(f"The VM in {directory.name} has ended")
    try:
        yield process
    except EngineFailed as error:
        died = await is_dying(process)
        process.release()
        if died:
            raise GuestDied(f"The VM in {directory.name} ended while it was adopted") from error
        raise
    except BaseException:
        process.release()
        raise
