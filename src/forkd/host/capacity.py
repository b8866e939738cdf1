"""Probes of how many children fit: memory, open files, processes."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from forkd.host.cgroup_probe import CgroupLimits, probe_limits
from forkd.host.finding import Finding, Status
from forkd.host.memory import parse_kib_table

_MIB = 1 << 20
# Measured under TCG: a child that has run numpy owns 28 MiB; with room for one that works a little.
CHILD_MIB = 32
# Of one that is forked from a template: 4 to 6 MiB, with room likewise.
FORKED_CHILD_MIB = 12
# A parent of the default size while it boots, and room for everything else on the machine.
RESERVE_MIB = 512 + 256
# Sockets, logs, the image, the memory file and KVM's own, of one child.
CHILD_FILES = 10
_OWN_FILES = 64
# QEMU's main loop, vCPU, RCU and worker threads; every thread counts as a process.
CHILD_TASKS = 8
_OWN_TASKS = 64
# Fewer children than this is worth a word.
_FEW = 100


def probe_memory() -> Finding:
    try:
        available = parse_available(Path("/proc/meminfo").read_text())
    except OSError:
        available = None
    if available is None:
        return Finding("memory", Status.WARN, "could not be read from /proc/meminfo", "Mount /proc")
    limit = probe_limits().memory_left_bytes
    return judge_memory(available, limit)


def parse_available(meminfo: str) -> int | None:
    """Bytes a new process may have without swapping."""
    return parse_kib_table(meminfo).get("MemAvailable")


def judge_memory(available_bytes: int, group_left_bytes: int | None) -> Finding:
    limited = group_left_bytes is not None and group_left_bytes < available_bytes
    mib = (group_left_bytes if limited and group_left_bytes is not None else available_bytes) // _MIB
    where = " within this control group" if limited else ""
    children, forked = (max(0, mib - RESERVE_MIB) // each for each in (CHILD_MIB, FORKED_CHILD_MIB))
    found = (
        f"{mib:,} MiB available{where}, about {children:,} children of {CHILD_MIB} MiB, "
        f"or {forked:,} of {FORKED_CHILD_MIB} MiB forked from a template"
    )
    if children == 0:
        return Finding(
            "memory", Status.FAIL, found, f"Free memory: a parent and a child need {RESERVE_MIB + CHILD_MIB} MiB"
        )
    if children < 10:
        return Finding("memory", Status.WARN, found, "More memory admits more children")
    return Finding("memory", Status.OK, found)


def allow_open_files() -> None:
    """As many as this process may have: some descriptors belong to each child."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError):  # under a unit's filter, which sets the limit itself
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def probe_open_files() -> Finding:
    return judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_open_files(soft: int, hard: int) -> Finding:
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", Status.OK, "no limit")
    children = max(0, soft - _OWN_FILES) // CHILD_FILES
    found = f"limit {soft:,}, enough for about {children:,} children"
    if children >= _FEW:
        return Finding("open files", Status.OK, found)
    raisable = hard == resource.RLIM_INFINITY or hard > soft
    remedy = f"ulimit -n {65536 if hard == resource.RLIM_INFINITY else hard}" if raisable else "Raise the hard limit"
    return Finding("open files", Status.WARN, found, remedy)


def probe_processes() -> Finding:
    kernel = [_read_number(Path("/proc/sys/kernel") / name) for name in ("pid_max", "threads-max")]
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = None if soft == resource.RLIM_INFINITY else soft
    return judge_processes([*kernel, user], probe_limits())


def judge_processes(limits: list[int | None], group: CgroupLimits) -> Finding:
    known = [limit for limit in (*limits, group.pids_max) if limit is not None]
    if not known:
        return Finding("processes", Status.OK, "no limit seen")
    children = max(0, min(known) - _OWN_TASKS) // CHILD_TASKS
    found = f"limit {min(known):,}, enough for about {children:,} children"
    if children >= _FEW:
        return Finding("processes", Status.OK, found)
    return Finding("processes", Status.WARN, found, "Raise ulimit -u, kernel.pid_max or the group's pids.max")


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
