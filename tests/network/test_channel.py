"""Messages between the daemon and the hub, when one side does not read for a while."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forkd.errors import NetworkFailed
from forkd.network.channel import Channel, make_pair

_PADDING = "x" * 50_000


class Ends:
    """Two ends of one channel; what the other one reads is kept, once it does."""

    def __init__(self) -> None:
        self._ours, self._theirs = make_pair()
        self.ended = asyncio.Event()
        self.here = Channel(self._ours, lambda *_: None, self.ended.set)
        self.there: Channel | None = None
        self.read: list[int] = []

    def begin_to_read(self) -> None:
        self.there = Channel(self._theirs, self._keep, lambda: None)

    def _keep(self, message: dict[str, Any], _descriptors: list[int]) -> None:
        self.read.append(message["number"])

    def close(self) -> None:
        self.here.close()
        if self.there is not None:
            self.there.close()
        self._theirs.close()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    made = Ends()
    yield made
    made.close()


def send_many(ends: Ends, count: int) -> list[asyncio.Task[None]]:
    """More than there is room for, at once."""
    messages = [{"number": number, "padding": _PADDING} for number in range(count)]
    return [asyncio.create_task(ends.here.send(message)) for message in messages]


async def test_many_who_wait_for_room_all_send_in_their_order(ends: Ends) -> None:
    sending = send_many(ends, 40)
    done, waiting = await asyncio.wait(sending, timeout=0.2)
    assert done and len(waiting) > 1
    ends.begin_to_read()
    await asyncio.gather(*sending)
    await ends.here.send({"number": 40})
    while len(ends.read) <= 40:
        await asyncio.sleep(0.01)
    assert ends.read == list(range(41))


async def test_who_waits_for_room_hears_at_once_that_the_channel_was_closed(ends: Ends) -> None:
    sending = send_many(ends, 40)
    await asyncio.wait(sending, timeout=0.2)
    ends.here.close()
    async with asyncio.timeout(5):  # half of what a side that does not read is given
        ended = await asyncio.gather(*sending, return_exceptions=True)
    assert any(isinstance(each, NetworkFailed) for each in ended)


async def test_one_who_gives_up_does_not_keep_the_others(ends: Ends) -> None:
    sending = send_many(ends, 40)
    _, waiting = await asyncio.wait(sending, timeout=0.2)
    first = next(each for each in sending if each in waiting)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first
    ends.begin_to_read()
    await asyncio.gather(*(each for each in sending if each is not first))
