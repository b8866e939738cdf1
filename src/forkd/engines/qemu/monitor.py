"""QMP, by the official client: what we ask of a running QEMU, with deadlines and typed errors."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Coroutine
from typing import Any, BinaryIO

from qemu.qmp import EventListener, ExecuteError, QMPClient, QMPError

from forkd.engines.qemu.state import Incoming, receive_state
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


class Monitor:
    def __init__(self, name: str, sock: socket.socket) -> None:
        """Takes the socket over; `close` closes it, whether it was connected or not."""
        self._sock = sock
        self._client = QMPClient(name)
        self._migration = EventListener(names=("MIGRATION",))
        self._client.register_listener(self._migration)

    async def connect(self, deadline_s: float = START_DEADLINE_S) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                await self._client.connect(self._sock)
        except (QMPError, TimeoutError, OSError) as error:
            raise EngineFailed("QEMU did not open its monitor") from error

    async def close(self) -> None:
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                await self._client.disconnect()
        except (QMPError, TimeoutError, OSError, EOFError):
            pass  # the other end is dead or dying; nothing of ours stays open
        finally:
            self._sock.close()

    async def execute(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        try:
            async with asyncio.timeout(COMMAND_DEADLINE_S):
                return await self._client.execute(command, arguments)
        except ExecuteError as error:
            raise EngineFailed(f"QEMU refused {command}: {error.error.error.desc}") from error
        except (QMPError, TimeoutError, OSError) as error:
            raise EngineFailed(f"QEMU did not answer {command}") from error

    async def load_state(self, state: Incoming) -> None:
        """Returns when the guest may run."""
        await self.execute("migrate-set-capabilities", {"capabilities": _CAPABILITIES})
        await self.execute("migrate-incoming", {"uri": f"fd:{state.fd}"})
        await self._migrated(state.send())

    async def save_state(self, file: BinaryIO) -> None:
        """Device state, not memory."""
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
