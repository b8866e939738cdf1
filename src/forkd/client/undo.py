"""A spawn that was interrupted is undone: whatever its key made is removed, and what is on its way is refused.

In a thread, because neither a second Ctrl-C nor the end of an event loop may stop that; over a connection of its own,
because the old one was interrupted at an unknown point. Written by hand in both kinds, for they wait differently.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from forkd.client.controller import Controller
from forkd.client.endpoint import Endpoint, find_endpoint
from forkd.errors import ForkdError, Unreachable

if TYPE_CHECKING:
    from forkd.client.async_controller import AsyncController

UNDO_S = 10.0  # for an answer; the daemon goes on without us
_POLL_S = 0.005


class _Undoing(threading.Thread):
    """Not a daemon thread: the interpreter waits for it before it ends.

    `done` is for waiters in place of `join`: Python 3.11 takes a thread whose `join` is interrupted for ended.
    """

    def __init__(self, endpoint: Endpoint, key: str) -> None:
        super().__init__(name="forkd-undo")
        self._endpoint = endpoint
        self._key = key
        self._error: ForkdError | None = None
        self.done = threading.Event()

    def run(self) -> None:
        try:
            with Controller.at(self._endpoint, UNDO_S) as controller:
                controller.cancel_spawn(self._key)
        except ForkdError as error:
            self._error = error
        finally:
            self.done.set()

    def tell(self, interruption: BaseException) -> None:
        if self._error is not None:
            interruption.add_note(f"Sandboxes may still run, until their timeout: {self._error.message}")


def undo(controller: Controller | None, key: str, error: BaseException) -> None:
    """`error` is what ended the spawn."""
    if _may_have_spawned(error):
        undoing = _Undoing(_place_of(controller), key)
        undoing.start()
        undoing.done.wait()
        undoing.tell(error)


async def async_undo(controller: AsyncController | None, key: str, error: BaseException) -> None:
    import asyncio

    if not _may_have_spawned(error):
        return
    undoing = _Undoing(_place_of(controller), key)
    undoing.start()
    while not undoing.done.is_set() and not isinstance(error, GeneratorExit):  # then nothing may be awaited any more
        try:
            await asyncio.sleep(_POLL_S)
        except asyncio.CancelledError:
            continue  # it is being cancelled already, and waits no longer than the thread takes
    undoing.tell(error)


def _may_have_spawned(error: BaseException) -> bool:
    """Not when the daemon refused, or our own checks, or when nothing was sent."""
    if isinstance(error, Unreachable):
        return error.sent
    return not isinstance(error, ForkdError | TypeError)


def _place_of(controller: Controller | AsyncController | None) -> Endpoint:
    found = find_endpoint() if controller is None else controller.transport.place
    return replace(found, startable=False)
