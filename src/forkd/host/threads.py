"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")

_TURN_S = 0.00025
# Long enough for another thread to wake up and take the interpreter.
_AWAY_S = 1e-6


class Turns:
    """For long work in a thread: others get the interpreter often, not only after 5 ms each time that they want it.

    They may be holding a VM still, call by call.
    """

    def __init__(self) -> None:
        self._over_at = time.monotonic() + _TURN_S

    def give_way(self) -> None:
        """Does nothing until the turn is over, so it may be called in a loop."""
        if time.monotonic() > self._over_at:
            time.sleep(_AWAY_S)
            self._over_at = time.monotonic() + _TURN_S


async def in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but a cancelled caller waits: the work must not go on behind its back."""
    return await finished(asyncio.ensure_future(asyncio.to_thread(work)))


async def finished(running: asyncio.Future[T]) -> T:
    """Its result; a cancelled caller waits for its end."""
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # looked at: there is nobody left to tell
        raise


@contextlib.asynccontextmanager
async def offloaded(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave `manager` in a thread: both may hash, sync and rename gigabytes."""
    entered = False

    def enter() -> T:
        nonlocal entered
        value = manager.__enter__()
        entered = True
        return value

    try:
        yield await in_thread(enter)
    except BaseException as error:
        caught = error
        if not entered or not await in_thread(lambda: manager.__exit__(type(caught), caught, caught.__traceback__)):
            raise
    else:
        await in_thread(lambda: manager.__exit__(None, None, None))
