"""A new VM out of a live Firecracker: its process is forked, and KVM's objects are made anew beneath the fork."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forkd.engines.base import MEMORY_FILE, Nic, Phases, Way
from forkd.engines.firecracker.api import Api
from forkd.engines.firecracker.confine import Filters, render_settle
from forkd.engines.firecracker.jail import API_SOCKET, NIC_MARK, RECORD, SAVES, VMM_LOG, Slot
from forkd.engines.firecracker.machine import FirecrackerMachine, Resuming
from forkd.engines.firecracker.plan import render_pause, render_resume
from forkd.engines.fork_thread import (
    LISTENER,
    ForkThread,
    Prepared,
    Wish,
    find_files,
    find_roles,
    fork_running,
    from_thread,
    list_open_files,
    look_at,
    render_death,
    wish_for,
)
from forkd.engines.machine import AGENT_SOCKET, CONSOLE, grouped, listening_socket, made_directory
from forkd.errors import NotForkable
from forkd.host.dead_end import open_nothing
from forkd.host.fork_cell import SourceCell, find_source_cell, render_leave, render_rights
from forkd.host.id_maps import UserRange
from forkd.host.kvmfork.plan import VmPlan, is_remade
from forkd.host.kvmfork.record import MAX_JSON_BYTES, Record, parse_record
from forkd.host.process import WatchedProcess
from forkd.host.procfork import seed
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.descriptors import Action, Choice, Dead, Descriptor, Keep, Kind, Ours
from forkd.host.procfork.program import DATA, Call
from forkd.host.procfork.registers import WAITS
from forkd.host.procfork.shared_memory import MemoryFile, is_memory_file, read_memory_files, render_remap
from forkd.host.procfork.source import Caller, Source, Thread
from forkd.host.tap import attach_tap
from forkd.host.user_ids import UserIds, held_users
from forkd.model.machine import NO_LIMITS, Limits

_API, _AGENT, _CONSOLE, _LOG, _TAP, _KVM = "api", "agent", "console", "log", "tap", "kvm"
_ROLES = {API_SOCKET: _API, AGENT_SOCKET: _AGENT}
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_KVM_DEVICE, _KVM_OBJECTS = "/dev/kvm", "anon_inode:kvm-"
_MADVISE, _MOUNT = 28, 165
_POPULATE_WRITE = 23
# What is before and behind the VM's name among its arguments, and so the room for another one.
_BEFORE_NAME, _BEHIND_NAME = b"\0--id\0", b"\0--api-sock\0"
_NOSUID_NODEV_NOEXEC = 0x2 | 0x4 | 0x8


async def fork_machine(
    source: FirecrackerMachine,
    directory: Path,
    limits: Limits,
    users: UserIds,
    filters: Filters,
    nic: Nic | None = None,
    *,
    paused: bool,
    outlive: bool,
    template: bool = False,
) -> FirecrackerMachine:
    """See Engine.fork_live. `template`: it rehearses, and is to be forked then."""
    phases = Phases(time.monotonic(), way=Way.FORK)
    await source.running()
    async with source.forking:
        if source.death.done():  # its pid may be another's by now
            raise NotForkable(f"The VM to fork has ended: {source.death.result().reason.value}")
        files = find_files(source.pid, source.directory) if limits != NO_LIMITS else []
        if source.fork_thread is None:
            source.fork_thread = new_fork_thread(source, users.users, filters)
        thread = source.fork_thread
        wish = wish_for(source.pid, outlive=outlive, paused=paused)
        # Always a cell of its own: what is saved of a fork is written in there.
        await thread.prepare(Wish(wish.dies_with, own_cell=True))
        with (
            made_directory(directory),
            held_users(users, source.lineage, claim=thread.gives_users) as lineage,
            grouped(directory, limits, files, always=True) as group,
            opened_ends(directory, nic) as ours,
        ):
            copy_notes(source.directory, directory)
            held = asyncio.Event()
            user = lineage[-1] if thread.gives_users else None
            work = thread.fork(directory, ours, group, user, linger=source.paused, on_held=from_thread(held))
            async with told_to_go_on(directory, paused=paused) as (api, resuming):
                made = await (work if source.paused else fork_running(_Stopping(source), work, held, phases))
            phases.steps.update(made.steps)
            process = WatchedProcess(made.pid, made.pidfd)
    machine = FirecrackerMachine(
        *(Slot(directory, None), process, phases, api), group=group, template=template, paused=True
    )
    machine.keep_users(users, lineage)
    if paused:
        machine.stands_still()
    machine.go_on(resuming)
    return machine


@contextlib.asynccontextmanager
async def told_to_go_on(directory: Path, *, paused: bool) -> AsyncIterator[tuple[Api, Resuming | None]]:
    """A fork finds this when it runs: its API takes connections before. Taken back when the block fails."""
    api = Api(directory / API_SOCKET)
    resuming = None if paused else asyncio.ensure_future(api.call(render_resume()))
    try:
        yield api, resuming
    except BaseException:
        if resuming is not None:
            resuming.cancel()
            await asyncio.gather(resuming, return_exceptions=True)
        raise


@dataclass(frozen=True)
class _Stopping:
    source: FirecrackerMachine

    async def stop(self) -> None:
        await self.source.ask(render_pause())

    async def go_on(self) -> float:
        await self.source.ask(render_resume())
        return 0.0


def copy_notes(source: Path, directory: Path) -> None:
    """What a VM's directory says of it: its memory's file, what was asked of KVM, which descriptor its tap is."""
    shutil.copyfile(source / RECORD, directory / RECORD)
    (directory / MEMORY_FILE).symlink_to((source / MEMORY_FILE).readlink())
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(source / NIC_MARK, directory / NIC_MARK)


@contextlib.contextmanager
def opened_ends(directory: Path, nic: Nic | None) -> Iterator[Mapping[str, int]]:
    """What a fork is reached by, and its logs, by name. Closed when the block has ended: the fork has its own."""
    with contextlib.ExitStack() as opened:
        api = opened.enter_context(listening_socket(directory / API_SOCKET))
        agent = opened.enter_context(listening_socket(directory / AGENT_SOCKET))
        for sock in (api, agent):
            sock.setblocking(False)
        logs = {}
        for name, file in ((_CONSOLE, CONSOLE), (_LOG, VMM_LOG)):
            logs[name] = os.open(directory / file, _LOG_FLAGS, 0o600)
            opened.callback(os.close, logs[name])
        kvm = os.open(_KVM_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, kvm)
        tap = open_nothing() if nic is None else attach_tap(nic.namespace, nic.tap_name)
        opened.callback(os.close, tap)
        yield {_API + LISTENER: api.fileno(), _AGENT + LISTENER: agent.fileno(), _TAP: tap, _KVM: kvm, **logs}


def new_fork_thread(source: FirecrackerMachine, users: UserRange, filters: Filters) -> ForkThread:
    look = functools.cache(lambda: find_out(source, users, filters))
    return ForkThread(source.pid, source.directory.name, lambda wish: look().prepare(wish), _BEFORE_NAME, _BEHIND_NAME)


@dataclass
class Beneath:
    """What a fork does not inherit from a VMM: KVM's objects, and memory files that it maps for itself."""

    machine: FirecrackerMachine
    vm: VmPlan
    files: Mapping[MemoryFile, bytes] = field(default_factory=dict)

    def look(self, source: Source) -> None:
        self.vm.look(source, self.machine.stood_ns())
        self.files = read_memory_files(source)

    def render(self, free: int) -> list[Call]:
        return [*render_copies(self.machine.first_written), *render_remap(self.files, free), *self.vm.set_up(free)]


@dataclass(frozen=True)
class Found:
    """How a Firecracker is forked: what stays as it is as long as it lives."""

    maker: int
    confined: bool
    cell: SourceCell
    choice: Choice
    beneath: Beneath
    filters: Filters
    clear_tid: int | None
    pid: int

    def prepare(self, wish: Wish) -> Prepared:
        last = [*render_own_saves(), *render_rights(self.cell), *render_death(wish.dies_with)]

        def settle(thread: Thread) -> Sequence[Call]:
            return render_settle(self.filters, thread, main=thread.tid == self.pid, confined=self.confined)

        plan = ForkPlan(
            self.choice,
            render_leave(self.cell),
            lambda free: [*last, *self.beneath.render(free)],
            WAITS,  # while its VM is paused the main thread waits for nothing but a call of the API
            look=self.beneath.look,
            replaced=lambda name: is_remade(name) or is_memory_file(name),
            settle=settle,
            clear_tid=self.clear_tid,
            caller=Caller(self.maker, suspend_filters=True),
        )
        return Prepared(plan, self.cell)


def find_out(source: FirecrackerMachine, users: UserRange, filters: Filters) -> Found:
    """Raises NotForkable."""
    pid, directory = source.pid, source.directory
    record = read_record(directory)
    maker = seed.find(pid)
    if maker is None:
        raise NotForkable("The VM was started where it cannot be forked", hint="Fork its snapshot instead")
    cell = find_source_cell(pid, users)
    if cell is None:
        raise NotForkable("The VM to fork is in no cell", hint="Fork its snapshot instead")
    choice = render_choice(find_logs(pid, directory), find_roles(pid, _ROLES), read_tap_number(directory))
    # Firecracker stops a vCPU only when it has answered it.
    beneath = Beneath(source, VmPlan(record, answers_all=True))
    return Found(maker, _is_confined(pid, maker), cell, choice, beneath, filters, record.clear_tid, pid)


def read_record(directory: Path) -> Record:
    """Raises NotForkable."""
    try:
        return parse_record(_read_note(directory / RECORD))
    except OSError:
        raise NotForkable("The VM was started where it cannot be forked", hint="Fork its snapshot instead") from None


def _read_note(path: Path) -> str:
    """What is no text is not what was written there, and is found to be none by who reads it. Raises OSError."""
    with path.open(errors="replace") as file:
        return file.read(MAX_JSON_BYTES + 1)


def find_logs(pid: int, directory: Path) -> dict[int, str]:
    """Its console and its log, by number. Their names are of another mount namespace, which says nothing."""
    files = {_CONSOLE: directory / CONSOLE, _LOG: Slot.found(directory).root / VMM_LOG}
    try:
        wanted = {name: path.stat() for name, path in files.items()}
        seen = list_open_files(pid)
    except OSError as error:
        raise NotForkable(f"The files of process {pid} cannot be looked at: {error.strerror}") from error
    return {
        number: name for number, file in seen.items() for name, each in wanted.items() if os.path.samestat(file, each)
    }


def read_tap_number(directory: Path) -> int | None:
    """None: its guest has no network interface."""
    try:
        return int(_read_note(directory / NIC_MARK))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise NotForkable("What is noted of the VM's network interface is damaged", hint="Start it again") from None


def render_choice(logs: Mapping[int, str], roles: Mapping[str, str], tap: int | None = None) -> Choice:
    """Connections end: those of its API are ours, and those of its guest are told there that the other side is gone."""

    def choose(descriptor: Descriptor) -> Action | None:
        if descriptor.number == tap:
            return Ours(_TAP)
        if (name := logs.get(descriptor.number)) is not None:
            return Ours(name)
        if descriptor.kind is Kind.SOCKET:
            role = roles.get(descriptor.link, "")
            return Ours(role) if role.endswith(LISTENER) else Dead()
        if descriptor.link == _KVM_DEVICE:
            return Ours(_KVM)
        # The duplicate makes new ones in their place.
        return Keep() if descriptor.link.startswith(_KVM_OBJECTS) else None

    return choose


def render_own_saves() -> list[Call]:
    """A small file system that it has alone, over that of its source, for what is saved of it."""
    words = [b"tmpfs\0", SAVES.encode() + b"\0", b"size=4m,nr_inodes=16,mode=700,uid=0,gid=0\0"]
    data, places = b"", []
    for word in words:
        places.append(DATA + len(data))
        data += word
    kind, place, options = places
    args = (kind, place, kind, _NOSUID_NODEV_NOEXEC, options)
    return [Call(_MOUNT, args, data, what="mount a place for what is saved")]


def render_copies(spans: Sequence[tuple[int, int]]) -> list[Call]:
    """Pages that the guest will write are copied before it runs. When it does that itself, KVM first maps the page of
    the source for reading, and is entered three times in all. A kernel before 5.14 does not know this.
    """
    return [
        Call(_MADVISE, (begin, end - begin, _POPULATE_WRITE), may_fail=True, what="copy memory that it will write")
        for begin, end in spans
    ]


def _is_confined(pid: int, tid: int) -> bool:
    status = look_at(pid, f"task/{tid}/status")
    return b"\nSeccomp:\t2\n" in status
