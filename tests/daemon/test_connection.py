"""Bounds of a connection, with deadlines short enough to be waited for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest
from starlette.types import Message, Receive, Scope, Send

from forkd.daemon import call, connection
from forkd.daemon.call import Call, Daemon, while_connected
from forkd.daemon.cap import ConnectionCap
from forkd.daemon.connection import LINK, Link
from forkd.daemon.errors import ClientGone, ForkdError
from forkd.daemon.listeners import opened_unix, served

BIG = 4_000_000
Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers /big with much, /wait when the client is gone, the rest with little."""
    status, body = 200, b"x" * (BIG if scope["path"] == "/big" else 3)
    if scope["path"] == "/wait":
        try:
            async with while_connected(scope[LINK], receive):
                await asyncio.sleep(30)
        except ClientGone:
            status = 400
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Connect]:
    with opened_unix(tmp_path / "s") as sock:
        async with served(app, sock, None, 1, ConnectionCap(100)):
            yield lambda: asyncio.open_unix_connection(str(tmp_path / "s"))


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(10):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


async def test_a_head_that_does_not_come_in_time_is_refused(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    late = b"did not arrive"
    for sent, answer in ((b"", b""), (b"GET / HT", late), (b"GET / HTTP/1.1\r\nA: ", late)):
        reader, writer = await connect()
        writer.write(sent)
        received = await read_to_end(reader)
        assert answer in received
        assert bool(received) == bool(answer)
        writer.close()
    reader, writer = await connect()
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"xxx")
        await asyncio.sleep(0.3)  # between two requests there is no head to wait for
    writer.close()


async def test_who_does_not_read_is_cut_off_and_who_reads_slowly_is_not(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WRITE_STALL_S", 0.3)
    reader, writer = await connect()
    writer.write(b"GET /big HTTP/1.1\r\n\r\n")
    received = 0
    async with asyncio.timeout(20):
        while received < BIG:
            received += len(await reader.read(200_000))
            await asyncio.sleep(0.02)
    writer.close()
    for more in (b"", b"Connection: close\r\n"):
        reader, writer = await connect()
        writer.write(b"GET /big HTTP/1.1\r\n" + more + b"\r\n")
        await asyncio.sleep(1.2)
        assert len(await read_to_end(reader)) < BIG
        writer.close()


def test_head_and_body_are_sent_together() -> None:
    transport = _Transport()
    joining = connection.Joining(cast(asyncio.Transport, transport))
    joining.holding = True
    joining.write(b"head ")
    assert transport.written == []
    joining.holding = False
    joining.write(b"body")
    joining.write(b"more")
    assert transport.written == [b"head body", b"more"]


class _Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


async def test_a_client_that_goes_away_or_half_closes_ends_the_work(connect: Connect) -> None:
    reader, writer = await connect()
    writer.write(b"GET /wait HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0.1)
    writer.write_eof()
    assert b" 400 " in await read_to_end(reader)
    writer.close()


class _Link:
    cut = False


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    return await Call(cast(Daemon, None), cast(Link, _Link()), "id", {}, b"", receive).read_body(limit_bytes)


async def test_a_body_that_stops_coming_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "GAP_S", 0.1)
    pieces = iter([b"a"])

    async def receive() -> Message:
        for piece in pieces:
            return {"type": "http.request", "body": piece, "more_body": True}
        await asyncio.sleep(30)
        raise AssertionError

    with pytest.raises(ForkdError, match="No more of the body"):
        await read_body(receive, 100)


async def test_a_body_that_comes_by_drops_is_refused_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "JSON_S", 0.2)

    async def receive() -> Message:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"a", "more_body": True}

    with pytest.raises(ForkdError, match="did not arrive within"):
        await read_body(receive, 10_000)
