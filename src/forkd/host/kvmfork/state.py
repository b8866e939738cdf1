"""What a VM that stands still has in the kernel, read by calls of its own VMM."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from forkd.errors import NotForkable
from forkd.host.kvmfork.ioctls import Request, name_of
from forkd.host.kvmfork.msrs import TSC, MsrPlan, parse_msrs, plan_msrs, render_msrs
from forkd.host.kvmfork.record import Record
from forkd.host.kvmfork.run_pages import (
    STOP_AT,
    RunPages,
    can_be_finished,
    check_kernel_pages,
    check_run_pages,
    find_run_pages,
    find_unfinished,
    is_told_to_stop,
)
from forkd.host.procfork.program import DATA, Call
from forkd.host.procfork.ptrace import Gone
from forkd.host.procfork.source import Source

_IOCTL = 16
_CAP_SREGS2, _CAP_XSAVE2 = 200, 208
_REGS, _SREGS, SREGS2_BYTES, _XSAVE, _XCRS = 144, 312, 320, 4096, 392
_DEBUGREGS, _LAPIC, _EVENTS, _MP_STATE, _IRQCHIP, _PIT, _CLOCK = 128, 1024, 64, 4, 520, 112, 48
_CPUID_ENTRIES, _CPUID_HEAD, _CPUID_ENTRY = 256, 8, 40
_IRQCHIPS = (0, 1, 2)

_CR4_AT, _EFER_AT = 248, 264
_CR4_VMXE, _EFER_SVME = 1 << 13, 1 << 12
_EVENTS_SMI_AT = 24
_IN_SMM = 1 << 0

# The vCPUs of a VM are in step if they were read within a second; so does the kernel see it when they are set.
_IN_STEP_CYCLES = 10**9
# By one part of so many two clocks of a host may differ.
_CLOCKS_DIFFER = 10_000


@dataclass(frozen=True)
class VcpuState:
    """As the kernel's structures have it. `msrs`: those that are to be set; `lapic`: none, if the VMM plays it."""

    mp_state: bytes
    regs: bytes = field(repr=False)
    sregs: bytes = field(repr=False)
    xsave: bytes = field(repr=False)
    xcrs: bytes = field(repr=False)
    debugregs: bytes = field(repr=False)
    events: bytes = field(repr=False)
    cpuid: bytes = field(repr=False)
    msrs: bytes = field(repr=False)
    lapic: bytes = field(repr=False, default=b"")


@dataclass(frozen=True)
class State:
    vcpus: tuple[VcpuState, ...]
    clock: bytes
    irqchips: tuple[bytes, ...] = ()
    pit: bytes = b""
    told_to_stop: tuple[bool, ...] = ()

    def before(self, stood_ns: int, khz: int) -> State:
        """The same that long ago, of a guest that did nothing since; with `khz`, how fast its processors count.

        Rather too little is taken off than too much, which would have the guest's time go back.
        """
        if stood_ns <= 0:
            return self
        stood_ns -= stood_ns // _CLOCKS_DIFFER
        (clock,) = struct.unpack_from("<Q", self.clock)
        vcpus = tuple(replace(each, msrs=_turned_back(each.msrs, stood_ns * khz // 10**6)) for each in self.vcpus)
        return replace(self, vcpus=vcpus, clock=struct.pack("<Q", max(0, clock - stood_ns)) + self.clock[8:])


def _turned_back(msrs: bytes, cycles: int) -> bytes:
    values = [(index, max(1, value - cycles) if index == TSC else value) for index, value in parse_msrs(msrs)]
    return render_msrs(values)


@dataclass(frozen=True)
class Get:
    """One ioctl that reads. `head`: what its memory has to say before."""

    fd: int
    request: Request
    size: int
    head: bytes = b""


class Saver:
    """Reads the state of one VM, over and over; what does not change is found out once."""

    def __init__(self, record: Record, *, answers_all: bool = False) -> None:
        """`answers_all`: a VMM that stands still has answered whatever its vCPUs asked, and they may take it."""
        self._record = record
        self._answers_all = answers_all
        self._sregs2 = False
        self._xsave_bytes = _XSAVE
        self._cpuids: tuple[bytes, ...] = ()
        self._msrs: MsrPlan | None = None
        self._khz = 0
        self.run_pages: tuple[RunPages, ...] = ()
        self.kernel_pages: tuple[int, ...] = ()
        self._told_to_stop: tuple[bool, ...] = ()

    def save(self, source: Source, stood_ns: int = 0) -> State:
        """As it was when it began to stand still, `stood_ns` ago. Raises NotForkable for what no duplicate could have.

        The kernel's clocks go on meanwhile, the guest's are not to.
        """
        if self._msrs is None:
            self._learn(source)
        # Each time: memory of its own that a VMM shares by then would be shared with its fork.
        self.kernel_pages = check_kernel_pages(source.maps, self._record)
        shared = [source.read_memory(pages.address, pages.size) for pages in self.run_pages]
        for fd, pages, memory in zip(self._record.vcpu_fds, self.run_pages, shared, strict=True):
            check_run_pages(memory, self._record)
            if asked := find_unfinished(memory):
                self._finish(source, fd, pages, memory, asked)
        self._told_to_stop = tuple(map(is_told_to_stop, shared))
        while True:
            seen = self._read(source)
            if unreadable := self._find_unreadable(seen):
                self._forget(unreadable)
            else:
                return self._parse(seen).before(stood_ns, self._khz)

    def _finish(self, source: Source, fd: int, pages: RunPages, memory: bytes, asked: str) -> None:
        """Have a vCPU take the answer that it may wait for, by a run that is over before the guest goes on."""
        if not (self._answers_all and can_be_finished(memory)):
            raise NotForkable(f"A vCPU may wait for an answer from {asked}", hint="Try again")
        source.write_memory(pages.address + STOP_AT, b"\1")
        try:
            value = source.call(_IOCTL, fd, Request.RUN, 0)
        finally:
            source.write_memory(pages.address + STOP_AT, memory[STOP_AT : STOP_AT + 1])
        if value != -errno.EINTR:
            raise NotForkable(f"A vCPU asks {asked} for more than one thing", hint="Try again")

    def _learn(self, source: Source) -> None:
        if not source.maps:
            raise Gone
        self.run_pages = find_run_pages(source.maps, self._record)
        vm, vcpu = self._record.vm_fd, self._record.vcpu_fds[0]
        self._sregs2 = source.call(_IOCTL, vm, Request.CHECK_EXTENSION, _CAP_SREGS2) > 0
        self._xsave_bytes = max(_XSAVE, source.call(_IOCTL, vm, Request.CHECK_EXTENSION, _CAP_XSAVE2))
        self._khz = max(0, source.call(_IOCTL, vcpu, Request.GET_TSC_KHZ, 0))
        size = _CPUID_HEAD + _CPUID_ENTRY * _CPUID_ENTRIES
        head = struct.pack("<II", _CPUID_ENTRIES, 0)
        gets = [Get(fd, Request.GET_CPUID2, size, head) for fd in self._record.vcpu_fds]
        self._cpuids = tuple(_cut_cpuid(data) for _, data in read_all(source, gets))
        banks = max((each.data[0] for each in self._record.ioctls if each.request == Request.SETUP_MCE), default=0)
        self._msrs = plan_msrs(self._cpuids[0], with_irqchip=self._record.has_irqchip, banks=banks)

    def _read(self, source: Source) -> list[tuple[int, bytes]]:
        assert self._msrs is not None
        return read_all(
            source, render_gets(self._record, self._msrs, sregs2=self._sregs2, xsave_bytes=self._xsave_bytes)
        )

    def _find_unreadable(self, seen: list[tuple[int, bytes]]) -> int | None:
        """A register that a vCPU of ours has, and that of the VM does not give."""
        assert self._msrs is not None
        indexes = self._msrs.indexes
        counts = [seen[at][0] for at in _places(self._record, Request.GET_MSRS)]
        return next((indexes[count] for count in counts if count < len(indexes)), None)

    def _forget(self, index: int) -> None:
        assert self._msrs is not None
        left = tuple(each for each in self._msrs.indexes if each != index)
        self._msrs = MsrPlan(left, self._msrs.fixed)

    def _parse(self, seen: list[tuple[int, bytes]]) -> State:
        assert self._msrs is not None
        data = iter(data for _, data in seen)
        vcpus = []
        first_tsc: int | None = None
        for cpuid in self._cpuids:
            mp_state, regs, sregs, xsave, xcrs, debugregs = (next(data) for _ in range(6))
            lapic = next(data) if self._record.has_lapic else b""
            values = _settable(parse_msrs(next(data)), self._msrs)
            first_tsc, values = in_step(first_tsc, values)
            events = next(data)
            _check_vcpu(sregs, events)
            state = VcpuState(mp_state, regs, sregs, xsave, xcrs, debugregs, events, cpuid, render_msrs(values), lapic)
            vcpus.append(state)
        irqchips = tuple(next(data) for _ in _IRQCHIPS) if self._record.has_irqchip else ()
        pit = next(data) if self._record.has(Request.CREATE_PIT2) else b""
        return State(tuple(vcpus), next(data), irqchips, pit, self._told_to_stop)


def save(source: Source, record: Record) -> State:
    """Once; of a VM that is saved often, a Saver remembers what does not change."""
    return Saver(record).save(source)


def render_gets(record: Record, msrs: MsrPlan, *, sregs2: bool, xsave_bytes: int) -> list[Get]:
    """In this order: the first may change what the others read, and the events are what is left then."""
    gets = []
    msr_head = render_msrs([(index, 0) for index in msrs.indexes])
    for fd in record.vcpu_fds:
        xsave = Request.GET_XSAVE2 if xsave_bytes > _XSAVE else Request.GET_XSAVE
        gets += [
            Get(fd, Request.GET_MP_STATE, _MP_STATE),
            Get(fd, Request.GET_REGS, _REGS),
            Get(fd, Request.GET_SREGS2, SREGS2_BYTES) if sregs2 else Get(fd, Request.GET_SREGS, _SREGS),
            Get(fd, xsave, xsave_bytes),
            Get(fd, Request.GET_XCRS, _XCRS),
            Get(fd, Request.GET_DEBUGREGS, _DEBUGREGS),
            *([Get(fd, Request.GET_LAPIC, _LAPIC)] if record.has_lapic else []),
            Get(fd, Request.GET_MSRS, len(msr_head), msr_head),
            Get(fd, Request.GET_VCPU_EVENTS, _EVENTS),
        ]
    vm = record.vm_fd
    if record.has_irqchip:
        gets += [Get(vm, Request.GET_IRQCHIP, _IRQCHIP, struct.pack("<I", chip)) for chip in _IRQCHIPS]
    if record.has(Request.CREATE_PIT2):
        gets.append(Get(vm, Request.GET_PIT2, _PIT))
    return [*gets, Get(vm, Request.GET_CLOCK, _CLOCK)]


def _places(record: Record, request: Request) -> list[int]:
    """Where the answers to a request are among those of all."""
    plan = MsrPlan(())
    gets = render_gets(record, plan, sregs2=False, xsave_bytes=_XSAVE)
    return [at for at, each in enumerate(gets) if each.request == request]


def read_all(source: Source, gets: Sequence[Get]) -> list[tuple[int, bytes]]:
    """What each returned, and its memory. Raises NotForkable."""
    calls = [
        Call(_IOCTL, (each.fd, each.request, DATA), each.head.ljust(each.size, b"\0"), what=name_of(each.request))
        for each in gets
    ]
    answers = source.make_all(calls)
    if (value := answers[-1].value) < 0:
        what = calls[len(answers) - 1].what
        raise NotForkable(f"The VM's state could not be read: {what}: {os.strerror(-value)}")
    return [(answer.value, answer.data[: each.size]) for answer, each in zip(answers, gets, strict=True)]


def _cut_cpuid(data: bytes) -> bytes:
    count: int = struct.unpack_from("<I", data)[0]
    return data[: _CPUID_HEAD + _CPUID_ENTRY * count]


def _settable(values: Sequence[tuple[int, int]], plan: MsrPlan) -> list[tuple[int, int]]:
    fixed = dict(plan.fixed)
    for index, value in values:
        if fixed.get(index, value) != value:
            raise NotForkable(f"A vCPU has changed register {index:#x}, which cannot be set in a fork")
    return [(index, value) for index, value in values if index not in fixed]


def in_step(first: int | None, values: list[tuple[int, int]]) -> tuple[int | None, list[tuple[int, int]]]:
    """The time of a vCPU is read a little after that of the first one, and is the same."""
    tsc = dict(values).get(TSC)
    if tsc is None or first is None:
        return tsc if first is None else first, values
    if abs(tsc - first) < _IN_STEP_CYCLES:
        values = [(index, first if index == TSC else value) for index, value in values]
    return first, values


def _check_vcpu(sregs: bytes, events: bytes) -> None:
    cr4: int = struct.unpack_from("<Q", sregs, _CR4_AT)[0]
    efer: int = struct.unpack_from("<Q", sregs, _EFER_AT)[0]
    if cr4 & _CR4_VMXE or efer & _EFER_SVME:
        raise NotForkable("The guest runs virtual machines of its own, or is ready to")
    if events[_EVENTS_SMI_AT] & _IN_SMM:
        raise NotForkable("The guest is in system management mode")
