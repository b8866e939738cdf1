"""Signals during work that must be undone: the first one interrupts, later ones do not cut the clean-up short."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine
from types import FrameType, TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


class Interrupts:
    """Inside the block the first signal raises KeyboardInterrupt or SystemExit, and later ones are ignored.

    `hold` keeps it back until `release`: for a call whose outcome must be known. `settle` says that the work is done
    and there is nothing to undo. Once either has happened signals stay ignored, for the process is ending.
    """

    def __init__(self) -> None:
        self._caught: int | None = None
        self._raised = False
        self._holding = False
        self._settled = False
        self._notify: Callable[[], object] | None = None
        # A signal that our starter ignores (nohup, a job in the background) stays ignored.
        self._previous = {
            number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) is not signal.SIG_IGN
        }

    def __enter__(self) -> Self:
        for number in self._previous:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ending = self._caught is not None or self._settled
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_IGN if ending else handler)

    def hold(self, notify: Callable[[], object] | None = None) -> None:
        """`notify` is called when there is a signal."""
        self._holding, self._notify = True, notify
        if notify is not None and self._caught is not None:
            notify()

    def release(self) -> None:
        self._holding = False
        self._raise_caught()

    def settle(self) -> None:
        """A signal that was caught before is raised here; later ones are ignored."""
        self._settled = True
        self._raise_caught()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._caught is not None or self._settled:
            return
        self._caught = number
        if not self._holding:
            self._raise_caught()
        elif self._notify is not None:
            self._notify()

    def _raise_caught(self) -> None:
        if self._caught is None or self._raised:
            return
        self._raised = True
        if self._caught == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._caught)


def run_async(work: Coroutine[object, object, T]) -> T:
    """Like asyncio.run, but the first signal cancels and later ones are ignored: tear-down is bounded and completes.

    Plain signal handlers: those of the loop give way to the default ones, which kill, while it still cleans up.
    """
    import asyncio

    async def supervise() -> T:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        interrupts.hold(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            return await task
        finally:
            interrupts.hold()

    with Interrupts() as interrupts:
        interrupts.hold()
        try:
            return asyncio.run(supervise())
        except BaseException:
            interrupts.release()  # asked to stop, it stopped, whatever it ended with
            raise
