"""This terminal attached to a command in a sandbox: keys and window sizes go to it; afterwards all is as before."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from forkd.cli.interrupts import Interrupts
from forkd.errors import ForkdError

if TYPE_CHECKING:
    from forkd.client import Controller

_CHUNK = 64 * 1024
# It may be waiting for a guest that does not read its input; it ends with this process at the latest.
_STOP_DEADLINE_S = 2.0
_RESIZED, _STOP = b"r", b"s"


@contextmanager
def attached(
    controller: Controller, sandbox_id: str, start: Callable[[], int], *, stdin: bool, tty: bool
) -> Iterator[int]:
    """The pid that `start` returns. After a signal, an error or a broken pipe the command is killed."""
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
    with ExitStack() as stack:
        if stdin and tty:
            stack.enter_context(_raw())
        if tty:
            before = signal.signal(signal.SIGWINCH, lambda _number, _frame: keyboard.wake())
            stack.callback(signal.signal, signal.SIGWINCH, before)
        keyboard.start()
        stack.callback(keyboard.stop)
        yield


def read_size() -> tuple[int, int]:
    """Rows and columns of the terminal itself: COLUMNS and LINES stay as they were when it is resized."""
    for stream in (0, 1, 2):
        with suppress(OSError):
            columns, rows = os.get_terminal_size(stream)
            if columns and rows:
                return rows, columns
    columns, rows = shutil.get_terminal_size()
    return rows, columns


class _Keyboard:
    """A thread that sends keys and window sizes: a signal handler may not use the connection."""

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
            # The command takes no more input. The output stream says how it ended.
            return

    def _step(self) -> bool:
        watched = [self._woken] if self._stdin is None else [self._woken, self._stdin]
        readable, _, _ = select.select(watched, [], [])
        if self._woken in readable:
            if _STOP in os.read(self._woken, 64):
                return False
            self._controller.resize_process(self._sandbox_id, self._pid, *read_size())
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
def _raw() -> Iterator[None]:
    """Every key goes to the guest, Ctrl-C too. The terminal is restored, whatever happens."""
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
