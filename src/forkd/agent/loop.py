"""The agent's event loop: epoll, a few timers, and the reaping of children.

Blocks without a timeout when nothing is due: an idle guest must cost its host nothing.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List

    Timer = List[Any]  # deadline (monotonic seconds), callback

READ = select.EPOLLIN
WRITE = select.EPOLLOUT
# More than we ever register. A turn that sees every ready descriptor lets "the pipe was not reported" mean "the pipe
# is empty", which saves a read per pipe and eval.
_MAX_EVENTS = 512


class Loop:
    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.running = True
        self.later: List[Callable[[], None]] = []  # after this turn's events
        self.busy: List[Callable[[], None]] = []  # every turn, without blocking, while listed
        self.children: Dict[int, Callable[[int], None]] = {}
        self._handlers: Dict[int, Callable[[int], None]] = {}
        self._timers: List[Timer] = []
        self._wake = -1

    def stop(self) -> None:
        self.running = False

    def watch(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self._handlers[fd] = handler
        self.epoll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self.epoll.unregister(fd)

    def call_at(self, deadline: float, callback: Callable[[], None]) -> Timer:
        timer = [deadline, callback]
        self._timers.append(timer)
        return timer

    def cancel(self, timer: Timer | None) -> None:
        # By identity: two timers may be equal.
        self._timers = [one for one in self._timers if one is not timer]

    def catch_children(self) -> None:
        """Get an event for each child that ends, orphans included."""
        self._wake, write = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _no_action)
        # Python would make it an exception, and the end of PID 1 is a kernel panic. Ctrl-Alt-Del sends it too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.watch(self._wake, READ, self._on_signal)

    def run(self) -> None:
        poll = self.epoll.poll
        handlers = self._handlers
        while self.running:
            for fd, events in poll(self._timeout(), _MAX_EVENTS):
                handler = handlers.get(fd)
                if handler is not None:
                    try:
                        handler(events)
                    except Exception as error:
                        complain(error)
            if self.later:
                self._run_all(self.later)
            if self._timers:
                self._fire()
            if self.busy:
                self._run_all(list(self.busy))

    def _timeout(self) -> float | None:
        if self.busy or self.later:
            return 0
        if not self._timers:
            return None
        due: float = min([timer[0] for timer in self._timers])
        return max(0.0, due - time.monotonic())

    def _fire(self) -> None:
        now = time.monotonic()
        due = [timer[1] for timer in self._timers if timer[0] <= now]
        if due:
            self._timers = [timer for timer in self._timers if timer[0] > now]
            self._run_all(due)

    def _run_all(self, callbacks: List[Callable[[], None]]) -> None:
        todo = callbacks[:]
        if callbacks is self.later:
            callbacks.clear()
        for callback in todo:
            try:
                callback()
            except Exception as error:
                complain(error)
                if callback in self.busy:
                    self.busy.remove(callback)

    def _on_signal(self, _events: int) -> None:
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ended = self.children.pop(pid, None)
            if ended is not None:
                ended(status)


def _no_action(_signal: int, _frame: object) -> None:
    """SIGCHLD needs a handler for the wake-up descriptor to be written."""


def complain(error: Exception) -> None:
    """To the console; the agent is PID 1 and must go on."""
    import traceback

    try:
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)
    except Exception:
        pass
