"""Bytes through non-blocking descriptors: out to the host and to programs, and in from programs as the host grants."""

from __future__ import annotations

import fcntl
import os
import termios
from struct import Struct

from forkd.agent.loop import READ, WRITE
from forkd.wire.agent import DATA, MAX_PAYLOAD, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List

    from forkd.agent.loop import Loop
    from forkd.agent.port import Port
    from forkd.agent.stream import Stream

# With more than this queued, no output of commands is read; below half of it, reading goes on.
HIGH_BYTES = 256 * 1024
_INT = Struct("i")


class Outbox:
    """Writes at once what it can, and the rest when writable: the port, the interpreter, a command's stdin."""

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


class Source:
    """Output of a command or of the interpreter on its way to the host. Without an owner, it is dropped."""

    def __init__(self, loop: Loop, port: Port, fd: int, flag: int) -> None:
        self.fd = fd
        self.closed = False
        self.owner: Stream | None = None
        self._loop = loop
        self._port = port
        self._flag = flag
        self._paused = False
        self._full = False  # the last read took all it asked for: there may be more
        self._left: int | None = None  # when draining: how much was in the pipe when its writer ended
        self._on_dry: Callable[[], None] | None = None
        os.set_blocking(fd, False)
        loop.watch(fd, READ, self._on_ready)

    def resume(self) -> None:
        """There is credit again, or room on the port."""
        if self._paused and not self.closed:
            self._paused = False
            self._loop.watch(self.fd, READ, self._on_ready)

    def drain(self, on_dry: Callable[[], None]) -> None:
        """Call `on_dry` once everything written so far is sent, even when others still hold the pipe."""
        # Not reported readable in this turn, and not held back by us: empty. See Loop.
        if self.closed or not (self._paused or self._full):
            on_dry()
            return
        self.drain_counted(on_dry)

    def drain_counted(self, on_dry: Callable[[], None]) -> None:
        """The same when nothing is known about this turn: ask the kernel how much there is."""
        left = 0 if self.closed else self._unread()
        if left == 0:
            on_dry()
            return
        self._left = left
        self._on_dry = on_dry

    def drain_to_end(self, on_dry: Callable[[], None]) -> None:
        """The same once nobody holds the other end any more; `drain_counted` cuts the wait short."""
        if self.closed:
            on_dry()
        else:
            self._on_dry = on_dry

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._paused:
            self._loop.unwatch(self.fd)
        os.close(self.fd)
        self._dry()

    def _on_ready(self, _events: int) -> None:
        owner = self.owner
        want = MAX_PAYLOAD if owner is None else self._allowance(owner)
        if want <= 0:
            return
        try:
            data = os.read(self.fd, want)
        except BlockingIOError:
            self._full = False
            return
        except OSError:
            data = b""  # a terminal whose last user is gone says EIO
        if not data:
            self.close()
            return
        self._full = len(data) == want
        if owner is not None:
            owner.credit -= len(data)
            self._port.send(encode(DATA, owner.number, data, self._flag))
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._dry()

    def _allowance(self, owner: Stream) -> int:
        """How much to read now. Nothing: paused, until there is credit or room."""
        want = MAX_PAYLOAD
        if owner.credit < want:
            want = owner.credit
        if self._left is not None and self._left < want:
            want = self._left
        if want <= 0 or self._port.congested:
            self._pause(want > 0)
            return 0
        return want

    def _pause(self, congested: bool) -> None:
        self._paused = True
        self._loop.unwatch(self.fd)
        if congested:
            self._port.when_clear(self.resume)

    def _dry(self) -> None:
        self._left = None
        self._full = False
        on_dry, self._on_dry = self._on_dry, None
        if on_dry is not None:
            on_dry()

    def _unread(self) -> int:
        try:
            count: int = _INT.unpack(fcntl.ioctl(self.fd, termios.FIONREAD, bytes(4)))[0]
        except OSError:
            return 0
        return count
