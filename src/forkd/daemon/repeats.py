"""How often the log says the same thing. What is beyond that is counted, and the count is one line.

Anyone who can make the daemon log a line can make it log a million: the log must not fill the disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

WINDOW_S = 60.0
BUDGET = 60  # lines of one kind in a window
TRACEBACK_COST = 6  # in lines
_MAX_KINDS = 256
_KIND_CHARS = 100


@dataclass(frozen=True)
class Kind:
    """Lines that differ only in their arguments."""

    logger: str
    level: int
    text: str


@dataclass
class _Window:
    begun_s: float
    spent: int = 0
    left_out: int = 0


def kind_of(record: logging.LogRecord) -> Kind:
    """asyncio appends what an error is about to its message, line by line: only the first one is the same each time."""
    return Kind(record.name, record.levelno, str(record.msg).partition("\n")[0][:_KIND_CHARS])


class RepeatLimit:
    """Which records are shown, and how many of a kind were not."""

    def __init__(self) -> None:
        self._windows: dict[Kind, _Window] = {}  # the oldest first

    def admit(self, kind: Kind, cost: int, now_s: float) -> bool:
        window = self._windows.setdefault(kind, _Window(now_s))
        if window.spent + cost > BUDGET:
            window.left_out += 1
            return False
        window.spent += cost
        return True

    def take_due(self, now_s: float) -> Iterator[tuple[Kind, int]]:
        """Windows that are over, each with the number of lines it left out, if any."""
        while self._windows:
            kind, window = next(iter(self._windows.items()))
            if now_s < window.begun_s + WINDOW_S and len(self._windows) <= _MAX_KINDS:
                return
            del self._windows[kind]
            if window.left_out:
                yield kind, window.left_out


class BoundedHandler(logging.StreamHandler[TextIO]):
    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._limit = RepeatLimit()

    def emit(self, record: logging.LogRecord) -> None:
        now_s = self._clock()
        self._report(now_s)
        if self._limit.admit(kind_of(record), TRACEBACK_COST if record.exc_info else 1, now_s):
            super().emit(record)

    def close(self) -> None:
        self._report(float("inf"))
        super().close()

    def _report(self, now_s: float) -> None:
        for kind, count in self._limit.take_due(now_s):
            text = "Left out %d more lines like: %s"
            super().emit(logging.LogRecord(kind.logger, kind.level, "", 0, text, (count, kind.text), None))
