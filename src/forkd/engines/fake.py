"""The `fake` engine: the real agent as a plain process. No VM, no isolation; for tests of everything above engines.

It keeps the engines' contract, state included: what a parent evaluated before its freeze is recorded by its agent and
evaluated again in every child before the child is handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from forkd.engines.base import (
    BootSpec,
    Entry,
    ExitReason,
    Findings,
    Frozen,
    Machine,
    Nic,
    Phases,
    Saved,
    Verdict,
    WithoutLiveForks,
    check_same,
    refuse_cpu_template,
)
from forkd.engines.machine import (
    AGENT_SOCKET,
    CONSOLE,
    ProcessMachine,
    connect_to,
    connected_socket,
    found_process,
    grouped,
    listening_socket,
    made_directory,
)
from forkd.errors import EngineFailed
from forkd.host.cgroup import find_group
from forkd.host.marked import Marked, is_stopped, kill_marked, render_environment
from forkd.host.process import ExitStatus, children_of, spawn
from forkd.host.tap import take_tap
from forkd.host.threads import in_thread
from forkd.model.machine import NO_LIMITS, Limits
from forkd.wire.agent import EVAL, MORE, REPLY, Joiner, Parser, WireError, encode_message

_JOURNAL = "journal"
_TAP = "tap"  # stands for the descriptor that a VMM would hold
_READ_BYTES = 64 * 1024
_REPLAY_DEADLINE_S = 60.0
_STOP_DEADLINE_S = 10.0
_POLL_S = 0.001

# Our own path instead of what `site` would look for: it is a third of an interpreter's start.
_START = """\
import sys
listener, root, journal, path = sys.argv[1:]
sys.path[:] = path.split(":")
from forkd.agent.main import rehearse
rehearse(int(listener), root, journal)
"""


class FakeMachine(ProcessMachine):
    _tap: int | None = None

    def replay(self, past: list[bytes], client: socket.socket) -> None:
        """Takes the client over; it may be cancelled before it begins."""
        self._begin(_replay(past, client, self.phases)).add_done_callback(lambda _: client.close())

    async def running(self) -> None:
        try:
            await super().running()
        except (EngineFailed, OSError, TimeoutError) as error:
            tail = self.console_tail() or None
            raise EngineFailed("The fake guest could not replay its past", details=tail) from error

    async def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self._paused = True

    async def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._paused = False

    async def plug(self, nic: Nic | None) -> None:
        """As far as we know: the process keeps what it was started with."""
        await self.running()
        self._close_tap()
        if nic is None:
            (self._directory / _TAP).unlink(missing_ok=True)
        else:
            self._tap = os.dup(nic.tap)
            (self._directory / _TAP).write_text(nic.tap_name)

    def find_tap(self) -> int | None:
        """The file stands in for a descriptor that is no tap, as networks that are fake give it."""
        place = self._directory / _TAP
        if not place.exists():
            return None
        try:
            found = take_tap(self.pid) if self._tap is None else os.dup(self._tap)
            return os.open(place, os.O_RDONLY | os.O_CLOEXEC) if found is None else found
        except OSError as error:
            raise EngineFailed(f"The process of {self._directory.name} cannot be looked at") from error

    def _close_tap(self) -> None:
        if self._tap is not None:
            os.close(self._tap)
            self._tap = None

    async def release(self) -> None:
        await super().release()
        self._close_tap()

    async def save(self, into: Path) -> None:
        if not self._paused:
            raise EngineFailed("Only a paused VM can be saved", hint="Pause it first")
        await self.running()
        async with asyncio.timeout(_STOP_DEADLINE_S):
            while True:
                if is_stopped(self.pid):
                    break
                await asyncio.sleep(_POLL_S)  # the signal is on its way
        self.copy_journal(into)

    def copy_journal(self, into: Path) -> None:
        shutil.copyfile(self._directory / _JOURNAL, into / _JOURNAL)

    async def _end_process(self) -> None:
        # Stopped first, so that it starts nothing while we look; it adopts its orphans.
        self._process.send_signal(signal.SIGSTOP)
        for pid in _descendants(self.pid) if not self._process.exited.done() else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await super()._end_process()
        self._close_tap()
        # What it had started may have another parent by now, or be about to end; only the mark tells whose it is.
        await in_thread(lambda: kill_marked(self._directory))

    def _reason(self, status: ExitStatus) -> ExitReason:
        if status.code is None and status.signal is None:
            return ExitReason.UNKNOWN
        return ExitReason.POWERED_OFF if status.code == 0 else ExitReason.CRASHED


class FakeEngine(WithoutLiveForks):
    name = "fake"
    isolation = "none"
    opens_taps = False
    streams_go_on = True
    learns = False

    def __init__(self, *, outlive: bool = False) -> None:
        """`outlive`: forks go on when we end."""
        self._outlive = outlive

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path, nic: Nic | None = None) -> Machine:
        refuse_cpu_template(spec.machine, self.name)
        return self._start(directory, [], NO_LIMITS, nic, outlive=False)

    async def freeze(self, machine: Machine, into: Path) -> Mapping[str, str]:
        assert isinstance(machine, FakeMachine)
        machine.copy_journal(into)
        await machine.kill()
        return _platform()

    async def save(self, machine: Machine, into: Path) -> Saved:
        assert isinstance(machine, FakeMachine)
        try:
            await machine.save(into)
        except (OSError, TimeoutError) as error:
            raise EngineFailed("What the fake guest did could not be saved") from error
        return Saved(_platform(), None)

    def check(self, frozen: Frozen) -> None:
        check_same("python", frozen.platform.get("python"), _platform()["python"])

    def check_nic(self, frozen: Frozen) -> None:
        pass

    async def fork(
        self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        past = parse_journal((frozen.directory / _JOURNAL).read_bytes())
        return self._start(directory, past, limits, nic, outlive=self._outlive)

    async def adopt(self, directory: Path, leader: Marked | None = None) -> Machine:
        async with found_process(directory, leader) as process:
            channel = await connect_to(directory / AGENT_SOCKET)
            group, paused = find_group(directory), is_stopped(process.pid)
            phases = Phases(time.monotonic())
            return FakeMachine(directory, process, phases, channel=channel, group=group, paused=paused)

    def _start(
        self, directory: Path, past: list[bytes], limits: Limits, nic: Nic | None, *, outlive: bool
    ) -> FakeMachine:
        phases = Phases(time.monotonic())
        files = [Path(sys.executable)]  # all that a fake guest reads of a disk, and it need not
        with (
            made_directory(directory),
            grouped(directory, limits, files) as group,
            contextlib.ExitStack() as on_failure,
        ):
            if nic is not None:
                (directory / _TAP).write_text(nic.tap_name)
            with listening_socket(directory / AGENT_SOCKET) as listener:
                # The agent serves one client after the other: first who replays the past, then who has the channel.
                client = on_failure.enter_context(connected_socket(directory / AGENT_SOCKET)) if past else None
                channel = on_failure.enter_context(connected_socket(directory / AGENT_SOCKET))
                process = spawn(
                    render_command(listener.fileno(), directory),
                    output=directory / CONSOLE,
                    env=render_environment(directory),
                    inherited_fds=[listener.fileno(), *([] if nic is None else [nic.tap])],
                    outlive=outlive,
                    group=group,
                )
            on_failure.pop_all()
        machine = FakeMachine(directory, process, phases, channel=channel, group=group)
        if client is not None:
            machine.replay(past, client)
        return machine


def _platform() -> dict[str, str]:
    return {"python": sys.version.split()[0]}


def render_command(listener: int, directory: Path) -> list[str]:
    path = ":".join(entry for entry in sys.path if entry)
    return [
        *(sys.executable, "-I", "-S", "-c", _START),
        *(str(listener), str(directory / "root"), str(directory / _JOURNAL), path),
    ]


def parse_journal(data: bytes) -> list[bytes]:
    """The requests to evaluate, in their order."""
    parser, joiner = Parser(), Joiner()
    past = []
    for kind, flags, stream, payload in parser.feed(data):
        try:
            whole = joiner.join(kind, flags, stream, payload)
        except WireError:
            continue  # too large: it was refused then, too
        if whole is not None:
            past.append(whole)
    return past


async def _replay(past: list[bytes], client: socket.socket, phases: Phases) -> None:
    reader, writer = await asyncio.open_connection(sock=client)
    try:
        async with asyncio.timeout(_REPLAY_DEADLINE_S):
            parser = Parser()
            for number, payload in enumerate(past, start=1):
                writer.write(encode_message(EVAL, number, payload))
                answered = False
                while not answered:
                    data = await reader.read(_READ_BYTES)
                    if not data:
                        raise EngineFailed("The fake guest ended while its past was replayed")
                    answered = any(kind == REPLY and not flags & MORE for kind, flags, _, _ in parser.feed(data))
    finally:
        writer.transport.abort()
    phases.mark("resume", time.monotonic())


def _descendants(pid: int) -> list[int]:
    children = children_of(pid)
    return [*children, *(deeper for child in children for deeper in _descendants(child))]


def judge(found: Findings, asked: bool) -> Verdict:
    """Never in place of a VM."""
    if not asked:
        return Verdict("it runs no VM", lack="fake")
    return Verdict("; it is for tests and runs no VM", None, "none")


ENTRY = Entry("fake", (), judge, lambda _, opening: FakeEngine(outlive=opening.outlive), runs_vms=False)
