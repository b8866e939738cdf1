"""The guest memory of a VMM process: where it is, which of its pages are not the root file's, and what they hold.

A VMM maps the memory file of a root privately, in one piece or several; layers are mapped over parts of that. A page
that was written is anonymous then, which /proc/<pid>/pagemap shows. Works while the process runs, stands still, or is
traced; what is read is one instant only if the process does not run.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from forkd.errors import EngineFailed, GuestDied
from forkd.model.memory import PAGE, Run, lay_over, merge_spans

_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) ...([ps]) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) (\d+) *(.*)$", re.MULTILINE
)
# In the top byte of a page's 64 bits. A page that is the file's own, or is not there, was not written.
_PRESENT, _SWAPPED, _OF_FILE, _ALONE = 0x80, 0x40, 0x20, 0x01
_IS_OWN = bytes(bool(top & (_PRESENT | _SWAPPED)) and not top & _OF_FILE for top in range(256))
_IS_ALONE = bytes(bool(top & _PRESENT) and bool(top & _ALONE) and not top & _OF_FILE for top in range(256))
_FOUND = re.compile(rb"\x01+")
_ENTRY = 8
_MAPS_BATCH = 1 << 18
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


class Handles(NamedTuple):
    """Descriptors of files in /proc/<pid>. They work in a process that inherits them, which may not open its own."""

    mem: int
    maps: int
    pagemap: int | None  # some kernels have none


@dataclass(frozen=True)
class LiveMemory:
    """Sorted by start, disjoint, page-aligned. `file` is the root's memory file, which lies below it all."""

    pid: int
    file: Path
    areas: tuple[Area, ...]
    # Of the process, opened by someone who may; None: they are opened when they are needed.
    handles: Handles | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return self.areas[-1].end


class Mapping(NamedTuple):
    """A line of /proc/<pid>/maps."""

    begin: int
    end: int
    private: bool
    offset: int
    device: tuple[int, int]
    inode: int
    path: str


@dataclass(frozen=True)
class Identity:
    device: tuple[int, int]
    inode: int
    path: str

    def is_of(self, mapping: Mapping) -> bool:
        # Some file systems show another device in maps than in stat.
        return mapping.inode == self.inode and (mapping.device == self.device or mapping.path == self.path)


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
    with opened_handles(LiveMemory(pid, file, ())) as handles:
        mappings = _read_mappings(pid, handles.maps)
    areas = render_areas(mappings, _identity(file), size)
    covered = merge_spans((area.start, area.end) for area in areas)
    if not areas or len(covered) != 1 or covered[0][0] != 0 or (size is not None and covered[0][1] != size):
        raise EngineFailed(f"The guest memory of process {pid} was not found: it does not map all of {file}")
    return LiveMemory(pid, file, areas)


def render_areas(mappings: list[Mapping], file: Identity, size: int | None) -> tuple[Area, ...]:
    """Pieces of the file with the same distance of address and offset are one area, whatever lies between them."""
    spans: dict[int, tuple[int, int]] = {}
    for mapping in mappings:
        if not mapping.private or not file.is_of(mapping):
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


def find_written(memory: LiveMemory, runs: Sequence[Run] = ()) -> list[tuple[int, int]]:
    """Spans (start, end) of guest memory that may differ from the root's file with `runs` over it: all that do are.

    Pages that are the process's own, and what is not mapped from where the runs or the root have it.
    """
    with opened_handles(memory) as handles:
        mappings = _read_mappings(memory.pid, handles.maps)
        spans = [span for area in memory.areas for span in _mapped_elsewhere(memory, area, mappings, runs)]
        with _named(memory.pid):
            for area in memory.areas:
                shift = area.start - area.address
                own = _find_pages(handles.pagemap, area.address, area.address + area.length, _IS_OWN)
                spans.extend((begin + shift, end + shift) for begin, end in own)
    return merge_spans(spans)


def _mapped_elsewhere(
    memory: LiveMemory, area: Area, mappings: list[Mapping], runs: Sequence[Run]
) -> Iterator[tuple[int, int]]:
    identities: dict[Path | None, Identity | None] = {None: None, memory.file: _identity(memory.file)}
    shift = area.start - area.address
    wanted = lay_over((Run(0, memory.size, memory.file, 0),), runs)
    at = 0
    for mapping in mappings:
        start, end = max(mapping.begin + shift, area.start), min(mapping.end + shift, area.end)
        while start < end:
            while wanted[at].end <= start:
                at += 1
            run = wanted[at]
            stop = min(end, run.end)
            if run.file not in identities:
                assert run.file is not None
                identities[run.file] = _identity(run.file)
            offset = run.at + start - run.start
            if not _is_mapped(mapping, identities[run.file], offset, start - shift):
                yield start, stop
            start = stop


def _is_mapped(mapping: Mapping, identity: Identity | None, offset: int, address: int) -> bool:
    """A private mapping of that file, with that offset at that address. None: of no file."""
    if identity is None:
        return mapping.private and mapping.inode == 0 and not mapping.path
    return mapping.private and identity.is_of(mapping) and mapping.offset + address - mapping.begin == offset


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
    with opened_handles(memory) as handles:
        yield MemoryReader(memory, handles.mem)


@contextlib.contextmanager
def opened_handles(memory: LiveMemory) -> Iterator[Handles]:
    """Those it has, or new ones."""
    if memory.handles is not None:
        yield memory.handles
        return
    with contextlib.ExitStack() as stack:

        def opened(name: str) -> int:
            fd = os.open(f"/proc/{memory.pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            return fd

        with _named(memory.pid):
            mem, maps = opened("mem"), opened("maps")
            pagemap: int | None = None
            with contextlib.suppress(FileNotFoundError):
                pagemap = opened("pagemap")
        yield Handles(mem, maps, pagemap)


def find_alone(memory: LiveMemory) -> list[tuple[int, int]]:
    """Spans of addresses whose pages no other process has: what a fork has written, as long as its source lives.

    Nothing where the kernel has no pagemap.
    """
    with opened_handles(memory) as handles, _named(memory.pid):
        if handles.pagemap is None:
            return []
        areas = [(area.address, area.address + area.length) for area in memory.areas]
        return [span for begin, end in areas for span in _find_pages(handles.pagemap, begin, end, _IS_ALONE)]


def _find_pages(pagemap: int | None, begin: int, end: int, wanted: bytes) -> Iterator[tuple[int, int]]:
    """Spans of addresses; `wanted` says of each top byte whether it is. Where the kernel has no pagemap: all."""
    if pagemap is None:
        yield begin, end
        return
    for start in range(begin, end, _PAGEMAP_BATCH * PAGE):
        pages = (min(end, start + _PAGEMAP_BATCH * PAGE) - start) // PAGE
        entries = os.pread(pagemap, pages * _ENTRY, start // PAGE * _ENTRY)
        if len(entries) != pages * _ENTRY:
            raise ProcessLookupError
        for found in _FOUND.finditer(entries[_ENTRY - 1 :: _ENTRY].translate(wanted)):
            yield start + found.start() * PAGE, start + found.end() * PAGE


def _read_mappings(pid: int, maps: int) -> list[Mapping]:
    with _named(pid):
        os.lseek(maps, 0, os.SEEK_SET)
        text = b"".join(iter(lambda: os.read(maps, _MAPS_BATCH), b""))
    return parse_mappings(text.decode("utf-8", "replace"))


def _identity(file: Path) -> Identity:
    try:
        info = file.stat()
    except OSError as error:
        raise EngineFailed(f"The memory file {file} cannot be read: {error.strerror}") from error
    return Identity((os.major(info.st_dev), os.minor(info.st_dev)), info.st_ino, str(file.resolve()))


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
