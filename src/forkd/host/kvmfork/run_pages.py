"""The memory a VMM shares with the kernel for each vCPU: where it is, and that nothing is under way in it. Pure."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from forkd.errors import NotForkable
from forkd.host.kvmfork.ioctls import Request
from forkd.host.kvmfork.record import Record

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw-s ([0-9a-f]+) \S+ \d+ +anon_inode:kvm-vcpu:(\d+)$", re.MULTILINE)
_NAME = re.compile(r"anon_inode:kvm-vcpu:\d+")

# struct kvm_run
_EXIT_AT, _CR8_AT, _SYNC_REGS_AT, _SYNC_REGS_BYTES = 8, 16, 288, 16
# Of coalesced writes: a ring in the third page, which the VMM has to empty.
_RING_AT = 2 * 4096
# The VMM has still to answer these, or has just done it, and the kernel to go on with what it was told. Which of the
# two cannot be seen: how the next run ended is told in the same place, but not if that was over at once.
_UNFINISHED: Mapping[int, str] = {
    2: "a port",
    3: "a hypercall",
    6: "a device",
    27: "Hyper-V",
    29: "a register",
    30: "a register",
}


@dataclass(frozen=True)
class RunPages:
    vcpu: int
    address: int
    size: int


def is_run_page(name: str) -> bool:
    """Of a mapping, by its name: shared, and made anew in a duplicate."""
    return _NAME.fullmatch(name) is not None


def find_run_pages(maps: str, record: Record) -> tuple[RunPages, ...]:
    """By the vCPU's number. `maps`: the text of /proc/<pid>/maps. Raises NotForkable."""
    found: dict[int, RunPages] = {}
    for each in _MAPPING.finditer(maps):
        start, end, offset, number = int(each[1], 16), int(each[2], 16), int(each[3], 16), int(each[4])
        if offset or number in found:
            raise NotForkable(f"vCPU {number} is mapped in an unusual way")
        found[number] = RunPages(number, start, end - start)
    if sorted(found) != list(range(len(record.vcpu_fds))) or len(found) != len(_NAME.findall(maps)):
        raise NotForkable(f"{len(found)} vCPUs are mapped; {len(record.vcpu_fds)} were expected")
    return tuple(found[number] for number in sorted(found))


def is_told_to_stop(memory: bytes) -> bool:
    """Whether its next run ends at once: so a VMM stops a vCPU, and takes it back before it lets that go on."""
    return memory[1] != 0


def check_run_pages(memory: bytes, record: Record, *, between_runs: bool = False) -> None:
    """What else is told there is lost in a duplicate, so there has to be nothing. Raises NotForkable.

    `between_runs`: the VMM stops a vCPU only when a run was broken off before it began, and with that the kernel has
    taken all answers. How the run before it ended is still told.
    """
    if memory[0]:
        raise NotForkable("A vCPU was just told to stop", hint="Try again")
    reason = _UNFINISHED.get(struct.unpack_from("<I", memory, _EXIT_AT)[0])
    if reason and not between_runs:
        raise NotForkable(f"A vCPU may wait for an answer from {reason}", hint="Try again")
    if any(memory[_CR8_AT : _CR8_AT + 8]) and not record.has_lapic:
        raise NotForkable("The VMM plays the guest's local APIC")
    if any(memory[_SYNC_REGS_AT : _SYNC_REGS_AT + _SYNC_REGS_BYTES]):
        raise NotForkable("The VMM takes registers from the memory that it shares with KVM")
    if record.has(Request.REGISTER_COALESCED_MMIO):
        first, last = struct.unpack_from("<II", memory, _RING_AT)
        if first != last:
            raise NotForkable("The VMM has writes of the guest still to see", hint="Try again")
