"""A seccomp filter: the process may make threads, but no processes, and may not look into other processes. Pure.

A tracer decides about a clone that makes a process (SECCOMP_RET_TRACE). Without a tracer it fails: a VMM that was
broken into starts nothing, and we can still fork it by tracing it. Neither needs a privilege.
"""

from __future__ import annotations

import errno
import struct

from forkd.host.procfork.program import DATA, Call

_SECCOMP, _PRCTL = 317, 157
_SET_MODE_FILTER, _TSYNC = 1, 1
_PR_SET_NO_NEW_PRIVS = 38

_LOAD_WORD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_X86_64 = 0xC000003E
_X32_NUMBERS = 0x40000000
_CLONE_THREAD = 0x10000
_CLONE, _FORK, _VFORK, _EXECVE, _EXECVEAT, _CLONE3 = 56, 57, 58, 59, 322, 435
# The daemon's own filter, which a VMM inherits, must allow these; a VMM does not need them.
_PTRACE, _PROCESS_VM_READV, _PROCESS_VM_WRITEV, _PIDFD_GETFD = 101, 310, 311, 438
_REFUSED = (_FORK, _VFORK, _EXECVE, _EXECVEAT, _PTRACE, _PROCESS_VM_READV, _PROCESS_VM_WRITEV, _PIDFD_GETFD)

_ALLOW, _TRACE, _ERRNO = 0x7FFF0000, 0x7FF00000, 0x00050000

_Instruction = tuple[int, int, int, int]


def render_filter() -> bytes:
    """The program, as the kernel takes it. The C library falls back to clone where there is no clone3."""
    refused = _ERRNO | errno.EPERM
    program: list[_Instruction] = [
        *_unless_equal(_ARCHITECTURE_AT, _X86_64, refused),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32_NUMBERS),
        (_RETURN, 0, 0, refused),
        *_if_equal(_CLONE3, _ERRNO | errno.ENOSYS),
        *(step for number in _REFUSED for step in _if_equal(number, refused)),
        (_JUMP_EQUAL, 1, 0, _CLONE),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD_WORD, 0, 0, _FIRST_ARGUMENT_AT),
        (_JUMP_BITS, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _TRACE),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def render_calls() -> list[Call]:
    """The system calls with which a process puts itself under the filter, all its threads included."""
    program = render_filter()
    header = struct.pack("<HxxxxxxQ", len(program) // 8, 0)
    return [
        Call(_PRCTL, (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), what="give up new privileges"),
        Call(
            _SECCOMP,
            (_SET_MODE_FILTER, _TSYNC, DATA),
            header + program,
            pointers=((8, len(header)),),
            returns=0,
            what="set a seccomp filter",
        ),
    ]


def _if_equal(value: int, verdict: int) -> list[_Instruction]:
    return [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, verdict)]


def _unless_equal(at: int, value: int, verdict: int) -> list[_Instruction]:
    return [(_LOAD_WORD, 0, 0, at), (_JUMP_EQUAL, 1, 0, value), (_RETURN, 0, 0, verdict)]
