"""A QEMU's memory: the snapshot's file mapped privately, and over it what layers hold, by QEMU's own system calls.

QEMU saves device state without memory only of memory that it believes is shared. So it is started with a decoy, an
empty file of the same size, shared; before it loads anything the snapshot's file is mapped over that, privately: the
believing stays. The file takes the decoy's place among its descriptors, too, open for reading only: nobody who breaks
into a QEMU can write to it.
"""

from __future__ import annotations

import contextlib
import os
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
_CLOSE, _MMAP, _DUP3 = 3, 9, 292
_READ_WRITE = 3
_PRIVATE, _FIXED, _ANONYMOUS = 0x02, 0x10, 0x20
_NO_FD = 2**64 - 1


@dataclass(frozen=True)
class Content:
    """What a VM's memory is to have. QEMU inherits the descriptors of `fds` and `file_fd`, under the same numbers."""

    file: Path
    file_fd: int = -1
    mapped: tuple[Run, ...] = ()
    copied: tuple[Run, ...] = ()
    fds: tuple[tuple[Path, int], ...] = ()


@contextlib.contextmanager
def opened_content(file: Path, runs: Sequence[Run]) -> Iterator[Content]:
    """Its descriptors are closed when the block has ended."""
    mapped, copied = choose_mapped(runs)
    with contextlib.ExitStack() as opened:
        fds = []
        for path in (file, *files_of(mapped)):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            opened.callback(os.close, fd)
            fds.append((path, fd))
        yield Content(file, fds[0][1], tuple(mapped), tuple(copied), tuple(fds[1:]))


def make_decoy(place: Path, size_bytes: int, user: int | None) -> Path:
    """For QEMU to be started with, as `user`. It is gone once the memory is in place."""
    with place.open("xb") as file:
        file.truncate(size_bytes)
        if user is not None:
            os.fchown(file.fileno(), user, user)
    return place


def make_private(pid: int, decoy: Path, content: Content, then: Sequence[Call] = ()) -> None:
    """Of a QEMU that has loaded nothing yet; `then` are calls to be made on the way. Raises EngineFailed."""
    with _understood(pid, content.file):
        fd, link = _find_descriptor(pid, decoy)
        size = decoy.stat().st_size
        if content.file.stat().st_size != size:
            raise EngineFailed(f"The memory {content.file} has not {size} bytes", hint="Make the snapshot again")
        address = find_address(_read_maps(pid), link, size)
        calls = render_mapping(content, address, size, fd)
        (make_many_calls if content.mapped else make_calls)(pid, [*calls, *then], POLLS)
        if find_mapped(_read_maps(pid), link):
            raise EngineFailed(
                "QEMU still shares its memory with another file than the snapshot's", hint="Fork it again"
            )
        decoy.unlink()
        write_runs(LiveMemory(pid, content.file, (Area(0, address, size),)), content.copied)


def find_live_memory(pid: int) -> LiveMemory:
    """Where a QEMU has its guest's memory. Raises EngineFailed unless all of it is its own."""
    with _understood(pid, Path("of the guest")):
        # Its own descriptor stays, though the snapshot may be gone.
        held = _find_memory_descriptor(pid, _read_maps(pid))
        link = held.readlink()
        named = link.exists() and link.samefile(held)
        return find_memory(pid, link if named else held, held.stat().st_size)


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
    """The calls that map the file privately at `address`, runs over it, and close what they were read by. Pure.

    `fd`: of what was there before, whose place the file takes.
    """
    for run in (*content.mapped, *content.copied):
        if run.start < 0 or run.end > size:
            raise EngineFailed(f"A layer has memory up to byte {run.end}, the VM has {size} bytes")
    fds = dict(content.fds)
    calls = [
        _map(address, size, _PRIVATE, content.file_fd, 0),
        Call(_DUP3, (content.file_fd, fd, os.O_CLOEXEC), returns=fd, what="put the memory file in place"),
        Call(_CLOSE, (content.file_fd,), what="close the memory file"),
    ]
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


def _find_descriptor(pid: int, file: Path) -> tuple[int, str]:
    """QEMU's own of a file, and what the kernel calls that."""
    wanted = file.stat()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(entry.stat(), wanted):
                return int(entry.name), str(entry.readlink())
    raise EngineFailed(f"QEMU does not have {file} open", hint="Fork it again")


def _find_memory_descriptor(pid: int, maps: str) -> Path:
    """The one file that QEMU has both open and mapped, privately. By its inode: it may have lost its name."""
    mapped = {(each.inode, each.path) for each in parse_mappings(maps) if each.inode and each.private}
    for entry in sorted(Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            name = str(entry.readlink()).replace("\n", "\\012")
            if entry.is_file() and (entry.stat().st_ino, name) in mapped and _is_read_only(pid, entry.name):
                return entry
    raise EngineFailed("The VM was started with memory that cannot be saved", hint="Fork its snapshot again")


def _is_read_only(pid: int, number: str) -> bool:
    flags = int(Path(f"/proc/{pid}/fdinfo/{number}").read_text().partition("flags:")[2].split()[0], 8)
    return flags & os.O_ACCMODE == os.O_RDONLY


def _read_maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")


@contextlib.contextmanager
def _understood(pid: int, file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineFailed(f"The memory {file} of process {pid} cannot be looked at: {error.strerror}") from error
