"""The `fake` engine: the real agent as a plain process. No VM, no isolation; for tests of everything above engines.

It keeps the engines' contract, state included: what a parent evaluated before its freeze is recorded on the way to its
agent and evaluated again in every child before the child is handed over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from forkd.engines.base import BootSpec, Death, ExitReason, Frozen, Machine, Phases, record_pid, tail_of
from forkd.errors import EngineFailed, SnapshotIncompatible
from forkd.host.process import ChildProcess, ExitStatus, spawn
from forkd.wire.agent import EVAL, MORE, REPLY, Joiner, Parser, encode_message

_JOURNAL = "journal"
_READ_BYTES = 64 * 1024
_REPLAY_DEADLINE_S = 60.0


class FakeMachine:
    def __init__(self, directory: Path, process: ChildProcess, agent: socket.socket, journal: list[bytes]) -> None:
        self.phases = Phases(time.monotonic())
        self.death: asyncio.Future[Death] = asyncio.get_running_loop().create_future()
        self.journal = list(journal)
        self._directory = directory
        self._process = process
        self._killed = False
        self._channel, ours = socket.socketpair()
        self._taken = False
        self._relay = asyncio.create_task(self._run(agent, ours))
        self._ready = asyncio.Event()
        process.exited.add_done_callback(self._on_exit)

    @property
    def pid(self) -> int:
        return self._process.pid

    def take_channel(self) -> socket.socket:
        if self._taken:
            raise EngineFailed("The agent's channel of this machine was taken already")
        self._taken = True
        return self._channel

    async def running(self) -> None:
        ready = asyncio.ensure_future(self._ready.wait())
        try:
            await asyncio.wait([ready, self._relay], return_when=asyncio.FIRST_COMPLETED)
        finally:
            ready.cancel()
        if not self._ready.is_set():
            raise EngineFailed("The fake guest could not take up its past", details=self.console_tail() or None)

    async def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    async def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._killed = True
        await asyncio.shield(asyncio.ensure_future(self._release()))

    async def _release(self) -> None:
        # Stopped first, so that it starts nothing while we look; it adopts its orphans, so this is all there is.
        self._process.send_signal(signal.SIGSTOP)
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self._process.kill()
        self._relay.cancel()
        await asyncio.gather(self._relay, return_exceptions=True)
        if not self._taken:
            self._taken = True
            self._channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def console_tail(self) -> str:
        return tail_of(self._directory / "console.log")

    def _on_exit(self, exited: asyncio.Future[ExitStatus]) -> None:
        status = exited.result()
        reason = ExitReason.POWERED_OFF if status.code == 0 else ExitReason.CRASHED
        self.death.set_result(Death(ExitReason.KILLED if self._killed else reason, str(status)))

    async def _run(self, agent: socket.socket, ours: socket.socket) -> None:
        """Replay, then carry bytes both ways until one side is gone."""
        from_agent, to_agent = await asyncio.open_connection(sock=agent)
        from_host, to_host = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(_REPLAY_DEADLINE_S):
                await self._replay(from_agent, to_agent)
            self.phases.mark("resume", time.monotonic())
            self._ready.set()
            pumps = [
                asyncio.ensure_future(_pump(from_agent, to_host, None)),
                asyncio.ensure_future(_pump(from_host, to_agent, self.journal)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            to_agent.close()
            to_host.close()

    async def _replay(self, from_agent: asyncio.StreamReader, to_agent: asyncio.StreamWriter) -> None:
        parser = Parser()
        for number, payload in enumerate(self.journal, start=1):
            to_agent.write(encode_message(EVAL, number, payload))
            answered = False
            while not answered:
                data = await from_agent.read(_READ_BYTES)
                if not data:
                    raise EngineFailed("The fake guest ended while its past was replayed")
                answered = any(kind == REPLY and not flags & MORE for kind, flags, _, _ in parser.feed(data))


def _descendants(pid: int) -> list[int]:
    try:
        children = [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [*children, *(deeper for child in children for deeper in _descendants(child))]


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, journal: list[bytes] | None) -> None:
    parser, joiner = Parser(), Joiner()
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_READ_BYTES):
            if journal is not None:
                for kind, flags, stream, payload in parser.feed(data):
                    whole = joiner.join(kind, flags, stream, payload) if flags & MORE or joiner.active else payload
                    if kind == EVAL and whole is not None:
                        journal.append(whole)
            writer.write(data)
            await writer.drain()


class FakeEngine:
    name = "fake"
    isolation = "none"

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path) -> Machine:
        return self._start(directory, [])

    async def freeze(self, machine: Machine, into: Path) -> Mapping[str, str]:
        assert isinstance(machine, FakeMachine)
        (into / _JOURNAL).write_text(json.dumps([payload.hex() for payload in machine.journal]))
        await machine.kill()
        return {"python": sys.version.split()[0]}

    def check(self, frozen: Frozen) -> None:
        wanted, found = frozen.platform.get("python"), sys.version.split()[0]
        if wanted != found:
            raise SnapshotIncompatible(f"The snapshot was made with python {wanted}, this host has {found}")

    async def fork(self, frozen: Frozen, directory: Path) -> Machine:
        journal = json.loads((frozen.directory / _JOURNAL).read_bytes())
        return self._start(directory, [bytes.fromhex(entry) for entry in journal])

    def _start(self, directory: Path, journal: list[bytes]) -> FakeMachine:
        directory.mkdir(mode=0o700)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                agent = [sys.executable, "-m", "forkd.agent.main", "--fd", str(theirs.fileno())]
                process = spawn(
                    [*agent, "--root", str(directory / "root")],
                    output=directory / "console.log",
                    inherited_fds=[theirs.fileno()],
                )
            record_pid(directory, process)
        except BaseException:
            ours.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        return FakeMachine(directory, process, ours, journal)
