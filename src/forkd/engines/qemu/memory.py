"""A QEMU's memory: the snapshot's file mapped privately, and over it what layers hold, by QEMU's own system calls.

QEMU saves device state without memory only of memory that it believes is shared. So it is started with the file shared,
and before it loads anything the file is mapped once more at the same address, privately: the believing stays.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.runs import files_of, write_runs
from forkd.errors import EngineFailed
from forkd.host.pages import Area, LiveMemory, Mapping, find_memory, parse_mappings
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.source import make_calls, make_many_calls
from forkd.model.memory import PAGE, Run, cut, merge_runs

# Each costs a system call at the start, and a little in every fork; the rest of a layer is copied.
MOST_MAPPED = 512
_CLOSE, _MMAP = 3, 9
_READ_WRITE = 3
_PRIVATE, _FIXED, _ANONYMOUS = 0x02, 0x10, 0x20
_NO_FD = 2**64 - 1
_SHARED_MEMORY = b",share=on,"
_MEMORY_PATH = re.compile(rb",mem-path=((?:[^,\0]|,,)*),")


@dataclass(frozen=True)
class Content:
    """What a VM's memory is to have. QEMU inherits the descriptors of `fds`, under the same numbers."""

    file: Path
    mapped: tuple[Run, ...] = ()
    copied: tuple[Run, ...] = ()
    fds: tuple[tuple[Path, int], ...] = ()


@contextlib.contextmanager
def opened_content(file: Path, runs: Sequence[Run]) -> Iterator[Content]:
    """Its descriptors are closed when the block has ended."""
    mapped, copied = choose_mapped(runs)
    with contextlib.ExitStack() as opened:
        fds = []
        for path in files_of(mapped):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            fds.append((path, fd))
        yield Content(file, tuple(mapped), tuple(copied), tuple(fds))


def make_private(pid: int, content: Content, then: Sequence[Call] = ()) -> None:
    """Of a QEMU that has loaded nothing yet; `then` are calls to be made on the way. Raises EngineFailed."""
    with _understood(pid, content.file):
        fd, link = _find_descriptor(pid, content.file)
        size = content.file.stat().st_size
        address = find_address(_read_maps(pid), link, size)
        calls = render_mapping(content, address, size, fd)
        (make_many_calls if content.mapped else make_calls)(pid, [*calls, *then], POLLS)
        _check_private(pid, link)
        write_runs(LiveMemory(pid, content.file, (Area(0, address, size),)), content.copied)


def find_live_memory(pid: int) -> LiveMemory:
    """Where a QEMU has its guest's memory. Raises EngineFailed unless all of it is its own."""
    try:
        file = parse_memory_path(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError as error:
        raise EngineFailed(f"Process {pid} cannot be looked at: {error.strerror}") from error
    if file is None:
        raise EngineFailed("The VM was started with memory that cannot be saved", hint="Fork its snapshot again")
    with _understood(pid, file):
        # Its own descriptor stays, though the snapshot may be gone.
        held = _find_memory_descriptor(pid, file)
        _check_private(pid, str(held.readlink()))
        named = file.exists() and file.samefile(held)
        return find_memory(pid, file if named else held, held.stat().st_size)


def choose_mapped(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """The runs to map, the largest, and those to copy. Pure.

    The first page is never mapped: what is left of the file's own mapping tells where the memory begins.
    """
    whole = merge_runs(runs)
    first = [cut(run, 0, PAGE) for run in whole[:1] if run.start == 0]
    rest = [cut(run, max(run.start, PAGE), run.end) for run in whole if run.end > PAGE]
    largest = sorted(rest, key=lambda run: run.length, reverse=True)[:MOST_MAPPED]
    chosen = set(largest)
    return [run for run in rest if run in chosen], [*first, *(run for run in rest if run not in chosen)]


def render_mapping(content: Content, address: int, size: int, fd: int) -> list[Call]:
    """The calls that map the file privately at `address`, runs over it, and close what they were read by. Pure."""
    for run in (*content.mapped, *content.copied):
        if run.start < 0 or run.end > size:
            raise EngineFailed(f"A layer has memory up to byte {run.end}, the VM has {size} bytes")
    fds = dict(content.fds)
    calls = [_map(address, size, _PRIVATE, fd, 0)]
    for run in content.mapped:
        place = address + run.start
        if run.file is None:
            calls.append(_map(place, run.length, _PRIVATE | _ANONYMOUS, _NO_FD, 0))
        else:
            calls.append(_map(place, run.length, _PRIVATE, fds[run.file], run.at))
    return calls + [Call(_CLOSE, (number,), what="close a layer's file") for _, number in content.fds]


def _map(address: int, length: int, how: int, fd: int, at: int) -> Call:
    args = (address, length, _READ_WRITE, how | _FIXED, fd, at)
    return Call(_MMAP, args, returns=address, what="map memory")


def find_mapped(maps: str, link: str) -> list[Mapping]:
    """The pieces of a file, by the name that the kernel has for it. Pure."""
    name = link.replace("\n", "\\012")
    lines = [line for line in maps.splitlines() if line.endswith(name)]  # to take all of them apart takes a millisecond
    return [mapping for mapping in parse_mappings("\n".join(lines)) if mapping.path == name]


def find_address(maps: str, link: str, size: int) -> int:
    """Where the guest's memory begins. Pure."""
    pieces = [(each.begin, each.offset, each.end - each.begin) for each in find_mapped(maps, link)]
    if len(pieces) != 1 or pieces[0][1:] != (0, size) or size % PAGE:
        raise EngineFailed(f"QEMU does not map its memory of {size} bytes in one piece")
    return pieces[0][0]


def parse_memory_path(arguments: bytes) -> Path | None:
    """The memory file, from a command line; None where QEMU does not take it for shared. Pure."""
    found = _MEMORY_PATH.search(arguments)
    if found is None or _SHARED_MEMORY not in arguments:
        return None
    return Path(os.fsdecode(found[1].replace(b",,", b",")))


def _check_private(pid: int, link: str) -> None:
    """A guest that wrote to the snapshot's file would change what all others read."""
    if any(not piece.private for piece in find_mapped(_read_maps(pid), link)):
        raise EngineFailed("QEMU still shares its memory with the snapshot", hint="Fork it again")


def _find_descriptor(pid: int, file: Path) -> tuple[int, str]:
    """QEMU's own of its memory file, and what the kernel calls that."""
    wanted = file.stat()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(entry.stat(), wanted):
                return int(entry.name), str(entry.readlink())
    raise EngineFailed(f"QEMU does not have {file} open", hint="The snapshot was replaced: fork the new one")


def _find_memory_descriptor(pid: int, file: Path) -> Path:
    """The only file that QEMU may both read and write. By what the kernel has of it: it may have lost its name."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if entry.is_file() and _is_writable(Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text()):
                return entry
    raise EngineFailed(f"QEMU does not have {file} open any more", hint="Fork its snapshot again")


def _is_writable(fdinfo: str) -> bool:
    flags = int(fdinfo.partition("flags:")[2].split()[0], 8)
    return flags & os.O_ACCMODE == os.O_RDWR


def _read_maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")


@contextlib.contextmanager
def _understood(pid: int, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineFailed(f"The memory {file} of process {pid} cannot be looked at: {error.strerror}") from error
