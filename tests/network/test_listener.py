"""Connections of guests to their gateways, in bounds."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Awaitable, Iterator

import pytest

from forkd.host import nftables
from forkd.network.hub import choose_room
from forkd.network.listener import Listener, Room


def fill(room: Room, greedy: int) -> list[int]:
    """What each of so many has that want all."""
    taken = [0] * greedy
    entered = True
    while entered:
        entered = False
        for each in range(greedy):
            if room.enter(taken[each]):
                taken[each], entered = taken[each] + 1, True
    return taken


@pytest.mark.parametrize("greedy", [1, 2, 9])
def test_those_who_want_all_get_the_same_and_leave_as_much_for_a_newcomer(greedy: int) -> None:
    room = Room(1000)
    taken = fill(room, greedy)
    assert min(taken) >= 1000 // (greedy + 1) - 1 and max(taken) - min(taken) <= 1
    [newcomer] = fill(room, 1)
    assert newcomer >= 1000 // (greedy + 1) // 2 - 1
    for _ in range(sum(taken) + newcomer):
        room.leave()
    assert fill(room, 1) == [500]


def test_half_of_the_descriptors_are_for_connections() -> None:
    assert (choose_room(4096), choose_room(1 << 20)) == (1024, 8192)


class Counting(socket.socket):
    accepts = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.accepts += 1
        return super().accept()


@pytest.fixture
def counting() -> Iterator[Counting]:
    with Counting() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        sock.setblocking(False)
        yield sock


async def echo(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with connection:
        while data := await loop.sock_recv(connection, 100):
            await loop.sock_sendall(connection, data)


def spawn(work: Awaitable[None]) -> asyncio.Future[None]:
    return asyncio.ensure_future(work)


@contextlib.contextmanager
def without_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_without_descriptors_it_rests_and_serves_those_who_wait_when_there_are_some(counting: Counting) -> None:
    listener = Listener(counting, 10, Room(100), echo, spawn)
    listener.start()
    with socket.create_connection(counting.getsockname()) as sock:
        with without_descriptors():
            for _ in range(100):
                await asyncio.sleep(0)
            assert counting.accepts == 1
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(sock, b"hello")
        assert await asyncio.get_running_loop().sock_recv(sock, 100) == b"hello"
    listener.stop()


def test_a_descriptor_that_cannot_be_moved_is_closed() -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    with without_descriptors(), pytest.raises(OSError):
        nftables.move_away(descriptor)
    with pytest.raises(OSError):
        os.fstat(descriptor)


async def test_what_is_too_much_is_reset_and_who_leaves_makes_room(counting: Counting) -> None:
    room, tasks = Room(100), []

    def keep(work: Awaitable[None]) -> asyncio.Future[None]:
        tasks.append(asyncio.ensure_future(work))
        return tasks[-1]

    async def ask() -> bytes:
        try:
            reader, writer = await asyncio.open_connection(*counting.getsockname())
            opened.append(writer)
            writer.write(b"hello")
            return await reader.read(100)
        except ConnectionResetError:
            return b""

    listener, opened = Listener(counting, 2, room, echo, keep), []
    listener.start()
    assert [await ask() for _ in range(3)] == [b"hello", b"hello", b""]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.sleep(0)
    others = 0
    while room.enter(0):
        others += 1
    assert others == 100, "they have left it"
    assert await ask() == b""
    room.leave()
    assert await ask() == b"hello"
    for writer in opened:
        writer.close()
    listener.stop()
    await asyncio.gather(*tasks, return_exceptions=True)
