"""Signals during work that has to be undone: the first one interrupts, the others do not cut the clean-up short."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self

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
        # What whoever started us had ignored (nohup, a job in the background) stays so.
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

    def hold(self) -> None:
        self._holding = True

    def release(self) -> None:
        self._holding = False
        self._raise_caught()

    def settle(self) -> None:
        """A signal that was caught before is raised here; none is afterwards."""
        self._settled = True
        self._raise_caught()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._caught is not None or self._settled:
            return
        self._caught = number
        if not self._holding:
            self._raise_caught()

    def _raise_caught(self) -> None:
        if self._caught is None or self._raised:
            return
        self._raised = True
        if self._caught == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self._caught)
