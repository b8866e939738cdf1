"""What /proc says of a process that stands still: read at once, with no more calls than it takes."""

from __future__ import annotations

import os
from dataclasses import replace

from forkd.host.procfork import ptrace
from forkd.host.procfork.descriptors import Descriptor, same_file_candidates

_READ_BYTES = 1 << 16


def read_descriptors(pid: int) -> dict[int, Descriptor]:
    descriptors = {}
    for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        place = f"/proc/{pid}/fd/{number}"
        link, info = os.readlink(place), read_whole(f"/proc/{pid}/fdinfo/{number}")
        mode = os.stat(place).st_mode if link.startswith("/") else 0
        descriptors[number] = Descriptor(number, link, info.decode("utf-8", "replace"), mode=mode)
    for numbers in same_file_candidates(descriptors.values()):
        for index, number in enumerate(numbers):
            first = next((one for one in numbers[:index] if ptrace.is_same_file(pid, one, number)), None)
            if first is not None:
                descriptors[number] = replace(descriptors[number], alias_of=first)
    return descriptors


def read_whole(path: str) -> bytes:
    """All of it; the source stands still meanwhile, and a file object costs as much as the reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(fd, _READ_BYTES):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)
