"""Of all that was asked of a VM, what is in force. Pure.

What was asked twice is made once in a duplicate, as it was asked last; what was taken back is not made at all.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable

from forkd.host.kvmfork.ioctls import Request
from forkd.host.kvmfork.record import Ioctl

_IRQFD_DEASSIGN, _IOEVENTFD_DEASSIGN = 1 << 0, 1 << 2
_IOEVENTFD_DATAMATCH, _IOEVENTFD_PORT = 1 << 0, 1 << 1

# Asked again, these replace what was asked before.
_REPLACED = frozenset(
    {
        *(Request.SET_NR_MMU_PAGES, Request.SET_TSS_ADDR, Request.SET_IDENTITY_MAP_ADDR, Request.SET_GSI_ROUTING),
        *(Request.REINJECT_CONTROL, Request.SET_BOOT_CPU_ID, Request.SET_SIGNAL_MASK, Request.SET_GUEST_DEBUG),
        *(Request.SETUP_MCE, Request.SET_TSC_KHZ),
    }
)


def fold(ioctls: Iterable[Ioctl]) -> tuple[Ioctl, ...]:
    """In the order in which they were asked last."""
    asked: dict[Hashable, Ioctl] = {}
    for index, each in enumerate(ioctls):
        if each.request == Request.UNREGISTER_COALESCED_MMIO:
            for key in [key for key, one in asked.items() if _is_in_zone(one, each)]:
                del asked[key]
            continue
        key = _key(each) or index
        asked.pop(key, None)
        if not _takes_back(each):
            asked[key] = each
    return tuple(asked.values())


def _key(each: Ioctl) -> Hashable:
    """The same for two ioctls of which the second one replaces the first; None for one that stays."""
    match each.request:
        case request if request in _REPLACED:
            return request, each.fd
        case Request.SET_USER_MEMORY_REGION | Request.SET_USER_MEMORY_REGION2:
            return "memory", each.data[:4]
        case Request.IRQFD:
            return each.request, each.data[:8]  # the eventfd and the interrupt
        case Request.IOEVENTFD:
            match, address, size, fd, flags = struct.unpack_from("<QQIiI", each.data)
            wanted = match if flags & _IOEVENTFD_DATAMATCH else None
            return each.request, address, size, fd, flags & _IOEVENTFD_PORT, wanted
    return None


def _takes_back(each: Ioctl) -> bool:
    match each.request:
        case Request.SET_USER_MEMORY_REGION | Request.SET_USER_MEMORY_REGION2:
            return bool(struct.unpack_from("<Q", each.data, 16)[0] == 0)
        case Request.IRQFD:
            return bool(struct.unpack_from("<I", each.data, 8)[0] & _IRQFD_DEASSIGN)
        case Request.IOEVENTFD:
            return bool(struct.unpack_from("<I", each.data, 24)[0] & _IOEVENTFD_DEASSIGN)
        case Request.SET_GUEST_DEBUG:
            return not any(each.data[:4])
    return False


def _is_in_zone(one: Ioctl, taken: Ioctl) -> bool:
    """Whether a zone of coalesced writes covers the one that is taken back, which is when the kernel drops it."""
    if one.request != Request.REGISTER_COALESCED_MMIO:
        return False
    (address, size, port), (its, its_size, its_port) = (struct.unpack("<QII", each.data) for each in (one, taken))
    return bool(port == its_port and address <= its and its + its_size <= address + size)
