"""Seccomp filters: which system calls a process may make, and what happens at another one. Pure.

A filter is an allow-list. A call that is not on it ends the process (`Verdict.KILL`). A call that is `TRACED` is up to
whoever traces the process; without a tracer it is not made, and fails with ENOSYS: so we can have a VMM make it, and
one that was broken into cannot.
"""

from __future__ import annotations

import enum
import errno
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from forkd.host.procfork.program import DATA, Call

_SECCOMP, _PRCTL = 317, 157
_SET_MODE_FILTER, _TSYNC = 1, 1
_PR_SET_NO_NEW_PRIVS = 38

_LOAD_WORD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT, _ARGUMENT_BYTES = 0, 4, 16, 8
_X86_64 = 0xC000003E
_X32_NUMBERS = 0x40000000

_Instruction = tuple[int, int, int, int]


class Verdict(enum.IntEnum):
    ALLOW = 0x7FFF0000
    TRACED = 0x7FF00000
    KILL = 0x80000000  # the whole process
    REFUSED = 0x00050000 | errno.EPERM
    UNSUPPORTED = 0x00050000 | errno.ENOTTY
    ABSENT = 0x00050000 | errno.ENOSYS  # as if the kernel were too old for it


@dataclass(frozen=True)
class Among:
    """By the low 32 bits of an argument, of which only those of `mask` count."""

    argument: int
    verdicts: Mapping[int, Verdict]
    mask: int = 0xFFFFFFFF
    otherwise: Verdict = Verdict.KILL


@dataclass(frozen=True)
class HasBits:
    """By whether an argument has any of some bits."""

    argument: int
    bits: int
    then: Verdict
    otherwise: Verdict


Rule = Verdict | Among | HasBits


def render_filter(rules: Mapping[int, Rule]) -> bytes:
    """The program, as the kernel takes it; `rules` by the number of the system call."""
    program: list[_Instruction] = [
        (_LOAD_WORD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _X86_64),
        (_RETURN, 0, 0, Verdict.KILL),
        (_LOAD_WORD, 0, 0, _NUMBER_AT),
        (_JUMP_AT_LEAST, 0, 1, _X32_NUMBERS),
        (_RETURN, 0, 0, Verdict.KILL),
    ]
    for number, rule in rules.items():
        steps = _render_rule(rule)
        program += [(_JUMP_EQUAL, 0, len(steps), number), *steps]
    program.append((_RETURN, 0, 0, Verdict.KILL))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)


def _render_rule(rule: Rule) -> list[_Instruction]:
    """Every way through it ends with a verdict."""
    if isinstance(rule, Verdict):
        return [(_RETURN, 0, 0, rule)]
    load = (_LOAD_WORD, 0, 0, _ARGUMENTS_AT + rule.argument * _ARGUMENT_BYTES)
    if isinstance(rule, HasBits):
        return [
            load,
            (_JUMP_BITS, 0, 1, rule.bits),
            (_RETURN, 0, 0, rule.then),
            (_RETURN, 0, 0, rule.otherwise),
        ]
    cases = [step for value, verdict in rule.verdicts.items() for step in _if_equal(value, verdict)]
    return [load, (_AND, 0, 0, rule.mask), *cases, (_RETURN, 0, 0, rule.otherwise)]


def _if_equal(value: int, verdict: Verdict) -> list[_Instruction]:
    return [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, verdict)]


def render_install(program: bytes, *, all_threads: bool = True) -> list[Call]:
    """The system calls with which a process puts itself under a filter; or a thread itself alone."""
    header = struct.pack("<HxxxxxxQ", len(program) // 8, 0)
    return [
        Call(_PRCTL, (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), what="give up new privileges"),
        Call(
            _SECCOMP,
            (_SET_MODE_FILTER, _TSYNC if all_threads else 0, DATA),
            header + program,
            pointers=((8, len(header)),),
            returns=0,
            what="set a seccomp filter",
        ),
    ]
