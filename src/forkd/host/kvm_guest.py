"""A tiny 64-bit guest: what `kvm_trial` runs to learn how fast, and whether, this KVM runs a kernel's work.

Everything here is a value. The guest has four-level page tables over its first 16 pages, runs at CPL 0, and
is made of routines that each end in `hlt`; the caller sets RIP and the counters in RCX and RBX and runs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MEMORY_BYTES = 0x10000

_PML4, _PDPT, _PD, _PT = 0x1000, 0x2000, 0x3000, 0x4000
_GDT, _IDT, _TSS = 0x5000, 0x5100, 0x5800
_COUNT, _PREPARE, _KERNEL, _USER, _FAULT, _STRAY = 0x6000, 0x6100, 0x6200, 0x6300, 0x6400, 0x6500
_STACK_TOP = 0x8000
_USER_PAGE = 0x9000
# A page that is unmapped and mapped again, its entry, and the second frame it alternates with.
_PAGE, _PAGE_ENTRY, _OTHER_FRAME = 0xB000, _PT + 0xB * 8, 0xC000

_PRESENT, _WRITABLE, _USER_ACCESS = 1, 2, 4
_PAGE_FAULT = 14
_VECTORS = 32

_KERNEL_CODE, _KERNEL_DATA, _USER_BASE, _TASK = 0x08, 0x10, 0x18, 0x30

# The register loop is also run on the host itself, ended by `ret` in place of `hlt`.
COUNT_LOOP = bytes.fromhex(
    "ffc9"  # 1: dec ecx
    "75fc"  #    jnz 1b
)
_HLT = b"\xf4"

# At CPL 3: one SSE2 instruction, which an emulator standing in for the processor does not know, and back.
_USER_CODE = bytes.fromhex(
    "660ffec8"  # paddd xmm1, xmm0
    "41ffc0"  #   inc r8d
    "0f05"  #     syscall
)


@dataclass(frozen=True)
class TrialGuest:
    memory_bytes: int
    chunks: dict[int, bytes]  # what is not zero, by guest-physical address
    sregs: bytes  # struct kvm_sregs up to and without apic_base
    stack_top: int
    entries: dict[str, int]  # where each routine starts
    ends: dict[str, int]  # RIP after each went well; a stray exception halts elsewhere


def render_guest() -> TrialGuest:
    kernel, fault = _render_kernel(), _render_fault()
    user, syscall_entry = _render_user()
    chunks = {
        _PML4: _quads(_PDPT | _PRESENT | _WRITABLE | _USER_ACCESS),
        _PDPT: _quads(_PD | _PRESENT | _WRITABLE | _USER_ACCESS),
        _PD: _quads(_PT | _PRESENT | _WRITABLE | _USER_ACCESS),
        _PT: _quads(*(_page_entry(address) for address in range(0, MEMORY_BYTES, 0x1000))),
        _GDT: _render_gdt(),
        _IDT: b"".join(_gate(_FAULT if vector == _PAGE_FAULT else _STRAY) for vector in range(_VECTORS)),
        _TSS: struct.pack("<IQ", 0, _STACK_TOP),
        _COUNT: COUNT_LOOP + _HLT,
        _PREPARE: _render_prepare(syscall_entry),
        _KERNEL: kernel,
        _USER: user,
        _FAULT: fault,
        _STRAY: _HLT,
        _USER_PAGE: _USER_CODE,
    }
    entries = {"count": _COUNT, "prepare": _PREPARE, "kernel": _KERNEL, "user": _USER}
    ends = {name: entry + len(chunks[entry]) for name, entry in entries.items()}
    return TrialGuest(MEMORY_BYTES, chunks, _render_sregs(), _STACK_TOP, entries, ends)


def _render_kernel() -> bytes:
    """RBX rounds of what a kernel does all day: unmap, flush, fault, load CR3, set flags and an MSR."""
    return _loop(
        bytes.fromhex(
            f"802425{_hex32(_PAGE_ENTRY)}fe"  # and byte [entry], ~present
            f"0f013c25{_hex32(_PAGE)}"  #       invlpg [page]
            f"ff0425{_hex32(_PAGE)}"  #         inc dword [page], which faults and is tried again
            "0f20d8 0f22d8"  #                  mov rax, cr3; mov cr3, rax
            "9c fa 9d"  #                       pushf; cli; popf
            "b9000100c0 0f32 0f30"  #           mov ecx, FS_BASE; rdmsr; wrmsr
        )
    )


def _render_fault() -> bytes:
    """The page fault handler: counts in R8, and maps the page to its other frame."""
    toggle = _PAGE ^ _OTHER_FRAME | _PRESENT
    return bytes.fromhex(
        "41ffc0"  #                                      inc r8d
        f"813425{_hex32(_PAGE_ENTRY)}{_hex32(toggle)}"  # xor dword [entry], toggle
        "4883c408"  #                                    add rsp, 8 (the error code)
        "48cf"  #                                        iretq
    )


def _render_user() -> tuple[bytes, int]:
    """RBX trips to CPL 3 and back, and where `syscall` lands."""
    out = bytes.fromhex(
        f"b9{_hex32(_USER_PAGE)}"  # mov ecx, user page
        "41bb02000000"  #            mov r11d, 2
        "480f07"  #                  sysretq
    )
    return _loop(out), _USER + len(out)


def _loop(body: bytes) -> bytes:
    turn = body + bytes.fromhex("ffcb 0f85")  # dec ebx; jnz to the start
    return turn + struct.pack("<i", -(len(turn) + 4)) + _HLT


def _render_prepare(syscall_entry: int) -> bytes:
    selectors = (_USER_BASE << 16) | _KERNEL_CODE
    return (
        bytes.fromhex("b9810000c0 31c0 ba")  # mov ecx, STAR; xor eax, eax; mov edx, selectors
        + struct.pack("<I", selectors)
        + bytes.fromhex("0f30 ffc1 b8")  #     wrmsr; inc ecx (LSTAR); mov eax, syscall_entry
        + struct.pack("<I", syscall_entry)
        + bytes.fromhex("31d2 0f30")  #        xor edx, edx; wrmsr
        + _HLT
    )


def _page_entry(address: int) -> int:
    return address | _PRESENT | _WRITABLE | (_USER_ACCESS if address == _USER_PAGE else 0)


def _render_gdt() -> bytes:
    null, unused = 0, 0
    kernel_code, kernel_data = 0x00AF9B000000FFFF, 0x00CF93000000FFFF
    user_data, user_code = 0x00CFF3000000FFFF, 0x00AFFB000000FFFF
    task = 0x00008B0000000067 | _TSS << 16
    return _quads(null, kernel_code, kernel_data, unused, user_data, user_code, task, 0)


def _gate(handler: int) -> bytes:
    return struct.pack("<HHBBHII", handler & 0xFFFF, _KERNEL_CODE, 0, 0x8E, handler >> 16, 0, 0)


def _render_sregs() -> bytes:
    code = _segment(limit=0xFFFFFFFF, selector=_KERNEL_CODE, kind=11, long=1, granular=1)
    data = _segment(limit=0xFFFFFFFF, selector=_KERNEL_DATA, kind=3, big=1, granular=1)
    task = _segment(base=_TSS, limit=0x67, selector=_TASK, kind=11, system=True)
    local = _segment(kind=2, system=True, unusable=1)
    tables = struct.pack("<QH6xQH6x", _GDT, len(_render_gdt()) - 1, _IDT, 16 * _VECTORS - 1)
    cr0 = 0x80010033  # PG WP NE ET MP PE
    cr4 = 0x620  # OSXMMEXCPT OSFXSR PAE
    efer = 0xD01  # NXE LMA LME SCE
    return code + data * 5 + task + local + tables + _quads(cr0, 0, _PML4, cr4, 0, efer)


def _segment(
    *,
    base: int = 0,
    limit: int = 0,
    selector: int = 0,
    kind: int,
    big: int = 0,
    long: int = 0,
    granular: int = 0,
    system: bool = False,
    unusable: int = 0,
) -> bytes:
    present, level = 1 - unusable, 0
    return struct.pack(
        "<QIHBBBBBBBBBB",
        base, limit, selector, kind, present, level, big, int(not system), long, granular, 0, unusable, 0,
    )  # fmt: skip


def _hex32(value: int) -> str:
    return struct.pack("<I", value).hex()


def _quads(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)
