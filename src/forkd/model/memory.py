"""What the memory of a guest is made of: runs of pages in files, laid over each other. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096


@dataclass(frozen=True, slots=True)
class Run:
    """Guest memory from byte `start` on is what `file` has from byte `at` on; None: zeros.

    A tuple of runs is sorted by start, disjoint and page-aligned.
    """

    start: int
    length: int
    file: Path | None
    at: int

    @property
    def end(self) -> int:
        return self.start + self.length


def lay_over(lower: Sequence[Run], upper: Sequence[Run]) -> tuple[Run, ...]:
    """Both together; where both have something, what `upper` has."""
    return merge_runs(heapq.merge(_uncovered(lower, upper), upper, key=lambda run: run.start))


def merge_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs that go on in both the guest and the file become one."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and _goes_on(last, run):
            merged[-1] = Run(last.start, last.length + run.length, last.file, last.at)
        else:
            merged.append(run)
    return tuple(merged)


def merge_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Of spans (start, end) in any order, the same bytes as few spans, sorted."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def cut(run: Run, start: int, end: int) -> Run:
    """The part of a run that is guest memory from `start` to `end`."""
    return Run(start, end - start, run.file, 0 if run.file is None else run.at + start - run.start)


def _goes_on(last: Run, run: Run) -> bool:
    if last.end != run.start or last.file != run.file:
        return False
    return run.file is None or last.at + last.length == run.at


def _uncovered(lower: Sequence[Run], upper: Sequence[Run]) -> Iterator[Run]:
    first = 0
    for run in lower:
        while first < len(upper) and upper[first].end <= run.start:
            first += 1
        start, at = run.start, first
        while at < len(upper) and upper[at].start < run.end:
            if upper[at].start > start:
                yield cut(run, start, upper[at].start)
            start = upper[at].end
            at += 1
        if start < run.end:
            yield cut(run, start, run.end)
