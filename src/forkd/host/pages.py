"""The guest memory of a VMM process: where it is, which of its pages are not the root file's, and what they hold.

A VMM maps the memory file of a root privately, in one piece or several; layers are mapped over parts of that. A page
that was written is anonymous then, which /proc/<pid>/pagemap shows. Works while the process runs, stands still, or is
traced; what is read is one instant only if the process does not run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import EngineFailed, GuestDied
from forkd.model.memory import PAGE, merge_spans

_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) ...([ps]) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$", re.MULTILINE
)
# In the top byte of a page's 64 bits. A page that is the file's own, or is not there, was not written.
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20
_IS_OWN = bytes(bool(top & (_PRESENT | _SWAPPED)) and not top & _OF_FILE for top in range(256))
_OWN = re.compile(rb"\x01+")
_ENTRY = 8
_PAGEMAP_BATCH = 1 << 17  # pages: 1 MiB of entries


@dataclass(frozen=True)
class Area:
    """Guest bytes from `start` on are at `address` of the process."""

    start: int
    address: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class LiveMemory:
    """Sorted by start, disjoint, page-aligned. `file` is the root's memory file, which lies below it all."""

    pid: int
    file: Path
    areas: tuple[Area, ...]

    @property
    def size(self) -> int:
        return self.areas[-1].end


@dataclass(frozen=True)
class Mapping:
    """A line of /proc/<pid>/maps."""

    begin: int
    end: int
    private: bool
    offset: int
    device: tuple[int, int]
    inode: int
    path: str


def parse_mappings(maps: str) -> list[Mapping]:
    return [
        Mapping(
            int(found[1], 16),
            int(found[2], 16),
            found[3] == "p",
            int(found[4], 16),
            (int(found[5], 16), int(found[6], 16)),
            int(found[7]),
            found[8],
        )
        for found in _MAPPING.finditer(maps)
    ]


def find_memory(pid: int, file: Path, size: int | None = None) -> LiveMemory:
    """By the private mappings of `file`, whose offsets are guest addresses, and what is mapped over them.

    With `size`, of the guest's memory, also what is mapped over its beginning and end. Raises EngineFailed when the
    process does not map the file, or parts of it cannot be found.
    """
    mappings = _read_mappings(pid)
    areas = render_areas(mappings, _identity(file), str(file.resolve()), size)
    covered = merge_spans((area.start, area.end) for area in areas)
    if not areas or len(covered) != 1 or covered[0][0] != 0 or (size is not None and covered[0][1] != size):
        raise EngineFailed(f"The guest memory of process {pid} was not found: it does not map all of {file}")
    return LiveMemory(pid, file, areas)


def render_areas(
    mappings: list[Mapping], identity: tuple[tuple[int, int], int], path: str, size: int | None
) -> tuple[Area, ...]:
    """Pieces of the file with the same distance of address and offset are one area, whatever lies between them."""
    device, inode = identity
    spans: dict[int, tuple[int, int]] = {}
    for mapping in mappings:
        # Some file systems show another device in maps than in stat.
        if not mapping.private or mapping.inode != inode or (mapping.device != device and mapping.path != path):
            continue
        distance, end = mapping.begin - mapping.offset, mapping.offset + mapping.end - mapping.begin
        begin, last = spans.get(distance, (mapping.offset, end))
        spans[distance] = min(begin, mapping.offset), max(last, end)
    ordered = sorted((begin, end, distance) for distance, (begin, end) in spans.items())
    if ordered and size is not None:
        begin, end, distance = ordered[0]
        ordered[0] = 0, end, distance
        begin, end, distance = ordered[-1]
        ordered[-1] = begin, max(begin, size), distance
    return tuple(Area(begin, begin + distance, end - begin) for begin, end, distance in ordered)


def find_written(memory: LiveMemory) -> list[tuple[int, int]]:
    """Spans (start, end) of guest memory that may differ from the root's file: all that do are in them.

    Pages that are the process's own, and all that is mapped from elsewhere.
    """
    identity, path = _identity(memory.file), str(memory.file.resolve())
    mappings = _read_mappings(memory.pid)
    spans: list[tuple[int, int]] = []
    with _named(memory.pid), _opened(f"/proc/{memory.pid}/pagemap") as pagemap:
        for area in memory.areas:
            for mapping in mappings:
                begin, end = max(mapping.begin, area.address), min(mapping.end, area.address + area.length)
                if begin >= end:
                    continue
                shift = area.start - area.address
                of_root = mapping.inode == identity[1] and (mapping.device == identity[0] or mapping.path == path)
                if of_root and mapping.private and mapping.offset == mapping.begin + shift:
                    spans.extend((start + shift, stop + shift) for start, stop in _own_pages(pagemap, begin, end))
                else:
                    spans.append((begin + shift, end + shift))
    return merge_spans(spans)


class MemoryReader:
    """Reads guest memory by guest address."""

    def __init__(self, memory: LiveMemory, fd: int) -> None:
        self._memory = memory
        self._fd = fd

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` from guest byte `start` on. Raises GuestDied when the process is gone."""
        with _named(self._memory.pid):
            for area in self._memory.areas:
                begin, end = max(start, area.start), min(start + len(buffer), area.end)
                if begin < end:
                    self._fill(area.address + begin - area.start, buffer[begin - start : end - start])

    def _fill(self, address: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self._fd, [buffer[done:]], address + done)
            if count == 0:  # its address space is gone
                raise _ended(self._memory.pid)
            done += count


@contextlib.contextmanager
def opened_memory(memory: LiveMemory) -> Iterator[MemoryReader]:
    with _named(memory.pid):
        fd = os.open(f"/proc/{memory.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield MemoryReader(memory, fd)
    finally:
        os.close(fd)


def _own_pages(pagemap: int | None, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans of addresses. Where the kernel has no pagemap: all."""
    if pagemap is None:
        yield begin, end
        return
    for start in range(begin, end, _PAGEMAP_BATCH * PAGE):
        pages = (min(end, start + _PAGEMAP_BATCH * PAGE) - start) // PAGE
        entries = os.pread(pagemap, pages * _ENTRY, start // PAGE * _ENTRY)
        if len(entries) != pages * _ENTRY:
            raise ProcessLookupError
        for found in _OWN.finditer(entries[_ENTRY - 1 :: _ENTRY].translate(_IS_OWN)):
            yield start + found.start() * PAGE, start + found.end() * PAGE


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int | None]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        fd = None
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def _read_mappings(pid: int) -> list[Mapping]:
    with _named(pid):
        return parse_mappings(Path(f"/proc/{pid}/maps").read_text("utf-8", "replace"))


def _identity(file: Path) -> tuple[tuple[int, int], int]:
    try:
        info = file.stat()
    except OSError as error:
        raise EngineFailed(f"The memory file {file} cannot be read: {error.strerror}") from error
    return (os.major(info.st_dev), os.minor(info.st_dev)), info.st_ino


@contextlib.contextmanager
def _named(pid: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, (FileNotFoundError, ProcessLookupError)) or not Path(f"/proc/{pid}/maps").exists():
            raise _ended(pid) from error
        raise EngineFailed(
            f"The memory of process {pid} cannot be read: {error.strerror}",
            hint="The kernel or a container may forbid it: forkd doctor shows what it allows",
        ) from error


def _ended(pid: int) -> GuestDied:
    return GuestDied(f"Process {pid} ended while its memory was read")
