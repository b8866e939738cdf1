"""The index of a layer: which pages of the guest are where in its file `pages`, or zero. Pure.

    8 bytes    b"forkdex1"
    8 bytes    how many extents follow
    24 bytes   each: first page in the guest, how many, first page in `pages` (all bits set: they are zero)

Numbers are little-endian. Extents are sorted, do not overlap, and may share pages of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from forkd.model.memory import PAGE, Run

MAGIC = b"forkdex1"
ZEROS = (1 << 64) - 1
# A VMM cannot have as many mappings; a writer stays far below.
MAX_EXTENTS = 1 << 18
_HEADER = struct.Struct("<8sQ")
_EXTENT = struct.Struct("<QQQ")
MAX_BYTES = _HEADER.size + MAX_EXTENTS * _EXTENT.size

# First page in the guest, how many, first page in the file or ZEROS.
Extent = tuple[int, int, int]


def render_extents(extents: Iterable[Extent]) -> bytes:
    numbers = list(chain.from_iterable(extents))
    count = len(numbers) // 3
    return _HEADER.pack(MAGIC, count) + struct.pack(f"<{len(numbers)}Q", *numbers)


def parse_extents(data: bytes, *, pages_bytes: int, memory_bytes: int) -> list[Extent]:
    """Raises ValueError unless each lies within the guest's memory and within `pages`, and after the one before."""
    if len(data) < _HEADER.size or len(data) > MAX_BYTES:
        raise ValueError(f"extents of {len(data)} bytes")
    magic, count = _HEADER.unpack_from(data)
    if magic != MAGIC or len(data) != _HEADER.size + count * _EXTENT.size:
        raise ValueError("no extents, or not as many as announced")
    extents: list[Extent] = []
    last, guest_pages, file_pages = 0, memory_bytes // PAGE, pages_bytes // PAGE
    for first, length, place in _EXTENT.iter_unpack(memoryview(data)[_HEADER.size :]):
        if not last <= first < first + length <= guest_pages:
            raise ValueError(f"an extent at page {first} with {length} pages")
        if place != ZEROS and place + length > file_pages:
            raise ValueError(f"an extent at page {place} of the file with {length} pages")
        last = first + length
        extents.append((first, length, place))
    return extents


def runs_of(extents: Iterable[Extent], file: Path) -> list[Run]:
    return [
        Run(first * PAGE, length * PAGE, None, 0)
        if place == ZEROS
        else Run(first * PAGE, length * PAGE, file, place * PAGE)
        for first, length, place in extents
    ]
