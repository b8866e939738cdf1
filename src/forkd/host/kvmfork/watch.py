"""Watching the system calls of a process that runs: what procfork's ptrace, which stops processes, has no need of."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import time
from dataclasses import dataclass

from forkd.host.procfork import ptrace
from forkd.host.procfork.ptrace import Gone, Stop

_DETACH, _SYSCALL, _LISTEN, _GET_SYSCALL_INFO = 17, 24, 0x4208, 0x420E
_ENTERED = 1
_INFO_BYTES, _NUMBER_AT = 88, 24
_ALL_KINDS = 0x40000000  # __WALL
_OURS_ONLY = 0x20000000  # __WNOTHREAD: what this thread traces
_IN_CALL = signal.SIGTRAP | 0x80
_EVENT_SHIFT = 8
_JOB_CONTROL = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

# A process that makes a VM stops every few microseconds; one that waits to be told to does not stop at all.
_SPIN_S = 0.0002
_PAUSE_S = 0.0005

_libc = ctypes.CDLL(None, use_errno=True)
_ptrace = _libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


@dataclass(frozen=True)
class SystemCall:
    entered: bool  # else it is about to return
    number: int = -1
    args: tuple[int, ...] = ()
    result: int = 0


def get_call(tid: int) -> SystemCall:
    """That it is stopped in. Raises Gone, and OSError."""
    buffer = ctypes.create_string_buffer(_INFO_BYTES)
    _request(_GET_SYSCALL_INFO, tid, _INFO_BYTES, ctypes.addressof(buffer))
    if buffer.raw[0] == _ENTERED:
        number, *args = struct.unpack_from("<7Q", buffer.raw, _NUMBER_AT)
        return SystemCall(True, number, tuple(args))
    return SystemCall(False, result=struct.unpack_from("<q", buffer.raw, _NUMBER_AT)[0])


def is_in_call(stop: Stop) -> bool:
    """Whether a call begins or has returned."""
    return stop.event == 0 and stop.signal == _IN_CALL


def is_signal(stop: Stop) -> bool:
    """Whether a signal is on its way to it."""
    return stop.event == 0 and stop.signal != _IN_CALL


def go_on(tid: int, stop: Stop) -> None:
    """To its next call; a signal arrives. That it was killed is not told: it has no next stop."""
    try:
        if stop.event == ptrace.EVENT_STOP and stop.signal in _JOB_CONTROL:
            _request(_LISTEN, tid)  # it is to stand still, until it gets SIGCONT
        else:
            _request(_SYSCALL, tid, 0, stop.signal if is_signal(stop) else 0)
    except Gone:
        pass


def detach(tid: int, stop: Stop) -> None:
    """The same, and it is no longer traced."""
    _request(_DETACH, tid, 0, stop.signal if is_signal(stop) else 0)


class Stops:
    """Of all that this thread traces, as they come."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def find_next(self) -> tuple[int, Stop] | None:
        """None after a moment without one. Raises Gone when nothing is left to be traced."""
        try:
            info = os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG | _ALL_KINDS | _OURS_ONLY)
        except ChildProcessError as error:
            raise Gone from error
        if info is None:
            self._pause()
            return None
        self._last = time.monotonic()
        event, number = divmod(info.si_status, 1 << _EVENT_SHIFT)
        return info.si_pid, Stop(event, number)

    def _pause(self) -> None:
        if time.monotonic() - self._last < _SPIN_S:
            os.sched_yield()
        else:
            time.sleep(_PAUSE_S)


def _request(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    if _ptrace(request, tid, address, data) < 0:
        number = ctypes.get_errno()
        if number == errno.ESRCH:
            raise Gone
        raise OSError(number, f"ptrace: {os.strerror(number)}")
