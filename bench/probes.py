"""What children cost beside time: of the VMM's process alone, or of all processes in a child's control group."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench import figures
from bench.figures import Figure
from forkd.engines.base import Frozen
from forkd.errors import EngineFailed, GuestDied
from forkd.host.cgroup import Group, find_group
from forkd.host.memory import MemoryUse, memory_use
from forkd.model.limits import NO_LIMITS, Limits
from forkd.runtime import demo
from forkd.runtime.sandbox import Sandbox

SETTLE_S = 2.0
# With any limit a child of every engine has a group; this one stops nobody.
GROUPED = Limits(pids=10_000)

_MIB = 2**20
_BLOCK_BYTES = 512
# Of a process, by its number: see clock_getcpuclockid(3).
_CPU_CLOCK = 2
# Both engines that have one call it so.
_MEMORY_FILE = "memory"
_MAPPING = re.compile("[0-9a-f]+-[0-9a-f]+ ")


class Probe(Protocol):
    @property
    def limits(self) -> Limits:
        """What children are forked with, so that this can look at them."""

    def cpu_figure(self, n: int, way: str) -> Figure: ...

    def cpu_seconds(self, child: Sandbox) -> float: ...

    def unique_mib(self, children: Sequence[Sandbox]) -> list[float]:
        """Memory that each child has to itself; nothing where `held` reads it, later."""

    async def held(self, children: Sequence[Sandbox], frozen: Frozen, way: str) -> dict[Figure, float]:
        """What children cost by being there, each after its first evaluation."""


class VmmProbe:
    limits = NO_LIMITS

    def cpu_figure(self, n: int, way: str) -> Figure:
        return figures.fork_cpu(n, "the VMM", way)

    def cpu_seconds(self, child: Sandbox) -> float:
        return exact_cpu_seconds(child.machine.pid)

    def unique_mib(self, children: Sequence[Sandbox]) -> list[float]:
        return [unique_mib(child.machine.pid) for child in children]

    async def held(self, children: Sequence[Sandbox], frozen: Frozen, way: str) -> dict[Figure, float]:
        return {figures.idle_cpu(len(children), demo.IDLE_S, way): await demo.idle_cpu_percent(list(children))}


OF_VMM = VmmProbe()


@dataclass(frozen=True)
class GroupProbe:
    """All of a child counts: its gate and its keeper, what mounts for it, the jailer. `directory` is where VMs are."""

    directory: Path
    limits: Limits = GROUPED

    def cpu_figure(self, n: int, way: str) -> Figure:
        return figures.fork_cpu(n, "all processes", way)

    def cpu_seconds(self, child: Sandbox) -> float:
        return self._group(child).cpu_seconds()

    def unique_mib(self, children: Sequence[Sandbox]) -> list[float]:
        return []

    async def held(self, children: Sequence[Sandbox], frozen: Frozen, way: str) -> dict[Figure, float]:
        n = len(children)
        before = [self.cpu_seconds(child) for child in children]
        await asyncio.sleep(SETTLE_S)
        spent = [self.cpu_seconds(child) - at for child, at in zip(children, before, strict=True)]
        unique = [self._unique_bytes(child) for child in children]
        resident = resident_bytes(frozen)
        return {
            figures.idle_cpu(n, SETTLE_S, way): statistics.mean(spent) / SETTLE_S * 100,
            figures.idle_unique_memory(n, "mean", SETTLE_S): statistics.mean(unique) / _MIB,
            figures.idle_unique_memory(n, "largest", SETTLE_S): max(unique) / _MIB,
            figures.resident_memory(): resident / _MIB,
            figures.unique_share(n): max(unique) / resident * 100,
        }

    def _unique_bytes(self, child: Sandbox) -> int:
        pids = (self._group(child).path / "cgroup.procs").read_text().split()
        return sum(_unique_bytes(int(pid)) for pid in pids)

    def _group(self, child: Sandbox) -> Group:
        group = find_group(self.directory / child.id)
        if group is None:
            raise EngineFailed(f"{child.id} has no control group to be measured by")
        return group


def _unique_bytes(pid: int) -> int:
    try:
        return memory_use(pid).unique_bytes
    except ProcessLookupError:
        return 0  # KVM has threads of the kernel in a VM's group; those have no memory of their own


def unique_mib(pid: int) -> float:
    return _memory_use(pid).unique_bytes / _MIB


def anonymous_mib(pid: int) -> float:
    """What belongs to no file, and so is the same whoever else maps those."""
    return _memory_use(pid).anonymous_bytes / _MIB


def guest_written_mib(pid: int, frozen: Frozen) -> float:
    """What the guest of a VMM has written to, of the memory that was frozen."""
    path = frozen.directory / _MEMORY_FILE
    total, counts = 0.0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            counts = line.endswith(f" {path}")
        elif counts and line.startswith("Anonymous:"):
            total += int(line.split()[1]) / 1024
    return total


def _memory_use(pid: int) -> MemoryUse:
    try:
        return memory_use(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise GuestDied(f"Process {pid} ended while it was measured") from None


def exact_cpu_seconds(pid: int) -> float:
    """Of all its threads. /proc/<pid>/stat rounds down to ticks of 10 ms, as much as a fork needs in all."""
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        raise GuestDied(f"Process {pid} ended while it was measured") from None


def resident_bytes(frozen: Frozen) -> int:
    """What the guest had touched when it was frozen: the rest of its memory file is holes."""
    return (frozen.directory / _MEMORY_FILE).stat().st_blocks * _BLOCK_BYTES
