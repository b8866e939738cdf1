"""Device state on its way, without QEMU: what either end may do to the other."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from pathlib import Path

import pytest

from forkd.engines.qemu import state
from forkd.engines.qemu.state import Incoming, receive_state
from forkd.errors import EngineFailed

# More than a socket takes at once.
LARGE = bytes(range(256)) * 8192


def read_all(sock: socket.socket) -> bytes:
    with sock:
        return b"".join(iter(lambda: sock.recv(65536), b""))


def make_incoming(tmp_path: Path) -> Incoming:
    (tmp_path / "state").write_bytes(LARGE)
    return Incoming(tmp_path / "state")


def test_all_of_a_file_is_sent_and_then_comes_the_end(tmp_path: Path) -> None:
    incoming = make_incoming(tmp_path)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(read_all(incoming.theirs)))
    reader.start()
    asyncio.run(incoming.send())
    reader.join(10)
    assert got == [LARGE]


def test_a_reader_that_goes_away_ends_the_sending(tmp_path: Path) -> None:
    incoming = make_incoming(tmp_path)
    incoming.theirs.close()
    asyncio.run(incoming.send())


def test_what_is_received_is_written_until_the_end() -> None:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            theirs.sendall(LARGE)

    sender = threading.Thread(target=send)
    sender.start()
    file = io.BytesIO()
    with ours:
        asyncio.run(receive_state(ours, file))
    sender.join(10)
    assert file.getvalue() == LARGE


def test_a_vmm_that_sends_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_STATE_BYTES", 1024)
    ours, theirs = socket.socketpair()
    theirs.sendall(bytes(1025))
    with ours, theirs, pytest.raises(EngineFailed, match="larger than"):
        asyncio.run(receive_state(ours, io.BytesIO()))
