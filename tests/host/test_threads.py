"""Blocking work beside the event loop, and callers that stop waiting for it."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from forkd.host.threads import in_thread, offloaded


class Door:
    """Opened and closed in a thread, which waits on the way in until it is let in."""

    def __init__(self, error: Exception | None = None) -> None:
        self.at_the_door = threading.Event()
        self.may_enter = threading.Event()
        self.error = error
        self.seen: list[str] = []

    @contextmanager
    def opened(self) -> Iterator[str]:
        self.at_the_door.set()
        assert self.may_enter.wait(5)
        if self.error is not None:
            raise self.error
        self.seen.append("entered")
        try:
            yield "inside"
        except BaseException as error:
            self.seen.append(type(error).__name__)
            raise
        self.seen.append("left")


async def _pass(door: Door) -> str:
    async with offloaded(door.opened()) as value:
        return value


async def test_a_manager_is_entered_and_left() -> None:
    door = Door()
    door.may_enter.set()
    assert await _pass(door) == "inside"
    assert door.seen == ["entered", "left"]


@pytest.mark.parametrize(
    ("error", "seen"), [(None, ["entered", "CancelledError"]), (OSError("full"), [])], ids=["it opens", "it fails"]
)
async def test_what_was_entered_for_a_cancelled_caller_is_left_again(error: Exception | None, seen: list[str]) -> None:
    door = Door(error)
    passing = asyncio.create_task(_pass(door))
    await asyncio.to_thread(door.at_the_door.wait, 5)
    passing.cancel()
    await asyncio.sleep(0)
    door.may_enter.set()
    with pytest.raises(asyncio.CancelledError):
        await passing
    assert door.seen == seen


async def test_what_fails_for_a_cancelled_caller_is_not_reported_as_forgotten() -> None:
    reports: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    begun, may_fail = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        assert may_fail.wait(5)
        raise OSError("gone")

    working = asyncio.create_task(in_thread(fail))
    await asyncio.to_thread(begun.wait, 5)
    working.cancel()
    await asyncio.sleep(0)
    may_fail.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    del working
    gc.collect()
    await asyncio.sleep(0)
    assert reports == []
