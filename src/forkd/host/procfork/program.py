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
_STORE_RAX = b"\x48\x89\x05"  # mov [rip + disp32], rax
_TEST_RAX = b"\x48\x85\xc0\x0f\x88"  # test rax, rax; js rel32
# What a call returned is stored, then tested.
_STORE_AND_TEST, _TESTED_BYTES = struct.Struct("<3si5si"), 9
_MOVE_RCX_RAX = b"\x48\x89\xc1"
_JUMP_IF_RCX_ZERO = b"\xe3"  # jrcxz rel8: no flag is changed
_JUMP_NEAR = b"\xe9"  # jmp rel32
_JUMP_TO_NEXT_QUAD = b"\xff\x25\x00\x00\x00\x00"  # jmp [rip + 0]

_TO_ARGUMENTS, _TO_RAX = tuple(_MOVE_64[name] for name in _ARGUMENTS), _MOVE_64["rax"]
_CALL_WITH = [struct.Struct("<" + "2sQ" * count + "2sQ2s") for count in range(len(_ARGUMENTS) + 1)]

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


@dataclass(frozen=True)
class Program:
    """Calls, laid out for one address: results first, then their data, then the code, and how that ends.

    A call that fails is the last one, unless it may; the others' results stay 0. The code may be elsewhere, nearby.
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
        """How many there are at the base, for `parse_results`."""
        return len(self.calls) * _WORD

    @property
    def size(self) -> int:
        return self.memory_bytes + self.code_bytes

    @property
    def memory_bytes(self) -> int:
        """Of results and data."""
        return self._addresses[-1] - self.base

    @functools.cached_property
    def code_bytes(self) -> int:
        code = sum(_CALL_WITH[len(call.args)].size + _STORE_AND_TEST.size for call in self.calls)
        return code + len(self.ending)

    def moved_by(self, distance: int) -> Program:
        return replace(self, base=self.base + distance)

    def render(self) -> bytes:
        """All of it, in one piece."""
        return self.render_memory() + self.render_code()

    def render_memory(self) -> bytes:
        data = (call.placed_data(address) for call, address in zip(self.calls, self._addresses, strict=False))
        return bytes(self.results_bytes) + b"".join(data)

    def render_code(self) -> bytes:
        parts: list[bytes] = []
        at, end, result = self.entry, self.entry + self.code_bytes - len(self.ending), self.base
        for call, address in zip(self.calls, self._addresses, strict=False):
            made = render_call(call.number, call.placed_args(address))
            at += len(made) + _STORE_AND_TEST.size
            target = at if call.may_fail else end
            parts += [made, _STORE_AND_TEST.pack(_STORE_RAX, result - (at - _TESTED_BYTES), _TEST_RAX, target - at)]
            result += _WORD
        return b"".join(parts) + self.ending

    def parse_results(self, memory: bytes) -> list[int]:
        """`memory`: what is at the base after the run."""
        return list(struct.unpack_from(f"<{len(self.calls)}q", memory))

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
