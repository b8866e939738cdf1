"""A process's memory map: where a detour fits, what a fork leaves out, what would be shared. Pure.

A VMM has hundreds of mappings and stands still while they are looked at: what is looked for is found by its text, and
only the lines that matter are taken apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

_SHARED = re.compile(r"^([0-9a-f]+)-\S+ .w.s \S+ \S+ \S+ *(.*)$", re.MULTILINE)
_WRITTEN_AND_SHARED = ("w-s ", "wxs ")
_CODE = re.compile(r"^[0-9a-f]+-([0-9a-f]+) r-xp \S+ \S+ \S+ +/", re.MULTILINE)
# Mapped by the kernel for itself; advice on them is refused.
_KERNELS = ("[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]")


def find_shared(maps: str, replaced: Callable[[str], bool] = lambda _: False) -> str | None:
    """Memory that the source and its duplicate would both write to; but for what is `replaced` in the duplicate."""
    if not any(text in maps for text in _WRITTEN_AND_SHARED):
        return None
    names = (found[2] or found[1] for found in _SHARED.finditer(maps))
    return next((name for name in names if not replaced(name)), None)


def code_ends(maps: str) -> Iterator[int]:
    """Where code that was loaded from a file ends; the rest of the last page is padding, as a rule."""
    return (int(found[1], 16) for found in _CODE.finditer(maps))


def advisable_ranges(maps: str) -> list[tuple[int, int]]:
    """Start and length of all memory that is the process's own, holes included, in as few pieces as possible."""
    ranges = []
    begin = 0
    for at in sorted(at for at in (maps.find(f" {name}\n") for name in _KERNELS) if at >= 0):
        ranges += _whole_range(maps[begin : maps.rfind("\n", 0, at) + 1])
        begin = maps.index("\n", at) + 1
    return ranges + _whole_range(maps[begin:])


def _whole_range(lines: str) -> list[tuple[int, int]]:
    """From the start of the first line's mapping to the end of the last one's."""
    if not lines:
        return []
    start = int(lines[: lines.index("-")], 16)
    last = lines[lines.rfind("\n", 0, -1) + 1 :]
    return [(start, int(last[last.index("-") + 1 : last.index(" ")], 16) - start)]
