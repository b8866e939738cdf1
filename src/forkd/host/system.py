"""What the machine has and what a process uses of it, read from /proc; how many children fit."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from forkd.host.cgroup import OWN, ROOT, parse_groups
from forkd.host.finding import Finding, Status

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MIB = 1 << 20
# cgroup version 1 writes 'no limit' as a huge number.
_NO_LIMIT = 1 << 60
# The limit and what is used of it, in version 2 and 1.
_MEMORY_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
# Measured under TCG: a child that has run numpy owns 28 MiB; with room for one that works a little.
CHILD_MIB = 32
# One forked from a template owns 4 to 6 MiB; with room as above.
FORKED_CHILD_MIB = 12
# A parent of the default size while it boots, and room for everything else on the machine.
RESERVE_MIB = 512 + 256
# Sockets, logs, the image, the memory file and KVM's own, of one child.
CHILD_FILES = 10
_OWN_FILES = 64
# QEMU's main loop, vCPU, RCU and worker threads; every thread counts as a process.
CHILD_TASKS = 8
_OWN_TASKS = 64
# Fewer children than this get a warning.
_FEW = 100


def parse_cpu(cpuinfo: str) -> str:
    """The processor as far as a frozen VM depends on it."""
    pairs = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = hashlib.sha256(" ".join(sorted(fields.get("flags", "").split())).encode()).hexdigest()[:12]
    return f"{fields.get('model name', 'unknown')} flags-{flags}"


def read_cpuinfo() -> str:
    # Only the first processor: the others repeat it.
    return Path("/proc/cpuinfo").read_text().partition("\n\n")[0]


@dataclass(frozen=True)
class MemoryUse:
    """`unique_bytes` would be freed if this one process died; `resident_bytes` counts shared pages in full.

    `anonymous_bytes` belong to no file, however many forks share them.
    """

    unique_bytes: int
    resident_bytes: int
    anonymous_bytes: int


def parse_kib_table(text: str) -> dict[str, int]:
    """The 'Name:   123 kB' lines of /proc/meminfo and smaps_rollup, in bytes."""
    table = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            table[name] = int(words[0]) * 1024
    return table


def available_mib() -> int:
    return parse_kib_table(Path("/proc/meminfo").read_text())["MemAvailable"] // _MIB


def memory_use(pid: int) -> MemoryUse:
    table = parse_kib_table(Path(f"/proc/{pid}/smaps_rollup").read_text())
    return MemoryUse(
        unique_bytes=table["Private_Clean"] + table["Private_Dirty"],
        resident_bytes=table["Rss"],
        anonymous_bytes=table["Anonymous"],
    )


def steady_s() -> float:
    """Seconds on a clock that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; the resolution is one scheduler tick."""
    fields = read_stat(pid)
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def start_time_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot: pid and start time name one process for good. None: it ended."""
    try:
        fields = read_stat(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie does nothing any more, and where nobody reaps it, it stays.
    return None if fields[0] in "ZX" else int(fields[19])


def read_stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat after the command name, which may hold spaces and parentheses."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def probe_memory() -> Finding:
    try:
        available = parse_available(Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    if available is None:
        return Finding("memory", Status.WARN, "could not be read from /proc/meminfo", "Mount /proc")
    return judge_memory(available, probe_limits().memory_left_bytes)


def parse_available(meminfo: str) -> int | None:
    """Bytes a new process may have without swapping."""
    return parse_kib_table(meminfo).get("MemAvailable")


def judge_memory(available_bytes: int, group_left_bytes: int | None) -> Finding:
    least = available_bytes if group_left_bytes is None else min(available_bytes, group_left_bytes)
    mib, where = least // _MIB, " within this control group" if least < available_bytes else ""
    children, forked = (max(0, mib - RESERVE_MIB) // each for each in (CHILD_MIB, FORKED_CHILD_MIB))
    found = (
        f"{mib:,} MiB available{where}, about {children:,} children of {CHILD_MIB} MiB, "
        f"or {forked:,} of {FORKED_CHILD_MIB} MiB forked from a template"
    )
    if children == 0:
        remedy = f"Free memory: a parent and a child need {RESERVE_MIB + CHILD_MIB} MiB"
        return Finding("memory", Status.FAIL, found, remedy)
    if children < 10:
        return Finding("memory", Status.WARN, found, "Add memory for more children")
    return Finding("memory", Status.OK, found)


def allow_open_files() -> None:
    """Raise our limit as far as we may: each child takes some descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # under a unit's filter, which sets the limit itself
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_open_files() -> int:
    """That this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def probe_open_files() -> Finding:
    return judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    raisable = hard == resource.RLIM_INFINITY or hard > soft
    remedy = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else hard}" if raisable else "Raise the hard limit"
    limit = None if soft == resource.RLIM_INFINITY else soft
    return _judge_limit("open files", limit, _OWN_FILES, CHILD_FILES, remedy)


def probe_processes() -> Finding:
    kernel = [_read_number(Path("/proc/sys/kernel") / name) for name in ("pid_max", "threads-max")]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = None if soft == resource.RLIM_INFINITY else soft
    return judge_processes([*kernel, user], probe_limits())


def judge_processes(limits: list[int | None], group: CgroupLimits) -> Finding:
    remedy = "Raise ulimit -u, kernel.pid_max or the group's pids.max"
    return _judge_limit("processes", _smallest([*limits, group.pids_max]), _OWN_TASKS, CHILD_TASKS, remedy)


def _judge_limit(name: str, limit: int | None, own: int, child: int, remedy: str) -> Finding:
    """`own` of the limit are for forkd itself, `child` for each child."""
    if limit is None:
        return Finding(name, Status.OK, "no limit")
    children = max(0, limit - own) // child
    found = f"limit {limit:,}, enough for about {children:,} children"
    return Finding(name, Status.OK, found) if children >= _FEW else Finding(name, Status.WARN, found, remedy)


@dataclass(frozen=True)
class CgroupLimits:
    """Of the groups we are in, version 2 or 1. None where there is no limit, or none that can be seen."""

    memory_left_bytes: int | None = None
    pids_max: int | None = None


def probe_limits(root: Path = ROOT, own: Path = OWN) -> CgroupLimits:
    try:
        groups = parse_groups(own.read_text())
    except OSError:
        return CgroupLimits()
    memory = [_left(path, *names) for path in _places(root, groups, "memory") for names in _MEMORY_FILES]
    pids = [_read_number(path / "pids.max") for path in _places(root, groups, "pids")]
    return CgroupLimits(_smallest(memory), _smallest(pids))


def _places(root: Path, groups: dict[str, str], controller: str) -> list[Path]:
    """Our group and those above it, in both versions; in a container the path may not exist, the root does."""
    places: list[Path] = []
    for base, path in ((root, groups.get("")), (root / controller, groups.get(controller))):
        if path is not None:
            leaf = base / path.lstrip("/")
            places += [leaf, *(parent for parent in leaf.parents if parent.is_relative_to(base))]
    return places


def _left(path: Path, limit: str, used: str) -> int | None:
    most, now = _read_number(path / limit), _read_number(path / used)
    return None if most is None or now is None else max(0, most - now)


def _read_number(path: Path) -> int | None:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number < _NO_LIMIT else None


def _smallest(numbers: list[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)
