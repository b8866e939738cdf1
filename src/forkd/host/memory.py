"""What memory and CPU time processes use, and what the machine has left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MIB = 1024 * 1024


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


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far; the resolution is one scheduler tick."""
    # The command name may hold spaces and parentheses; the fields after the last ')' are fixed.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def start_time_ticks(pid: int) -> int | None:
    """When a process started, in ticks since boot: with the pid it names one process for good. None: it is over."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # A zombie does nothing any more, and where nobody reaps it stays for ever.
    return None if fields[0] in "ZX" else int(fields[19])
