"""A command's other end at this terminal: keys and window sizes go to it, and the terminal is put back afterwards."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from forkd.cli.interrupts import Interrupts
from forkd.errors import ForkdError

if TYPE_CHECKING:
    from forkd.client.controller import Controller

_CHUNK = 64 * 1024
# It may be waiting for a guest that does not read its input, and ends with this process at the latest.
_STOP_DEADLINE_S = 2.0
_RESIZED, _STOP = b"r", b"s"


@contextmanager
def attached(
    controller: Controller, sandbox_id: str, start: Callable[[], int], *, stdin: bool, tty: bool
) -> Iterator[int]:
    """The pid that `start` returns, killed unless the block ends by itself: a signal, an error, a reader that left."""
    with Interrupts() as interrupts:
        interrupts.hold()
        pid = start()
        try:
            interrupts.release()
            with _keyboard(controller, sandbox_id, pid, stdin=stdin, tty=tty):
                yield pid
            interrupts.settle()
        except BaseException:
            with suppress(ForkdError):  # it ended just now, or its sandbox did
                controller.signal_process(sandbox_id, pid, signal.SIGKILL)
            raise


@contextmanager
def _keyboard(controller: Controller, sandbox_id: str, pid: int, *, stdin: bool, tty: bool) -> Iterator[None]:
    keyboard = _Keyboard(controller, sandbox_id, pid, stdin=stdin)
    with _raw(stdin and tty), _resizing(keyboard if tty else None):
        keyboard.start()
        try:
            yield
        finally:
            keyboard.stop()


class _Keyboard:
    """A thread that sends what is typed, and tells window sizes: a signal handler may not use the connection."""

    def __init__(self, controller: Controller, sandbox_id: str, pid: int, *, stdin: bool) -> None:
        self._controller = controller
        self._sandbox_id = sandbox_id
        self._pid = pid
        self._stdin = sys.stdin.fileno() if stdin else None
        self._woken, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="keyboard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        os.write(self._waker, _RESIZED)

    def stop(self) -> None:
        os.write(self._waker, _STOP)
        self._thread.join(_STOP_DEADLINE_S)
        if not self._thread.is_alive():
            os.close(self._woken)
            os.close(self._waker)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except ForkdError:
            # Nobody reads any more. Whoever follows the output learns what became of the command.
            return

    def _step(self) -> bool:
        watched = [self._woken] if self._stdin is None else [self._woken, self._stdin]
        readable, _, _ = select.select(watched, [], [])
        if self._woken in readable:
            if _STOP in os.read(self._woken, 64):
                return False
            columns, rows = shutil.get_terminal_size()
            self._controller.resize_process(self._sandbox_id, self._pid, rows, columns)
        if self._stdin in readable:
            self._send(self._stdin)
        return True

    def _send(self, stdin: int) -> None:
        try:
            data = os.read(stdin, _CHUNK)
        except OSError:  # a terminal that hung up
            data = b""
        self._controller.write_stdin(self._sandbox_id, self._pid, data, eof=not data)
        if not data:
            self._stdin = None


@contextmanager
def _raw(wanted: bool) -> Iterator[None]:
    """Every key goes to the guest, Ctrl-C too; our own terminal is as it was, whatever happens."""
    if not wanted:
        yield
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd, termios.TCSADRAIN)  # what was typed ahead is for the guest too
        yield
    finally:
        with suppress(termios.error):  # it hung up
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextmanager
def _resizing(keyboard: _Keyboard | None) -> Iterator[None]:
    if keyboard is None:
        yield
        return

    def on_resize(_number: int, _frame: FrameType | None) -> None:
        keyboard.wake()

    before = signal.signal(signal.SIGWINCH, on_resize)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
