"""The seccomp filters of a running program's threads: read, joined into one, and put on again in another process.

All is pure but `read_filters`.
"""

from __future__ import annotations

import errno
import struct
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from forkd.errors import NotForkable
from forkd.host import seccomp
from forkd.host.procfork import ptrace
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import PPOLL
from forkd.host.procfork.rest import Stopped, understood

MOST_INSTRUCTIONS = 4096
_INSTRUCTION = struct.Struct("<HBBI")
_LOAD, _LOAD_NUMBER, _LOAD_X, _JUMP, _JUMP_EQUAL, _RETURN, _RETURN_A = 0x20, 0x00, 0x01, 0x05, 0x15, 0x06, 0x16
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4
_X86_64 = 0xC000003E
_ACTION = 0xFFFF0000
_ALLOW = 0x7FFF0000
_REFUSED = 0x00050000 | errno.EPERM
_STOP_DEADLINE_S = 2.0
_NO_FILTER = errno.EINVAL


def read_filters(pid: int) -> dict[str, bytes]:
    """By the name of the thread; of several that a thread has, the youngest. Raises NotForkable."""
    with understood(pid):
        stopped = Stopped(pid)
        try:
            for tid in ptrace.list_threads(pid):
                stopped.interrupt(tid)
                stopped.wait(tid, time.monotonic() + _STOP_DEADLINE_S)
            found = {tid: _find_youngest(tid) for tid in stopped.tids}
            return {_read_name(pid, tid): program for tid, program in found.items() if program is not None}
        except TimeoutError as error:
            raise NotForkable(f"A thread of process {pid} cannot be stopped") from error
        finally:
            stopped.let_go()


def _find_youngest(tid: int) -> bytes | None:
    youngest, index = None, 0
    try:
        while (program := ptrace.find_filter(tid, index)) is not None:
            youngest, index = program, index + 1
    except OSError as error:
        if error.errno == _NO_FILTER:
            return None
        if error.errno != errno.EACCES:
            raise
        raise NotForkable(
            "Seccomp filters cannot be read", hint="It takes root, outside of every seccomp filter"
        ) from error
    return youngest


def _read_name(pid: int, tid: int) -> str:
    return Path(f"/proc/{pid}/task/{tid}/comm").read_text("utf-8", "replace").rstrip("\n")


def join_filters(programs: Sequence[bytes], also_allow: Collection[int] = (PPOLL,)) -> bytes:
    """One that allows what any of them allows, and the calls of these numbers.

    Anything else fails, as if not permitted: a thread that makes calls for us may be left alone by us just before one
    of them, and then goes on without it.
    """
    parts = [_render_numbers(also_allow), *(_parse(program) for program in programs)]
    joined: list[tuple[int, int, int, int]] = []
    for part in parts:
        joined += [(_LOAD_NUMBER, 0, 0, 0), (_LOAD_X, 0, 0, 0)]  # as at the start of a program
        for index, instruction in enumerate(part):
            code, _, _, value = instruction
            if code == _RETURN_A:
                raise NotForkable("A seccomp filter computes what it returns, and cannot be joined with others")
            if code == _RETURN and value & _ACTION != _ALLOW:
                instruction = (_JUMP, 0, 0, len(part) - index - 1)  # to the start of the next
            joined.append(instruction)
    joined.append((_RETURN, 0, 0, _REFUSED))
    if len(joined) > MOST_INSTRUCTIONS:
        raise NotForkable(f"Seccomp filters of {len(joined)} instructions cannot be joined; {MOST_INSTRUCTIONS} can")
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in joined)


def _render_numbers(numbers: Collection[int]) -> list[tuple[int, int, int, int]]:
    """A program that allows these, and nothing else."""
    program = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_JUMP_EQUAL, 1, 0, _X86_64), (_RETURN, 0, 0, 0)]
    program.append((_LOAD, 0, 0, _NUMBER_AT))
    for number in numbers:
        program += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, 0)]


def _parse(program: bytes) -> list[tuple[int, int, int, int]]:
    if not program or len(program) % _INSTRUCTION.size:
        raise NotForkable(f"A seccomp filter of {len(program)} bytes is not one")
    return [_INSTRUCTION.unpack_from(program, at) for at in range(0, len(program), _INSTRUCTION.size)]


def render_install(program: bytes) -> list[Call]:
    """The system calls with which a thread puts itself under a filter, and no other thread."""
    return seccomp.render_install(program, all_threads=False)
