"""Memory files that a process has mapped shared, for itself alone: its duplicate gets files of its own, with the same
content, at the same addresses. Firecracker maps each queue of buffers twice in a row that way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.host.procfork.program import DATA, Call
from forkd.host.procfork.source import Source

_CLOSE, _MMAP, _PWRITE64, _FTRUNCATE, _MEMFD_CREATE = 3, 9, 18, 77, 319
_SHARED_FIXED, _MFD_CLOEXEC = 0x11, 1
_MAPPED = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) ([r-])([w-])([x-])s ([0-9a-f]+) \S+ (\d+) +/memfd:(\S*) \(deleted\)$", re.MULTILINE
)
_NAME = re.compile(r"/memfd:\S* \(deleted\)")
_PAGE = 4096


@dataclass(frozen=True)
class Piece:
    address: int
    size: int
    offset: int
    protection: int


@dataclass(frozen=True)
class MemoryFile:
    name: str
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return max(piece.offset + piece.size for piece in self.pieces)


def is_memory_file(name: str) -> bool:
    """Of a mapping, by its name."""
    return _NAME.fullmatch(name) is not None


def find_memory_files(maps: str) -> list[MemoryFile]:
    """From /proc/<pid>/maps. Pure."""
    found: dict[str, tuple[str, list[Piece]]] = {}
    for each in _MAPPED.finditer(maps):
        start, end = int(each[1], 16), int(each[2], 16)
        protection = sum(bit for bit, letter in ((1, each[3]), (2, each[4]), (4, each[5])) if letter != "-")
        found.setdefault(each[7], (each[8], []))[1].append(Piece(start, end - start, int(each[6], 16), protection))
    return [MemoryFile(name, tuple(pieces)) for name, pieces in found.values()]


def read_memory_files(source: Source) -> dict[MemoryFile, bytes]:
    """Those of a process at rest, with what is in them."""
    maps = Path(f"/proc/{source.pid}/maps").read_text(errors="replace")
    return {file: _read(source, file) for file in find_memory_files(maps)}


def _read(source: Source, file: MemoryFile) -> bytes:
    content = bytearray(file.size)
    for piece in file.pieces:
        content[piece.offset : piece.offset + piece.size] = source.read_memory(piece.address, piece.size)
    return bytes(content)


def render_remap(files: Mapping[MemoryFile, bytes], free: int) -> list[Call]:
    """`files` with what is in them; `free`: the lowest number that no descriptor has. Pure."""
    calls: list[Call] = []
    for file, content in files.items():
        name = file.name.encode() + b"\0"
        calls += [
            Call(_MEMFD_CREATE, (DATA, _MFD_CLOEXEC), name, returns=free, what="make a memory file"),
            Call(_FTRUNCATE, (free, file.size), what="size a memory file"),
            *_fill(free, content),
        ]
        for piece in file.pieces:
            args = (piece.address, piece.size, piece.protection, _SHARED_FIXED, free, piece.offset)
            calls.append(Call(_MMAP, args, returns=piece.address, what="map a memory file"))
        calls.append(Call(_CLOSE, (free,), what="close a memory file"))
    return calls


def _fill(fd: int, content: bytes) -> Sequence[Call]:
    """Only what is not zero, in whole pages."""
    pages = [at for at in range(0, len(content), _PAGE) if any(content[at : at + _PAGE])]
    return [
        Call(
            _PWRITE64,
            (fd, DATA, len(content[at : at + _PAGE]), at),
            content[at : at + _PAGE],
            returns=len(content[at : at + _PAGE]),
            what="fill a memory file",
        )
        for at in pages
    ]
