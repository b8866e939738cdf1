"""What layers hold of a VM's memory, written into that of its VMM."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from forkd.errors import EngineFailed
from forkd.host.pages import LiveMemory
from forkd.model.memory import Run, cut

_CHUNK_BYTES = 1024 * 1024


def write_runs(memory: LiveMemory, runs: Sequence[Run]) -> None:
    """Of a VMM that maps its memory privately, or the snapshot's file is written to. Raises EngineFailed, OSError."""
    if runs and runs[-1].end > memory.size:
        raise EngineFailed(f"A layer has memory up to byte {runs[-1].end}, the VM has {memory.size} bytes")
    with contextlib.ExitStack() as opened:
        place = opened.enter_context(Path(f"/proc/{memory.pid}/mem").open("r+b", buffering=0)).fileno()
        files = {path: opened.enter_context(path.open("rb", buffering=0)).fileno() for path in files_of(runs)}
        for address, run in _pieces(memory, runs):
            size = run.length
            data = bytes(size) if run.file is None else os.pread(files[run.file], size, run.at)
            if len(data) != size or os.pwrite(place, data, address) != size:
                raise EngineFailed(f"The memory of process {memory.pid} could not be written")


def files_of(runs: Sequence[Run]) -> list[Path]:
    return sorted({run.file for run in runs if run.file is not None})


def _pieces(memory: LiveMemory, runs: Sequence[Run]) -> Iterator[tuple[int, Run]]:
    """As much at a time as is read at once, and lies together."""
    for run in runs:
        for area in memory.areas:
            start, end = max(run.start, area.start), min(run.end, area.end)
            for begin in range(start, end, _CHUNK_BYTES):
                yield area.address + begin - area.start, cut(run, begin, min(begin + _CHUNK_BYTES, end))
