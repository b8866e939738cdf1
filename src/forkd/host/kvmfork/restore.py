"""The calls with which a duplicate of a VMM makes its VM anew, under the same numbers and in the same state. Pure.

Orders that matter: each memory slot after the interrupt chips waits for a grace period of the kernel's. The local APIC
is before the other registers, or the deadline of its timer is lost; pending events come after the registers, which
clear them. The clock is last.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from forkd.host.kvmfork.ioctls import Request, Value, argument_of, name_of
from forkd.host.kvmfork.record import SPLIT_IRQCHIP, Ioctl, Record
from forkd.host.kvmfork.run_pages import RunPages
from forkd.host.kvmfork.state import SREGS2_BYTES, State, VcpuState
from forkd.host.procfork.program import DATA, Call

_READ, _WRITE, _CLOSE, _MMAP, _MUNMAP, _IOCTL, _EVENTFD2, _DUP3 = 0, 1, 3, 9, 11, 16, 290, 292
_PAGE = 4096
_SECOND_BYTE = 1 << 8
_CLOEXEC = 0o2000000
_READ_WRITE, _SHARED_FIXED = 3, 0x11
_MEMORY = (Request.SET_USER_MEMORY_REGION, Request.SET_USER_MEMORY_REGION2)
_SIGNALS = (Request.IRQFD, Request.IOEVENTFD)
_TO_MSI, _ROUTES_AT, _ROUTE_BYTES = 2, 8, 48

# What a vCPU has when it is made. Of the events, what follows the flags is checked too.
_RUNNABLE, _UNINITIALIZED = 0, 1
_FRESH_DEBUGREGS = struct.pack("<4QQQ", 0, 0, 0, 0, 0xFFFF0FF0, 0x400).ljust(128, b"\0")
_FRESH_XCRS = struct.pack("<IIIIQ", 1, 0, 0, 0, 1)
_EVENTS_FLAGS = slice(20, 24)


def render_restore(
    record: Record, state: State, free: int, run_pages: Sequence[RunPages], kernel_pages: Sequence[int] = ()
) -> list[Call]:
    """`free`: the lowest number that no descriptor of the duplicate has; afterwards it is free again.

    `kernel_pages`: what KVM had mapped for the source's VM; it does so again for the new one.
    """
    create, *others = record.ioctls
    calls = [Call(_MUNMAP, (page, _PAGE), what="unmap a page of the source's VM") for page in kernel_pages]
    calls += _made_under(record.vm_fd, create, free)
    for each in _in_order(others):
        if each.request == Request.CREATE_VCPU:
            calls += _made_under(each.result, each, free)
        else:
            calls.append(_again(each))
    stopped = state.told_to_stop or (False,) * len(state.vcpus)
    for fd, vcpu, pages, stops in zip(record.vcpu_fds, state.vcpus, run_pages, stopped, strict=True):
        args = (pages.address, pages.size, _READ_WRITE, _SHARED_FIXED, fd, 0)
        calls.append(Call(_MMAP, args, returns=pages.address, what="map a vCPU"))
        if stops:
            calls += _render_stop(pages.address, free)
        calls += _render_vcpu(fd, vcpu, _fresh_mp_state(record, pages.vcpu))
    vm = record.vm_fd
    calls += [_set(vm, Request.SET_IRQCHIP, chip) for chip in state.irqchips]
    if state.pit:
        calls.append(_set(vm, Request.SET_PIT2, state.pit))
    # Without flags: the guest's time goes on where it was, however long ago that is.
    calls.append(_set(vm, Request.SET_CLOCK, state.clock[:8].ljust(len(state.clock), b"\0")))
    signals = [each for each in others if each.request in _SIGNALS]
    return [*calls, *map(_again, signals), *_render_wake(record, signals)]


def _render_stop(address: int, free: int) -> list[Call]:
    """Tell a vCPU to stop: eight bytes are written there by reading an eventfd, the second of them 1."""
    return [
        Call(_EVENTFD2, (_SECOND_BYTE, 0), returns=free, what="make an eventfd"),
        Call(_READ, (free, address, 8), returns=8, what="tell a vCPU to stop"),
        Call(_CLOSE, (free,), what="close an eventfd"),
    ]


def _in_order(ioctls: Iterable[Ioctl]) -> list[Ioctl]:
    """Without the eventfds, which are connected when all is in place; memory before the interrupt chips."""
    memory = [each for each in ioctls if each.request in _MEMORY]
    others = [each for each in ioctls if each.request not in (*_MEMORY, *_SIGNALS)]
    at = next((index for index, each in enumerate(others) if _makes_irqchip(each)), len(others))
    return [*others[:at], *memory, *others[at:]]


def _makes_irqchip(each: Ioctl) -> bool:
    return each.request == Request.CREATE_IRQCHIP or each.capability == SPLIT_IRQCHIP


def _made_under(number: int, make: Ioctl, free: int) -> list[Call]:
    """A descriptor gets the lowest free number, which may be the one it is to have."""
    args, what = (make.fd, make.request, make.arg), name_of(make.request)
    if number < free:
        close = Call(_CLOSE, (number,), what=f"close descriptor {number}")
        return [close, Call(_IOCTL, args, returns=number, what=what)]
    return [
        Call(_IOCTL, args, returns=free, what=what),
        Call(_DUP3, (free, number, _CLOEXEC), returns=number, what=f"put descriptor {number} in place"),
        Call(_CLOSE, (free,), what=f"close descriptor {free}"),
    ]


def _again(each: Ioctl) -> Call:
    if isinstance(argument_of(each.request), Value):
        return Call(_IOCTL, (each.fd, each.request, each.arg), returns=each.result, what=name_of(each.request))
    return Call(_IOCTL, (each.fd, each.request, DATA), each.data, returns=each.result, what=name_of(each.request))


def _set(fd: int, request: Request, data: bytes, returns: int = 0) -> Call:
    return Call(_IOCTL, (fd, request, DATA), data, returns=returns, what=name_of(request))


def _render_vcpu(fd: int, vcpu: VcpuState, fresh_mp_state: int) -> list[Call]:
    sregs = Request.SET_SREGS2 if len(vcpu.sregs) == SREGS2_BYTES else Request.SET_SREGS
    msr_count: int = struct.unpack_from("<I", vcpu.msrs)[0]
    calls = [_set(fd, Request.SET_CPUID2, vcpu.cpuid), _set(fd, sregs, vcpu.sregs)]
    if vcpu.xcrs[: len(_FRESH_XCRS)] != _FRESH_XCRS:
        calls.append(_set(fd, Request.SET_XCRS, vcpu.xcrs))
    calls += [_set(fd, Request.SET_XSAVE, vcpu.xsave), _set(fd, Request.SET_REGS, vcpu.regs)]
    if vcpu.debugregs != _FRESH_DEBUGREGS:
        calls.append(_set(fd, Request.SET_DEBUGREGS, vcpu.debugregs))
    if vcpu.lapic:
        calls.append(_set(fd, Request.SET_LAPIC, vcpu.lapic))
    calls.append(_set(fd, Request.SET_MSRS, vcpu.msrs, returns=msr_count))
    if _has_events(vcpu.events):
        calls.append(_set(fd, Request.SET_VCPU_EVENTS, vcpu.events))
    if vcpu.mp_state != struct.pack("<I", fresh_mp_state):
        calls.append(_set(fd, Request.SET_MP_STATE, vcpu.mp_state))
    return calls


def _has_events(events: bytes) -> bool:
    """Whether anything is pending; the flags say only which fields are valid."""
    return any(events[: _EVENTS_FLAGS.start]) or any(events[_EVENTS_FLAGS.stop :])


def _fresh_mp_state(record: Record, vcpu: int) -> int:
    first = next((each.arg for each in record.ioctls if each.request == Request.SET_BOOT_CPU_ID), 0)
    return _RUNNABLE if vcpu == first or not record.has_lapic else _UNINITIALIZED


def _render_wake(record: Record, signals: Iterable[Ioctl]) -> list[Call]:
    """Each line once, should an interrupt be on its way: the kernel has taken it from the eventfd, and not given it to
    the chips yet, so that it is in neither. A guest whose device has nothing to say goes on."""
    calls = []
    messages = _message_lines(record)
    for each in signals:
        if each.request == Request.IRQFD:
            fd, line = struct.unpack_from("<iI", each.data)
            if line not in messages:  # a message is delivered at once
                calls.append(Call(_WRITE, (fd, DATA, 8), struct.pack("<Q", 1), returns=8, what="signal an irqfd"))
    return calls


def _message_lines(record: Record) -> frozenset[int]:
    lines = set()
    for each in record.ioctls:
        if each.request == Request.SET_GSI_ROUTING:
            for at in range(_ROUTES_AT, len(each.data), _ROUTE_BYTES):
                line, kind = struct.unpack_from("<II", each.data, at)
                if kind == _TO_MSI:
                    lines.add(line)
    return frozenset(lines)
