"""What a seed has, a thread that waits for ever and makes calls for us: code that the process cannot change, and room.

- What it runs: it names itself, then waits in ppoll(2); what wakes it changes nothing.
- Its birth: what another thread runs to make it, and how that one finds back without our help.
- Room for the detour, which it takes to make a call for us, and for more code, with which it makes many.
- Room for their data, and its stack. This alone it can write to.

Pure.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from forkd.host.procfork.program import DETOUR_BYTES, SYSCALL, fits_detour, render_call, render_jump, render_unless_zero

NAME = b"forkd-seed"
PAGE_BYTES = 4096
# All of it is in one piece. Nothing of the rooms is there before it is used.
CODE_BYTES, DATA_BYTES, _STACK_BYTES = 4 * PAGE_BYTES, 1 << 19, 1 << 14
ALL_BYTES = CODE_BYTES + DATA_BYTES + _STACK_BYTES
ROOM_FOR_CODE, ROOM_FOR_DATA = CODE_BYTES - PAGE_BYTES, DATA_BYTES

_BIRTH_AT, _MASKS_AT, _DETOUR_AT = 1024, 2040, 2048
# Of the stack: where the mask of the thread that makes it is kept meanwhile.
_OLD_MASK_BELOW = 16
_SIGPROCMASK, _CLONE, _PRCTL, _PPOLL = 14, 56, 157, 271
_SETMASK, _MASK_BYTES, _PR_SET_NAME = 2, 8, 15
# A thread of the process (VM FS FILES SIGHAND THREAD SYSVSEM SETTLS) with no thread-local storage, that tells nobody
# when it ends: the C library does not know of it.
_FLAGS = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x80000
_MAGIC = b"forkd\0\0\2"
_NAME_BYTES = 16
_JUMP_NEAR, _JUMP_SHORT = b"\xe9", b"\xeb"
_ZERO_ARGUMENTS = b"\x31\xff\x31\xf6\x31\xd2\x4d\x31\xd2\x4d\x31\xc0"  # rdi rsi rdx r10 r8
_NAME_TO_RSI = b"\x48\x8d\x35"  # lea rsi, [rip + disp32]
_EAX, _EDI = b"\xb8", b"\xbf"


def _render_seed() -> tuple[bytes, int, int]:
    """The same at every address; where it begins, and where it is as long as it waits."""
    start = len(_MAGIC) + _NAME_BYTES
    code = _ZERO_ARGUMENTS + _EDI + struct.pack("<I", _PR_SET_NAME)
    code += _NAME_TO_RSI + struct.pack("<i", len(_MAGIC) - (start + len(code) + 7))
    code += _EAX + struct.pack("<I", _PRCTL) + SYSCALL
    loop = len(code)
    code += _ZERO_ARGUMENTS + _EAX + struct.pack("<I", _PPOLL) + SYSCALL
    rests = len(code)
    code += _JUMP_SHORT + struct.pack("<b", loop - (rests + 2))
    return _MAGIC + NAME.ljust(_NAME_BYTES, b"\0") + code, start, start + rests


_SEED, _START, _RESTS = _render_seed()


@dataclass(frozen=True)
class SeedPage:
    base: int

    @property
    def birth(self) -> int:
        return self.base + _BIRTH_AT

    @property
    def detour(self) -> int:
        return self.base + _DETOUR_AT

    @property
    def code(self) -> int:
        return self.base + PAGE_BYTES

    @property
    def data(self) -> int:
        return self.base + CODE_BYTES

    def render(self, way_back: int) -> bytes:
        """Its page of code. `way_back`: where the thread that makes it finds back to what it did."""
        page = bytearray(PAGE_BYTES)
        page[: len(_SEED)] = _SEED
        page[_MASKS_AT : _MASKS_AT + _MASK_BYTES] = b"\xff" * _MASK_BYTES
        birth = self._render_birth(way_back)
        assert len(birth) <= _MASKS_AT - _BIRTH_AT
        page[_BIRTH_AT : _BIRTH_AT + len(birth)] = birth
        return bytes(page)

    def _render_birth(self, way_back: int) -> bytes:
        """The seed never takes a signal: it is made while all are kept from its maker."""
        old = self.base + ALL_BYTES - _OLD_MASK_BELOW
        code = render_call(_SIGPROCMASK, (_SETMASK, self.base + _MASKS_AT, old, _MASK_BYTES))
        code += render_call(_CLONE, (_FLAGS, old, 0, 0, 0))
        back = render_call(_SIGPROCMASK, (_SETMASK, old, 0, _MASK_BYTES)) + render_jump(way_back)
        code += render_unless_zero(back)
        return code + _JUMP_NEAR + struct.pack("<i", _START - (_BIRTH_AT + len(code) + 5))


# Of the calls of its birth: which one makes it.
BIRTH_CALLS, CLONE_IS = 3, 1


def is_seed(page: bytes) -> bool:
    """Whether a page is one of ours, as we wrote it; a detour may have been written there since."""
    detour = page[_DETOUR_AT : _DETOUR_AT + DETOUR_BYTES]
    return len(page) == PAGE_BYTES and page.startswith(_SEED) and fits_detour(detour)


def page_of(rests_at: int) -> SeedPage | None:
    """By where a thread waits."""
    base = rests_at - _RESTS
    return None if base % PAGE_BYTES else SeedPage(base)
