"""Sandboxes that live on while they are used: the daemon is asked for more time when half of it is over."""

from __future__ import annotations

import time
from collections.abc import AsyncIterable, AsyncIterator
from typing import TYPE_CHECKING

from forkd.client.lifetime import Lifetime
from forkd.errors import Conflict, ForkdError, NotFound

if TYPE_CHECKING:
    from forkd.client.async_controller import AsyncController


class AsyncRenewal:
    """Of one sandbox, or of those that were made together: whoever uses one of them keeps all."""

    def __init__(self, controller: AsyncController, ids: set[str], lifetime: Lifetime) -> None:
        self._controller = controller
        self._ids = ids
        self._lifetime = lifetime

    def release(self, sandbox_id: str) -> None:
        """It has ended, or has an end of its own now."""
        self._ids.discard(sandbox_id)

    async def use(self, takes_s: float = 0.0) -> None:
        """Before a call that may take so long, and while a stream is read."""
        now = time.monotonic()
        seconds = self._lifetime.missing(now, takes_s)
        if seconds is None:
            return
        # Before asking, so that calls which are made meanwhile do not ask too.
        self._lifetime.extend(now, seconds)
        for sandbox_id in tuple(self._ids):
            try:
                await self._controller.set_sandbox_timeout(sandbox_id, seconds, extend=True)
            except (NotFound, Conflict):
                self.release(sandbox_id)
            except ForkdError:
                self._lifetime.extend(now, 0.0)  # what is wrong is said by the call that is made next
                return

    async def while_sent(self, content: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
        """An upload may take longer than a lifetime."""
        async for piece in content:
            await self.use()
            yield piece
