"""Processes that carry in their environment which VM they belong to.

The mark is there from the first instruction of the program to the last and is inherited, so processes that a killed run
left can be found without a record of them.

Everybody can put anything into the environment of a process of theirs. So a mark counts only when it is written as we
write it, and when the process is one that we may have started: all its user ids are ours or, where we are root, one of
those that only VMs have; and it can never gain privileges. Without the latter, a set-user-id program that another user
started with a mark would look like ours.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import EngineFailed
from forkd.host.process import KILL_DEADLINE_S
from forkd.host.system import read_stat, start_time_ticks
from forkd.host.user_ids import is_of_a_vm

MARK = "FORKD_VM"
# A VM process sees only this of our environment, which may hold secrets.
_HANDED_ON = ("PATH", "HOME", "LANG", "TMPDIR")
# How long an exec may take until it shows the environment of the new program: it reads the program from disk first.
_EXEC_DEADLINE_S = 2.0
_EXEC_RETRY_S = 0.001

# Places in /proc/<pid>/stat, counted from the state.
_STATE, _PARENT, _FLAGS, _ENV_START, _ENV_END = 0, 1, 6, 47, 48
# More than the directory of a VM needs: the paths of its sockets have at most 108 bytes.
ROOM_BYTES = 256
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD

# It has ended, or we may not look at it.
_OUT_OF_SIGHT = (FileNotFoundError, ProcessLookupError, PermissionError)


@dataclass(frozen=True)
class Marked:
    """Names one process for good: another process may get its pid, but with another start time."""

    pid: int
    start_ticks: int


def render_environment(directory: Path, *, room: bool = False) -> dict[str, str]:
    """The whole environment of a VM process that lives in `directory`; with `room` its forks can be marked anew."""
    handed_on = {name: os.environ[name] for name in _HANDED_ON if name in os.environ}
    return {**handed_on, MARK: render_mark(directory, ROOM_BYTES if room else 0)}


def render_mark(directory: Path, size: int) -> str:
    """A path with slashes behind it is the same path."""
    path = os.path.realpath(directory)
    return path + "/" * (size - len(os.fsencode(path)))


@dataclass(frozen=True)
class MarkPlace:
    """Where in a process's memory its mark is."""

    address: int
    size: int

    def render(self, directory: Path) -> bytes:
        mark = os.fsencode(render_mark(directory, self.size))
        if len(mark) > self.size:
            raise EngineFailed(f"The path {directory} is too long to mark a fork with", hint="Use a shorter directory")
        return mark


def find_mark_place(pid: int) -> MarkPlace | None:
    """None: it has no mark, or has ended."""
    fields, prefix, at = _read_stat(pid), MARK.encode() + b"=", 0
    for entry in _read_environ(pid).split(b"\0") if fields else ():
        if fields and entry.startswith(prefix):
            return MarkPlace(int(fields[_ENV_START]) + at + len(prefix), len(entry) - len(prefix))
        at += len(entry) + 1
    return None


def find_marked(under: Path) -> dict[Path, Marked]:
    """The leading process of each VM whose directory is `under` or below it; one look at all processes."""
    leaders: dict[Path, Marked] = {}
    for directory, members in _scan(under).items():
        pids = {member.pid for member in members}
        # Processes that a VM process started are below it, or have lost it as parent: then they are younger.
        heads = [member for member in members if _parent(member.pid) not in pids]
        leaders[directory] = min(heads or members, key=lambda member: (member.start_ticks, member.pid))
    return leaders


def kill_marked(under: Path) -> None:
    """Kill every process of the VMs `under` a directory, and wait until they have ended."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    # Again until there are none: one may have started another meanwhile.
    while members := [member for group in _scan(under).values() for member in group]:
        for member in members:
            _kill(member, deadline)
        if time.monotonic() > deadline:
            raise EngineFailed(f"Processes of VMs in {under} do not end", hint="Is their memory or disk stuck?")


def _kill(process: Marked, deadline: float) -> None:
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        # Look once the pidfd is open: from then on it cannot mean another process.
        if start_time_ticks(process.pid) == process.start_ticks:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    except ProcessLookupError:
        pass
    finally:
        os.close(pidfd)


def is_stopped(pid: int) -> bool:
    """Stopped by a signal, until it is told to go on."""
    fields = _read_stat(pid)
    return fields is not None and fields[_STATE] == "T"


class _Turning(Exception):
    """The process is becoming another program, or what we want it to be: it is looked at again."""


def _scan(under: Path) -> dict[Path, list[Marked]]:
    """All marked processes but ourselves, by directory; `under` is the first part of each as it is given."""
    found: dict[Path, list[Marked]] = {}
    place = os.path.realpath(under)
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    deadline = time.monotonic() + _EXEC_DEADLINE_S
    while pids:
        unsure = []
        for pid in pids:
            try:
                directory, process = _look(pid, place)
            except _Turning:
                if _has_our_user(_read_status(pid)):
                    unsure.append(pid)
                continue
            if process is not None and pid != os.getpid():
                found.setdefault(under / os.path.relpath(directory, place), []).append(process)
        if time.monotonic() > deadline:
            break
        time.sleep(_EXEC_RETRY_S if unsure else 0)
        pids = unsure
    return found


def _look(pid: int, place: str) -> tuple[str, Marked | None]:
    """What a process is marked with, and the process when that is at `place` or below."""
    directory = _read_mark(pid)
    if not is_at(directory, place) or not _is_ours(pid):
        return directory, None
    started = start_time_ticks(pid)
    # The mark again: another process may have got the pid before we asked for its start.
    if started is None or _read_mark(pid) != directory:
        return directory, None
    return directory, Marked(pid, started)


def is_at(mark: str, place: str) -> bool:
    """`place` or below, without a detour: `place/../other` is not below `place`."""
    return (mark == place or mark.startswith(place + "/")) and mark == os.path.normpath(mark)


def _is_ours(pid: int) -> bool:
    """Raises _Turning for one that has just been started, and may give up the right to more privileges next."""
    status = _read_status(pid)
    if not _has_our_user(status):
        return False
    if status["NoNewPrivs"].strip() != "1" and _is_new(pid):
        raise _Turning
    return status["NoNewPrivs"].strip() == "1"


def _has_our_user(status: Mapping[str, str]) -> bool:
    """The owner of /proc/<pid> does not tell: it is root for each process that must not be looked into."""
    # Real, effective, saved, of the file system.
    users = {int(uid) for uid in status.get("Uid", "").split()}
    if len(users) != 1:
        return False
    # As root we start each VM as a user of a range that is nobody else's.
    return users == {os.geteuid()} or (os.geteuid() == 0 and is_of_a_vm(users.pop()))


def _is_new(pid: int) -> bool:
    started = start_time_ticks(pid)
    now = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")
    return started is not None and now - started < _EXEC_DEADLINE_S * os.sysconf("SC_CLK_TCK")


def _read_status(pid: int) -> dict[str, str]:
    """Empty when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except _OUT_OF_SIGHT:
        return {}
    return dict(line.split(":", 1) for line in status.splitlines() if ":" in line)


def _read_mark(pid: int) -> str:
    """Empty when there is none."""
    prefix = MARK.encode() + b"="
    for entry in _read_environ(pid).split(b"\0"):
        if entry.startswith(prefix):
            return os.fsdecode(entry[len(prefix) :]).rstrip("/")
    return ""


def _read_environ(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/environ")
    try:
        environ = path.read_bytes()
        if environ or (fields := _read_stat(pid)) is None or fields[_STATE] in "ZX":
            return environ
        if int(fields[_FLAGS]) & _KERNEL_THREAD:
            return environ
        # It may have become another program since we opened the file, and may do it again when we look once more.
        if int(fields[_ENV_END]) == 0 or not ((again := path.read_bytes()) or fields[_ENV_START] == fields[_ENV_END]):
            raise _Turning
        return again
    except _OUT_OF_SIGHT:
        return b""


def _parent(pid: int) -> int | None:
    fields = _read_stat(pid)
    return int(fields[_PARENT]) if fields is not None else None


def _read_stat(pid: int) -> list[str] | None:
    try:
        return read_stat(pid)
    except _OUT_OF_SIGHT:
        return None
