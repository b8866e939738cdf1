"""Machine code that makes system calls, one after the other, and keeps what each returned. Pure."""

from __future__ import annotations

import functools
import itertools
import os
import struct
from dataclasses import dataclass

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
_STORE_RAX = b"\x48\x89\x05"  # mov [rip + disp32], rax
_TEST_RAX = b"\x48\x85\xc0"
_JUMP_IF_NEGATIVE = b"\x0f\x88"  # js rel32
_MOVE_RCX_RAX = b"\x48\x89\xc1"
_JUMP_IF_RCX_ZERO = b"\xe3"  # jrcxz rel8: no flag is changed
_JUMP_NEAR = b"\xe9"  # jmp rel32
_JUMP_TO_NEXT_QUAD = b"\xff\x25\x00\x00\x00\x00"  # jmp [rip + 0]

_WORD = 8
_MASK = 2**64 - 1
_EXIT_GROUP = 231


def _move(register: str, value: int) -> bytes:
    return _MOVE_64[register] + struct.pack("<Q", value & _MASK)


@dataclass(frozen=True)
class Call:
    """One system call. `data` is put beside the code; an argument that is `DATA + n` is the address of its byte n."""

    number: int
    args: tuple[int, ...] = ()
    data: bytes = b""
    pointers: tuple[tuple[int, int], ...] = ()  # (at, to): byte `at` of the data holds the address of its byte `to`
    returns: int | None = None  # what it has to return; None: anything but an error
    what: str = ""  # for the message when it fails

    def placed_args(self, address: int) -> tuple[int, ...]:
        """The arguments, when the data is at `address`."""
        return tuple(value - DATA + address if value >= DATA else value for value in self.args)

    def placed_data(self, address: int) -> bytes:
        data = bytearray(self.data.ljust(_padded(len(self.data)), b"\0"))
        for at, to in self.pointers:
            struct.pack_into("<Q", data, at, address + to)
        return bytes(data)

    def find_failure(self, value: int) -> Failed | None:
        wrong = value < 0 or (self.returns is not None and value != self.returns)
        return Failed(self, value) if wrong else None


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


@dataclass(frozen=True)
class Program:
    """Calls, laid out for one address: results first, then their data, then the code, which ends at a breakpoint."""

    base: int
    calls: tuple[Call, ...]

    @functools.cached_property
    def _addresses(self) -> list[int]:
        """Of each call's data; the last one is that of the code."""
        sizes = (_padded(len(call.data)) for call in self.calls)
        return list(itertools.accumulate(sizes, initial=self.base + self.results_bytes))

    @property
    def entry(self) -> int:
        return self._addresses[-1]

    def data_address(self, index: int) -> int:
        return self._addresses[index]

    @property
    def results_bytes(self) -> int:
        """How many there are at the base, for `parse_results`."""
        return len(self.calls) * _WORD

    def render(self) -> bytes:
        code = bytearray()
        failures: list[int] = []
        for index, call in enumerate(self.calls):
            for register, value in zip(_ARGUMENTS, call.placed_args(self.data_address(index)), strict=False):
                code += _move(register, value)
            code += _move("rax", call.number) + SYSCALL
            result = self.base + index * _WORD
            code += _STORE_RAX + struct.pack("<i", result - (self.entry + len(code) + 7))
            code += _TEST_RAX + _JUMP_IF_NEGATIVE
            failures.append(len(code))
            code += bytes(4)
        for at in failures:
            code[at : at + 4] = struct.pack("<i", len(code) - (at + 4))
        results = bytes(self.results_bytes)
        data = b"".join(call.placed_data(self.data_address(index)) for index, call in enumerate(self.calls))
        return results + data + bytes(code) + _BREAK

    def parse_results(self, memory: bytes) -> list[int]:
        """`memory`: what is at the base after the run."""
        return list(struct.unpack_from(f"<{len(self.calls)}q", memory))

    def find_failure(self, results: list[int]) -> Failed | None:
        failures = (call.find_failure(value) for call, value in zip(self.calls, results, strict=True))
        return next((failure for failure in failures if failure), None)


def _padded(size: int) -> int:
    return -(-size // _WORD) * _WORD


# The detour: what the source's main thread runs to make a call for us, and how it finds back without our help.
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
    def fork(self) -> int:
        return self.call + len(SYSCALL) + len(self._back())

    def render(self) -> bytes:
        code = _MAGIC + SYSCALL + self._back()
        code += SYSCALL + _MOVE_RCX_RAX + _JUMP_IF_RCX_ZERO + struct.pack("<b", 5)
        to_back = len(_MAGIC) + len(SYSCALL)
        code += _JUMP_NEAR + struct.pack("<i", to_back - (len(code) + 5))
        return code + _move("rdi", 1) + _move("rax", _EXIT_GROUP) + SYSCALL

    def _back(self) -> bytes:
        registers = b"".join(_move(name, self.back[name]) for name in (*_ARGUMENTS, "rax"))
        return registers + _JUMP_TO_NEXT_QUAD + struct.pack("<Q", self.back["rip"])


DETOUR_BYTES = len(Detour(0, dict.fromkeys((*_MOVE_64, "rip"), 0)).render())


def fits_detour(end_of_code: bytes) -> bool:
    """Whether a detour may be written there: over nothing, or over the last one."""
    return end_of_code.startswith(_MAGIC) or not any(end_of_code)
