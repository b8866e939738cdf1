"""What VMs of every engine share: a process, a directory, the agent's socket in it."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from forkd.engines.base import Death, ExitReason, Phases, tail_of
from forkd.engines.sockets import AGENT_SOCKET, reach
from forkd.errors import EngineFailed, GuestDied
from forkd.host.marked import Marked, find_marked
from forkd.host.process import ExitStatus, WatchedProcess, take_over

CONSOLE = "console.log"
# A VMM whose sockets broke is dying; its exit follows within moments.
_DEATH_DEADLINE_S = 1.0


class ProcessMachine:
    """Owns the process, the channel until it is taken, and the directory; `kill` or `release` ends that."""

    def __init__(
        self, directory: Path, process: WatchedProcess, channel: socket.socket, phases: Phases, *, paused: bool = False
    ) -> None:
        self.phases = phases
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self._directory = directory
        self._process = process
        self._channel: socket.socket | None = channel
        self._paused = paused
        self._killed = False
        process.exited.add_done_callback(self._on_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def paused(self) -> bool:
        return self._paused

    def take_channel(self) -> socket.socket:
        if self._channel is None:
            raise EngineFailed("The agent's channel of this machine was taken already")
        channel, self._channel = self._channel, None
        return channel

    async def reconnect(self) -> socket.socket:
        if self.death.done():
            raise GuestDied(f"The VM has ended: {self.death.result().reason.value}")
        self._close_channel()  # one that nobody took would be served before it
        return await reach(self._directory / AGENT_SOCKET)

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

    async def _end(self) -> None:
        await self._end_process()
        self._close_channel()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _end_process(self) -> None:
        await self._process.kill()

    async def release(self) -> None:
        self._process.release()
        self._close_channel()

    def console_tail(self) -> str:
        return tail_of(self._directory / CONSOLE)

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _on_exit(self, exited: asyncio.Future[ExitStatus]) -> None:
        status = exited.result()
        reason = ExitReason.KILLED if self._killed else self._reason(status)
        self.death.set_result(Death(reason, str(status), self._vmm_output()))

    def _reason(self, status: ExitStatus) -> ExitReason:
        raise NotImplementedError

    def _vmm_output(self) -> str:
        return ""


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
        raise EngineFailed(f"Could not prepare a VM in {directory}: {error.strerror}") from error
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


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
        await asyncio.wait([process.exited], timeout=_DEATH_DEADLINE_S)
        died = process.exited.done()
        process.release()
        if died:
            raise GuestDied(f"The VM in {directory.name} ended while it was adopted") from error
        raise
    except BaseException:
        process.release()
        raise
