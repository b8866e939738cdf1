"""One QEMU process: its life, its monitor, its console."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from forkd.engines.base import ExitReason, Phases, tail_of
from forkd.engines.machine import ProcessMachine, found_process, parse_exit
from forkd.engines.qemu.monitor import QMP_SOCKET, Monitor
from forkd.engines.qemu.state import Incoming
from forkd.engines.sockets import AGENT_SOCKET, reach
from forkd.errors import EngineFailed
from forkd.host.cgroup import Group, find_group
from forkd.host.marked import Marked
from forkd.host.process import ExitStatus, WatchedProcess

VMM_LOG = "qemu.log"
# QEMU answers at once; a host that is busy with many others may take its time.
ADOPT_DEADLINE_S = 20.0


class QemuMachine(ProcessMachine):
    def __init__(
        self,
        directory: Path,
        process: WatchedProcess,
        phases: Phases,
        monitor: Monitor,
        *,
        channel: socket.socket,
        group: Group | None,
        paused: bool = False,
    ) -> None:
        """One whose monitor is connected, or about to be: see `start`."""
        super().__init__(directory, process, phases, channel=channel, group=group, paused=paused)
        self.monitor = monitor

    def start(self, state: Incoming | None) -> None:
        starting = self._begin(self._start(state))
        if state is not None:
            starting.add_done_callback(lambda _: state.close())

    async def _start(self, state: Incoming | None) -> None:
        try:
            await self.monitor.connect()
            self.phases.mark("process start", time.monotonic())
            if state is not None:
                await self.monitor.load_state(state)
                self.phases.mark("state load", time.monotonic())
                await self.monitor.execute("cont")
                self.phases.mark("resume", time.monotonic())
        except EngineFailed as error:
            raise EngineFailed(error.message, hint=error.hint, details=self._vmm_output() or None) from error

    async def pause(self) -> None:
        await self.running()
        await self.monitor.execute("stop")
        self._paused = True

    async def resume(self) -> None:
        await self.running()
        await self.monitor.execute("cont")
        self._paused = False

    async def _end_process(self) -> None:
        await super()._end_process()
        await self.monitor.close()

    async def release(self) -> None:
        await super().release()
        await self.monitor.close()

    def _vmm_output(self) -> str:
        lines = tail_of(self._directory / VMM_LOG).splitlines()
        # Said of every channel we hand over already connected; it is no news.
        return "\n".join(line for line in lines if "waiting for connection on" not in line)

    def _reason(self, status: ExitStatus) -> ExitReason:
        return parse_exit(status, self.console_tail())


async def adopt(directory: Path, leader: Marked | None) -> QemuMachine:
    """See Engine.adopt."""
    async with found_process(directory, leader) as process:
        monitor = Monitor(directory.name, await reach(directory / QMP_SOCKET))
        try:
            await monitor.connect(ADOPT_DEADLINE_S)
            paused = parse_paused(await monitor.execute("query-status"))
            channel = await reach(directory / AGENT_SOCKET)
        except BaseException:
            await monitor.close()
            raise
        group, phases = find_group(directory), Phases(time.monotonic())
        return QemuMachine(directory, process, phases, monitor, channel=channel, group=group, paused=paused)


def parse_paused(answer: object) -> bool:
    """From query-status. A VM that neither runs nor was paused is none that can be taken over."""
    status = answer.get("status") if isinstance(answer, dict) else None
    if status not in ("running", "paused"):
        raise EngineFailed(f"QEMU says that the VM is {status}", hint="Kill it and fork another")
    return bool(status == "paused")
