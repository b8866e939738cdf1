"""The answer to a command that a fork was given before it ran: found among what QEMU says of its own accord."""

import asyncio
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.engines.qemu import monitor as state
from forkd.engines.qemu.monitor import Incoming, find_answer, parse_age_s, read_answer, receive_state
from forkd.errors import EngineFailed

_EVENT = b'{"event": "RESUME", "timestamp": {"seconds": 1, "microseconds": 2}}\r\n'
_ANSWER = b'{"return": {}}\r\n'
_REFUSAL = b'{"error": {"class": "GenericError", "desc": "no"}}\r\n'


@pytest.mark.parametrize(
    ("seen", "answer", "size"),
    [
        (b"", None, 0),
        (_EVENT, None, len(_EVENT)),
        (_EVENT + _ANSWER[:5], None, len(_EVENT)),
        (_ANSWER + _EVENT, {"return": {}}, len(_ANSWER)),
        (_EVENT + _EVENT + _REFUSAL + _ANSWER, json.loads(_REFUSAL), len(_EVENT + _EVENT + _REFUSAL)),
        (b"[]\r\n" + _ANSWER, {"return": {}}, len(b"[]\r\n" + _ANSWER)),
    ],
)
def test_the_first_answer_among_whole_lines_is_found(seen: bytes, answer: object, size: int) -> None:
    assert find_answer(seen) == (answer, size)


async def test_an_answer_in_pieces_behind_events_is_read_and_what_follows_stays() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reading = asyncio.create_task(read_answer(ours))
        for piece in (_EVENT, _EVENT[:9], _EVENT[9:] + _ANSWER[:4], _ANSWER[4:] + _EVENT):
            theirs.send(piece)
            await asyncio.sleep(0.01)
        assert await reading == {"return": {}}
        assert ours.recv(1000) == _EVENT


async def test_events_before_the_answer_do_not_keep_the_loop_busy() -> None:
    looks = 0

    class Counting(socket.socket):
        def recv(self, *args: int) -> bytes:
            nonlocal looks
            looks += 1
            return super().recv(*args)

    ours, theirs = socket.socketpair()
    with Counting(fileno=ours.detach()) as counting, theirs:
        counting.setblocking(False)
        reading = asyncio.create_task(read_answer(counting))
        theirs.send(_EVENT)
        for _ in range(200):
            await asyncio.sleep(0)
        theirs.send(_ANSWER)
        await reading
    assert looks == 4  # each was looked at, and taken out


@pytest.mark.parametrize("said", [b"", b"no JSON\r\n", b"x" * 70_000, _EVENT * 1500])
async def test_no_answer_is_an_error(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        with theirs:
            theirs.send(said)
            reading = asyncio.create_task(read_answer(ours))
            if said:
                with pytest.raises((OSError, ValueError)):
                    await reading
        if not said:
            with pytest.raises(OSError):
                await reading


@pytest.mark.parametrize(
    ("stamp", "age_s"),
    [
        ({"seconds": 100, "microseconds": 250_000}, 0.75),
        ({"seconds": 102, "microseconds": 0}, 0.0),  # the clock was set meanwhile
        ({"seconds": 100}, 0.0),
        (None, 0.0),
        ("soon", 0.0),
    ],
)
def test_how_long_ago_an_event_was_is_never_negative(stamp: object, age_s: float) -> None:
    assert parse_age_s({"event": "RESUME", "timestamp": stamp}, 101.0) == age_s


# More than a socket takes at once.
LARGE = bytes(range(256)) * 8192


@pytest.fixture
def incoming(tmp_path: Path) -> Iterator[Incoming]:
    (tmp_path / "state").write_bytes(LARGE)
    incoming = Incoming(tmp_path / "state")
    yield incoming
    incoming.close()


async def test_all_of_a_state_is_sent_and_what_is_received_is_written_until_the_end(incoming: Incoming) -> None:
    file = io.BytesIO()
    await asyncio.gather(incoming.send(), receive_state(incoming.theirs, file))
    assert file.getvalue() == LARGE


async def test_a_reader_that_goes_away_ends_the_sending(incoming: Incoming) -> None:
    incoming.theirs.close()
    await incoming.send()


async def test_a_vmm_that_sends_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "MAX_STATE_BYTES", 1024)
    ours, theirs = socket.socketpair()
    theirs.sendall(bytes(1025))
    with ours, theirs, pytest.raises(EngineFailed, match="larger than"):
        await receive_state(ours, io.BytesIO())
