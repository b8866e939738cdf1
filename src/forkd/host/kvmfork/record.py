"""What made a VM, as the calls that make it once more. Pure.

It is kept with the VM, and read again by the next daemon: what is read is checked as if anybody had written it.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forkd.errors import NotForkable
from forkd.host.kvmfork.ioctls import Effect, Request, effect_of, is_whole, name_of

MAX_VCPUS = 8
MAX_IOCTLS = 4096
MAX_JSON_BYTES = 4 << 20
_VERSION = 1
_MAX_FD = 1 << 20
_READONLY = 1 << 1
_RESAMPLE = 1 << 1
_DATAMATCH, _PORT = 1 << 0, 1 << 1
_ROUTE_BYTES, _ROUTES_AT = 48, 8
_TO_IRQCHIP, _TO_MSI = 1, 2

# Those that only say how the VM is to be run, and can be asked for again. By number, as linux/kvm.h has them.
CAPABILITIES: Mapping[int, str] = {
    116: "DISABLE_QUIRKS",
    121: "SPLIT_IRQCHIP",
    128: "MAX_VCPU_ID",
    129: "X2APIC_API",
    143: "X86_DISABLE_EXITS",
    159: "MSR_PLATFORM_INFO",
    168: "MANUAL_DIRTY_LOG_PROTECT2",
    182: "HALT_POLL",
    188: "X86_USER_SPACE_MSR",
    190: "ENFORCE_PV_FEATURE_CPUID",
    193: "X86_BUS_LOCK_EXIT",
    201: "EXIT_HYPERCALL",
    204: "EXIT_ON_EMULATION_FAILURE",
    212: "PMU_CAPABILITY",
    213: "DISABLE_QUIRKS2",
    218: "X86_TRIPLE_FAULT_EVENT",
    219: "X86_NOTIFY_VMEXIT",
    220: "VM_DISABLE_NX_HUGE_PAGES",
}
SPLIT_IRQCHIP = 121

_OF_VM = frozenset(
    {
        *(Request.CREATE_VCPU, Request.SET_NR_MMU_PAGES, Request.SET_USER_MEMORY_REGION, Request.SET_TSS_ADDR),
        *(Request.SET_USER_MEMORY_REGION2, Request.SET_IDENTITY_MAP_ADDR, Request.CREATE_IRQCHIP, Request.IRQFD),
        *(Request.REGISTER_COALESCED_MMIO, Request.SET_GSI_ROUTING, Request.REINJECT_CONTROL, Request.CREATE_PIT2),
        *(Request.SET_BOOT_CPU_ID, Request.IOEVENTFD, Request.SET_TSC_KHZ, Request.ENABLE_CAP),
    }
)
_OF_VCPU = frozenset({Request.SET_SIGNAL_MASK, Request.SETUP_MCE, Request.SET_TSC_KHZ, Request.ENABLE_CAP})


@dataclass(frozen=True)
class Ioctl:
    """`data`: the memory that `arg` points to; none, where it is a number."""

    fd: int
    request: int
    arg: int
    data: bytes = field(repr=False, default=b"")
    result: int = 0

    @property
    def capability(self) -> int | None:
        """That an ENABLE_CAP asks for."""
        return _word(self.data) if self.request == Request.ENABLE_CAP else None


@dataclass(frozen=True)
class Record:
    """`vcpu_fds`: by the vCPU's number. `clear_tid`: what the kernel clears when a thread ends, if all agree on it.
    `kernel_pages`: how many pages of shared memory KVM mapped for itself when it made the vCPUs.

    The first ioctl is CREATE_VM; the others are in force, in an order in which they can be made again.
    """

    kvm_fd: int
    vm_fd: int
    vcpu_fds: tuple[int, ...]
    ioctls: tuple[Ioctl, ...]
    clear_tid: int | None = None
    kernel_pages: int = 0

    def has(self, request: Request) -> bool:
        return any(each.request == request for each in self.ioctls)

    @property
    def has_irqchip(self) -> bool:
        """All of it in the kernel: two PICs and an IOAPIC, which have state."""
        return self.has(Request.CREATE_IRQCHIP)

    @property
    def has_lapic(self) -> bool:
        return self.has_irqchip or any(each.capability == SPLIT_IRQCHIP for each in self.ioctls)

    @property
    def descriptors(self) -> frozenset[int]:
        """Those that a duplicate keeps until it makes the VM anew, and then replaces."""
        return frozenset((self.kvm_fd, self.vm_fd, *self.vcpu_fds))

    def check(self) -> None:
        """Raises NotForkable for what cannot be made once more."""
        if not self.vcpu_fds:
            raise NotForkable("The VM has no vCPU")
        if len(self.vcpu_fds) > MAX_VCPUS:
            raise NotForkable(f"The VM has {len(self.vcpu_fds)} vCPUs; {MAX_VCPUS} is the most that can be forked")
        if len(self.descriptors) != len(self.vcpu_fds) + 2:
            raise NotForkable("The VM's descriptors are not distinct")
        first, *others = self.ioctls or (None,)
        if first is None or (first.fd, first.request, first.result) != (self.kvm_fd, Request.CREATE_VM, self.vm_fd):
            raise NotForkable("How the VM was made is not known")
        if first.arg:
            raise NotForkable(f"The VM is of kind {first.arg}; only ordinary ones can be forked")
        for each in others:
            self._check_ioctl(each)
        made = {each.arg: each.result for each in others if each.request == Request.CREATE_VCPU}
        if made != dict(enumerate(self.vcpu_fds)) or _count(others, Request.CREATE_VCPU) != len(self.vcpu_fds):
            raise NotForkable("The VM's vCPUs are not numbered from 0 on")

    def _check_ioctl(self, each: Ioctl) -> None:
        if effect_of(each.request) is not Effect.SET_UP:
            raise NotForkable(f"The VM was set up by {name_of(each.request)}, which a fork cannot repeat")
        if not (each.fd == self.vm_fd and each.request in _OF_VM) and not (
            each.fd in self.vcpu_fds and each.request in _OF_VCPU
        ):
            raise NotForkable(f"{name_of(each.request)} on descriptor {each.fd} cannot be repeated")
        if not is_whole(each.request, each.data) or each.result < 0:
            raise NotForkable(f"The record of {name_of(each.request)} is damaged")
        if lack := find_lack(each):
            raise NotForkable(f"{lack}, which a fork cannot repeat")

    def to_json(self) -> str:
        ioctls = [
            [each.fd, each.request, each.arg, base64.b64encode(each.data).decode(), each.result] for each in self.ioctls
        ]
        return json.dumps(
            {
                "version": _VERSION,
                "kvm_fd": self.kvm_fd,
                "vm_fd": self.vm_fd,
                "vcpu_fds": self.vcpu_fds,
                "clear_tid": self.clear_tid,
                "kernel_pages": self.kernel_pages,
                "ioctls": ioctls,
            }
        )


def parse_record(text: str) -> Record:
    """Checked. Raises NotForkable."""
    try:
        if len(text) > MAX_JSON_BYTES:
            raise ValueError
        fields = json.loads(text)
        if not isinstance(fields, dict) or fields.get("version") != _VERSION:
            raise ValueError
        vcpu_fds = _list(fields["vcpu_fds"], MAX_VCPUS)
        clear_tid = fields["clear_tid"]
        record = Record(
            kvm_fd=_number(fields["kvm_fd"], _MAX_FD),
            vm_fd=_number(fields["vm_fd"], _MAX_FD),
            vcpu_fds=tuple(_number(each, _MAX_FD) for each in vcpu_fds),
            ioctls=tuple(_parse_ioctl(each) for each in _list(fields["ioctls"], MAX_IOCTLS)),
            clear_tid=None if clear_tid is None else _number(clear_tid, 1 << 64),
            kernel_pages=_number(fields["kernel_pages"], MAX_VCPUS + 1),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotForkable("The record of how the VM was made is damaged", hint="Start the VM again") from error
    record.check()
    return record


def _parse_ioctl(fields: Any) -> Ioctl:
    fd, request, arg, data, result = _list(fields, 5)
    if not isinstance(data, str):
        raise TypeError
    return Ioctl(
        fd=_number(fd, _MAX_FD),
        request=_number(request, 1 << 32),
        arg=_number(arg, 1 << 64),
        data=_decode(data),
        result=_number(result, 1 << 31),
    )


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError from error


def _number(value: Any, limit: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
        raise ValueError
    return value


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError
    return value


def _count(ioctls: list[Ioctl], request: Request) -> int:
    return sum(each.request == request for each in ioctls)


def find_lack(each: Ioctl) -> str | None:
    """What it asked for that a duplicate cannot have."""
    match each.request:
        case Request.SET_USER_MEMORY_REGION | Request.SET_USER_MEMORY_REGION2:
            # Flags: log of written pages, read-only, memory of its own descriptor.
            slot, flags = struct.unpack_from("<II", each.data)
            if flags & ~_READONLY:
                return f"Memory slot {slot:#x} has flags {flags:#x}"
            size: int = struct.unpack_from("<Q", each.data, 16)[0]
            return None if size else f"Memory slot {slot:#x} is empty"
        case Request.IRQFD:
            flags = _word(each.data, 8)
            return f"An irqfd has flags {flags:#x}" if flags & ~_RESAMPLE else None
        case Request.IOEVENTFD:
            flags = _word(each.data, 24)
            return f"An ioeventfd has flags {flags:#x}" if flags & ~(_DATAMATCH | _PORT) else None
        case Request.ENABLE_CAP:
            number = _word(each.data)
            return None if number in CAPABILITIES else f"The VM has capability {number}"
        case Request.SET_GSI_ROUTING:
            return _find_unknown_route(each.data)
        case Request.SET_GUEST_DEBUG | Request.UNREGISTER_COALESCED_MMIO:
            return f"The VM is in a state made by {name_of(each.request)}"
    return None


def _find_unknown_route(data: bytes) -> str | None:
    for at in range(_ROUTES_AT, len(data), _ROUTE_BYTES):
        kind = _word(data, at + 4)
        if kind not in (_TO_IRQCHIP, _TO_MSI):
            return f"An interrupt is routed in way {kind}"
    return None


def _word(data: bytes, at: int = 0) -> int:
    value: int = struct.unpack_from("<I", data, at)[0]
    return value
