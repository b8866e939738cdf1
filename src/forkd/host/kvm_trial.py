"""Run a tiny 64-bit guest once and print what was seen, one JSON object per line.

A program of its own, started by `kvm` as `python -I -S kvm_trial.py <hopeless>`: KVM_RUN may never return, and only
a process can be given up. Standard library only, imports nothing of forkd. Times are CPU time of this thread, which
includes the guest's, so that a busy host does not look like a slow KVM.

The guest is a value. It has four-level page tables over its first 16 pages, runs at CPL 0, and consists of routines
that each end in `hlt`; the caller sets RIP and the counters in RCX and RBX and runs.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

_DEVICE = "/dev/kvm"

_GET_API_VERSION = 0xAE00
_CREATE_VM = 0xAE01
_GET_VCPU_MMAP_SIZE = 0xAE04
_GET_SUPPORTED_CPUID = 0xC008AE05
_CREATE_VCPU = 0xAE41
_SET_USER_MEMORY_REGION = 0x4020AE46
_SET_TSS_ADDR = 0xAE47
_RUN = 0xAE80
_GET_REGS, _SET_REGS = 0x8090AE81, 0x4090AE82
_GET_SREGS, _SET_SREGS = 0x8138AE83, 0x4138AE84
_SET_CPUID2 = 0x4008AE90

_EXIT_HLT = 5
_RBX, _RCX, _RSP, _R8, _RIP, _RFLAGS = 1, 2, 6, 8, 16, 17

_CPUID_ENTRIES = 256
# Three pages Intel wants for itself. fcntl.ioctl takes a signed int, so the usual 0xfffbd000 does not fit.
_TSS_ADDRESS = 0x7FFBD000

# A measurement grows until it has taken this long, or has done this much.
_ENOUGH_NS = 2_000_000
_MOST_COUNTS = 8_000_000
_MOST_ROUNDS = 20_000
_REPEATS = 5
# When our parent dies, nobody else ends a KVM_RUN that hangs.
_LAST_RESORT_S = 60

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


class TrialGuest(NamedTuple):
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


class GuestLost(Exception):
    def __init__(self, exit_reason: int, rip: int) -> None:
        super().__init__(f"exit {exit_reason} at {rip:#x}")
        self.exit_reason = exit_reason
        self.rip = rip


class Trial:
    """One VM with one vCPU over the guest's memory."""

    def __init__(self, kvm: int, guest: TrialGuest) -> None:
        self._guest = guest
        self._memory = mmap.mmap(-1, guest.memory_bytes)
        for address, data in guest.chunks.items():
            self._memory[address : address + len(data)] = data
        self._vm = fcntl.ioctl(kvm, _CREATE_VM, 0)
        host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        region = struct.pack("<IIQQQ", 0, 0, 0, guest.memory_bytes, host_address)
        fcntl.ioctl(self._vm, _SET_USER_MEMORY_REGION, region)
        fcntl.ioctl(self._vm, _SET_TSS_ADDR, _TSS_ADDRESS)
        self._vcpu = fcntl.ioctl(self._vm, _CREATE_VCPU, 0)
        self._run = mmap.mmap(self._vcpu, fcntl.ioctl(kvm, _GET_VCPU_MMAP_SIZE, 0))
        cpuid = bytearray(8 + 40 * _CPUID_ENTRIES)
        struct.pack_into("<I", cpuid, 0, _CPUID_ENTRIES)
        fcntl.ioctl(kvm, _GET_SUPPORTED_CPUID, cpuid, True)
        fcntl.ioctl(self._vcpu, _SET_CPUID2, cpuid, True)

    def enter_long_mode(self) -> None:
        sregs = bytearray(312)
        fcntl.ioctl(self._vcpu, _GET_SREGS, sregs, True)
        sregs[: len(self._guest.sregs)] = self._guest.sregs
        fcntl.ioctl(self._vcpu, _SET_SREGS, sregs, True)

    def call(self, routine: str, times: int) -> tuple[int, list[int]]:
        """Run a routine to its `hlt`; returns the nanoseconds it took and the registers after it."""
        regs = [0] * 18
        regs[_RBX] = regs[_RCX] = times
        regs[_RSP] = self._guest.stack_top
        regs[_RIP] = self._guest.entries[routine]
        regs[_RFLAGS] = 2
        fcntl.ioctl(self._vcpu, _SET_REGS, struct.pack("<18Q", *regs))
        began = time.thread_time_ns()
        self._run_once()
        elapsed = time.thread_time_ns() - began
        after = bytearray(144)
        fcntl.ioctl(self._vcpu, _GET_REGS, after, True)
        regs = list(struct.unpack("<18Q", after))
        reason: int = struct.unpack_from("<I", self._run, 8)[0]
        if reason != _EXIT_HLT or regs[_RIP] != self._guest.ends[routine]:
            raise GuestLost(reason, regs[_RIP])
        return elapsed, regs

    def _run_once(self) -> None:
        while True:
            try:
                fcntl.ioctl(self._vcpu, _RUN, 0)
                return
            except InterruptedError:
                continue

    def count(self, times: int) -> int:
        return self.call("count", times)[0]

    def rounds(self, routine: str, times: int) -> int:
        elapsed, regs = self.call(routine, times)
        # Both routines count a round in R8 only when the fault or syscall was delivered well.
        if regs[_R8] != times:
            raise GuestLost(_EXIT_HLT, regs[_RIP])
        return elapsed


def measure(run: Callable[[int], int], start: int, most: int) -> float:
    """Nanoseconds per unit: the best of some runs, each long enough to drown the cost of starting it."""
    times, elapsed = start, run(start)
    while elapsed < _ENOUGH_NS and times < most:
        times = min(times * 8, most)
        elapsed = run(times)
    return min([elapsed, *(run(times) for _ in range(_REPEATS - 1))]) / times


def measure_host(loop: bytes) -> float:
    """The same register loop on the host itself, for the price of one call."""
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        # Hardened hosts forbid writable code. One item of this sum costs about 30 turns of the loop.
        return measure(_sum_numbers, 2_000, _MOST_COUNTS) / 30
    head = bytes.fromhex("89f9")  # mov ecx, edi
    code = head + loop + b"\xc3"
    page[: len(code)] = code
    function = ctypes.CFUNCTYPE(None, ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))

    def run(times: int) -> int:
        began = time.thread_time_ns()
        function(times)
        return time.thread_time_ns() - began

    return measure(run, 2_000, _MOST_COUNTS)


def _sum_numbers(times: int) -> int:
    began = time.thread_time_ns()
    sum(range(times))
    return time.thread_time_ns() - began


def say(stage: str, **seen: Any) -> None:
    print(json.dumps({"stage": stage, **seen}), flush=True)


def run_trial(hopeless: float) -> None:
    """`hopeless` times slower than the host is the verdict already."""
    host_ns = measure_host(COUNT_LOOP)
    say("host", host_ns=host_ns)
    kvm = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    say("open", api=fcntl.ioctl(kvm, _GET_API_VERSION, 0))
    trial = Trial(kvm, render_guest())
    say("created")
    trial.enter_long_mode()
    trial.count(1)
    say("long_mode", exit_ns=min(trial.count(1) for _ in range(10)))
    guest_ns = measure(trial.count, 2_000, _MOST_COUNTS)
    say("count", guest_ns=guest_ns)
    trial.call("prepare", 1)
    say("kernel", kernel_ns=measure(partial(trial.rounds, "kernel"), 50, _MOST_ROUNDS))
    # An emulated loop may be followed by a `sysretq` that hangs (seen). The verdict stands: do not wait for it.
    if guest_ns > host_ns * hopeless:
        return
    say("user", user_ns=measure(partial(trial.rounds, "user"), 50, _MOST_ROUNDS))


def main() -> None:
    signal.alarm(_LAST_RESORT_S)
    try:
        run_trial(float(sys.argv[1]))
    except OSError as error:
        say("failed", errno=error.errno, message=error.strerror)
    except GuestLost as lost:
        say("failed", exit_reason=lost.exit_reason, rip=lost.rip)


if __name__ == "__main__":
    main()
