"""A process's memory map: where a detour fits, what a fork leaves out, what would be shared. Pure.

Read by patterns: a VMM has hundreds of mappings, and stands still while they are looked at.
"""

from __future__ import annotations

import re

_SHARED = re.compile(r"^([0-9a-f]+)-\S+ .w.s \S+ \S+ \S+ *(.*)$", re.MULTILINE)
_CODE = re.compile(r"^[0-9a-f]+-([0-9a-f]+) r-xp \S+ \S+ \S+ +/", re.MULTILINE)
# Mapped by the kernel for itself; advice on them is refused.
_KERNELS = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*\[(?:vvar|vvar_vclock|vdso|vsyscall)\]$\n?", re.MULTILINE)
_FIRST = re.compile(r"^([0-9a-f]+)-")
_LAST = re.compile(r"^[0-9a-f]+-([0-9a-f]+) [^\n]*\n?\Z", re.MULTILINE)


def find_shared(maps: str) -> str | None:
    """Memory that the source and its duplicate would both write to."""
    found = _SHARED.search(maps)
    return (found[2] or found[1]) if found else None


def code_ends(maps: str) -> list[int]:
    """Where code that was loaded from a file ends; the rest of the last page is padding, as a rule."""
    return [int(end, 16) for end in _CODE.findall(maps)]


def advisable_ranges(maps: str) -> list[tuple[int, int]]:
    """Start and length of all memory that is the process's own, holes included, in as few pieces as possible."""
    ranges = []
    for part in _KERNELS.sub("\n", maps).split("\n\n"):
        first, last = _FIRST.search(part.lstrip("\n")), _LAST.search(part)
        if first and last:
            ranges.append((int(first[1], 16), int(last[1], 16) - int(first[1], 16)))
    return ranges
