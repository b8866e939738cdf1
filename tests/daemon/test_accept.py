"""Connections where the kernel gives no more of them, or their client gives up."""

import asyncio
import errno
import logging
import socket
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from forkd.daemon import accept
from forkd.daemon.cap import ConnectionCap
from forkd.daemon.listeners import served


class Exhausted(socket.socket):
    """Its first connections cannot be accepted."""

    failures = 3

    def accept(self) -> tuple[socket.socket, object]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def listen(path: Path) -> Exhausted:
    sock = Exhausted(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


async def test_without_files_it_waits_says_one_line_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(accept, "RETRY_S", 0.01)
    with caplog.at_level(logging.ERROR), listen(tmp_path / "s") as sock:
        async with served(app, sock, None, 1, ConnectionCap(10)):
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
            writer.write(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
            async with asyncio.timeout(10):
                assert b" 204 " in await reader.read()
            writer.close()
    said = [record for record in caplog.records if record.name == "forkd.connections"]
    assert [record.getMessage() for record in said] == [
        "No connection can be accepted for 0.01 s: Too many open files"
    ] * 3
    assert all(record.exc_info is None for record in said)


async def test_a_connection_that_is_gone_makes_room(tmp_path: Path) -> None:
    cap = ConnectionCap(10)
    with listen(tmp_path / "s") as sock:
        sock.failures = 0
        async with served(app, sock, None, 1, cap):
            for _ in range(3):
                _, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
                writer.close()
            async with asyncio.timeout(10):
                while len(cap):
                    await asyncio.sleep(0.01)
