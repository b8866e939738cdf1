"""The memory of a snapshot, read through its chain; and memory written as one file."""

from __future__ import annotations

import contextlib
import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import SnapshotDamaged
from forkd.host.files import enough_disk
from forkd.host.pages import LiveMemory, MemoryReader, find_written, opened_memory
from forkd.host.turns import Turns
from forkd.model.memory import PAGE, merge_spans
from forkd.store.chain import MEMORY, Snapshot
from forkd.store.manifest import render_remedy

# Bytes that are looked at together: memory use stays bounded, and calls are few.
BATCH = 4 * 1024 * 1024
# A step of finding zeros; pages are looked at one by one only where it is not all zeros.
_BLOCK = 16 * PAGE
_ZERO_BLOCK = bytes(_BLOCK)
ZERO_PAGE = bytes(PAGE)

# Called with the bytes that are done, and those there are in all.
OnProgress = Callable[[int, int], None]


class Content:
    """Reads the guest memory of a snapshot whose files are open.

    By read(2), not by mapping: a file that is cut short meanwhile is an error then, and not our end.
    """

    def __init__(self, snapshot: Snapshot, files: dict[Path, int]) -> None:
        assert snapshot.root_memory is not None
        self.size = snapshot.memory_bytes
        self._tag = snapshot.manifest.tag
        self._root = files[snapshot.root_memory]
        self._runs = snapshot.runs
        self._starts = [run.start for run in snapshot.runs]
        self._files = files

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with guest memory from byte `start` on."""
        end = start + len(buffer)
        at = max(0, bisect_right(self._starts, start) - 1)
        done = start
        while done < end:
            while at < len(self._runs) and self._runs[at].end <= done:
                at += 1
            run = self._runs[at] if at < len(self._runs) else None
            if run is None or run.start > done:
                stop = end if run is None else min(end, run.start)
                self._fill(self._root, done, buffer[done - start : stop - start])
            else:
                stop = min(end, run.end)
                part = buffer[done - start : stop - start]
                if run.file is None:
                    part[:] = bytes(len(part))
                else:
                    self._fill(self._files[run.file], run.at + done - run.start, part)
            done = stop

    def data_spans(self) -> list[tuple[int, int]]:
        """Spans (start, end) outside of which all is zero."""
        over = ((run.start, run.end) for run in self._runs if run.file is not None)
        return merge_spans([*data_spans(self._root, self.size), *over])

    def _fill(self, fd: int, offset: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            if count == 0:
                raise SnapshotDamaged(
                    f"The memory of snapshot {self._tag} is shorter than it was", hint=render_remedy(self._tag)
                )
            done += count


@contextlib.contextmanager
def opened_content(snapshot: Snapshot) -> Iterator[Content]:
    """Of a snapshot that is held."""
    assert snapshot.root_memory is not None
    paths = {snapshot.root_memory, *(run.file for run in snapshot.runs if run.file is not None)}
    files: dict[Path, int] = {}
    try:
        for path in paths:
            files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        yield Content(snapshot, files)
    finally:
        for fd in files.values():
            os.close(fd)


def data_spans(fd: int, size: int) -> list[tuple[int, int]]:
    """The parts of a file that are no holes, in whole pages."""
    spans = []
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            raise
        end = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        spans.append((start // PAGE * PAGE, min(size, -(-end // PAGE) * PAGE)))
    return merge_spans(spans)


@dataclass(frozen=True)
class WholeStats:
    bytes_logical: int
    bytes_written: int


def write_whole(source: LiveMemory | Snapshot, staging: Path, *, on_progress: OnProgress | None = None) -> WholeStats:
    """All of a VM's or a snapshot's memory as one sparse file `memory`. What is only zeros is a hole."""
    with contextlib.ExitStack() as stack:
        reader: Content | MemoryReader
        if isinstance(source, Snapshot):
            reader = stack.enter_context(opened_content(source))
            spans, size = reader.data_spans(), reader.size
        else:
            reader = stack.enter_context(opened_memory(source))
            with source.file.open("rb") as root:
                spans = merge_spans([*data_spans(root.fileno(), source.size), *find_written(source)])
            size = source.size
        with enough_disk(staging), (staging / MEMORY).open("wb", buffering=0) as out:
            out.truncate(size)
            return WholeStats(size, _write_spans(reader, spans, out.fileno(), on_progress))


def _write_spans(
    reader: Content | MemoryReader, spans: list[tuple[int, int]], fd: int, on_progress: OnProgress | None
) -> int:
    buffer = memoryview(bytearray(BATCH))
    total, done, written, turns = sum(end - start for start, end in spans), 0, 0, Turns()
    for begin, end in spans:
        for start in range(begin, end, BATCH):
            part = buffer[: min(BATCH, end - start)]
            reader.read_into(start, part)
            for first, last in _nonzero_parts(part, turns):
                _write_all(fd, part[first:last], start + first)
                written += last - first
            done += len(part)
            if on_progress is not None:
                on_progress(done, total)
    return written


def _nonzero_parts(data: memoryview, turns: Turns) -> list[tuple[int, int]]:
    parts = []
    for start in range(0, len(data), _BLOCK):
        turns.give_way()
        block = data[start : start + _BLOCK].tobytes()
        if block == _ZERO_BLOCK[: len(block)]:
            continue
        parts += [
            (start + at, start + min(at + PAGE, len(block)))
            for at in range(0, len(block), PAGE)
            if block[at : at + PAGE] != ZERO_PAGE[: len(block) - at]
        ]
    return merge_spans(parts)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
