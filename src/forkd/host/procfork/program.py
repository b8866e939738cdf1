"""Machine code that makes system calls, one after the other, and keeps what each returned. Pure."""

from __future__ import annotations

import functools
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

SYSCALL = b"\x0f\x05"
_BREAK = b"\xcc"
_ARGUMENTS = ("rdi", "rsi", "rdx", "r10", "r8", "r9")
_MOVE_64 = {
    "rax": b"\x48\xb8",
    "rdi": b"\x48\xbf",
    "rsi": b"\x48\xbe",
    "rdx": b"\x48\xba",
    "r10": b"\x49\xba",
    "r8": b"\x49\xb8",
    "r9": b"\x49\xb9",
}
_LOAD_R11, _STORE_R11 = b"\x4c\x8b\x1d", b"\x4c\x89\x1d"  # mov r11, [rip + disp32], and back
_COMPARE_R11 = b"\x4c\x3b\x1d"  # cmp r11, [rip + disp32]
_JUMP_UNLESS_NEGATIVE, _JUMP_UNLESS_EQUAL = b"\x79", b"\x75"  # rel8
_MOVE_RCX_RAX = b"\x48\x89\xc1"
_JUMP_IF_RCX_ZERO = b"\xe3"  # jrcxz rel8: no flag is changed
_JUMP_NEAR = b"\xe9"  # jmp rel32
_JUMP_TO_NEXT_QUAD = b"\xff\x25\x00\x00\x00\x00"  # jmp [rip + 0]

_TO_ARGUMENTS, _TO_RAX = tuple(_MOVE_64[name] for name in _ARGUMENTS), _MOVE_64["rax"]
_CALL_WITH = [struct.Struct("<" + "2sQ" * count + "2sQ2s") for count in range(len(_ARGUMENTS) + 1)]

_NO_ARGUMENTS = (0,) * len(_ARGUMENTS)
_WORD = 8
_MASK = 2**64 - 1
_EXIT_GROUP = 231


def _move(register: str, value: int) -> bytes:
    return _MOVE_64[register] + struct.pack("<Q", value & _MASK)


def render_call(number: int, args: Sequence[int]) -> bytes:
    """Code that makes one system call."""
    moves: list[bytes | int] = []
    for prefix, value in zip(_TO_ARGUMENTS, args, strict=False):
        moves += prefix, value & _MASK
    return _CALL_WITH[len(args)].pack(*moves, _TO_RAX, number, SYSCALL)


def render_jump(target: int) -> bytes:
    return _JUMP_TO_NEXT_QUAD + struct.pack("<Q", target)


def render_unless_zero(code: bytes) -> bytes:
    """Code that is left out where the last call returned 0. It changes no flag."""
    return _MOVE_RCX_RAX + _JUMP_IF_RCX_ZERO + struct.pack("<b", len(code)) + code


@dataclass(frozen=True)
class Call:
    """One system call. `data` is put beside the code; an argument that is `DATA + n` is the address of its byte n."""

    number: int
    args: tuple[int, ...] = ()
    data: bytes = b""
    pointers: tuple[tuple[int, int], ...] = ()  # (at, to): byte `at` of the data holds the address of its byte `to`
    returns: int | None = None  # what it has to return; None: anything but an error
    may_fail: bool = False  # what it returns does not matter
    what: str = ""  # for the message when it fails

    def placed_args(self, address: int) -> tuple[int, ...]:
        """The arguments, when the data is at `address`."""
        return tuple(value - DATA + address if value >= DATA else value for value in self.args)

    def placed_data(self, address: int) -> bytes:
        padded = self.data.ljust(_padded(len(self.data)), b"\0")
        if not self.pointers:
            return padded
        data = bytearray(padded)
        for at, to in self.pointers:
            struct.pack_into("<Q", data, at, address + to)
        return bytes(data)

    def is_failed(self, value: int) -> bool:
        """Whether no call is made after it."""
        return value < 0 and not self.may_fail

    def find_failure(self, value: int) -> Failed | None:
        is_other = self.returns is not None and value != self.returns and not self.may_fail
        return Failed(self, value) if is_other or self.is_failed(value) else None


DATA = 1 << 80


@dataclass(frozen=True)
class Failed:
    """The first call that did not return what it had to."""

    call: Call
    value: int

    def __str__(self) -> str:
        what = self.call.what or f"system call {self.call.number}"
        if self.value < 0:
            return f"{what}: {os.strerror(-self.value)}"
        return f"{what}: returned {self.value}, not {self.call.returns}"


# A program is a table of calls, and code that goes through it. The table begins with the addresses of the entry whose
# turn it is, and of the end. An entry is the result, the number, whether a failure matters, and six arguments.
_HEAD, _ENTRY = struct.Struct("<QQ"), struct.Struct("<qII6Q")
_RESULT = struct.Struct(f"<q{_ENTRY.size - _WORD}x")
# Of an entry that r11 points to: what the call takes, what it returned, and whether that may be an error.
_TAKE = bytes.fromhex("498b7b10 498b7318 498b5320 4d8b5328 4d8b4330 4d8b4b38 418b4308")
_KEEP_AND_TEST = bytes.fromhex("498903 4885c0")
_LOAD_MAY_FAIL, _TO_NEXT = bytes.fromhex("418b4b0c"), b"\x49\x83\xc3" + bytes([_ENTRY.size])


def _render_loop(at: int, table: int) -> bytes:
    """It uses no register that a system call does not change anyway, or take."""
    code = b""

    def beside(instruction: bytes, target: int) -> bytes:
        return instruction + struct.pack("<i", target - (at + len(code) + len(instruction) + 4))

    code += beside(_LOAD_R11, table)
    code += _TAKE + SYSCALL
    code += beside(_LOAD_R11, table)
    code += _KEEP_AND_TEST
    code += _JUMP_UNLESS_NEGATIVE + struct.pack("<b", len(_LOAD_MAY_FAIL) + 2)
    code += _LOAD_MAY_FAIL
    # Behind the loop, over what follows.
    rest = len(_TO_NEXT) + 2 * (len(_STORE_R11) + 4) + 2
    code += _JUMP_IF_RCX_ZERO + struct.pack("<b", rest)
    code += _TO_NEXT
    code += beside(_STORE_R11, table)
    code += beside(_COMPARE_R11, table + _WORD)
    return code + _JUMP_UNLESS_EQUAL + struct.pack("<b", -(len(code) + 2))


_LOOP_BYTES = len(_render_loop(0, 0))


@dataclass(frozen=True)
class Program:
    """Calls, laid out for one address: their table first, then their data, then the code, and how that ends.

    A call that fails is the last one, unless it may; the others' results stay 0. The code may be elsewhere, nearby.
    What is in memory is run once: the code notes there how far it is.
    """

    base: int
    calls: tuple[Call, ...]
    ending: bytes = _BREAK
    code_at: int | None = None

    @functools.cached_property
    def _addresses(self) -> list[int]:
        """Of each call's data, and behind the last one's."""
        sizes = (_padded(len(call.data)) for call in self.calls)
        return list(itertools.accumulate(sizes, initial=self.base + self.results_bytes))

    @property
    def entry(self) -> int:
        return self._addresses[-1] if self.code_at is None else self.code_at

    def data_address(self, index: int) -> int:
        return self._addresses[index]

    @property
    def results_bytes(self) -> int:
        """How many `parse_results` needs, from the base on: the table."""
        return _HEAD.size + len(self.calls) * _ENTRY.size

    @property
    def size(self) -> int:
        return self.memory_bytes + self.code_bytes

    @property
    def memory_bytes(self) -> int:
        """Of the table and data."""
        return self._addresses[-1] - self.base

    @property
    def code_bytes(self) -> int:
        return (_LOOP_BYTES if self.calls else 0) + len(self.ending)

    def moved_by(self, distance: int) -> Program:
        return replace(self, base=self.base + distance)

    def render(self) -> bytes:
        """All of it, in one piece."""
        return self.render_memory() + self.render_code()

    def render_memory(self) -> bytes:
        parts = [_HEAD.pack(self.base + _HEAD.size, self.base + self.results_bytes)]
        for call, address in zip(self.calls, self._addresses, strict=False):
            args = (value & _MASK for value in call.placed_args(address))
            parts.append(_ENTRY.pack(0, call.number, call.may_fail, *args, *_NO_ARGUMENTS[len(call.args) :]))
        parts += (call.placed_data(address) for call, address in zip(self.calls, self._addresses, strict=False))
        return b"".join(parts)

    def render_code(self) -> bytes:
        return (_render_loop(self.entry, self.base) if self.calls else b"") + self.ending

    def parse_results(self, memory: bytes) -> list[int]:
        """`memory`: what is at the base after the run."""
        return [result for (result,) in _RESULT.iter_unpack(memory[_HEAD.size : self.results_bytes])]

    def is_over(self, results: list[int]) -> bool:
        """Of one that runs, and whose last call returns anything but 0."""
        failed = (call.is_failed(value) for call, value in zip(self.calls, results, strict=True))
        return results[-1] != 0 or any(failed)

    def parse_data(self, memory: bytes) -> list[bytes]:
        """Of each call, from what is at the base after the run."""
        places = (address - self.base for address in self._addresses)
        return [memory[at : at + len(call.data)] for at, call in zip(places, self.calls, strict=False)]

    def find_failure(self, results: list[int]) -> Failed | None:
        failures = (call.find_failure(value) for call, value in zip(self.calls, results, strict=True))
        return next((failure for failure in failures if failure), None)


def _padded(size: int) -> int:
    return -(-size // _WORD) * _WORD


# The detour: what a thread of the source runs to make a call for us, and how it finds back without our help.
#
#     magic; call: syscall; back: <registers as they were>; jmp <where it was>
#            fork: syscall; parent: goto back; child: exit_group(1)
#
# A child whose tracer is gone before it took the child over therefore ends at once.
_MAGIC = b"forkd\0\0\1"


@dataclass(frozen=True)
class Detour:
    """`back`: the registers to go on with, `rip` being where to."""

    base: int
    back: dict[str, int]

    @property
    def call(self) -> int:
        return self.base + len(_MAGIC)

    @property
    def way_back(self) -> int:
        return self.call + len(SYSCALL)

    @property
    def fork(self) -> int:
        return self.way_back + len(self._back())

    def render(self) -> bytes:
        code = _MAGIC + SYSCALL + self._back()
        code += SYSCALL
        at = self.base + len(code) + len(render_unless_zero(b""))
        code += render_unless_zero(_JUMP_NEAR + struct.pack("<i", self.way_back - (at + 5)))
        return code + render_call(_EXIT_GROUP, (1,))

    def _back(self) -> bytes:
        registers = b"".join(_move(name, self.back[name]) for name in (*_ARGUMENTS, "rax"))
        return registers + render_jump(self.back["rip"])


DETOUR_BYTES = len(Detour(0, dict.fromkeys((*_MOVE_64, "rip"), 0)).render())


def fits_detour(end_of_code: bytes) -> bool:
    """Whether a detour may be written there: over nothing, or over the last one."""
    return end_of_code.startswith(_MAGIC) or not any(end_of_code)
