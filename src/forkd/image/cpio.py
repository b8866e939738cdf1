"""The cpio archive the kernel unpacks as its first root: format "newc", written in memory."""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass

_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"
_BLOCK = 512


@dataclass(frozen=True)
class Entry:
    """One member. `mode` carries the type bits; everything belongs to root and has no time."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(name: str) -> Entry:
    return Entry(name, stat.S_IFDIR | 0o755)


def file(name: str, data: bytes, mode: int = 0o644) -> Entry:
    return Entry(name, stat.S_IFREG | mode, data)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, stat.S_IFLNK | 0o777, target.encode())


def character_device(name: str, major: int, minor: int, mode: int = 0o600) -> Entry:
    return Entry(name, stat.S_IFCHR | mode, device=(major, minor))


def render_cpio(entries: Iterable[Entry]) -> bytes:
    out = bytearray()
    for inode, entry in enumerate(entries, start=1):
        _append(out, entry, inode)
    _append(out, Entry(_TRAILER, 0), 0)
    out += bytes(-len(out) % _BLOCK)
    return bytes(out)


def _append(out: bytearray, entry: Entry, inode: int) -> None:
    name = entry.name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    out += _MAGIC + b"".join(b"%08X" % field for field in fields) + name
    out += bytes(-len(out) % 4)
    out += entry.data
    out += bytes(-len(out) % 4)
