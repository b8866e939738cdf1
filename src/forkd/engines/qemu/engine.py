"""The `qemu` engine: a QEMU process each, the parent's memory file mapped privately. Runs on any Linux."""

from __future__ import annotations

import enum
import functools
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from forkd.engines.base import (
    MEMORY_FILE,
    STATE_FILE,
    BootSpec,
    Frozen,
    Machine,
    Phases,
    Saved,
    check_same,
    refuse_cpu_template,
)
from forkd.engines.machine import AGENT_SOCKET, CONSOLE, connected_socket, grouped, listening_socket, made_directory
from forkd.engines.qemu.args import Binary, Ram, Slot, find_binary, render_args, render_platform
from forkd.engines.qemu.live_fork import finished_or_killed, fork_machine
from forkd.engines.qemu.machine import VMM_LOG, QemuMachine, adopt
from forkd.engines.qemu.memory import make_private, opened_content
from forkd.engines.qemu.monitor import QMP_SOCKET, Incoming, Monitor
from forkd.engines.runs import files_of
from forkd.errors import Unsupported
from forkd.host.cgroup import Group
from forkd.host.marked import Marked, render_environment
from forkd.host.process import spawn
from forkd.host.procfork.trial import find_lack
from forkd.host.spawn_filter import render_calls
from forkd.host.system import read_cpuinfo
from forkd.host.threads import in_thread
from forkd.model.machine import NO_LIMITS, Limits

# A guest that floods its console fills this much of the runtime directory and no more.
_MAX_CONSOLE_BYTES = 1024 * 1024


class Role(enum.Enum):
    """What a QEMU process is for."""

    PARENT = "parent"  # boots, to be frozen
    SANDBOX = "sandbox"
    TEMPLATE = "template"  # rehearses, then stands still, to be forked
    STILL = "still"  # the same, and never runs


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
        return self._start(Frozen(memory_in, spec, {}), directory, NO_LIMITS, Role.PARENT)

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
        return self._start(frozen, directory, limits, Role.SANDBOX)

    def why_no_live_forks(self) -> str | None:
        if self._accelerator != "tcg":
            return "a VM under KVM belongs to the process that made it"
        return find_tracing_lack()

    async def template(self, frozen: Frozen, directory: Path, *, run: bool = True) -> Machine:
        self._require_live_forks()
        return self._start(frozen, directory, NO_LIMITS, Role.TEMPLATE if run else Role.STILL)

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
        forking = fork_machine(source, directory, limits, paused=paused, outlive=self._outlive)
        return await finished_or_killed(forking)

    async def save(self, machine: Machine, into: Path) -> Saved:
        assert isinstance(machine, QemuMachine)
        if lack := find_tracing_lack():
            raise Unsupported(f"The engine qemu cannot save a running VM here: {lack}", hint="See: forkd doctor")
        state, memory = await machine.save()
        await in_thread(lambda: (into / STATE_FILE).write_bytes(state))
        return Saved(self._platform, memory)

    def _require_live_forks(self) -> None:
        if lack := self.why_no_live_forks():
            raise Unsupported(f"The engine qemu cannot fork a live VM here: {lack}", hint="See: forkd doctor")

    async def adopt(self, directory: Path, leader: Marked | None = None) -> Machine:
        return await adopt(directory, leader)

    def _start(self, frozen: Frozen, directory: Path, limits: Limits, role: Role) -> QemuMachine:
        lack = find_tracing_lack()
        if frozen.runs and lack:
            raise Unsupported(
                f"The engine qemu cannot run a layer here: {lack}", hint="Compact the snapshot: forkd snapshot compact"
            )
        phases = Phases(time.monotonic())
        files = [frozen.boot.root, frozen.memory_file, *files_of(frozen.runs)]
        with made_directory(directory), grouped(directory, limits, files) as group:
            return self._spawn(frozen, directory, group, phases, role, traceable=lack is None)

    def _spawn(
        self, frozen: Frozen, directory: Path, group: Group | None, phases: Phases, role: Role, *, traceable: bool
    ) -> QemuMachine:
        loads = role is not Role.PARENT
        # Where it can be forked later the filter that allows no process but that is ours; else it is QEMU's own.
        forkable = loads and self.why_no_live_forks() is None
        with ExitStack() as ours, ExitStack() as on_failure:
            agent = ours.enter_context(listening_socket(directory / AGENT_SOCKET))
            qmp = ours.enter_context(listening_socket(directory / QMP_SOCKET))
            channel = on_failure.enter_context(connected_socket(directory / AGENT_SOCKET))
            control = on_failure.enter_context(connected_socket(directory / QMP_SOCKET))
            incoming = Incoming(frozen.directory / STATE_FILE) if loads else None
            if incoming:
                ours.enter_context(incoming.theirs)
                on_failure.callback(incoming.close)
            content = ours.enter_context(opened_content(frozen.memory_file, frozen.runs))
            inherited = [agent.fileno(), qmp.fileno(), *(fd for _, fd in content.fds)]
            process = spawn(
                render_args(
                    self._binary.path,
                    self._accelerator,
                    frozen.boot,
                    Slot(directory.name, directory / CONSOLE, agent.fileno(), qmp.fileno()),
                    Ram(frozen.memory_file, shared=traceable or not loads),
                    incoming=loads,
                    spawn="allow" if forkable else "deny",
                ),
                output=directory / VMM_LOG,
                env=render_environment(directory, room=True),
                inherited_fds=[*inherited, *([incoming.fd] if incoming else [])],
                max_file_bytes=_MAX_CONSOLE_BYTES,
                outlive=self._outlive and role is Role.SANDBOX,
                group=group,
            )
            on_failure.pop_all()
        machine = QemuMachine(directory, process, phases, Monitor(control), channel=channel, group=group)
        calls = render_calls() if forkable else []
        set_up = (lambda pid: make_private(pid, content, calls)) if loads and traceable else None
        machine.start(incoming, set_up, run=role is not Role.STILL)
        return machine
