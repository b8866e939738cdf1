"""What VM processes have in common, and what they may do: seen from outside, and tried out inside.

Used by tests, and by a program that an ordinary user runs.
"""

import ctypes
import errno
import itertools
import os
import re
import signal
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from engine_cases import Case, live_forks, rehearsed, started

from forkd.engines.base import Machine
from forkd.host.marked import find_marked
from forkd.host.procfork import ptrace, rest, source
from forkd.host.procfork.program import DATA, Call
from forkd.host.procfork.registers import POLLS
from forkd.host.seccomp import render_filter
from forkd.host.vmm_filter import render_rules

MAX_FILE_BYTES = 1024 * 1024
_KCMP, _KCMP_FILE = 312, 0
_GET_FILTER = 0x420C
_PRCTL, _GET_PDEATHSIG = 157, 2
_CLONE, _CLONE3 = 56, 435
_CLONE_VM, _CLONE_VFORK, _CLONE_PARENT = 0x100, 0x4000, 0x8000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Family:
    """A template and three forks of it; a VM that runs and two forks of it, of which one waits."""

    template: Machine
    siblings: list[Machine]
    source: Machine
    live: list[Machine]

    @property
    def all(self) -> list[Machine]:
        return [self.template, *self.confined]

    @property
    def confined(self) -> list[Machine]:
        """Those that run a user's code in a guest."""
        return [*self.siblings, self.source, *self.live]

    @property
    def forks(self) -> list[Machine]:
        return [*self.siblings, *self.live]


@asynccontextmanager
async def family(case: Case, run: Path) -> Any:
    async with (
        rehearsed(case, run, "template-of-some-length") as template,
        live_forks(case.engine, template, run, 3, settled=True) as siblings,
        started(case, run) as source,
        live_forks(case.engine, source.machine, run, 1) as live,
    ):
        waiting = await case.engine.fork_live(source.machine, run / "waiting", paused=True)
        try:
            await waiting.running()
            machines = [each.machine for each in siblings]
            yield Family(template, machines, source.machine, [live[0].machine, waiting])
        finally:
            await waiting.kill()


# Descriptors


def list_fds(pid: int) -> list[int]:
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            os.stat(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # the one that the list was read from
            continue
        found.append(int(name))
    return found


def is_same_file(one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether descriptors of two processes, (pid, number), are one open file."""
    result = _libc.syscall(_KCMP, one[0], other[0], _KCMP_FILE, one[1], other[1])
    if result < 0:
        raise OSError(ctypes.get_errno(), f"kcmp of {one} and {other}")
    return bool(result == 0)


def find_shared_files(pids: Sequence[int]) -> list[str]:
    """Open files that two of the processes have in common."""
    fds = {pid: list_fds(pid) for pid in pids}
    return [
        f"{pid}/{number} {os.readlink(f'/proc/{pid}/fd/{number}')} is {other}/{theirs}"
        for pid, other in itertools.combinations(pids, 2)
        for number in fds[pid]
        for theirs in fds[other]
        if is_same_file((pid, number), (other, theirs))
    ]


def find_common_inodes(pids: Iterable[int]) -> set[str]:
    """What is open in more than one: files, sockets by their inode, eventfds by their number."""
    holders: dict[object, set[int]] = {}
    links: dict[object, str] = {}
    for pid in pids:
        for number in list_fds(pid):
            path = f"/proc/{pid}/fd/{number}"
            link, stat = os.readlink(path), os.stat(path)
            key: object = (stat.st_dev, stat.st_ino)
            if link.startswith("anon_inode:"):
                # They all have one inode; what is behind them only the kernel's comparison tells, eventfds aside.
                key = _find_eventfd(pid, number)
            if key is not None:
                holders.setdefault(key, set()).add(pid)
                links[key] = link
    return {links[key] for key, found in holders.items() if len(found) > 1}


def _find_eventfd(pid: int, number: int) -> str | None:
    found = re.search(r"^eventfd-id:\s*(\d+)", Path(f"/proc/{pid}/fdinfo/{number}").read_text(), re.MULTILINE)
    return found and f"eventfd {found[1]}"


# Names


def read_mark(pid: int) -> str:
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    (mark,) = (entry for entry in environ if entry.startswith("FORKD_VM="))
    return mark.removeprefix("FORKD_VM=").rstrip("/")


def read_name(pid: int) -> str:
    arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return arguments[arguments.index("-name") + 1]


def check_names(directories: dict[Path, Machine], run: Path) -> None:
    assert {path: found.pid for path, found in find_marked(run).items()} == {
        path: machine.pid for path, machine in directories.items()
    }
    for directory, machine in directories.items():
        assert read_mark(machine.pid) == os.path.realpath(directory)
        assert read_name(machine.pid) == f"forkd-{directory.name}"


# What it may do


def read_threads(pid: int) -> dict[int, dict[str, str]]:
    """The fields of /proc/<pid>/task/<tid>/status, by thread."""
    found = {}
    for tid in map(int, os.listdir(f"/proc/{pid}/task")):
        lines = Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines()
        found[tid] = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return found


def read_filters(pid: int) -> dict[int, list[bytes]]:
    """The seccomp filters of each thread, the youngest first. Only root may see them."""
    found = {}
    with rest.at_rest(pid, POLLS) as stopped:
        for tid in stopped.tids:
            found[tid] = list(_read_filters(tid))
    return found


def _read_filters(tid: int) -> Iterator[bytes]:
    for index in itertools.count():
        length = _libc.ptrace(_GET_FILTER, tid, ctypes.c_void_p(index), None)
        if length < 0:
            if ctypes.get_errno() != errno.ENOENT:
                raise OSError(ctypes.get_errno(), "PTRACE_SECCOMP_GET_FILTER")
            return
        buffer = ctypes.create_string_buffer(length * 8)
        _libc.ptrace(_GET_FILTER, tid, ctypes.c_void_p(index), buffer)
        yield buffer.raw


@contextmanager
def tracing_without_a_say() -> Iterator[None]:
    """As any other tracer would, which does not ask to decide on calls that a filter leaves to it."""
    with mock.patch.object(source, "_OPTIONS", source._OPTIONS & ~(ptrace.TRACE_SECCOMP | ptrace.TRACE_FORK)):
        yield


def have_called(pid: int, call: Call) -> tuple[int, bytes]:
    """What the main thread of a process at rest got for a call, and what became of the call's data."""
    with source.held(pid, POLLS) as stopped, stopped.scratch(4096) as scratch:
        stopped.write_memory(scratch, call.placed_data(scratch))
        value = stopped.call(call.number, *call.placed_args(scratch))
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            return value, os.pread(memory.fileno(), max(8, len(call.data)), scratch)


def try_to_make_a_process(pid: int) -> dict[str, str]:
    """The name of the error for each way to make a process that does not end it."""
    with tracing_without_a_say():
        return {name: _try(pid, call) for name, call in _WAYS.items()}


_WAYS = {
    "clone": Call(_CLONE, (signal.SIGCHLD, 0, 0, 0, 0)),
    "clone with its parent's": Call(_CLONE, (signal.SIGCHLD | _CLONE_PARENT, 0, 0, 0, 0)),
    "clone as vfork": Call(_CLONE, (signal.SIGCHLD | _CLONE_VM | _CLONE_VFORK, 0, 0, 0, 0)),
    "clone3": Call(_CLONE3, (DATA, 64), struct.pack("<8Q", 0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)),
}
REFUSED = dict.fromkeys(("clone", "clone with its parent's", "clone as vfork", "clone3"), "ENOSYS")


def _try(pid: int, call: Call) -> str:
    value, _ = have_called(pid, call)
    if value > 0:
        os.kill(value, signal.SIGKILL)
    return errno.errorcode.get(-value, f"{value}")


def read_death_signal(pid: int) -> int:
    value, data = have_called(pid, Call(_PRCTL, (_GET_PDEATHSIG, DATA), bytes(8)))
    assert value == 0
    return int(struct.unpack_from("<i", data)[0])


def check_confined(machine: Machine, *, root: bool, death_signal: int) -> None:
    """Of a VM that is paused: it makes no process, gains no privilege and fills no disk, whichever thread it is."""
    pid = machine.pid
    threads = read_threads(pid)
    assert len(threads) > 1
    for status in threads.values():
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert len({status.get("Seccomp_filters") for status in threads.values()}) == 1
    if root:
        assert all(render_filter(render_rules()) in filters for filters in read_filters(pid).values())
    assert all(int(status[kind], 16) == 0 for status in threads.values() for kind in ("CapPrm", "CapEff", "CapBnd"))
    assert try_to_make_a_process(pid) == REFUSED
    assert read_death_signal(pid) == death_signal
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(rf"^Max file size +{MAX_FILE_BYTES} +{MAX_FILE_BYTES} ", limits, re.MULTILINE)


# What else could be had in common, or left


def find_locks(pids: Iterable[int]) -> list[str]:
    wanted = {str(pid) for pid in pids}
    return [line for line in Path("/proc/locks").read_text().splitlines() if line.split()[4] in wanted]


def find_shared_memory(pid: int) -> list[str]:
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in maps if re.match(r"\S+ .w.s ", line)]


def read_code_flags(pid: int) -> list[set[str]]:
    """What the kernel was advised of each buffer for translated code: `hg` huge pages, `nh` none."""
    flags, is_buffer = [], False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
            is_buffer = " rwxp " in line
        elif is_buffer and line.startswith("VmFlags:"):
            flags.append(set(line.split()[1:]) & {"hg", "nh"})
    return flags


def list_code(pid: int) -> set[str]:
    """Where it has memory that can be executed."""
    return {line.split()[0] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if line.split()[1][2] == "x"}
