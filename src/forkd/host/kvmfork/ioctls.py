"""KVM's requests on x86: how long their arguments are, and what becomes of their effect in a duplicate. Pure."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass

_TYPE = 0xAE


class Request(enum.IntEnum):
    GET_API_VERSION = 0xAE00
    CREATE_VM = 0xAE01
    GET_MSR_INDEX_LIST = 0xC004AE02
    CHECK_EXTENSION = 0xAE03
    GET_VCPU_MMAP_SIZE = 0xAE04
    GET_SUPPORTED_CPUID = 0xC008AE05
    GET_EMULATED_CPUID = 0xC008AE09
    GET_MSR_FEATURE_INDEX_LIST = 0xC004AE0A
    CREATE_VCPU = 0xAE41
    GET_DIRTY_LOG = 0x4010AE42
    SET_NR_MMU_PAGES = 0xAE44
    GET_NR_MMU_PAGES = 0xAE45
    SET_USER_MEMORY_REGION = 0x4020AE46
    SET_TSS_ADDR = 0xAE47
    SET_IDENTITY_MAP_ADDR = 0x4008AE48
    SET_USER_MEMORY_REGION2 = 0x40A0AE49
    CREATE_IRQCHIP = 0xAE60
    IRQ_LINE = 0x4008AE61
    GET_IRQCHIP = 0xC208AE62
    SET_IRQCHIP = 0x8208AE63
    GET_PIT = 0xC048AE65
    SET_PIT = 0x8048AE66
    IRQ_LINE_STATUS = 0xC008AE67
    REGISTER_COALESCED_MMIO = 0x4010AE67
    UNREGISTER_COALESCED_MMIO = 0x4010AE68
    SET_GSI_ROUTING = 0x4008AE6A
    REINJECT_CONTROL = 0xAE71
    IRQFD = 0x4020AE76
    CREATE_PIT2 = 0x4040AE77
    SET_BOOT_CPU_ID = 0xAE78
    IOEVENTFD = 0x4040AE79
    SET_CLOCK = 0x4030AE7B
    GET_CLOCK = 0x8030AE7C
    RUN = 0xAE80
    GET_REGS = 0x8090AE81
    SET_REGS = 0x4090AE82
    GET_SREGS = 0x8138AE83
    SET_SREGS = 0x4138AE84
    TRANSLATE = 0xC018AE85
    INTERRUPT = 0x4004AE86
    GET_MSRS = 0xC008AE88
    SET_MSRS = 0x4008AE89
    SET_CPUID = 0x4008AE8A
    SET_SIGNAL_MASK = 0x4004AE8B
    GET_FPU = 0x81A0AE8C
    SET_FPU = 0x41A0AE8D
    GET_LAPIC = 0x8400AE8E
    SET_LAPIC = 0x4400AE8F
    SET_CPUID2 = 0x4008AE90
    GET_CPUID2 = 0xC008AE91
    GET_MP_STATE = 0x8004AE98
    SET_MP_STATE = 0x4004AE99
    NMI = 0xAE9A
    SET_GUEST_DEBUG = 0x4048AE9B
    SETUP_MCE = 0x4008AE9C
    GET_MCE_CAP_SUPPORTED = 0x8008AE9D
    GET_PIT2 = 0x8070AE9F
    SET_PIT2 = 0x4070AEA0
    GET_VCPU_EVENTS = 0x8040AE9F
    SET_VCPU_EVENTS = 0x4040AEA0
    GET_DEBUGREGS = 0x8080AEA1
    SET_DEBUGREGS = 0x4080AEA2
    SET_TSC_KHZ = 0xAEA2
    GET_TSC_KHZ = 0xAEA3
    ENABLE_CAP = 0x4068AEA3
    GET_XSAVE = 0x9000AEA4
    SET_XSAVE = 0x5000AEA5
    SIGNAL_MSI = 0x4020AEA5
    GET_XCRS = 0x8188AEA6
    SET_XCRS = 0x4188AEA7
    KVMCLOCK_CTRL = 0xAEAD
    SMI = 0xAEB7
    GET_NESTED_STATE = 0xC080AEBE
    GET_SUPPORTED_HV_CPUID = 0xC008AEC1
    GET_SREGS2 = 0x8140AECC
    SET_SREGS2 = 0x4140AECD
    GET_STATS_FD = 0xAECE
    GET_XSAVE2 = 0x9000AECF
    GET_DEVICE_ATTR = 0x4018AEE2
    HAS_DEVICE_ATTR = 0x4018AEE3


class Effect(enum.Enum):
    SET_UP = "made once more in a duplicate"
    STATE = "part of the state that is saved"
    NONE = "nothing that a duplicate needs"
    UNKNOWN = "not known, so that nothing can be forked"


@dataclass(frozen=True)
class Value:
    """The argument is a number itself."""


@dataclass(frozen=True)
class Fixed:
    size: int


@dataclass(frozen=True)
class Counted:
    """A head, whose first 32 bits count what follows it."""

    head: int
    unit: int
    most: int


Argument = Value | Fixed | Counted

_SET_UP: Mapping[Request, Argument] = {
    Request.CREATE_VM: Value(),
    Request.CREATE_VCPU: Value(),
    Request.SET_NR_MMU_PAGES: Value(),
    Request.SET_USER_MEMORY_REGION: Fixed(32),
    Request.SET_USER_MEMORY_REGION2: Fixed(160),
    Request.SET_TSS_ADDR: Value(),
    Request.SET_IDENTITY_MAP_ADDR: Fixed(8),
    Request.CREATE_IRQCHIP: Value(),
    Request.REGISTER_COALESCED_MMIO: Fixed(16),
    Request.UNREGISTER_COALESCED_MMIO: Fixed(16),
    Request.SET_GSI_ROUTING: Counted(8, 48, 4096),
    Request.REINJECT_CONTROL: Fixed(32),
    Request.IRQFD: Fixed(32),
    Request.CREATE_PIT2: Fixed(64),
    Request.SET_BOOT_CPU_ID: Value(),
    Request.IOEVENTFD: Fixed(64),
    Request.SET_SIGNAL_MASK: Counted(4, 1, 8),
    Request.SET_GUEST_DEBUG: Fixed(72),
    Request.SETUP_MCE: Fixed(8),
    Request.SET_TSC_KHZ: Value(),
    Request.ENABLE_CAP: Fixed(104),
}

_STATE = frozenset(
    {
        *(Request.IRQ_LINE, Request.IRQ_LINE_STATUS, Request.SIGNAL_MSI, Request.INTERRUPT, Request.NMI, Request.SMI),
        *(Request.SET_IRQCHIP, Request.SET_PIT, Request.SET_PIT2, Request.SET_CLOCK, Request.KVMCLOCK_CTRL),
        *(Request.SET_REGS, Request.SET_SREGS, Request.SET_SREGS2, Request.SET_FPU, Request.SET_XSAVE),
        *(Request.SET_XCRS, Request.SET_DEBUGREGS, Request.SET_MSRS, Request.SET_LAPIC, Request.SET_MP_STATE),
        *(Request.SET_VCPU_EVENTS, Request.SET_CPUID, Request.SET_CPUID2),
    }
)


_KNOWN = frozenset(Request)


def effect_of(request: int) -> Effect:
    if request in _SET_UP:
        return Effect.SET_UP
    if request in _STATE:
        return Effect.STATE
    return Effect.NONE if request in _KNOWN else Effect.UNKNOWN


def is_kvm(request: int) -> bool:
    return request >> 8 & 0xFF == _TYPE


def name_of(request: int) -> str:
    return f"KVM_{Request(request).name}" if request in _KNOWN else f"ioctl {request:#x}"


def head_bytes(request: int) -> int:
    """How much of the argument's memory says how long all of it is."""
    argument = _SET_UP.get(Request(request)) if request in _KNOWN else None
    match argument:
        case Fixed(size):
            return size
        case Counted(head):
            return head
        case _:
            return 0


def total_bytes(request: int, head: bytes) -> int | None:
    """Of the argument's memory; None where it is not to be believed."""
    argument = _SET_UP[Request(request)]
    if not isinstance(argument, Counted):
        return len(head)
    count: int = struct.unpack_from("<I", head)[0]
    return argument.head + argument.unit * count if count <= argument.most else None


def is_whole(request: int, data: bytes) -> bool:
    """Whether these bytes are an argument of the request, no more and no less."""
    head = head_bytes(request)
    return len(data) >= head and total_bytes(request, data[:head]) == len(data)


def argument_of(request: int) -> Argument:
    """Of one that is made once more."""
    return _SET_UP[Request(request)]
