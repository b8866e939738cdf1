"""Blocking work beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Like asyncio.to_thread, but a cancelled caller waits: the work must not go on behind its back."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


@contextlib.asynccontextmanager
async def offloaded(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter and leave `manager` in a thread: both may hash, sync and rename gigabytes."""
    value = await in_thread(manager.__enter__)
    try:
        yield value
    except BaseException as error:
        caught = error
        if not await in_thread(lambda: manager.__exit__(type(caught), caught, caught.__traceback__)):
            raise
    else:
        await in_thread(lambda: manager.__exit__(None, None, None))
