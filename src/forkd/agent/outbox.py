"""Bytes on their way out of a non-blocking descriptor: the port, the interpreter's pipe, a command's stdin."""

from __future__ import annotations

import os

from forkd.agent.loop import WRITE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List

    from forkd.agent.loop import Loop

# Above this much queued, nobody reads more output from commands; below half of it they go on.
HIGH_BYTES = 256 * 1024


class Outbox:
    """Writes at once what it can and the rest when the descriptor is writable again."""

    def __init__(self, loop: Loop, fd: int) -> None:
        self.fd = fd
        self.pending = 0
        self.broken = False
        self.on_progress: Callable[[int], None] | None = None  # bytes written from the queue
        self.on_broken: Callable[[], None] | None = None
        self._loop = loop
        self._queue: List[bytes] = []
        self._watching = False

    def send(self, data: bytes) -> int:
        """Bytes written right away."""
        if self.broken:
            return 0
        written = 0
        if not self._queue:
            try:
                written = os.write(self.fd, data)
            except BlockingIOError:
                pass
            except OSError:
                self._break()
                return 0
            if written == len(data):
                return written
            data = data[written:]
        self._queue.append(data)
        self.pending += len(data)
        if not self._watching:
            self._watching = True
            self._watch(True)
        return written

    def clear(self) -> None:
        self._queue.clear()
        self.pending = 0
        if self._watching:
            self._watching = False
            self._watch(False)

    def flush(self, _events: int = 0) -> None:
        """The descriptor is writable."""
        written = 0
        while self._queue:
            head = self._queue[0]
            try:
                count = os.write(self.fd, head)
            except BlockingIOError:
                break
            except OSError:
                self._break()
                return
            written += count
            if count < len(head):
                self._queue[0] = head[count:]
                break
            self._queue.pop(0)
        self.pending -= written
        if not self._queue:
            self.clear()
        if written and self.on_progress is not None:
            self.on_progress(written)

    def close(self) -> None:
        self.clear()
        self.broken = True
        os.close(self.fd)

    def _watch(self, on: bool) -> None:
        """Ask for (or no longer for) an event when writable. The port overrides it: it also reads its descriptor."""
        if on:
            self._loop.watch(self.fd, WRITE, self.flush)
        else:
            self._loop.unwatch(self.fd)

    def _break(self) -> None:
        self.clear()
        self.broken = True
        if self.on_broken is not None:
            self.on_broken()
