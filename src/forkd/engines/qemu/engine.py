"""The `qemu` engine: a QEMU process each, the parent's memory file mapped privately. Runs on any Linux."""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from forkd.engines.base import BootSpec, Frozen, Machine, Phases, check_same, refuse_cpu_template
from forkd.engines.machine import AGENT_SOCKET, CONSOLE, connected_socket, grouped, listening_socket, made_directory
from forkd.engines.qemu.args import Binary, Ram, Slot, find_binary, render_args, render_platform
from forkd.engines.qemu.live_fork import finished_or_killed, fork_machine
from forkd.engines.qemu.machine import VMM_LOG, QemuMachine, adopt
from forkd.engines.qemu.monitor import QMP_SOCKET, Incoming, Monitor
from forkd.errors import Unsupported
from forkd.host.cgroup import Group
from forkd.host.marked import Marked, render_environment
from forkd.host.process import spawn
from forkd.host.procfork.trial import find_lack
from forkd.host.system import read_cpuinfo
from forkd.model.machine import NO_LIMITS, Limits

MEMORY_FILE = "memory"
STATE_FILE = "state"

# A guest that floods its console fills this much of the runtime directory and no more.
_MAX_CONSOLE_BYTES = 1024 * 1024


class Role(enum.Enum):
    """What a QEMU process is for."""

    PARENT = "parent"  # boots, to be frozen
    SANDBOX = "sandbox"
    TEMPLATE = "template"  # stands still, to be forked


# Tried once: it takes some milliseconds, and what forbids it lasts.
find_tracing_lack = functools.cache(find_lack)


class QemuEngine:
    name = "qemu"

    def __init__(self, accelerator: str, *, outlive: bool = False, binary: Binary | None = None) -> None:
        """`outlive`: forks go on when we end. Parents never do: one that is not frozen is of no use."""
        self._binary = binary or find_binary()
        self._accelerator = accelerator
        self._outlive = outlive
        self._platform = render_platform(self._binary, accelerator, read_cpuinfo())
        self.isolation = "qemu-tcg" if accelerator == "tcg" else "qemu-kvm"

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path) -> Machine:
        refuse_cpu_template(spec.machine, self.name)
        memory = memory_in / MEMORY_FILE
        # Sized here, so that QEMU need not write it and the limit on its console file can be tight.
        with memory.open("xb") as file:
            file.truncate(spec.machine.memory_mib * 1024 * 1024)
        return self._start(spec, directory, Ram(memory, shared=True), None, NO_LIMITS, Role.PARENT)

    async def freeze(self, machine: Machine, into: Path) -> Mapping[str, str]:
        assert isinstance(machine, QemuMachine)
        await machine.running()
        await machine.monitor.execute("stop")
        with (into / STATE_FILE).open("xb") as state:
            await machine.monitor.save_state(state)
        await machine.kill()
        return self._platform

    def check(self, frozen: Frozen) -> None:
        for key, wanted in frozen.platform.items():
            check_same(key, wanted, self._platform.get(key))

    async def fork(self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS) -> Machine:
        return self._load(frozen, directory, limits, Role.SANDBOX)

    def why_no_live_forks(self) -> str | None:
        if self._accelerator != "tcg":
            return "a VM under KVM belongs to the process that made it"
        return find_tracing_lack()

    async def template(self, frozen: Frozen, directory: Path) -> Machine:
        self._require_live_forks()
        return self._load(frozen, directory, NO_LIMITS, Role.TEMPLATE)

    async def fork_live(
        self,
        source: Machine,
        directory: Path,
        limits: Limits = NO_LIMITS,
        *,
        settled: bool = False,
        paused: bool = False,
    ) -> Machine:
        assert isinstance(source, QemuMachine)
        self._require_live_forks()
        forking = fork_machine(source, directory, limits, settled=settled, paused=paused, outlive=self._outlive)
        return await finished_or_killed(forking)

    def _require_live_forks(self) -> None:
        if lack := self.why_no_live_forks():
            raise Unsupported(f"The engine qemu cannot fork a live VM here: {lack}", hint="See: forkd doctor")

    def _load(self, frozen: Frozen, directory: Path, limits: Limits, role: Role) -> QemuMachine:
        ram = Ram(frozen.directory / MEMORY_FILE, shared=False)
        return self._start(frozen.boot, directory, ram, frozen.directory / STATE_FILE, limits, role)

    async def adopt(self, directory: Path, leader: Marked | None = None) -> Machine:
        return await adopt(directory, leader)

    def _start(
        self, spec: BootSpec, directory: Path, ram: Ram, state: Path | None, limits: Limits, role: Role
    ) -> QemuMachine:
        phases = Phases(time.monotonic())
        with made_directory(directory), grouped(directory, limits, [spec.root, ram.path]) as group:
            return self._spawn(spec, directory, ram, state, group, phases, role)

    def _spawn(
        self,
        spec: BootSpec,
        directory: Path,
        ram: Ram,
        state: Path | None,
        group: Group | None,
        phases: Phases,
        role: Role,
    ) -> QemuMachine:
        # Where it can be forked later the filter that allows no process but that is ours; else it is QEMU's own.
        forkable = role is not Role.PARENT and self.why_no_live_forks() is None
        with ExitStack() as ours, ExitStack() as on_failure:
            agent = ours.enter_context(listening_socket(directory / AGENT_SOCKET))
            qmp = ours.enter_context(listening_socket(directory / QMP_SOCKET))
            channel = on_failure.enter_context(connected_socket(directory / AGENT_SOCKET))
            control = on_failure.enter_context(connected_socket(directory / QMP_SOCKET))
            incoming = Incoming(state) if state else None
            if incoming:
                ours.enter_context(incoming.theirs)
                on_failure.callback(incoming.close)
            process = spawn(
                render_args(
                    self._binary.path,
                    self._accelerator,
                    spec,
                    Slot(directory.name, directory / CONSOLE, agent.fileno(), qmp.fileno()),
                    ram,
                    incoming=not ram.shared,
                    spawn="allow" if forkable else "deny",
                ),
                output=directory / VMM_LOG,
                env=render_environment(directory, room=True),
                inherited_fds=[agent.fileno(), qmp.fileno(), *([incoming.fd] if incoming else [])],
                max_file_bytes=_MAX_CONSOLE_BYTES,
                outlive=self._outlive and role is Role.SANDBOX,
                group=group,
            )
            on_failure.pop_all()
        monitor = Monitor(control)
        machine = QemuMachine(directory, process, phases, monitor, channel=channel, group=group)
        machine.start(incoming, confine=forkable)
        return machine
