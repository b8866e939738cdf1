"""The `qemu` engine: a QEMU process each, the parent's memory file mapped privately. Runs on any Linux."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from forkd.engines.base import BootSpec, Frozen, Machine, Phases, check_same
from forkd.engines.cpu_template import refuse_cpu_template
from forkd.engines.machine import CONSOLE, grouped, made_directory
from forkd.engines.qemu.args import Ram, Seat, render_args
from forkd.engines.qemu.binary import Binary, find_binary, render_platform
from forkd.engines.qemu.machine import VMM_LOG, QemuMachine, adopt
from forkd.engines.qemu.monitor import QMP_SOCKET, Monitor
from forkd.engines.qemu.state import Incoming
from forkd.engines.sockets import AGENT_SOCKET, connected_socket, listening_socket
from forkd.host.cgroup import Group
from forkd.host.cpu import read_cpuinfo
from forkd.host.marked import Marked, render_environment
from forkd.host.process import spawn
from forkd.model.limits import NO_LIMITS, Limits

MEMORY_FILE = "memory"
STATE_FILE = "state"

# A guest that floods its console fills this much of the runtime directory and no more.
_MAX_CONSOLE_BYTES = 1024 * 1024


class QemuEngine:
    name = "qemu"

    def __init__(self, accelerator: str, *, outlive: bool = False, binary: Binary | None = None) -> None:
        """`outlive`: forks go on when we end. Parents never do: who has not frozen one does not miss it."""
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
        return self._start(spec, directory, Ram(memory, shared=True), None, NO_LIMITS)

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
        ram = Ram(frozen.directory / MEMORY_FILE, shared=False)
        return self._start(frozen.boot, directory, ram, frozen.directory / STATE_FILE, limits)

    async def adopt(self, directory: Path, leader: Marked | None = None) -> Machine:
        return await adopt(directory, leader)

    def _start(self, spec: BootSpec, directory: Path, ram: Ram, state: Path | None, limits: Limits) -> QemuMachine:
        phases = Phases(time.monotonic())
        with made_directory(directory), grouped(directory, limits, [spec.root, ram.path]) as group:
            return self._spawn(spec, directory, ram, state, group, phases)

    def _spawn(
        self, spec: BootSpec, directory: Path, ram: Ram, state: Path | None, group: Group | None, phases: Phases
    ) -> QemuMachine:
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
                self._render(spec, Seat(directory.name, directory / CONSOLE, agent.fileno(), qmp.fileno()), ram),
                output=directory / VMM_LOG,
                env=render_environment(directory),
                inherited_fds=[agent.fileno(), qmp.fileno(), *([incoming.fd] if incoming else [])],
                max_file_bytes=_MAX_CONSOLE_BYTES,
                outlive=self._outlive and state is not None,
                group=group,
            )
            on_failure.pop_all()
        monitor = Monitor(directory.name, control)
        machine = QemuMachine(directory, process, phases, monitor, channel=channel, group=group)
        machine.start(incoming)
        return machine

    def _render(self, spec: BootSpec, seat: Seat, ram: Ram) -> list[str]:
        return render_args(self._binary.path, self._accelerator, spec, seat, ram, incoming=not ram.shared)
