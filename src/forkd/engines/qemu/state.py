"""Device state between its file and QEMU, by a socket: QEMU 11 takes a descriptor of no file, QEMU 7 opens none."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import BinaryIO

from forkd.errors import EngineFailed

# About 0.4 MiB, and more with more vCPUs.
MAX_STATE_BYTES = 16 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024


class Incoming:
    """The state that a VM is to go on from. QEMU inherits `theirs`, under the number `fd`; then it is closed here."""

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
