"""How a sandbox comes by its controller and is opened. Really different in the two clients, so both are here by hand.

A sandbox that is given no controller uses one it shares with others: one per address, token and process, and in the
asynchronous client one per event loop.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from forkd.client.controller import Controller
from forkd.client.endpoint import Endpoint, find_endpoint

if TYPE_CHECKING:
    import asyncio

    from forkd.client.async_controller import AsyncController

_lock = threading.Lock()
# By process too: after a fork the sockets of the parent are not the child's to use.
_controllers: dict[tuple[Endpoint, int], Controller] = {}


def shared_controller() -> Controller:
    """The one for what the environment says now. Closed when the interpreter ends."""
    key = (find_endpoint(), os.getpid())
    with _lock:
        if key not in _controllers:
            _controllers[key] = Controller.at(key[0])
        return _controllers[key]


@atexit.register
def close_shared() -> None:
    with _lock:
        for (_, pid), controller in _controllers.items():
            if pid == os.getpid():
                controller.close()
        _controllers.clear()


def lease_controller(controller: Controller) -> Controller:
    return controller


def release_controller(controller: Controller) -> None:
    """Nothing to do: it is closed with the interpreter."""


@contextmanager
def leased(controller: Controller | None) -> Iterator[Controller]:
    yield controller or shared_controller()


class Opening:
    """An object whose constructor opens it."""

    def _opens(self, opening: Callable[[], object]) -> None:
        opening()

    def __enter__(self) -> Self:
        return self


@dataclass
class _Lease:
    controller: AsyncController
    users: int = 0


# An event loop's connections have to be closed before it ends, and nobody tells us: the last user closes.
_leases: dict[tuple[Endpoint, asyncio.AbstractEventLoop], _Lease] = {}


def async_lease_controller(controller: AsyncController | None = None) -> AsyncController:
    """The running loop's, for what the environment says now or where `controller` is; give it back when done."""
    import asyncio  # here and below: the synchronous client does not pay for it

    from forkd.client.async_controller import AsyncController

    endpoint = find_endpoint() if controller is None else controller.transport.endpoint
    key = (endpoint, asyncio.get_running_loop())
    with _lock:
        for old in [old for old in _leases if old[1].is_closed()]:
            del _leases[old]
        lease = _leases.get(key) or _Lease(controller or AsyncController.at(endpoint))
        _leases[key] = lease
        lease.users += 1
        return lease.controller


async def async_release_controller(controller: AsyncController) -> None:
    with _lock:
        key = next((key for key, lease in _leases.items() if lease.controller is controller), None)
        if key is None:
            return
        _leases[key].users -= 1
        if _leases[key].users > 0:
            return
        del _leases[key]
    await controller.close()


@asynccontextmanager
async def async_leased(controller: AsyncController | None) -> AsyncIterator[AsyncController]:
    """The one given, or the shared one for as long as this lasts."""
    if controller is not None:
        yield controller
        return
    lease = async_lease_controller()
    try:
        yield lease
    finally:
        await async_release_controller(lease)


class AsyncOpening:
    """An object whose constructor cannot wait: `await` or `async with` opens it."""

    _opening: Callable[[], Awaitable[object]] | None = None

    def _opens(self, opening: Callable[[], Awaitable[object]]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        opening, self._opening = self._opening, None
        if opening is not None:
            await opening()
        return self
