"""What this run of the tests holds: processes, mounts, descriptors.

Others use the same machine meanwhile, so a process counts when it is below us or works in a directory of ours, and a
mount when it is of or in such a directory.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

# For an orphan to be gone that was killed: nobody waits for it.
_ORPHAN_S = 5.0
# Places in /proc/<pid>/stat, counted from the state.
_PARENT, _START_TICKS = 1, 19
# Not there any more, or not ours to see.
_OUT_OF_SIGHT = (FileNotFoundError, ProcessLookupError, PermissionError)

# A pid and a start: the pid may be given to another process.
Processes = Mapping[tuple[int, int], str]

_made: set[Path] = set()


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "tempfile.mkdtemp":
        _made.add(Path(str(args[0])))


# Runtime directories are short and lie beside those of others in /tmp: only who made one knows whose it is.
sys.addaudithook(_note)


@dataclass(frozen=True)
class Holdings:
    processes: Processes  # below us
    orphans: Processes  # not, or not any more
    mounts: Mapping[int, str]  # by their number, where
    descriptors: Mapping[str, int]  # by what they refer to

    @property
    def all_processes(self) -> set[tuple[int, int]]:
        return {*self.processes, *self.orphans}


def temporary_directories() -> frozenset[Path]:
    """All that this process has made so far."""
    return frozenset(_made)


@contextmanager
def left_clean(directories: Callable[[], Iterable[Path]]) -> Iterator[None]:
    """`directories`, asked before and after, are those of ours: a test makes new ones."""
    before = take_holdings(directories())
    yield
    after = take_holdings(directories())
    deadline = time.monotonic() + _ORPHAN_S
    while after.orphans.keys() - before.all_processes and time.monotonic() < deadline:
        time.sleep(0.05)
        after = replace(after, orphans=take_holdings(directories()).orphans)
    left = find_left(before, after)
    assert left == [], left


def take_holdings(directories: Iterable[Path]) -> Holdings:
    ours = [os.path.realpath(directory) for directory in directories]
    mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    return Holdings(*_find_processes(ours), parse_mounts(mounts, ours), Counter(_list_descriptors()))


def find_left(before: Holdings, after: Holdings) -> list[str]:
    """Each thing that is there and was not, in words. Pure."""
    known = before.all_processes
    left = [f"process {key[0]}: {what}" for key, what in after.processes.items() if key not in known]
    left += [f"orphan {key[0]}: {what}" for key, what in after.orphans.items() if key not in known]
    left += [f"mount {point}" for key, point in after.mounts.items() if before.mounts.get(key) != point]
    for target, count in after.descriptors.items():
        left += [f"descriptor of {target}"] * (count - before.descriptors.get(target, 0))
    return left


def parse_mounts(mountinfo: str, directories: Iterable[str]) -> dict[int, str]:
    """Mounts in `directories`, and those of something in them elsewhere."""
    ours = list(directories)
    found = {}
    for line in mountinfo.splitlines():
        number, _, _, root, point, *_ = line.split(" ")
        if any(_is_within(_unescape(path), ours) for path in (root, point)):
            found[int(number)] = _unescape(point)
    return found


def _unescape(path: str) -> str:
    return re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), path)


def _is_within(path: str, directories: Iterable[str]) -> bool:
    return any(path == directory or path.startswith(directory + "/") for directory in directories)


def _find_processes(ours: list[str]) -> tuple[Processes, Processes]:
    """Those below us, and the orphans."""
    stats = {int(entry.name): _read_stat(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    alive = {pid: fields for pid, fields in stats.items() if fields is not None}
    below: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, fields in alive.items() if int(fields[_PARENT]) in level} - below
        below |= level
    orphans = [pid for pid in alive if pid not in below and pid != os.getpid() and _works_in(pid, ours)]

    def name(pids: Iterable[int]) -> Processes:
        return {(pid, int(alive[pid][_START_TICKS])): _read_command(pid) for pid in pids}

    return name(below), name(orphans)


def _read_stat(process: Path) -> list[str] | None:
    """The fields after the name, which may be anything."""
    return _read(process / "stat").rpartition(")")[2].split() or None


def _read_command(pid: int) -> str:
    return _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").strip()


def _works_in(pid: int, ours: list[str]) -> bool:
    """A daemon, a VM or a command that was told where, and may have lost us as its parent."""
    for entry in _read(Path(f"/proc/{pid}/environ")).split("\0"):
        name, _, value = entry.partition("=")
        if name.startswith("FORKD_") and value.startswith("/") and _is_within(os.path.realpath(value), ours):
            return True
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except _OUT_OF_SIGHT:
        return ""


def _list_descriptors() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the one that the list was read from
            continue
    return found
