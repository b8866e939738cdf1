"""One QEMU process: its life, its monitor, its console."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

from forkd.engines.base import ExitReason, Nic, Phases, tail_of
from forkd.engines.machine import AGENT_SOCKET, ProcessMachine, connect_to, found_process, parse_exit
from forkd.engines.qemu.memory import find_live_memory
from forkd.engines.qemu.monitor import QMP_SOCKET, Incoming, Monitor
from forkd.engines.qemu.nic import open_end, render_move, require_tap_number, take_tap
from forkd.errors import EngineFailed
from forkd.host.cgroup import Group, find_group
from forkd.host.marked import Marked
from forkd.host.pages import LiveMemory
from forkd.host.process import ExitStatus, WatchedProcess
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.source import make_calls
from forkd.host.threads import in_thread
from forkd.host.user_ids import UserIds, hold_lineage

VMM_LOG = "qemu.log"
# The device state that was saved last. QEMU saves it once while the VM stands still; then it is still true.
SAVED_STATE = "saved"
_SAVED = "postmigrate"
# Said of every channel we hand over already connected, and of an interface that is to lead nowhere.
_MEANS_NOTHING = ("waiting for connection on", "is not connected to host network")
SetUp = Callable[[int], None]
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
        """One whose monitor is connected, or about to be: see `start` and `go_on`."""
        super().__init__(directory, process, phases, channel=channel, group=group, paused=paused)
        self.monitor = monitor

    def start(self, state: Incoming | None, set_up: SetUp | None, *, run: bool = True) -> None:
        """`set_up`: what is done, in a thread, to its process before that loads the state; then its guest runs."""
        starting = self._begin(self._start(state, set_up, run=run))
        if state is not None:
            starting.add_done_callback(lambda _: state.close())

    def go_on(self, *, paused: bool) -> None:
        """Of a fork: in the session of its source's monitor."""
        self._begin(self._go_on(paused=paused))

    async def _start(self, state: Incoming | None, set_up: SetUp | None, *, run: bool) -> None:
        with self._told():
            await self.monitor.connect()
            self.phases.mark("process start", time.monotonic())
            if set_up is not None:
                await in_thread(lambda: set_up(self.pid))
                self.phases.mark("confine", time.monotonic())
            if state is not None:
                await self.monitor.load_state(state)
                self.phases.mark("state load", time.monotonic())
                self._paused = not run
            if run:
                await self.monitor.execute("cont")
                self.phases.mark("resume", time.monotonic())

    async def _go_on(self, *, paused: bool) -> None:
        with self._told():
            if not paused:
                await self.monitor.continued()
                self._paused = False
                self.phases.mark("resume", time.monotonic())

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """What QEMU itself said goes with the error."""
        try:
            yield
        except OSError as error:
            raise EngineFailed(f"QEMU could not be set up: {error.strerror}") from error
        except EngineFailed as error:
            raise EngineFailed(error.message, hint=error.hint, details=self._vmm_output() or None) from error

    async def pause(self) -> None:
        async with self._commanded():  # a fork stops it, and has it go on
            await self.monitor.execute("stop")
            self._paused = True

    async def resume(self) -> None:
        async with self._commanded():
            await self.monitor.execute("cont")
            self._paused = False

    async def plug(self, nic: Nic | None) -> None:
        async with self._commanded():
            tap = require_tap_number(self.pid)
            end = open_end(nic)
            try:
                lent = await self.monitor.lend(end)
                os.set_blocking(end, False)  # what QEMU receives it has block, and it would wait there for a packet
            finally:
                os.close(end)
            try:
                # Closed by QEMU itself, which counts it.
                calls = render_move(lent.number, tap)[:1]
                await in_thread(lambda: make_calls(self.pid, calls, POLLS))
            finally:
                await self.monitor.give_back(lent)

    def find_tap(self) -> int | None:
        try:
            return take_tap(self.pid)
        except OSError as error:
            raise EngineFailed(f"The network interface of {self.directory.name} cannot be looked at") from error

    async def save(self) -> tuple[bytes, LiveMemory]:
        """The device state of a paused VM, and where its memory is."""
        async with self._commanded():
            if not self._paused:
                raise EngineFailed("Only a paused VM can be saved", hint="Pause it first")
            memory = await in_thread(lambda: find_live_memory(self.pid))
            with self._told():
                return await self._save_state(), memory

    async def _save_state(self) -> bytes:
        place = self.directory / SAVED_STATE
        if parse_status(await self.monitor.execute("query-status")) == _SAVED:
            try:
                return place.read_bytes()
            except OSError as error:
                raise EngineFailed("What was saved of the VM is lost", hint="Resume and pause it first") from error
        place.unlink(missing_ok=True)
        state = BytesIO()
        await self.monitor.save_state(state)
        _keep(place, state.getvalue())
        return state.getvalue()

    async def _end_process(self) -> None:
        await super()._end_process()
        await self.monitor.close()

    async def release(self) -> None:
        await super().release()
        await self.monitor.close()

    def _vmm_output(self) -> str:
        lines = tail_of(self._directory / VMM_LOG).splitlines()
        return "\n".join(line for line in lines if not any(saying in line for saying in _MEANS_NOTHING))

    def _reason(self, status: ExitStatus) -> ExitReason:
        return parse_exit(status, self.console_tail())


def _keep(place: Path, data: bytes) -> None:
    """All of it or, where there is no space, nothing: the VM can then be saved once only."""
    new = place.with_suffix(".new")
    try:
        new.write_bytes(data)
        new.rename(place)
    except OSError:
        new.unlink(missing_ok=True)


async def adopt(directory: Path, leader: Marked | None, users: UserIds) -> QemuMachine:
    """See Engine.adopt."""
    async with found_process(directory, leader) as process:
        monitor = Monitor(await connect_to(directory / QMP_SOCKET))
        try:
            await monitor.connect(ADOPT_DEADLINE_S)
            paused = parse_paused(await monitor.execute("query-status"))
            channel = await connect_to(directory / AGENT_SOCKET)
        except BaseException:
            await monitor.close()
            raise
        group, phases = find_group(directory), Phases(time.monotonic())
        machine = QemuMachine(directory, process, phases, monitor, channel=channel, group=group, paused=paused)
        machine.keep_users(users, hold_lineage(users, process.pid))
        return machine


def parse_paused(answer: object) -> bool:
    """From query-status. A VM that neither runs nor was paused cannot be taken over."""
    status = parse_status(answer)
    if status not in ("running", "paused", _SAVED):
        raise EngineFailed(f"QEMU says that the VM is {status}", hint="Kill it and fork another")
    return status != "running"


def parse_status(answer: object) -> str | None:
    status = answer.get("status") if isinstance(answer, dict) else None
    return status if isinstance(status, str) else None
