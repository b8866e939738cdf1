"""Run the trial guest once and print what was seen, one JSON object per line.

A program of its own, started by `kvm_probe` as `python -I -S kvm_trial.py '<guest>'`: KVM_RUN may never
return, and only a process can be given up. Standard library only, imports nothing of ours. Times are CPU time
of this thread, which includes the guest's, so that a busy host does not look like a slow KVM.
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
from typing import Any

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
# Should whoever started us die, nobody is left to end a KVM_RUN that hangs.
_LAST_RESORT_S = 60


class GuestLost(Exception):
    def __init__(self, exit_reason: int, rip: int) -> None:
        super().__init__(f"exit {exit_reason} at {rip:#x}")
        self.exit_reason = exit_reason
        self.rip = rip


class Trial:
    """One VM with one vCPU over the guest's memory."""

    def __init__(self, kvm: int, guest: dict[str, Any]) -> None:
        self._guest = guest
        self._memory = mmap.mmap(-1, guest["memory_bytes"])
        for address, chunk in guest["chunks"].items():
            data = bytes.fromhex(chunk)
            self._memory[int(address) : int(address) + len(data)] = data
        self._vm = fcntl.ioctl(kvm, _CREATE_VM, 0)
        host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        region = struct.pack("<IIQQQ", 0, 0, 0, guest["memory_bytes"], host_address)
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
        wanted = bytes.fromhex(self._guest["sregs"])
        sregs[: len(wanted)] = wanted
        fcntl.ioctl(self._vcpu, _SET_SREGS, sregs, True)

    def call(self, routine: str, times: int) -> tuple[int, list[int]]:
        """Run a routine to its `hlt`; returns the nanoseconds it took and the registers after it."""
        regs = [0] * 18
        regs[_RBX] = regs[_RCX] = times
        regs[_RSP] = self._guest["stack_top"]
        regs[_RIP] = self._guest["entries"][routine]
        regs[_RFLAGS] = 2
        fcntl.ioctl(self._vcpu, _SET_REGS, struct.pack("<18Q", *regs))
        began = time.thread_time_ns()
        self._run_once()
        elapsed = time.thread_time_ns() - began
        after = bytearray(144)
        fcntl.ioctl(self._vcpu, _GET_REGS, after, True)
        regs = list(struct.unpack("<18Q", after))
        reason: int = struct.unpack_from("<I", self._run, 8)[0]
        if reason != _EXIT_HLT or regs[_RIP] != self._guest["ends"][routine]:
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
        # Both routines count each round in R8, from where only a well-delivered fault or syscall gets.
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


def run_trial(guest: dict[str, Any]) -> None:
    host_ns = measure_host(bytes.fromhex(guest["count_loop"]))
    say("host", host_ns=host_ns)
    kvm = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    say("open", api=fcntl.ioctl(kvm, _GET_API_VERSION, 0))
    trial = Trial(kvm, guest)
    say("created")
    trial.enter_long_mode()
    trial.count(1)
    say("long_mode", exit_ns=min(trial.count(1) for _ in range(10)))
    guest_ns = measure(trial.count, 2_000, _MOST_COUNTS)
    say("count", guest_ns=guest_ns)
    trial.call("prepare", 1)
    say("kernel", kernel_ns=measure(partial(trial.rounds, "kernel"), 50, _MOST_ROUNDS))
    # What emulates a loop may hang on a `sysretq` (seen). The verdict stands; spare the wait.
    if guest_ns > host_ns * guest["hopeless"]:
        return
    say("user", user_ns=measure(partial(trial.rounds, "user"), 50, _MOST_ROUNDS))


def main() -> None:
    signal.alarm(_LAST_RESORT_S)
    guest = json.loads(sys.argv[1])
    try:
        run_trial(guest)
    except OSError as error:
        say("failed", errno=error.errno, message=error.strerror)
    except GuestLost as lost:
        say("failed", exit_reason=lost.exit_reason, rip=lost.rip)


if __name__ == "__main__":
    main()
