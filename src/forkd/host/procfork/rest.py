"""Bringing a process to rest: every thread stopped in a wait, and let go again. Nothing is changed in it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator

from forkd.errors import NotForkable
from forkd.host.procfork import ptrace
from forkd.host.procfork.ptrace import Gone
from forkd.host.procfork.registers import WAITS, called_again, needs_help, waiting_in

# One try in ten finds a thread at work, and the next one finds it at rest; a busy one never is.
TRIES = 40
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_STOP_DEADLINE_S = 2.0
_ENDED = "ZX"
_STAT_BYTES = 512
_FLAGS, _USER_WORKER = 6, 0x4000


class Stopped:
    """The threads of a process, main thread first, and the signals that were kept from them."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.tids: list[int] = []
        self._running: set[int] = set()  # those that we trace and have not seen stop
        self._held: list[tuple[int, int]] = []

    def hold_signal(self, tid: int, number: int) -> None:
        self._held.append((tid, number))

    def interrupt(self, tid: int) -> None:
        # No options yet: it may be making a thread or a process just now, which we must not trace.
        ptrace.seize(tid, 0)
        self.tids.append(tid)
        self._running.add(tid)
        ptrace.interrupt(tid)

    def wait(self, tid: int, deadline: float) -> ptrace.Stop:
        """Raises TimeoutError."""
        stop = ptrace.wait_bounded(tid, deadline)
        self._running.discard(tid)
        if stop.event != ptrace.EVENT_STOP:
            self.hold_signal(tid, stop.signal)
        return stop

    def forget(self, tid: int) -> None:
        """It has ended."""
        self.tids.remove(tid)
        ptrace.reap(tid)

    def let_go(self) -> None:
        deadline = time.monotonic() + _STOP_DEADLINE_S
        for tid in reversed(self.tids):
            try:
                self._let_go(tid, deadline)
            except TimeoutError:
                continue  # only the end of this thread frees it
            except Gone:
                # We keep the exit status of our own child for its starter here. That of another goes to its parent.
                if tid != self.pid or _find_parent(tid) != os.getpid():
                    ptrace.reap(tid)
        for tid, number in self._held:
            ptrace.send_signal(self.pid, tid, number)

    def _let_go(self, tid: int, deadline: float) -> None:
        if tid in self._running:
            self.wait(tid, deadline)
        registers = ptrace.get_registers(tid)
        if needs_help(registers):
            ptrace.set_registers(tid, called_again(registers, in_duplicate=False))
        ptrace.detach(tid)


@contextlib.contextmanager
def at_rest(pid: int, main_rests_in: frozenset[int]) -> Iterator[Stopped]:
    """Raises NotForkable where it does not come to rest, cannot be traced, or ends meanwhile."""
    with understood(pid):
        pause_s = _FIRST_PAUSE_S
        for _ in range(TRIES):
            stopped = Stopped(pid)
            try:
                busy = _find_unstoppable(pid)
                if busy is None:
                    _stop_threads(stopped)
                    busy = _find_busy(stopped, main_rests_in)
                if busy is None:
                    yield stopped
                    return
            finally:
                stopped.let_go()
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)
        raise NotForkable(
            f"Process {pid} did not come to rest: in {TRIES} tries its thread {busy} was never found waiting",
            hint="It is busy; try again",
        )


@contextlib.contextmanager
def understood(pid: int) -> Iterator[None]:
    """What goes wrong with the process raises NotForkable."""
    try:
        yield
    except Gone as error:
        raise NotForkable(f"Process {pid} ended while it was forked") from error
    except OSError as error:
        if error.errno == errno.EPERM:
            raise NotForkable(
                f"Process {pid} may not be traced",
                hint="It is traced already, or kernel.yama.ptrace_scope, a seccomp filter or its user forbids it",
            ) from error
        raise NotForkable(f"Process {pid} could not be forked: {error.strerror}") from error


def _stop_threads(stopped: Stopped) -> None:
    """A thread that is still running may start another: until no new one is seen."""
    deadline = time.monotonic() + _STOP_DEADLINE_S
    while new := [tid for tid in _list_threads(stopped.pid) if tid not in stopped.tids]:
        for tid in new:
            try:
                stopped.interrupt(tid)
            except (Gone, PermissionError):
                if tid == stopped.pid or _read_state(stopped.pid, tid) not in _ENDED:
                    raise
        for tid in new:
            if tid in stopped.tids:
                _wait_interrupted(stopped, tid, deadline)
    if not stopped.tids:
        raise Gone


def _wait_interrupted(stopped: Stopped, tid: int, deadline: float) -> None:
    try:
        stop = stopped.wait(tid, deadline)
    except TimeoutError:
        raise NotForkable(f"Thread {tid} cannot be stopped", hint="Is its disk stuck?") from None
    except Gone:
        if tid == stopped.pid:
            raise
        stopped.forget(tid)
        return
    if stop.event != ptrace.EVENT_STOP:
        raise NotForkable(f"Process {stopped.pid} was just sent a signal", hint="Try again")
    if stop.signal != signal.SIGTRAP:
        raise NotForkable(f"Process {stopped.pid} is stopped by a signal", hint="Let it go on first")


def _find_unstoppable(pid: int) -> int | None:
    """A thread that waits for a disk, or for a process that it made. Once traced, it could not be let go before."""
    return next((tid for tid in _list_threads(pid) if _read_state(pid, tid) == "D"), None)


def _list_threads(pid: int) -> list[int]:
    """Without those that are the kernel's, as KVM has one: a duplicate gets its own when it needs one."""
    return [tid for tid in ptrace.list_threads(pid) if not _is_kernels(pid, tid)]


def _is_kernels(pid: int, tid: int) -> bool:
    fields = _read_stat(f"/proc/{pid}/task/{tid}/stat")
    return bool(fields) and bool(int(fields[_FLAGS]) & _USER_WORKER)


def _read_state(pid: int, tid: int) -> str:
    return (_read_stat(f"/proc/{pid}/task/{tid}/stat") or ["X"])[0]


def _find_parent(pid: int) -> int | None:
    fields = _read_stat(f"/proc/{pid}/stat")
    return int(fields[1]) if fields else None


def _read_stat(path: str) -> list[str]:
    """What is behind the name, which may be anything; nothing, of what is gone."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(_STAT_BYTES).rpartition(b")")[2].decode().split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _find_busy(stopped: Stopped, main_rests_in: frozenset[int]) -> int | None:
    for tid in stopped.tids:
        allowed = main_rests_in if tid == stopped.pid else WAITS
        if waiting_in(ptrace.get_registers(tid)) not in allowed:
            return tid
    return None
