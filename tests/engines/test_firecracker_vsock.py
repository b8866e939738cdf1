"""Streams through a unix socket that behaves as Firecracker's vsock does, and as it should not."""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from forkd.engines.firecracker.api import open_stream
from forkd.errors import EngineFailed, GuestTimeout

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        yield Path(path) / "agent.sock"


async def _open(place: Path, serve: Serve, *, deadline_s: float = 5.0) -> bytes:
    """What comes through the stream first."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    async with await asyncio.start_unix_server(handle, place):
        with await open_stream(place, 1024, deadline_s) as sock:
            return await asyncio.get_running_loop().sock_recv(sock, 100)


async def test_the_port_is_named_and_what_follows_the_answer_is_the_agents(place: Path) -> None:
    asked = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(b"OK 1073741824\nhello")
        await writer.drain()

    assert await _open(place, serve) == b"hello"
    assert asked == [b"CONNECT 1024\n"]


async def test_a_guest_that_does_not_listen_yet_is_asked_again(place: Path) -> None:
    calls = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(await reader.readline())
        if len(calls) > 3:
            writer.write(b"OK 1\nat last")
            await writer.drain()

    assert await _open(place, serve) == b"at last"
    assert len(calls) == 4


async def test_a_guest_that_never_listens_is_given_up(place: Path) -> None:
    async def serve(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.readline()

    with pytest.raises(GuestTimeout, match=r"within 0\.2 s"):
        await _open(place, serve, deadline_s=0.2)


@pytest.mark.parametrize("answer", [b"NO 1024\n", b"\n", b"O" * 100, b"\xff\xfe\n"])
async def test_what_is_no_answer_is_an_error(place: Path, answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        await writer.drain()

    with pytest.raises(EngineFailed, match="vsock answered"):
        await _open(place, serve)


async def test_a_link_in_place_of_the_socket_is_not_followed(place: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"OK 1\nsecret")
        await writer.drain()

    async with await asyncio.start_unix_server(serve, place):
        link = place.with_name("link.sock")
        link.symlink_to(place)
        with pytest.raises(GuestTimeout):
            await open_stream(link, 1024, 0.1)
