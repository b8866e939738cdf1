"""The unix sockets in a VM's directory: a VM process inherits them listening, and serves one client at a time."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from pathlib import Path

from forkd.errors import EngineFailed, GuestDied

AGENT_SOCKET = "agent.sock"
CONNECT_DEADLINE_S = 10.0
_RETRY_S = 0.02
# A client that is served, one that is about to replace it, and some that gave up before they were served.
_BACKLOG = 8


def listening_socket(path: Path) -> socket.socket:
    """Listening before its server is there, so that nobody has to wait for it to appear."""
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


async def reach(path: Path) -> socket.socket:
    """Connect to a VM that runs already. Whether it will serve us only an answer can tell."""
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            while True:
                try:
                    return connected_socket(path)
                except BlockingIOError:
                    await asyncio.sleep(_RETRY_S)
    except ConnectionRefusedError as error:
        raise GuestDied(f"Nobody serves {path.name} of {path.parent.name} any more") from error
    except TimeoutError as error:
        raise EngineFailed(f"{path.name} of {path.parent.name} takes no connection") from error
    except OSError as error:
        raise EngineFailed(f"Could not connect to {path}: {error.strerror}") from error
