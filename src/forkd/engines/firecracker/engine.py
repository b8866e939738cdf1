"""The `firecracker` engine: a Firecracker each, the parent's memory file mapped privately. Needs KVM."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from forkd.engines.base import (
    MEMORY_FILE,
    STATE_FILE,
    BootSpec,
    Frozen,
    Machine,
    Phases,
    Saved,
    WithoutLiveForks,
)
from forkd.engines.firecracker.api import Api
from forkd.engines.firecracker.jail import API_SOCKET, Given, Slot
from forkd.engines.firecracker.machine import FirecrackerMachine
from forkd.engines.firecracker.plan import (
    can_override_taps,
    check_platform,
    render_boot,
    render_freeze,
    render_load,
    render_platform,
)
from forkd.engines.firecracker.vmlinux import extract_elf
from forkd.engines.machine import CONSOLE, found_process, grouped, made_directory
from forkd.host.cgroup import find_group
from forkd.host.files import dig_holes
from forkd.host.firecracker import find_binaries
from forkd.host.marked import Marked, render_environment
from forkd.host.process import spawn
from forkd.host.system import read_cpuinfo
from forkd.host.tap import has_tun
from forkd.host.threads import in_thread
from forkd.model.machine import NO_LIMITS, Limits

_log = logging.getLogger(__name__)

# What Firecracker calls what it is given. The root's name is frozen into snapshots.
_ROOT, _KERNEL, _INITRD, _OUT = "root.erofs", "kernel", "initrd", "out"

_MIB = 1024 * 1024
# A guest that floods its console fills this much of the runtime directory. Firecracker takes a full file for its end,
# so it is far more than a guest says that means no harm.
_MAX_CONSOLE_BYTES = 4 * _MIB
# A parent also writes its memory, and its state of some ten KiB.
_MAX_STATE_BYTES = 16 * _MIB


class FirecrackerEngine(WithoutLiveForks):
    name = "firecracker"

    def __init__(self, *, outlive: bool = False) -> None:
        """`outlive`: forks go on when we end; parents never do. Raises HostLacks."""
        self._binaries = find_binaries()
        self._outlive = outlive
        self._jails = self._binaries.firecracker.name if self._binaries.jailer else None
        # Only a network namespace of its own keeps a VM's interface from everybody else's network.
        self._network = self._jails is not None and has_tun() and can_override_taps(self._binaries.version)
        self._platform = render_platform(self._binaries, read_cpuinfo(), os.uname().release, network=self._network)
        self.isolation = "firecracker-jailed" if self._jails else "firecracker-no-jail"
        if self._jails is None:
            _log.warning("Firecracker runs without a jail, as only root can make one: KVM and seccomp still hold")

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path) -> Machine:
        slot = Slot(directory, self._jails)
        tap = self._tap(slot)
        calls = render_boot(spec, _KERNEL, _INITRD, _ROOT, tap)
        kernel = await in_thread(lambda: extract_elf(spec.kernel.read_bytes()))
        with made_directory(directory):
            (directory / _KERNEL).write_bytes(kernel)
            given = {
                _KERNEL: Given(directory / _KERNEL),
                _INITRD: Given(spec.initrd),
                _ROOT: Given(spec.root),
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

    async def fork(self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS) -> Machine:
        given = {
            _ROOT: Given(frozen.boot.root),
            STATE_FILE: Given(frozen.directory / STATE_FILE),
            MEMORY_FILE: Given(frozen.memory_file),
        }
        slot = Slot(directory, self._jails)
        with made_directory(directory):
            if slot.jailed:  # else it is there anyway
                (directory / MEMORY_FILE).symlink_to(frozen.memory_file.absolute())
            machine = self._start(slot, given, limits, _MAX_CONSOLE_BYTES, parent=False)
        tap = self._tap(slot)
        load = render_load(STATE_FILE, MEMORY_FILE, tap, resume=not frozen.runs)
        machine.start([load], tap, frozen.runs)
        return machine

    async def save(self, machine: Machine, into: Path) -> Saved:
        assert isinstance(machine, FirecrackerMachine)
        state, memory = await machine.save()
        await in_thread(lambda: _write_readable(into / STATE_FILE, state))
        return Saved(self._platform, memory)

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
            return machine

    def _tap(self, slot: Slot) -> str | None:
        return slot.tap if self._network else None

    def _start(
        self, slot: Slot, given: Mapping[str, Given], limits: Limits, max_file_bytes: int, *, parent: bool
    ) -> FirecrackerMachine:
        phases, directory = Phases(time.monotonic()), slot.directory
        slot.furnish(given)
        files = [thing.path for thing in given.values()]
        with grouped(directory, limits, files, always=slot.jailed) as group:
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
        return FirecrackerMachine(slot, process, phases, api, group=group, parent=parent)


def _write_readable(path: Path, data: bytes) -> None:
    """By each child, which is a user of its own."""
    path.write_bytes(data)
    path.chmod(0o644)
