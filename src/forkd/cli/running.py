"""Running the asynchronous part of a command so that no signal cuts its clean-up short."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_async(work: Coroutine[object, object, T]) -> T:
    """Like asyncio.run, but the first signal cancels and later ones are ignored: tear-down is bounded and completes."""
    interrupt = _Interrupt()
    try:
        return asyncio.run(interrupt.supervise(work))
    except BaseException:
        if interrupt.caught is None:
            raise
        # Whatever it ended with: asked to stop, it stopped.
        if interrupt.caught == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + interrupt.caught) from None
    finally:
        interrupt.release()


class _Interrupt:
    """Plain signal handlers: those of the loop give way to the default ones, which kill, while it still cleans up."""

    def __init__(self) -> None:
        self.caught: int | None = None
        self._cancel: Callable[[], object] | None = None
        previous = {number: signal.getsignal(number) for number in _SIGNALS}
        # What whoever started us had ignored (nohup, a job in the background) stays so.
        self._previous = {number: handler for number, handler in previous.items() if handler is not signal.SIG_IGN}
        for number in self._previous:
            signal.signal(number, self._on_signal)

    async def supervise(self, work: Coroutine[object, object, T]) -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            if self.caught is not None:
                task.cancel()
            return await task
        finally:
            self._cancel = None

    def release(self) -> None:
        """After a signal the process is ending: what its callers have yet to clean up must not be cut short either."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if self.caught is None else signal.SIG_IGN)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is None:
            self.caught = number
            if self._cancel is not None:
                self._cancel()
