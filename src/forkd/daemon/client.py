"""Work that is of no use once the client is gone."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from forkd.daemon.connection import Link
from forkd.daemon.errors import ClientGone

# Most calls are over by then, and are spared a task that watches the connection.
PATIENCE_S = 0.02
# Who only has nothing more to say looks like one who is gone. Short work is finished for both.
EOF_GRACE_S = 1.0


class while_connected:
    """Cancels the block when the client closes its side; it then raises ClientGone."""

    def __init__(self, link: Link, receive: Receive, *, watching: bool = True) -> None:
        """Without `watching` the connection is not looked at before `watch()`: somebody reads a body from it."""
        self._link = link
        self._receive = receive
        self._watching = watching
        self._timer: asyncio.TimerHandle | None = None
        self._gone = False
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._watching:
            self.watch()
        return self

    def watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self._start)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._gone:
            self._task.uncancel()
            if kind is asyncio.CancelledError:
                raise ClientGone from None

    def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while not self._link.eof:
            if (await self._receive())["type"] == "http.disconnect":
                break
        else:
            await asyncio.sleep(EOF_GRACE_S)
        self._gone = True
        self._task.cancel()
