"""Layers: the pages in which a VM's memory differs from the snapshot it came from.

    pages     those pages, back to back
    extents   where each belongs in the guest (extents.py)

What is mapped when a layer is loaded is its extents, so they are kept few and long:

- Zero pages and pages that `pages` has already are not stored, if that leaves out at least four pages in a row, or all
  of a stretch of changed pages. A shorter one amid others is stored: it would cost two mappings more. Four become more,
  up to never, in a layer of many thousand extents.
- Only pages that differ are stored, until a layer has MANY_EXTENTS: from there on ever longer stretches of unchanged
  pages between changed ones are stored too. So a layer holds at most as many bytes as differ, and its index, which is
  0.6 % of them at worst, but for a guest that changed tens of thousands of scattered places.
- If the chain would have more than MAX_RUNS, the layer takes over all that the layers below it have: a process may
  have 65,530 mappings by default, and what cannot be loaded is lost.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import EngineFailed
from forkd.host.faults import fault_point
from forkd.host.files import enough_disk
from forkd.host.pages import LiveMemory, find_written, opened_memory
from forkd.host.turns import Turns
from forkd.model.memory import PAGE, lay_over, merge_spans
from forkd.store.chain import EXTENTS, PAGES, Snapshot, check_depth
from forkd.store.content import BATCH, ZERO_PAGE, OnProgress, opened_content
from forkd.store.extents import ZEROS, Extent, render_extents, runs_of

MANY_EXTENTS = 16_384
MAX_RUNS = 28_000
_LEAST = 4
# Pages that are looked at together.
_BLOCK = 16 * PAGE
_PENDING = 256 * 1024
# Pages that are remembered to find duplicates of: some 100 MiB of our memory.
_MAX_KNOWN = 1 << 20


@dataclass(frozen=True)
class LayerStats:
    bytes_looked_at: int  # pages that could differ
    bytes_dirty: int  # pages that differ
    bytes_written: int  # files of the layer
    bytes_zero: int  # of those that differ, not stored
    bytes_duplicate: int  # of those that differ, not stored
    extents: int


def write_layer(
    memory: LiveMemory, parent: Snapshot, staging: Path, *, on_progress: OnProgress | None = None
) -> LayerStats:
    """What differs in a VM that stands still from a snapshot, which is held, into `staging`.

    Fast for a VM that maps the snapshot's root, with or without layers over it; right for any of the same size. Raises
    Conflict for a snapshot that is too deep to have a layer over it.
    """
    check_depth(parent)
    if parent.root_memory is None or memory.size != parent.memory_bytes:
        raise EngineFailed(
            f"A VM with {memory.size} bytes of memory is not of snapshot {parent.manifest.tag}, "
            f"which has {parent.memory_bytes}"
        )
    below = [(run.start, run.end) for run in parent.runs]
    # A VM of another root may differ where it has written nothing.
    is_of_root = memory.file.samefile(parent.root_memory)
    spans = _few_spans(find_written(memory, parent.runs) if is_of_root else [(0, memory.size)])
    with enough_disk(staging):
        stats, extents = _write_pages(memory, parent, spans, (), staging, on_progress)
        if len(below) + len(extents) > MAX_RUNS and _count_runs(parent, extents) > MAX_RUNS:
            every = _few_spans(merge_spans([*spans, *below]))
            stats, extents = _write_pages(memory, parent, every, below, staging, on_progress)
        fault_point("layer.pages")
        index = render_extents(extents)
        (staging / EXTENTS).write_bytes(index)
    return LayerStats(
        stats.looked_at,
        stats.dirty,
        (staging / PAGES).stat().st_size + len(index),
        stats.zero,
        stats.duplicate,
        len(extents),
    )


@dataclass
class _Counts:
    looked_at: int = 0
    dirty: int = 0
    zero: int = 0
    duplicate: int = 0


def _write_pages(
    memory: LiveMemory,
    parent: Snapshot,
    spans: list[tuple[int, int]],
    also: Sequence[tuple[int, int]],
    staging: Path,
    on_progress: OnProgress | None,
) -> tuple[_Counts, list[Extent]]:
    """`also`: spans that are stored though they do not differ."""
    total = sum(end - start for start, end in spans)
    mine, theirs = memoryview(bytearray(BATCH)), memoryview(bytearray(BATCH))
    with (
        opened_memory(memory) as live,
        opened_content(parent) as content,
        (staging / PAGES).open("w+b", buffering=0) as out,
    ):
        turns = Turns()
        writer = _PageWriter(out.fileno(), turns)
        for start, end in _batches(spans):
            length = end - start
            live.read_into(start, mine[:length])
            content.read_into(start, theirs[:length])
            stretches = _differing(mine[:length], theirs[:length], turns)
            writer.counts.dirty += sum(last - first for first, last in stretches)
            if also:
                stretches = merge_spans([*stretches, *_within(also, start, end)])
            for first, last in _bridged(stretches, writer.bridge):
                writer.add((start + first) // PAGE, mine[first:last])
            writer.counts.looked_at += length
            if on_progress is not None:
                on_progress(writer.counts.looked_at, total)
        writer.flush()
        return writer.counts, writer.extents


class _PageWriter:
    def __init__(self, fd: int, turns: Turns) -> None:
        self.counts = _Counts()
        self.extents: list[Extent] = []
        self._fd = fd
        self._turns = turns
        # The key of each page of the file (0: zeros), and the first page of the file with a key.
        self._keys = array("q")
        self._known: dict[int, int] = {}
        # The last pages of the file, not written yet: guests often change pages one here, one there.
        self._pending = bytearray()
        self._written = 0

    @property
    def bridge(self) -> int:
        """The most unchanged bytes that are stored to join two changed stretches."""
        over = len(self.extents) - MANY_EXTENTS
        return 0 if over < 0 else PAGE << min(10, over // 512)

    @property
    def _least(self) -> int:
        """The fewest pages in a row to leave out."""
        return _LEAST << 2 * (len(self.extents) // 4096)

    def add(self, guest: int, data: memoryview) -> None:
        """A stretch of pages that is at page `guest`."""
        keys: list[int] = []
        for start in range(0, len(data), _BLOCK):
            keys += _keys_of(data[start : start + _BLOCK].tobytes())
            self._turns.give_way()
        least, count = self._least, len(keys)
        stored = at = 0  # pages from `stored` to `at` are to be written
        while at < count:
            self._turns.give_way()
            length, place = self._match(keys, at)
            if length < least and length < count:
                self._remember(keys[at])
                at += 1
                continue
            self._write(guest + stored, data[stored * PAGE : at * PAGE])
            stored = at
            if place != ZEROS and not self._is_at(place, data[at * PAGE : (at + length) * PAGE]):
                self._remember(keys[at])
                at += 1
                continue
            self._extend(guest + at, length, place)
            if place == ZEROS:
                self.counts.zero += length * PAGE
            else:
                self.counts.duplicate += length * PAGE
            at = stored = at + length
        self._write(guest + stored, data[stored * PAGE :])

    def _match(self, keys: list[int], at: int) -> tuple[int, int]:
        """How many pages from there on need not be stored, as far as keys tell, and where they are."""
        key, end, count = keys[at], at, len(keys)
        if key == 0:
            while end < count and keys[end] == 0:
                end += 1
            return end - at, ZEROS
        place = self._known.get(key)
        if place is None:
            return 0, ZEROS
        most = min(count, at + len(self._keys) - place)
        while end < most and keys[end] == self._keys[place + end - at]:
            end += 1
        return end - at, place

    def _remember(self, key: int) -> None:
        if key != 0 and len(self._known) < _MAX_KNOWN:
            self._known.setdefault(key, len(self._keys))
        self._keys.append(key)

    def _is_at(self, place: int, data: memoryview) -> bool:
        self.flush()
        return os.pread(self._fd, len(data), place * PAGE) == data.tobytes()

    def _write(self, guest: int, data: memoryview) -> None:
        """The last pages that were remembered."""
        if not data:
            return
        count = len(data) // PAGE
        if len(data) >= _PENDING:
            self.flush()
            self._put(data)
        else:
            self._pending += data
            if len(self._pending) >= _PENDING:
                self.flush()
        self._extend(guest, count, len(self._keys) - count)

    def flush(self) -> None:
        with memoryview(self._pending) as data:
            self._put(data)
        self._pending.clear()

    def _put(self, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._fd, data, self._written)
            self._written += count
            data = data[count:]

    def _extend(self, guest: int, length: int, place: int) -> None:
        if self.extents:
            first, count, at = self.extents[-1]
            if first + count == guest and (place == at == ZEROS or (place != ZEROS and at + count == place)):
                self.extents[-1] = first, count + length, at
                return
        self.extents.append((guest, length, place))


def _keys_of(block: bytes) -> list[int]:
    """Hashes of 64 bits with a secret of this process: no guest can make them collide, and equal ones are compared."""
    pages = (block[at : at + PAGE] for at in range(0, len(block), PAGE))
    return [0 if page == ZERO_PAGE else hash(page) or 1 for page in pages]


def _differing(mine: memoryview, theirs: memoryview, turns: Turns) -> list[tuple[int, int]]:
    """Stretches (first, end) of pages that differ."""
    stretches: list[tuple[int, int]] = []
    for start in range(0, len(mine), _BLOCK):
        ours, others = mine[start : start + _BLOCK].tobytes(), theirs[start : start + _BLOCK].tobytes()
        turns.give_way()
        if ours == others:
            continue
        for at in range(0, len(ours), PAGE):
            if ours[at : at + PAGE] != others[at : at + PAGE]:
                first = start + at
                if stretches and stretches[-1][1] == first:
                    stretches[-1] = stretches[-1][0], first + PAGE
                else:
                    stretches.append((first, first + PAGE))
    return stretches


def _bridged(stretches: list[tuple[int, int]], bridge: int) -> list[tuple[int, int]]:
    """Those that are no further apart than `bridge` become one."""
    if bridge == 0:
        return stretches
    joined: list[tuple[int, int]] = []
    for first, end in stretches:
        if joined and first - joined[-1][1] <= bridge:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((first, end))
    return joined


def _few_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where there are very many, what is between them is looked at too, so that extents can go through it."""
    bridge = PAGE
    while len(spans) > MANY_EXTENTS:
        spans = _bridged(spans, bridge)
        bridge *= 2
    return spans


def _batches(spans: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for begin, end in spans:
        for start in range(begin, end, BATCH):
            yield start, min(end, start + BATCH)


def _within(spans: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of sorted spans that lie between, counted from `start`."""
    at = max(0, bisect_right(spans, (start, start)) - 1)
    while at < len(spans) and spans[at][0] < end:
        first, last = max(spans[at][0], start), min(spans[at][1], end)
        if first < last:
            yield first - start, last - start
        at += 1


def _count_runs(parent: Snapshot, extents: list[Extent]) -> int:
    return len(lay_over(parent.runs, runs_of(extents, Path(PAGES))))
