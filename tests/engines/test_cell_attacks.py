"""Hostile code in place of a VMM: what a QEMU that was broken into can do to others, with and without its filter."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_cases import Case, live_forks, rehearsed, started

from forkd.engines.base import ExitReason
from forkd.errors import NotForkable
from forkd.host.procfork import ptrace
from forkd.host.procfork.program import DATA, Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.source import held, make_calls
from forkd.runtime.child import Child

pytestmark = [
    pytest.mark.vm,
    pytest.mark.anyio,
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(os.geteuid() != 0, reason="users of their own are root's to give"),
]

_DEATH_DEADLINE_S = 20.0
_SUSPEND_SECCOMP = 1 << 21
_OPEN, _MMAP, _SOCKET, _CONNECT, _KILL, _MKDIR, _SETRESUID, _PTRACE, _TGKILL = 2, 9, 41, 42, 62, 83, 117, 101, 234
_UNSHARE, _PROCESS_VM_READV, _PIDFD_OPEN, _PIDFD_GETFD, _PIDFD_SEND_SIGNAL = 272, 310, 434, 438, 424
_MOUNT, _EXECVE, _BPF, _SETNS = 165, 59, 321, 308
_SEIZE = 0x4206


@dataclass(frozen=True)
class Scene:
    """A template's two forks, a VM that was started, and a fork of one of the forks."""

    one: Child
    other: Child
    started: Child
    grandchild: Child


@asynccontextmanager
async def scene(case: Case, run: Path) -> AsyncIterator[Scene]:
    async with (
        rehearsed(case, run, "template") as template,
        live_forks(case.engine, template, run, 2, settled=True) as (one, other),
        started(case, run) as alone,
        live_forks(case.engine, other.machine, run, 1) as (grandchild,),
    ):
        yield Scene(one, other, alone, grandchild)


def call_unfiltered(pid: int, calls: Mapping[str, Call]) -> dict[str, int]:
    """What each call of a QEMU returns when its filter is suspended; an error is negative."""
    with held(pid, POLLS) as source, source.scratch(4096) as scratch:
        ptrace.set_options(pid, ptrace.TELL_CALLS | _SUSPEND_SECCOMP)
        results = {}
        for name, call in calls.items():
            source.write_memory(scratch, call.placed_data(scratch))
            results[name] = source.call(call.number, *call.placed_args(scratch))
        ptrace.set_options(pid, ptrace.TELL_CALLS)
        return results


def render_attacks(victim: Child, snapshot: Path) -> dict[str, Call]:
    pid, place = victim.machine.pid, victim.machine.directory
    vectors = struct.pack("<4Q", 0, 8, 0x400000, 8)
    return {
        "probe": Call(_KILL, (pid, 0)),
        "kill": Call(_KILL, (pid, signal.SIGKILL)),
        "kill a thread": Call(_TGKILL, (pid, pid, signal.SIGKILL)),
        "kill the daemon": Call(_KILL, (os.getpid(), signal.SIGTERM)),
        "trace": Call(_PTRACE, (_SEIZE, pid, 0, 0)),
        "trace the daemon": Call(_PTRACE, (_SEIZE, os.getpid(), 0, 0)),
        "read memory": Call(_PROCESS_VM_READV, (pid, DATA, 1, DATA + 16, 1, 0), vectors, pointers=((0, 0),)),
        "open memory": Call(_OPEN, (DATA, os.O_RDWR), f"/proc/{pid}/mem\0".encode()),
        "open a console": Call(_OPEN, (DATA, os.O_RDWR), bytes(place / "console.log") + b"\0"),
        "open the snapshot": Call(_OPEN, (DATA, os.O_RDWR), bytes(snapshot) + b"\0"),
        "open a secret of the host": Call(_OPEN, (DATA, os.O_RDONLY), b"/etc/shadow\0"),
        "make a directory": Call(_MKDIR, (DATA, 0o777), b"/mine\0"),
        "become the other": Call(_SETRESUID, (1, 1, 1)),
        "mount": Call(_MOUNT, (DATA, DATA, DATA + 8, 0, 0), b"/\0".ljust(8, b"\0") + b"tmpfs\0"),
        "reach its namespace": Call(_OPEN, (DATA, os.O_RDONLY), f"/proc/{pid}/ns/net\0".encode()),
    }


# A call that finds nothing is refused as well as one that is forbidden.
_REFUSED = {-errno.EPERM, -errno.EACCES, -errno.ENOENT, -errno.EROFS, -errno.EINVAL, -errno.ESRCH}


async def test_without_its_filter_a_vmm_cannot_reach_another_one_or_the_daemon(tcg: Case, run_directory: Path) -> None:
    async with scene(tcg, run_directory) as vms:
        pairs = [
            (vms.one, vms.other),
            (vms.other, vms.one),
            (vms.started, vms.one),
            (vms.one, vms.started),
            (vms.grandchild, vms.other),  # what it was forked from
            (vms.grandchild, vms.one),
            (vms.one, vms.grandchild),
        ]
        for attacker, victim in pairs:
            attacks = render_attacks(victim, tcg.frozen.memory_file)
            results = await asyncio.to_thread(call_unfiltered, attacker.machine.pid, attacks)
            assert {name: value for name, value in results.items() if value not in _REFUSED} == {}
        for child in (vms.one, vms.other, vms.started, vms.grandchild):
            assert (await child.agent.eval("past")).value == 41


async def test_without_its_filter_a_vmm_connects_to_nobody(tcg: Case, run_directory: Path) -> None:
    async with scene(tcg, run_directory) as vms:
        with socket.socket(socket.AF_UNIX) as abstract:
            abstract.bind("\0forkd-test-abstract")
            abstract.listen()
            for attacker in (vms.one, vms.started, vms.grandchild):
                for name in (
                    bytes(vms.other.machine.directory / "agent.sock"),
                    bytes(vms.other.machine.directory / "qmp.sock"),
                    b"\0forkd-test-abstract",
                ):
                    assert await asyncio.to_thread(_connect, attacker.machine.pid, name) in (
                        -errno.ENOENT,
                        -errno.ECONNREFUSED,
                    )


def _connect(pid: int, name: bytes) -> int:
    made = call_unfiltered(pid, {"socket": Call(_SOCKET, (socket.AF_UNIX, socket.SOCK_STREAM, 0))})["socket"]
    assert made >= 0
    address = struct.pack("<H", socket.AF_UNIX) + name
    calls = {"connect": Call(_CONNECT, (made, DATA, len(address)), address), "close": Call(3, (made,))}
    return call_unfiltered(pid, calls)["connect"]


async def test_the_snapshots_memory_cannot_be_written_through_what_a_vmm_has(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as child:
        pid, wanted = child.machine.pid, tcg.frozen.memory_file.stat().st_ino
        held_as = [int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir() if os.stat(fd).st_ino == wanted]
        assert held_as
        calls = {f"write {fd}": Call(1, (fd, DATA, 8), bytes(8)) for fd in held_as}
        calls |= {f"map {fd}": Call(_MMAP, (0, 4096, 3, 1, fd, 0)) for fd in held_as}
        results = await asyncio.to_thread(call_unfiltered, pid, calls)
        assert set(results.values()) <= {-errno.EBADF, -errno.EACCES}


_FORBIDDEN = {
    "kill": Call(_KILL, (1, 0)),
    "tgkill": Call(_TGKILL, (1, 1, 0)),
    "ptrace": Call(_PTRACE, (_SEIZE, 1, 0, 0)),
    "process_vm_readv": Call(_PROCESS_VM_READV, (1, 0, 0, 0, 0, 0)),
    "pidfd_open": Call(_PIDFD_OPEN, (1, 0)),
    "pidfd_getfd": Call(_PIDFD_GETFD, (0, 0, 0)),
    "pidfd_send_signal": Call(_PIDFD_SEND_SIGNAL, (0, 0, 0, 0)),
    "open": Call(_OPEN, (DATA, 0), b"/\0"),
    "socket": Call(_SOCKET, (1, 1, 0)),
    "connect": Call(_CONNECT, (0, 0, 0)),
    "execve": Call(_EXECVE, (DATA, 0, 0), b"/\0"),
    "mount": Call(_MOUNT, (0, 0, 0, 0, 0)),
    "setns": Call(_SETNS, (0, 0)),
    "bpf": Call(_BPF, (0, 0, 0)),
    "io_uring_setup": Call(425, (1, 0)),
    "userfaultfd": Call(323, (0,)),
    "keyctl": Call(250, (0, 0)),
    "perf_event_open": Call(298, (0, 0, 0, 0, 0)),
    "a prctl of another kind": Call(157, (3,)),
}


async def test_a_forbidden_call_ends_that_vm_and_only_that_one(tcg: Case, run_directory: Path) -> None:
    async with rehearsed(tcg, run_directory, "template") as template:
        async with live_forks(tcg.engine, template, run_directory, 1, settled=True) as (bystander,):
            for name, call in _FORBIDDEN.items():
                async with live_forks(tcg.engine, template, run_directory, 1, settled=True) as (child,):
                    with contextlib.suppress(NotForkable):  # it may end before it is let go, or then
                        await asyncio.to_thread(make_calls, child.machine.pid, [call], POLLS)
                    async with asyncio.timeout(_DEATH_DEADLINE_S):
                        death = await asyncio.shield(child.machine.death)
                    assert (death.reason, "SIGSYS" in death.status) == (ExitReason.CRASHED, True), name
            assert (await bystander.agent.eval("past")).value == 41
            assert not template.death.done()
