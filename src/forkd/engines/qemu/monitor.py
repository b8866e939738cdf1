"""QMP, by the official client: what we ask of a running QEMU, with deadlines and typed errors."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from qemu.qmp import EventListener, ExecuteError, QMPClient, QMPError

from forkd.errors import EngineFailed

QMP_SOCKET = "qmp.sock"
START_DEADLINE_S = 60.0
COMMAND_DEADLINE_S = 20.0
MIGRATION_DEADLINE_S = 60.0

# The client logs every broken connection itself; a VM we kill is not news.
logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL)

_CAPABILITIES = [
    {"capability": "x-ignore-shared", "state": True},
    {"capability": "events", "state": True},
]

# Of device state: about 0.4 MiB, and more with more vCPUs.
MAX_STATE_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_CONT = b'{"execute": "cont"}\n'
_MOST_BEFORE_ANSWER_BYTES = 64 * 1024


@dataclass(frozen=True)
class Lent:
    """A descriptor that QEMU has of us, under its number there."""

    set_id: int
    number: int


class Monitor:
    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over; `close` closes it, whether it was connected or not."""
        self._sock = sock
        self._inherited = False
        # One name for all: the client keeps a logger for each name it was ever given.
        self._client = QMPClient("forkd")
        self._migration = EventListener(names=("MIGRATION",))
        self._client.register_listener(self._migration)

    async def connect(self, deadline_s: float = START_DEADLINE_S) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._client.connect(self._sock)
        except (QMPError, TimeoutError, OSError, AssertionError) as error:
            # The client asserts that it is connected, which it is not where the other end is gone already.
            raise EngineFailed("QEMU did not open its monitor") from error

    def inherit(self) -> None:
        """A fork goes on in the session of its source, which was greeted long ago. Connected when first needed."""
        self._client.await_greeting = self._client.negotiate = False
        self._inherited = True

    def tell_cont(self) -> None:
        """Of a fork that does not run yet: it finds the command when it wakes up."""
        self._sock.send(_CONT)

    async def continued(self) -> None:
        """Until it has said that it goes on."""
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                answer = await read_answer(self._sock)
        except (TimeoutError, OSError, ValueError) as error:
            raise EngineFailed("QEMU did not answer cont") from error
        if "error" in answer:
            raise EngineFailed("QEMU refused cont")

    async def close(self) -> None:
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                await self._client.disconnect()
        except (QMPError, TimeoutError, OSError, EOFError):
            pass  # the other end is dead or dying; nothing of ours stays open
        finally:
            self._sock.close()

    async def lend(self, fd: int) -> Lent:
        """QEMU gets a duplicate, which it keeps until `give_back`."""
        await self._take_up()
        self._client.send_fd_scm(fd)
        answer = await self.execute("add-fd")
        try:
            return Lent(int(answer["fdset-id"]), int(answer["fd"]))
        except (TypeError, KeyError, ValueError) as error:
            raise EngineFailed("QEMU's answer to add-fd is invalid") from error

    async def give_back(self, lent: Lent) -> None:
        await self.execute("remove-fd", {"fdset-id": lent.set_id})

    async def _take_up(self) -> None:
        if self._inherited:
            self._inherited = False
            await self.connect(COMMAND_DEADLINE_S)

    async def execute(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        await self._take_up()
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                return await self._client.execute(command, arguments)
        except ExecuteError as error:
            raise EngineFailed(f"QEMU refused {command}: {error.error.error.desc}") from error
        except (QMPError, TimeoutError, OSError) as error:
            raise EngineFailed(f"QEMU did not answer {command}") from error

    async def go_on(self) -> float:
        """`cont`. For how long it had been running when we saw its answer, by its own word: we may be late."""
        with self._client.listener("RESUME") as resumed:
            await self.execute("cont")
            now = time.time()
            return 0.0 if resumed.empty() else parse_age_s(await resumed.get(), now)

    async def load_state(self, state: Incoming) -> None:
        """Returns when the guest may run."""
        await self.execute("migrate-set-capabilities", {"capabilities": _CAPABILITIES})
        await self.execute("migrate-incoming", {"uri": f"fd:{state.fd}"})
        await self._migrated(state.send())

    async def save_state(self, file: BinaryIO) -> None:
        """Device state, not memory. Once while the VM stands still."""
        self._migration.clear()
        await self.execute("migrate-set-capabilities", {"capabilities": _CAPABILITIES})
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._client.send_fd_scm(theirs.fileno())
                await self.execute("getfd", {"fdname": "state"})
            await self.execute("migrate", {"uri": "fd:state"})
            await self._migrated(receive_state(ours, file))

    async def _migrated(self, transfer: Coroutine[Any, Any, None]) -> None:
        both = asyncio.create_task(transfer), asyncio.create_task(self._completed())
        try:
            async with asyncio.timeout(MIGRATION_DEADLINE_S):
                await asyncio.gather(*both)
        except TimeoutError as error:
            raise EngineFailed("QEMU did not finish with the device state") from error
        finally:
            for task in both:
                task.cancel()
            await asyncio.wait(both)

    async def _completed(self) -> None:
        async for event in self._migration:
            data = event["data"]
            status = data.get("status") if isinstance(data, dict) else None
            if status == "completed":
                return
            if status in ("failed", "cancelled"):
                raise EngineFailed(f"QEMU reports that the device state was {status}")


def parse_age_s(event: Mapping[str, Any], now: float) -> float:
    """How long ago an event was, `now` being on the real-time clock; 0 where it does not say. Pure."""
    try:
        stamp = event["timestamp"]
        age_s = now - (float(stamp["seconds"]) + float(stamp["microseconds"]) / 1e6)
    except (TypeError, KeyError):
        return 0.0
    return max(0.0, age_s)


async def read_answer(sock: socket.socket) -> dict[str, Any]:
    """The answer to a command, after the events before it; what comes behind it stays in the socket."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[dict[str, Any]] = loop.create_future()
    skipped = 0

    def look() -> None:
        nonlocal skipped
        if found.done():  # nobody waits any more
            return
        try:
            seen = sock.recv(_MOST_BEFORE_ANSWER_BYTES, socket.MSG_PEEK)
            answer, size = find_answer(seen)
            # Events are taken out at once: as long as they are there the loop would call us for them.
            skipped += len(sock.recv(size)) if size else 0
            if answer is not None:
                found.set_result(answer)
            elif not seen or skipped + len(seen) - size >= _MOST_BEFORE_ANSWER_BYTES:
                raise ConnectionResetError("no answer came")
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            found.set_exception(error)
        if found.done():
            loop.remove_reader(sock)

    loop.add_reader(sock, look)
    try:
        return await found
    finally:
        loop.remove_reader(sock)


def find_answer(seen: bytes) -> tuple[dict[str, Any] | None, int]:
    """The first answer among whole lines, and how many bytes all lines up to it take. Pure."""
    at = 0
    for line in seen.splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        at += len(line)
        said = json.loads(line)
        if isinstance(said, dict) and ("return" in said or "error" in said):
            return said, at
    return None, at


class Incoming:
    """The device state that a VM goes on from. QEMU inherits `theirs`, under the number `fd`; then it is closed here.

    By a socket: QEMU 11 takes a descriptor of no file, QEMU 7 opens none.
    """

    def __init__(self, path: Path) -> None:
        self._data = path.read_bytes()
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.fd = self.theirs.fileno()

    async def send(self) -> None:
        """Ends early when QEMU wants no more of it; why, QEMU says."""
        with self._ours:
            try:
                await asyncio.get_running_loop().sock_sendall(self._ours, self._data)
            except (BrokenPipeError, ConnectionResetError):
                return

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


async def receive_state(sock: socket.socket, file: BinaryIO) -> None:
    """Until QEMU closes its end."""
    loop, received = asyncio.get_running_loop(), 0
    sock.setblocking(False)
    while data := await loop.sock_recv(sock, _CHUNK_BYTES):
        received += len(data)
        if received > MAX_STATE_BYTES:
            raise EngineFailed(f"QEMU's device state is larger than {MAX_STATE_BYTES >> 20} MiB")
        file.write(data)
