"""The agent's port without a host: a pseudo terminal hangs up and comes back as a virtio port does."""

import os
import pty
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forkd.agent.loop import Loop
from forkd.agent.port import Port
from forkd.wire.agent import CALL, HELLO, encode

GREETING = (HELLO, 0, 1, b"{}")


class Host:
    """The other side of the port, and what the port passed on."""

    def __init__(self) -> None:
        guest, host = pty.openpty()
        tty.setraw(host)
        self._name = os.ttyname(host)
        self._guest = guest
        self._loop = Loop()
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.hang_ups = 0
        port = Port(self._loop, guest)
        port.on_frames = self.frames.extend
        port.on_hangup = self._count
        os.close(host)

    def _count(self) -> None:
        self.hang_ups += 1

    def turn(self) -> None:
        """The guest takes note of all that has happened."""
        self._loop.running = True
        self._loop.call_at(time.monotonic() + 0.05, self._loop.stop)
        self._loop.run()

    @contextmanager
    def there(self) -> Iterator[int]:
        client = os.open(self._name, os.O_RDWR | os.O_NOCTTY)
        try:
            yield client
        finally:
            os.close(client)

    def close(self) -> None:
        os.close(self._guest)
        self._loop.epoll.close()


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


def test_a_host_that_is_away_and_comes_back_is_heard(host: Host) -> None:
    host.turn()
    assert host.hang_ups
    with host.there() as client:
        os.write(client, encode(HELLO, 1, b"{}"))
        host.turn()
        assert host.frames == [GREETING]


def test_a_greeting_that_comes_before_the_hang_up_was_seen_is_kept(host: Host) -> None:
    with host.there() as client:
        os.write(client, encode(HELLO, 1, b"{}"))
    host.turn()  # no host, and something to read: so a virtio port looks until the kernel knows that its host is back
    with host.there() as client:
        os.write(client, encode(CALL, 2, b"{}"))  # a virtio port wakes its reader by itself
        host.turn()
        assert host.frames == [GREETING, (CALL, 0, 2, b"{}")]


def test_half_a_frame_of_a_host_that_left_does_not_spoil_the_next_greeting(host: Host) -> None:
    with host.there() as client:
        os.write(client, encode(CALL, 7, b"x" * 100)[:50])
        host.turn()
    host.turn()
    with host.there() as client:
        os.write(client, encode(HELLO, 1, b"{}"))
        host.turn()
        assert host.frames == [GREETING]
