"""The kernel's calls for tracing, one function each. They raise OSError; of a tracee that is gone, Gone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from forkd.host.procfork.registers import Registers

_CONT, _DETACH, _SYSCALL = 7, 17, 24
_SETOPTIONS, _GETEVENTMSG, _GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4200, 0x4201, 0x4204, 0x4205, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK, _GET_FILTER, _GET_RSEQ = 0x420A, 0x420B, 0x420C, 0x420F
_PRSTATUS, _XSTATE = 1, 0x202

TRACE_FORK, TRACE_VFORK, TRACE_CLONE, TRACE_SECCOMP, EXIT_KILL = 1 << 1, 1 << 2, 1 << 3, 1 << 7, 1 << 20
# For `make_call`. Without it the kernel makes a signal of a stop whose tracer was killed, and that ends the tracee.
TELL_CALLS = 1
# No seccomp filter judges the tracee as long as it is traced; nor what it makes, which is traced from the beginning.
SUSPEND_FILTERS = 1 << 21
EVENT_FORK, EVENT_VFORK, EVENT_CLONE, EVENT_SECCOMP, EVENT_STOP = 1, 2, 3, 7, 128
_NEW_TASK = (EVENT_FORK, EVENT_VFORK, EVENT_CLONE)

_KCMP, _GET_ROBUST_LIST, _TGKILL, _PIDFD_GETFD = 312, 274, 234, 438
_KCMP_FILE = 0
_WALL = 0x40000000
_BREAKPOINT, _IN_CALL = signal.SIGTRAP, signal.SIGTRAP | 0x80
_MAX_EXTENDED_BYTES = 16384
_MASK_BYTES = 8
_INSTRUCTION_BYTES = 8  # of a filter
# A thread stops within microseconds, unless the kernel does not let it go.
_POLL_S = 0.00005

_libc = ctypes.CDLL(None, use_errno=True)
_ptrace = _libc.ptrace
_ptrace.restype = ctypes.c_long
_ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Gone(Exception):
    """The process was killed, or ended."""


@dataclass(frozen=True)
class Stop:
    event: int
    signal: int
    new_task: int = 0  # of a fork or clone


class _Buffer(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class _Rseq(ctypes.Structure):
    _fields_ = [
        *(("address", ctypes.c_uint64), ("size", ctypes.c_uint32)),
        *(("signature", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("pad", ctypes.c_uint32)),
    ]


@dataclass(frozen=True)
class Rseq:
    address: int
    size: int
    signature: int


def _checked(value: int, what: str) -> int:
    if value < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return value


def _request(request: int, tid: int, address: int = 0, data: int = 0) -> None:
    try:
        _checked(_ptrace(request, tid, address, data), "ptrace")
    except ProcessLookupError as error:
        raise Gone from error


def seize(tid: int, options: int) -> None:
    _request(_SEIZE, tid, 0, options)


def set_options(tid: int, options: int) -> None:
    _request(_SETOPTIONS, tid, 0, options)


def interrupt(tid: int) -> None:
    try:
        _request(_INTERRUPT, tid)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        raise Gone from error  # it is just ending


def detach(tid: int) -> None:
    _request(_DETACH, tid)


def get_registers(tid: int) -> Registers:
    registers = Registers()
    buffer = _Buffer(ctypes.addressof(registers), ctypes.sizeof(registers))
    _request(_GETREGSET, tid, _PRSTATUS, ctypes.addressof(buffer))
    return registers


def set_registers(tid: int, registers: Registers) -> None:
    buffer = _Buffer(ctypes.addressof(registers), ctypes.sizeof(registers))
    _request(_SETREGSET, tid, _PRSTATUS, ctypes.addressof(buffer))


def get_extended(tid: int) -> bytes:
    """Floating-point and vector registers."""
    memory = ctypes.create_string_buffer(_MAX_EXTENDED_BYTES)
    buffer = _Buffer(ctypes.addressof(memory), _MAX_EXTENDED_BYTES)
    _request(_GETREGSET, tid, _XSTATE, ctypes.addressof(buffer))
    return memory.raw[: buffer.size]


def set_extended(tid: int, state: bytes) -> None:
    memory = ctypes.create_string_buffer(state, len(state))
    buffer = _Buffer(ctypes.addressof(memory), len(state))
    _request(_SETREGSET, tid, _XSTATE, ctypes.addressof(buffer))


def get_signal_mask(tid: int) -> int:
    mask = ctypes.c_uint64()
    _request(_GETSIGMASK, tid, _MASK_BYTES, ctypes.addressof(mask))
    return mask.value


def set_signal_mask(tid: int, mask: int) -> None:
    value = ctypes.c_uint64(mask)
    _request(_SETSIGMASK, tid, _MASK_BYTES, ctypes.addressof(value))


def find_rseq(tid: int) -> Rseq | None:
    """None where the thread registered none, or the kernel does not tell (before 5.13)."""
    found = _Rseq()
    try:
        _request(_GET_RSEQ, tid, ctypes.sizeof(found), ctypes.addressof(found))
    except OSError:
        return None
    return Rseq(found.address, found.size, found.signature) if found.address else None


def find_filter(tid: int, index: int) -> bytes | None:
    """A seccomp filter of a stopped thread, the oldest is number 0. None where it has no more; EINVAL: has none."""
    try:
        count = _checked(_ptrace(_GET_FILTER, tid, index, 0), "ptrace")
        memory = ctypes.create_string_buffer(count * _INSTRUCTION_BYTES)
        _request(_GET_FILTER, tid, index, ctypes.addressof(memory))
    except FileNotFoundError:
        return None
    return memory.raw


def get_robust_list(tid: int) -> int:
    head, size = ctypes.c_uint64(), ctypes.c_size_t()
    _checked(_syscall(_GET_ROBUST_LIST, tid, ctypes.byref(head), ctypes.byref(size)), "get_robust_list")
    return head.value


def run(tid: int, on_signal: Callable[[int, int], None]) -> Stop:
    """Until it stops by itself: at a breakpoint, or with a new task."""
    go_on(tid)
    return wait_run(tid, on_signal)


def go_on(tid: int) -> None:
    """It runs, and is not waited for."""
    _request(_CONT, tid)


def wait_run(tid: int, on_signal: Callable[[int, int], None]) -> Stop:
    """For one that runs; see `run`."""
    return _wait_resumed(_CONT, tid, _BREAKPOINT, on_signal)


def make_call(tid: int, on_signal: Callable[[int, int], None], meanwhile: Callable[[], None] = lambda: None) -> Stop:
    """Over a system call, which is the next instruction; not out of it yet, when it made a new task.

    `meanwhile` is called, once, while the kernel makes it. A single step would do, but a tracee whose tracer is killed
    goes on in single steps, and the next one ends it.
    """
    enter_or_leave_call(tid, on_signal)
    return enter_or_leave_call(tid, on_signal, meanwhile)


def enter_or_leave_call(
    tid: int, on_signal: Callable[[int, int], None], meanwhile: Callable[[], None] = lambda: None
) -> Stop:
    _request(_SYSCALL, tid)
    meanwhile()
    return _wait_resumed(_SYSCALL, tid, _IN_CALL, on_signal)


def _wait_resumed(request: int, tid: int, until: int, on_signal: Callable[[int, int], None]) -> Stop:
    while True:
        stop = wait(tid)
        if stop.event in _NEW_TASK or (stop.event == 0 and stop.signal == until):
            return stop
        if stop.event == 0:
            on_signal(tid, stop.signal)  # kept from it here; it gets it later
        _request(request, tid)


def wait(tid: int) -> Stop:
    """Its next stop. Exit statuses are left alone: that of a process is for its parent, who may be us.

    Nor are they waited for: a main thread that was killed has none before all its other threads are reaped.
    """
    return _parse_stop(tid, _wait_stopped(tid, 0))


def wait_bounded(tid: int, deadline: float) -> Stop:
    """Raises TimeoutError."""
    while (info := _wait_stopped(tid, os.WNOHANG)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(_POLL_S)
    return _parse_stop(tid, info)


def _wait_stopped(tid: int, how: int) -> os.waitid_result | None:
    try:
        return os.waitid(os.P_PID, tid, os.WSTOPPED | how | _WALL)
    except ChildProcessError as error:
        raise Gone from error


def _parse_stop(tid: int, info: os.waitid_result | None) -> Stop:
    assert info is not None
    event, number = divmod(info.si_status, 1 << 8)
    return Stop(event, number, _event_message(tid) if event in _NEW_TASK else 0)


def _event_message(tid: int) -> int:
    message = ctypes.c_ulong()
    _request(_GETEVENTMSG, tid, 0, ctypes.addressof(message))
    return message.value


def reap(tid: int) -> None:
    """Wait until a traced task that was killed is over; as long as we do not, its process is not."""
    try:
        while True:
            _, status = os.waitpid(tid, _WALL)
            if not os.WIFSTOPPED(status):
                return
    except ChildProcessError:
        return


def find_newborn(known: Collection[int]) -> int | None:
    """A process that a tracee of this thread made, and was killed before we were told: it is traced from its beginning.

    Looked for, not waited for: threads of those that are `known` stop in the same way.
    """
    ours = f"\nTracerPid:\t{threading.get_native_id()}\n"
    pids = (int(name) for name in os.listdir("/proc") if name.isdecimal())
    return next((pid for pid in pids if pid not in known and ours in _read_status(pid)), None)


def _read_status(pid: int) -> str:
    """Nothing, of what is over or is hidden from us."""
    try:
        with open(f"/proc/{pid}/status", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def end(pid: int) -> None:
    """Kill a process that we trace, and wait until it is over."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    # Nobody may have told us of its last thread; and as long as one is not reaped, the process is not over.
    while others := [tid for tid in list_threads(pid) if tid != pid]:
        for tid in others:
            reap(tid)
    reap(pid)


def list_threads(pid: int) -> list[int]:
    """The main thread first. None when it is over."""
    try:
        return sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda tid: (tid != pid, tid))
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_same_file(pid: int, one: int, other: int) -> bool:
    """Whether two descriptors are one open file; where the kernel cannot tell (no kcmp), they are taken for two."""
    return bool(_syscall(_KCMP, pid, pid, _KCMP_FILE, one, other) == 0)


def take_descriptor(pidfd: int, number: int) -> int:
    """A descriptor of our own for a file that another process has open."""
    return _checked(_syscall(_PIDFD_GETFD, pidfd, number, 0), "pidfd_getfd")


def send_signal(pid: int, tid: int, number: int) -> None:
    _syscall(_TGKILL, pid, tid, number)
