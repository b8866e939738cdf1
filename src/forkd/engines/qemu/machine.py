"""One QEMU process: its life, its two sockets, its console."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from pathlib import Path

from forkd.engines.base import Death, ExitReason, Phases, tail_of
from forkd.engines.qemu.monitor import Monitor
from forkd.errors import EngineFailed
from forkd.host.process import ChildProcess, ExitStatus


class QemuMachine:
    """Owns the process, its monitor connection and its runtime directory; `kill` releases all three."""

    def __init__(
        self,
        directory: Path,
        process: ChildProcess,
        monitor: Monitor,
        qmp: socket.socket,
        channel: socket.socket,
        *,
        state_fd: int | None,
        phases: Phases,
    ) -> None:
        self.phases = phases
        self._directory = directory
        self._process = process
        self._monitor = monitor
        self._channel: socket.socket | None = channel
        self._killed = False
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        process.exited.add_done_callback(self._on_exit)
        self._started = asyncio.create_task(self._start(qmp, state_fd), name=f"start {directory.name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def monitor(self) -> Monitor:
        return self._monitor

    def take_channel(self) -> socket.socket:
        if self._channel is None:
            raise EngineFailed("The agent's channel of this machine was taken already")
        channel, self._channel = self._channel, None
        return channel

    async def running(self) -> None:
        await asyncio.shield(self._started)

    async def _start(self, qmp: socket.socket, state_fd: int | None) -> None:
        try:
            await self._monitor.connect(qmp)
            self.phases.mark("process start", time.monotonic())
            if state_fd is not None:
                await self._monitor.load_state(state_fd)
                self.phases.mark("state load", time.monotonic())
                await self._monitor.execute("cont")
                self.phases.mark("resume", time.monotonic())
        except EngineFailed as error:
            raise EngineFailed(error.message, hint=error.hint, details=self._log_tail()) from error

    async def pause(self) -> None:
        await self.running()
        await self._monitor.execute("stop")

    async def resume(self) -> None:
        await self.running()
        await self._monitor.execute("cont")

    async def kill(self) -> None:
        self._killed = True
        await asyncio.shield(asyncio.ensure_future(self._release()))

    async def _release(self) -> None:
        self._started.cancel()
        await self._process.kill()
        await asyncio.gather(self._started, return_exceptions=True)
        await self._monitor.close()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        shutil.rmtree(self._directory, ignore_errors=True)

    def console_tail(self) -> str:
        return tail_of(self._directory / "console.log")

    def _log_tail(self) -> str | None:
        lines = tail_of(self._directory / "qemu.log").splitlines()
        # Said of every channel we hand over already connected; it is no news.
        return "\n".join(line for line in lines if "waiting for connection on" not in line) or None

    def _on_exit(self, exited: asyncio.Future[ExitStatus]) -> None:
        status = exited.result()
        reason = ExitReason.KILLED if self._killed else parse_exit(status, self.console_tail())
        self.death.set_result(Death(reason, str(status), self._log_tail() or ""))


def parse_exit(status: ExitStatus, console: str) -> ExitReason:
    """Why a QEMU that nobody killed has ended. It exits with 0 both on power-off and on a panic's reboot."""
    if status.code != 0:
        return ExitReason.CRASHED
    return ExitReason.PANICKED if "Kernel panic" in console else ExitReason.POWERED_OFF
