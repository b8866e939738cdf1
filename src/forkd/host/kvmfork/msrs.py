"""Which model-specific registers a vCPU has here, and which of them can be set: asked of a vCPU of our own."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forkd.errors import NotForkable
from forkd.host.kvmfork.ioctls import Request

_DEVICE = "/dev/kvm"
_HEAD_BYTES, _ENTRY_BYTES = 8, 16
_MOST = 1024
TSC, TSC_DEADLINE = 0x10, 0x6E0
_APIC_BASE, _EFER = 0x1B, 0xC0000080
# The kernel lists none of these. How memory is cached: a guest that wakes a processor compares them.
_MTRRS = (
    *(0x2FF, 0x250, 0x258, 0x259, *range(0x268, 0x270)),
    *range(0x200, 0x210),
)
_ARCH_PRCTL, _ARCH_REQ_XCOMP_GUEST_PERM, _TILES = 158, 0x1025, 18
_MACHINE_CHECK_BANKS, _REGISTERS_PER_BANK = 0x400, 4


@dataclass(frozen=True)
class MsrPlan:
    """`fixed`: those that cannot be set, with the value that every vCPU has."""

    indexes: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...] = ()


def render_msrs(values: Sequence[tuple[int, int]]) -> bytes:
    """struct kvm_msrs."""
    entries = b"".join(struct.pack("<IIQ", index, 0, value) for index, value in values)
    return struct.pack("<II", len(values), 0) + entries


def parse_msrs(data: bytes) -> list[tuple[int, int]]:
    (count,) = struct.unpack_from("<I", data)
    entries = data[_HEAD_BYTES : _HEAD_BYTES + _ENTRY_BYTES * count]
    return [(index, value) for index, _, value in struct.iter_unpack("<IIQ", entries)]


def in_order(indexes: Sequence[int]) -> tuple[int, ...]:
    """The deadline of a timer means something only when the time is set."""
    special = {TSC: -1, TSC_DEADLINE: 1}
    return tuple(sorted(dict.fromkeys(indexes), key=lambda index: special.get(index, 0)))


@functools.lru_cache(maxsize=16)
def plan_msrs(cpuid: bytes, *, with_irqchip: bool, banks: int) -> MsrPlan:
    """For vCPUs with this CPUID and as many banks of machine checks. Raises NotForkable.

    A source stands still meanwhile, so it is asked once: the answer is the host's, and stays.
    """
    try:
        with _made_vcpu(cpuid, with_irqchip=with_irqchip) as (kvm, vcpu):
            extra = range(_MACHINE_CHECK_BANKS, _MACHINE_CHECK_BANKS + banks * _REGISTERS_PER_BANK)
            indexes = in_order((*_read_list(kvm), *_MTRRS, *extra))
            # The banks are not known to this vCPU; the one that is saved has them all.
            values = _readable(vcpu, [index for index in indexes if index not in extra])
            fixed = tuple((index, value) for index, value in values if not _sets(vcpu, index, value))
    except OSError as error:
        raise NotForkable(f"The registers of a vCPU could not be found out: {error.strerror}") from error
    known = {index for index, _ in values}
    return MsrPlan(tuple(index for index in indexes if index in known or index in extra), fixed)


@contextlib.contextmanager
def _made_vcpu(cpuid: bytes, *, with_irqchip: bool) -> Iterator[tuple[int, int]]:
    _allow_tiles()
    with contextlib.ExitStack() as opened:
        kvm = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, kvm)
        vm = fcntl.ioctl(kvm, Request.CREATE_VM, 0)
        opened.callback(os.close, vm)
        if with_irqchip:
            fcntl.ioctl(vm, Request.CREATE_IRQCHIP, 0)
        vcpu = fcntl.ioctl(vm, Request.CREATE_VCPU, 0)
        opened.callback(os.close, vcpu)
        fcntl.ioctl(vcpu, Request.SET_CPUID2, bytearray(cpuid), True)
        yield kvm, vcpu


def _allow_tiles() -> None:
    """Before the first vCPU of a process: it may not have the CPUID of a guest with AMX otherwise. Where there is none,
    or we have it already, this fails and does not matter."""
    ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_GUEST_PERM, _TILES)


def _read_list(kvm: int) -> list[int]:
    buffer = bytearray(4 + 4 * _MOST)
    struct.pack_into("<I", buffer, 0, _MOST)
    fcntl.ioctl(kvm, Request.GET_MSR_INDEX_LIST, buffer, True)
    (count,) = struct.unpack_from("<I", buffer)
    listed = struct.unpack_from(f"<{count}I", buffer, 4)
    return [index for index in listed if index not in (_APIC_BASE, _EFER)]  # they are special registers


def _readable(vcpu: int, indexes: Sequence[int]) -> list[tuple[int, int]]:
    """The kernel stops at the first one that it does not give."""
    values: list[tuple[int, int]] = []
    left = list(indexes)
    while left:
        buffer = bytearray(render_msrs([(index, 0) for index in left]))
        count = fcntl.ioctl(vcpu, Request.GET_MSRS, buffer, True)
        values += parse_msrs(bytes(buffer))[:count]
        left = left[count + 1 :]
    return values


def _sets(vcpu: int, index: int, value: int) -> bool:
    buffer = bytearray(render_msrs([(index, value)]))
    try:
        count: int = fcntl.ioctl(vcpu, Request.SET_MSRS, buffer, True)
    except OSError:
        return False
    return count == 1
