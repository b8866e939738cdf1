"""What a stopped thread was doing, and the registers with which it does it again. Pure."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping

NAMES = (
    *("r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi", "rdi"),
    *("orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs", "gs"),
)
_NO_CALL = 2**64 - 1
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")

_POLL, _NANOSLEEP, _SELECT, _FUTEX, _RESTART, _CLOCK_NANOSLEEP, _EPOLL_WAIT = 7, 35, 23, 202, 219, 230, 232
_PSELECT, PPOLL, _EPOLL_PWAIT, _EPOLL_PWAIT2 = 270, 271, 281, 441
POLLS = frozenset((_POLL, _SELECT, _PSELECT, PPOLL, _EPOLL_WAIT, _EPOLL_PWAIT, _EPOLL_PWAIT2, _RESTART))
WAITS = POLLS | {_FUTEX, _NANOSLEEP, _CLOCK_NANOSLEEP}

# What the kernel leaves in rax when a call was broken off, to be made again. EINTR: of epoll_wait, which it does not
# make again by itself.
_EINTR, _RESTART_BLOCK = 4, 516
_BROKEN_OFF = frozenset((_EINTR, 512, 513, 514, _RESTART_BLOCK))
_SYSCALL_BYTES = 2
_NEGATIVE_32 = 1 << 31
_FUTEX_COMMAND, _FUTEX_WAIT_BITSET = 0x7F, 9


class Registers(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in NAMES]

    def with_values(self, **values: int) -> Registers:
        changed = Registers.from_buffer_copy(self)
        for name, value in values.items():
            setattr(changed, name, value & _NO_CALL)
        return changed

    def get(self, name: str) -> int:
        return int(getattr(self, name))


def waiting_in(registers: Registers) -> int | None:
    """The number of the call that the thread waits in and that can be made again; None when it is doing anything."""
    call, value = registers.get("orig_rax"), -_signed(registers.get("rax"))
    return call if call < 2**31 and value in _BROKEN_OFF else None


def needs_help(registers: Registers) -> bool:
    """Whether a thread that is let go has to be told to make its call again.

    The kernel does not do so for some; and of a wait that it goes on with by itself it forgets what it was, so that the
    next duplicate could not be told.
    """
    if waiting_in(registers) not in WAITS:
        return False
    left = -_signed(registers.get("rax"))
    return left == _EINTR or (left == _RESTART_BLOCK and _can_begin_anew(registers))


def called_again(registers: Registers, *, in_duplicate: bool) -> Registers:
    """As before the call that it waits in.

    The kernel remembers what is left of a time limit, for the thread itself; a duplicate begins anew. Where only the
    kernel knows what the call was, it ends in the duplicate as it would by a signal.
    """
    number = registers.get("orig_rax")
    if in_duplicate and number == _RESTART:
        return registers.with_values(rax=-_EINTR, orig_rax=_NO_CALL)
    if not in_duplicate and -_signed(registers.get("rax")) == _RESTART_BLOCK and not _can_begin_anew(registers):
        number = _RESTART
    return registers.with_values(rip=registers.get("rip") - _SYSCALL_BYTES, rax=number, orig_rax=_NO_CALL)


def _can_begin_anew(registers: Registers) -> bool:
    """Whether its wait has no limit, or one by the clock."""
    number = registers.get("orig_rax")
    if number == _POLL:
        return bool(registers.get("rdx") & _NEGATIVE_32)
    return number == _FUTEX and registers.get("rsi") & _FUTEX_COMMAND == _FUTEX_WAIT_BITSET


def making_call(registers: Registers, at: int, number: int, args: tuple[int, ...]) -> Registers:
    """About to make a call with the syscall instruction `at`."""
    given = dict(zip(_ARGUMENTS, args, strict=False))
    return registers.with_values(rip=at, rax=number, orig_rax=_NO_CALL, **given)


def at_code(registers: Registers, entry: int) -> Registers:
    return registers.with_values(rip=entry, orig_rax=_NO_CALL)


def returned(registers: Registers) -> int:
    return _signed(registers.get("rax"))


def find_tid_offset(descriptors: Mapping[int, bytes]) -> int | None:
    """Where the C library keeps a thread's id, behind its descriptor: the first place that has it in every thread."""
    common: set[int] | None = None
    for tid, memory in descriptors.items():
        places = _find_words(memory, struct.pack("<I", tid))
        common = places if common is None else common & places
    return min(common) if common else None


def _find_words(memory: bytes, wanted: bytes) -> set[int]:
    places, at = set(), memory.find(wanted)
    while at >= 0:
        if at % len(wanted) == 0:
            places.add(at)
        at = memory.find(wanted, at + 1)
    return places


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
