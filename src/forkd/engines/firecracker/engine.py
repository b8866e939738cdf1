"""The `firecracker` engine: a Firecracker each, the parent's memory file mapped privately. Needs KVM."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from forkd.engines.base import (
    MEMORY_FILE,
    STATE_FILE,
    BootSpec,
    CellWish,
    Frozen,
    Machine,
    Nic,
    Phases,
    Saved,
    Way,
)
from forkd.engines.firecracker.api import Api
from forkd.engines.firecracker.base_vm import start_base
from forkd.engines.firecracker.confine import Filters, find_filters
from forkd.engines.firecracker.jail import API_SOCKET, NIC_MARK, Given, Place, Slot
from forkd.engines.firecracker.live_fork import fork_machine
from forkd.engines.firecracker.machine import FirecrackerMachine
from forkd.engines.firecracker.plan import (
    NIC_KEY,
    ROOT,
    can_override_taps,
    check_platform,
    find_fork_lack,
    render_boot,
    render_freeze,
    render_load,
    render_platform,
)
from forkd.engines.firecracker.vmlinux import extract_elf
from forkd.engines.fork_thread import finished_or_killed
from forkd.engines.machine import CONSOLE, found_process, grouped, made_directory
from forkd.errors import EngineFailed, HostLacks, Unsupported
from forkd.host.cell_plan import find_cell_lack
from forkd.host.cgroup import find_group
from forkd.host.files import dig_holes
from forkd.host.firecracker import find_binaries
from forkd.host.id_maps import UserRange
from forkd.host.kvmfork.record import MAX_VCPUS
from forkd.host.marked import Marked, render_environment
from forkd.host.process import spawn
from forkd.host.procfork.trial import find_lack
from forkd.host.system import read_cpuinfo
from forkd.host.tap import has_tun
from forkd.host.threads import in_thread
from forkd.host.user_ids import DEFAULT_USERS, held_users, hold_lineage, user_ids
from forkd.model.machine import NO_LIMITS, Limits

_log = logging.getLogger(__name__)

# What Firecracker calls what it is given.
_KERNEL, _INITRD, _OUT = "kernel", "initrd", "out"

_MIB = 1024 * 1024
# A guest that floods its console fills this much of the runtime directory. Firecracker takes a full file for its end,
# so it is far more than a guest says that means no harm.
_MAX_CONSOLE_BYTES = 4 * _MIB
# A parent also writes its memory, and its state of some ten KiB.
_MAX_STATE_BYTES = 16 * _MIB


# Tried once: it takes some milliseconds, and what forbids it lasts.
find_suspending_lack = functools.cache(lambda: find_lack(suspending=True))


class FirecrackerEngine:
    name = "firecracker"
    opens_taps = True
    streams_go_on = False
    learns = True

    def __init__(
        self,
        *,
        outlive: bool = False,
        cell: CellWish | None = None,
        users: UserRange = DEFAULT_USERS,
        live_forks: bool = True,
    ) -> None:
        """`outlive`: forks go on when we end; parents never do. `users`: whom VMs run as, for root. Raises HostLacks.

        `cell`: whether a VM must have one, or a jail; root's always do. `live_forks`: where they can be, its VMs are
        such that they can be forked while they run: in a cell of forkd's instead of the jailer's jail.
        """
        self._binaries = find_binaries()
        self._outlive = outlive
        self._users = user_ids(users)
        self._live_forks = live_forks
        self._filters: Filters | None = None
        self._filters_turn = asyncio.Lock()
        self._jails = self._binaries.firecracker.name if self._binaries.jailer else None
        # Only a network namespace of its own keeps a VM's interface from everybody else's network.
        self._network = self._jails is not None and has_tun() and can_override_taps(self._binaries.version)
        self._platform = render_platform(self._binaries, read_cpuinfo(), os.uname().release, network=self._network)
        self.isolation = "firecracker-jailed" if self._jails else "firecracker-no-jail"
        self._refuses = self._jails is None and cell == "required"
        if self._jails is None and not self._refuses:
            _log.warning("Firecracker runs without a jail, as only root can make one: KVM and seccomp still hold")

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path, nic: Nic | None = None) -> Machine:
        slot = self._slot(directory, nic)
        tap = self._tap(slot)
        calls = render_boot(spec, _KERNEL, _INITRD, ROOT, tap)
        kernel = await in_thread(lambda: extract_elf(spec.kernel.read_bytes()))
        with made_directory(directory):
            (directory / _KERNEL).write_bytes(kernel)
            given = {
                _KERNEL: Given(directory / _KERNEL),
                _INITRD: Given(spec.initrd),
                ROOT: Given(spec.root),
                _OUT: Given(memory_in, writable=True),
            }
            max_file_bytes = spec.machine.memory_mib * _MIB + _MAX_STATE_BYTES
            machine = self._start(slot, given, NO_LIMITS, max_file_bytes, parent=True)
        machine.start(calls, tap)
        return machine

    async def freeze(self, machine: Machine, into: Path) -> Mapping[str, str]:
        assert isinstance(machine, FirecrackerMachine)
        await machine.running()
        await machine.hang_up()
        for call in render_freeze(f"{_OUT}/{STATE_FILE}", f"{_OUT}/{MEMORY_FILE}"):
            await machine.ask(call)
        await machine.kill()
        for path in (into, into / STATE_FILE, into / MEMORY_FILE):
            os.chown(path, os.geteuid(), os.getegid(), follow_symlinks=False)
        for name in (STATE_FILE, MEMORY_FILE):
            (into / name).chmod(0o644)  # each child is a user of its own
        # Firecracker writes memory that was never touched, too.
        await in_thread(lambda: dig_holes(into / MEMORY_FILE))
        return self._platform

    def check(self, frozen: Frozen) -> None:
        check_platform(frozen.platform, self._platform)

    def check_nic(self, frozen: Frozen) -> None:
        if not self._network:
            raise _no_network()

    async def fork(
        self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        """By way of a base, so that it can be forked itself; where that cannot be, a Firecracker of its own."""
        if nic is not None and NIC_KEY not in frozen.platform:
            raise _no_nic()
        if self.why_no_live_forks() is None and frozen.boot.machine.vcpus <= MAX_VCPUS:
            try:
                machine = await self._fork_base(frozen, directory, limits, nic, outlive=self._outlive)
                machine.phases.way = Way.START
                return machine
            except EngineFailed as error:
                _log.warning("%s is started so that it cannot be forked: %s", directory.name, error.message)
        return self._fork_alone(frozen, directory, limits, nic)

    def _fork_alone(self, frozen: Frozen, directory: Path, limits: Limits, nic: Nic | None) -> Machine:
        given = {
            ROOT: Given(frozen.boot.root),
            STATE_FILE: Given(frozen.directory / STATE_FILE),
            MEMORY_FILE: Given(frozen.memory_file),
        }
        slot = self._slot(directory, nic)
        with made_directory(directory):
            if NIC_KEY in frozen.platform:
                (directory / NIC_MARK).touch()
            if slot.jailed:  # else it is there anyway
                (directory / MEMORY_FILE).symlink_to(frozen.memory_file.absolute())
            machine = self._start(slot, given, limits, _MAX_CONSOLE_BYTES, parent=False)
        tap = self._tap(slot)
        load = render_load(STATE_FILE, MEMORY_FILE, tap, resume=not frozen.runs)
        machine.start([load], tap, frozen.runs)
        return machine

    def why_no_live_forks(self) -> str | None:
        if not self._live_forks:
            return "it was opened without them"
        if os.geteuid() != 0:
            return "only root can have Firecracker's own filters put on its forks"
        return find_fork_lack(self._binaries.version) or find_suspending_lack() or find_cell_lack(self._users.users)

    async def template(self, frozen: Frozen, directory: Path, *, run: bool = True) -> Machine:
        self._require_live_forks()
        return await self._fork_base(frozen, directory, NO_LIMITS, None, outlive=False, paused=not run, template=True)

    async def _fork_base(
        self,
        frozen: Frozen,
        directory: Path,
        limits: Limits,
        nic: Nic | None,
        *,
        outlive: bool,
        paused: bool = False,
        template: bool = False,
    ) -> FirecrackerMachine:
        """A base is there for one fork, which has an address layout of its own; what is forked often is that fork."""
        begun = time.monotonic()
        filters = await self._obtain_filters(directory.with_name(f"{directory.name}-tiny"))
        base = await start_base(
            self._binaries,
            frozen,
            directory.with_name(f"{directory.name}-base"),
            self._users,
            network=NIC_KEY in frozen.platform,
            max_file_bytes=_MAX_CONSOLE_BYTES,
        )
        loaded = time.monotonic()
        try:
            forking = fork_machine(
                *(base, directory, limits, self._users, filters, nic),
                paused=paused,
                outlive=outlive,
                template=template,
            )
            machine = await finished_or_killed(forking)
        finally:
            await base.kill()
        machine.phases.begun = begun
        machine.phases.steps = {"state load": loaded, **machine.phases.steps}
        return machine

    async def fork_live(
        self,
        source: Machine,
        directory: Path,
        limits: Limits = NO_LIMITS,
        *,
        nic: Nic | None = None,
        settled: bool = False,
        paused: bool = False,
    ) -> Machine:
        assert isinstance(source, FirecrackerMachine)
        self._require_live_forks()
        if nic is not None and not (source.directory / NIC_MARK).exists():
            raise _no_nic()
        filters = await self._obtain_filters(directory.with_name(f"{directory.name}-tiny"))
        forking = fork_machine(
            source, directory, limits, self._users, filters, nic, paused=paused, outlive=self._outlive
        )
        return await finished_or_killed(forking)

    def _require_live_forks(self) -> None:
        if lack := self.why_no_live_forks():
            raise Unsupported(f"The engine firecracker cannot fork a live VM here: {lack}", hint="See: forkd doctor")

    async def _obtain_filters(self, directory: Path) -> Filters:
        """Raises NotForkable."""
        async with self._filters_turn:
            if self._filters is None:
                self._filters = await find_filters(self._binaries, directory)
            return self._filters

    async def save(self, machine: Machine, into: Path) -> Saved:
        assert isinstance(machine, FirecrackerMachine)
        state, memory = await machine.save()
        await in_thread(lambda: _write_readable(into / STATE_FILE, state))
        platform = dict(self._platform)
        if not (machine.directory / NIC_MARK).exists():  # it comes from a snapshot that was made without
            platform.pop(NIC_KEY, None)
        return Saved(platform, memory)

    async def adopt(self, directory: Path, leader: Marked | None = None) -> Machine:
        slot = Slot.found(directory)
        async with found_process(directory, leader) as process:
            api = Api(slot.root / API_SOCKET)
            group, phases = find_group(directory), Phases(time.monotonic())
            machine = FirecrackerMachine(slot, process, phases, api, group=group)
            try:
                await machine.take_up()
            except BaseException:
                await machine.release()
                raise
            # Not earlier: until then its process is known by its keeper, which is root.
            machine.keep_users(self._users, hold_lineage(self._users, machine.pid))
            return machine

    def _slot(self, directory: Path, nic: Nic | None) -> Slot:
        if self._refuses:
            raise HostLacks(
                "Neither a cell nor a jail can be made for a Firecracker: only root can",
                hint="Run forkd as root, use the engine qemu, or set cell to best-effort",
            )
        if nic is not None and not self._network:
            raise _no_network()
        return Slot(directory, self._jails, None if nic is None else Place(nic.namespace, nic.tap_name))

    def _tap(self, slot: Slot) -> str | None:
        return slot.tap if self._network else None

    def _start(
        self, slot: Slot, given: Mapping[str, Given], limits: Limits, max_file_bytes: int, *, parent: bool
    ) -> FirecrackerMachine:
        phases, directory = Phases(time.monotonic()), slot.directory
        files = [thing.path for thing in given.values()]
        with (
            held_users(self._users, (), claim=slot.jailed) as lineage,
            grouped(directory, limits, files, always=slot.jailed) as group,
        ):
            if lineage:
                slot = replace(slot, user=lineage[-1])
            slot.furnish(given)
            process = spawn(
                slot.render_command(self._binaries, max_file_bytes),
                output=directory / CONSOLE,
                env=render_environment(directory),
                cwd=directory,
                max_file_bytes=None if slot.jailed else max_file_bytes,
                outlive=self._outlive and not parent,
                group=group,
            )
        api = Api(slot.root / API_SOCKET)
        machine = FirecrackerMachine(slot, process, phases, api, group=group, parent=parent)
        machine.keep_users(self._users, lineage)
        return machine


def _write_readable(path: Path, data: bytes) -> None:
    """By each child, which is a user of its own."""
    path.write_bytes(data)
    path.chmod(0o644)


def _no_nic() -> Unsupported:
    return Unsupported("The snapshot was made without a network interface", hint="Make it again: forkd snapshot create")


def _no_network() -> Unsupported:
    return Unsupported(
        "Firecracker gives no network to its guests here",
        hint="Run forkd as root, with Firecracker's jailer 1.12 or newer and /dev/net/tun",
    )
