"""The `qemu` engine: a QEMU process each, the parent's memory file mapped privately. Runs on any Linux."""

from __future__ import annotations

import enum
import functools
import logging
import os
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

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
    check_same,
    refuse_cpu_template,
)
from forkd.engines.fork_thread import finished_or_killed
from forkd.engines.machine import AGENT_SOCKET, CONSOLE, connected_socket, grouped, listening_socket, made_directory
from forkd.engines.qemu.args import Binary, Ram, Slot, find_binary, render_args, render_platform
from forkd.engines.qemu.live_fork import fork_machine
from forkd.engines.qemu.machine import VMM_LOG, QemuMachine, adopt
from forkd.engines.qemu.memory import Content, make_decoy, make_private, opened_content
from forkd.engines.qemu.monitor import QMP_SOCKET, Incoming, Monitor
from forkd.engines.qemu.needs import find_needs
from forkd.engines.qemu.nic import KIND, Interface, has_nic, opened_interface, refuse_without_nic, require_tap_number
from forkd.engines.runs import files_of
from forkd.errors import HostLacks, Unsupported
from forkd.host.cell_plan import MAX_THREADS, CellPlan, find_cell_lack
from forkd.host.cgroup import Group
from forkd.host.fork_cell import CLOSE_TO_OTHERS, parse_most_threads, render_limit
from forkd.host.id_maps import UserRange
from forkd.host.marked import Marked, render_environment
from forkd.host.process import spawn
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.source import make_calls
from forkd.host.procfork.trial import find_lack
from forkd.host.system import read_cpuinfo
from forkd.host.threads import in_thread
from forkd.host.user_ids import DEFAULT_USERS, Lineage, held_users, user_ids
from forkd.host.vmm_filter import render_calls
from forkd.model.machine import NO_LIMITS, Limits

# A guest that floods its console fills this much of the runtime directory and no more.
_MAX_CONSOLE_BYTES = 1024 * 1024
_KVM = "/dev/kvm"
# As many pools of memory as the C library gives to threads without counting processors: it would read files for that,
# which no filter allows.
_LIBRARY = {"MALLOC_ARENA_MAX": "8"}
# In the VM's directory, while it starts.
_DECOY = "decoy"

_log = logging.getLogger(__name__)


class Role(enum.Enum):
    """What a QEMU process is for."""

    PARENT = "parent"  # boots, to be frozen
    SANDBOX = "sandbox"
    TEMPLATE = "template"  # rehearses, then stands still, to be forked
    STILL = "still"  # the same, and never runs


@dataclass(frozen=True)
class Start:
    """How one QEMU is started. `lineage`: the user ids that are held for it."""

    role: Role
    phases: Phases
    traceable: bool
    confined: bool
    lineage: Lineage

    @property
    def loads(self) -> bool:
        return self.role is not Role.PARENT

    @property
    def user(self) -> int | None:
        return self.lineage[-1] if self.lineage else None


# Tried once: it takes some milliseconds, and what forbids it lasts.
find_tracing_lack = functools.cache(find_lack)


class QemuEngine:
    name = "qemu"
    opens_taps = False
    streams_go_on = True
    learns = False

    def __init__(
        self,
        accelerator: str,
        *,
        outlive: bool = False,
        binary: Binary | None = None,
        cell: CellWish | Literal["off"] | None = None,
        users: UserRange = DEFAULT_USERS,
    ) -> None:
        """`outlive`: forks go on when we end. Parents never do: one that is not frozen is of no use.

        `cell`: whether a VM must have one; where it is not said, for root it must. "off", to measure what they cost:
        none has. `users`: whom VMs run as, for root.
        """
        self._binary = binary or find_binary()
        self._accelerator = accelerator
        self._outlive = outlive
        self._cells = cell != "off"
        self._cell_required = cell == "required" or (cell is None and os.geteuid() == 0)
        self._warned = False
        self._users = user_ids(users)
        self._platform = render_platform(self._binary, accelerator, read_cpuinfo(), KIND)
        self.isolation = "qemu-tcg" if accelerator == "tcg" else "qemu-kvm"

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path, nic: Nic | None = None) -> Machine:
        refuse_cpu_template(spec.machine, self.name)
        memory = memory_in / MEMORY_FILE
        # Sized here, so that QEMU need not write it and the limit on its console file can be tight.
        with memory.open("xb") as file:
            file.truncate(spec.machine.memory_mib * 1024 * 1024)
        return self._start(Frozen(memory_in, spec, self._platform), directory, NO_LIMITS, Role.PARENT, nic)

    async def freeze(self, machine: Machine, into: Path) -> Mapping[str, str]:
        assert isinstance(machine, QemuMachine)
        await machine.running()
        await machine.monitor.execute("stop")
        with (into / STATE_FILE).open("xb") as state:
            await machine.monitor.save_state(state)
        await machine.kill()
        os.chown(into / MEMORY_FILE, os.geteuid(), os.getegid(), follow_symlinks=False)
        return self._platform

    def check(self, frozen: Frozen) -> None:
        for key, wanted in frozen.platform.items():
            check_same(key, wanted, self._platform.get(key))

    def check_nic(self, frozen: Frozen) -> None:
        if "nic" not in frozen.platform:
            raise refuse_without_nic()

    async def fork(
        self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        return self._start(frozen, directory, limits, Role.SANDBOX, nic)

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
        nic: Nic | None = None,
        settled: bool = False,
        paused: bool = False,
    ) -> Machine:
        assert isinstance(source, QemuMachine)
        self._require_live_forks()
        if nic is not None:
            require_tap_number(source.pid)
        forking = fork_machine(source, directory, limits, self._users, nic, paused=paused, outlive=self._outlive)
        return await finished_or_killed(forking)

    async def save(self, machine: Machine, into: Path) -> Saved:
        assert isinstance(machine, QemuMachine)
        if lack := find_tracing_lack():
            raise Unsupported(f"The engine qemu cannot save a running VM here: {lack}", hint="See: forkd doctor")
        state, memory = await machine.save()
        await in_thread(lambda: (into / STATE_FILE).write_bytes(state))
        platform = dict(self._platform)
        if not has_nic(machine.pid):  # it comes from a snapshot that has none
            del platform["nic"]
        return Saved(platform, memory)

    def _require_live_forks(self) -> None:
        if lack := self.why_no_live_forks():
            raise Unsupported(f"The engine qemu cannot fork a live VM here: {lack}", hint="See: forkd doctor")

    async def adopt(self, directory: Path, leader: Marked | None = None) -> Machine:
        return await adopt(directory, leader, self._users)

    def _start(
        self, frozen: Frozen, directory: Path, limits: Limits, role: Role, nic: Nic | None = None
    ) -> QemuMachine:
        lack = find_tracing_lack()
        if nic is not None:
            self.check_nic(frozen)
        if frozen.runs and lack:
            raise Unsupported(
                f"The engine qemu cannot run a layer here: {lack}", hint="Compact the snapshot: forkd snapshot compact"
            )
        confined = self._may_confine()
        phases = Phases(time.monotonic())
        files = [frozen.boot.root, frozen.memory_file, *files_of(frozen.runs)]
        with (
            made_directory(directory),
            held_users(self._users, (), claim=confined and os.geteuid() == 0) as lineage,
            grouped(directory, limits, files, always=True) as group,
        ):
            start = Start(role, phases, traceable=lack is None, confined=confined, lineage=lineage)
            return self._spawn(frozen, directory, group, start, nic)

    def _may_confine(self) -> bool:
        """Whether a VM gets a cell. Raises HostLacks where it must have one and this host cannot."""
        if not self._cells:
            return False
        lack = find_tracing_lack() or find_cell_lack(self._users.users)
        if lack is None:
            return True
        if self._cell_required:
            raise HostLacks(f"No cell can be made for a VM: {lack}", hint="See: forkd doctor")
        if not self._warned:
            self._warned = True
            _log.warning("VMs run without a cell, with the rights of this user: %s", lack)
        return False

    def _spawn(
        self, frozen: Frozen, directory: Path, group: Group | None, start: Start, nic: Nic | None
    ) -> QemuMachine:
        # Where it can be forked later the filter that allows no process but that is ours; else it is QEMU's own.
        forkable = start.loads and self.why_no_live_forks() is None
        with ExitStack() as ours, ExitStack() as on_failure:
            agent = ours.enter_context(listening_socket(directory / AGENT_SOCKET))
            qmp = ours.enter_context(listening_socket(directory / QMP_SOCKET))
            channel = on_failure.enter_context(connected_socket(directory / AGENT_SOCKET))
            control = on_failure.enter_context(connected_socket(directory / QMP_SOCKET))
            incoming = Incoming(frozen.directory / STATE_FILE) if start.loads else None
            if incoming:
                ours.enter_context(incoming.theirs)
                on_failure.callback(incoming.close)
            console = _opened(directory / CONSOLE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, ours)
            root = _opened(frozen.boot.root, os.O_RDONLY, ours)
            content = ours.enter_context(opened_content(frozen.memory_file, frozen.runs))
            decoy = start.loads and start.traceable
            interface = Interface()
            if "nic" in frozen.platform:
                interface = ours.enter_context(opened_interface(self._accelerator, nic, changeable=decoy))
            inherited = [agent.fileno(), qmp.fileno(), console, root, *interface.fds]
            memory = frozen.memory_file
            if decoy:  # what it maps itself it opens itself
                inherited += [content.file_fd, *(fd for _, fd in content.fds)]
                memory = make_decoy(directory / _DECOY, frozen.boot.machine.memory_mib << 20, start.user)
            argv = render_args(
                self._argv(start),
                self._accelerator,
                frozen.boot,
                Slot(directory.name, console, root, agent.fileno(), qmp.fileno()),
                Ram(memory, shared=decoy or not start.loads),
                incoming=start.loads,
                forkable=forkable,
                nic=interface.args,
            )
            outlive = self._outlive and start.role is Role.SANDBOX
            process = spawn(
                self._enclosed(argv, frozen.boot, memory, start, None if outlive else os.getpid()),
                output=directory / VMM_LOG,
                env=_LIBRARY | render_environment(directory, room=True),
                inherited_fds=[*inherited, *([incoming.fd] if incoming else [])],
                max_file_bytes=None if start.traceable else _MAX_CONSOLE_BYTES,
                outlive=outlive,
                group=group,
            )
            on_failure.pop_all()
        machine = QemuMachine(directory, process, start.phases, Monitor(control), channel=channel, group=group)
        machine.keep_users(self._users, start.lineage)
        first = interface.calls
        set_up = (lambda pid: self._set_up(pid, directory, content, start, first)) if start.traceable else None
        machine.start(incoming, set_up, run=start.role is not Role.STILL)
        return machine

    def _argv(self, start: Start) -> tuple[str, ...]:
        return find_needs(self._binary.path, self._accelerator).argv if start.confined else (self._binary.path,)

    def _enclosed(
        self, argv: list[str], boot: BootSpec, memory: Path, start: Start, dies_with: int | None
    ) -> list[str]:
        """The command that starts it in its cell, where it gets one."""
        if not start.confined:
            return argv
        parent = not start.loads
        if parent and start.user is not None:
            os.chown(memory, start.user, start.user)  # it writes it; ours again when it is frozen
        plan = CellPlan(
            start.user,
            find_needs(self._binary.path, self._accelerator).files,
            copies=[str(boot.kernel), str(boot.initrd)] if parent else [],
            writable=[str(memory)],
            devices=[_KVM] if self._accelerator == "kvm" else [],
        )
        return plan.render_command(argv, dies_with)

    def _set_up(self, pid: int, directory: Path, content: Content, start: Start, first: Sequence[Call]) -> None:
        """Before its guest runs: its memory, what is to be `first`, its limits, its filter. Raises EngineFailed."""
        calls = [*first, *render_limits(pid, start)] + ([CLOSE_TO_OTHERS] if start.user is not None else [])
        calls += render_calls(pid if self._accelerator == "kvm" else None)
        if start.loads:
            make_private(pid, directory / _DECOY, content, calls)
        else:
            make_calls(pid, calls, POLLS)


def render_limits(pid: int, start: Start) -> list[Call]:
    """Not earlier: what it is started with is larger."""
    limits = [render_limit(resource.RLIMIT_FSIZE, _MAX_CONSOLE_BYTES, _MAX_CONSOLE_BYTES)]
    # A template's limit would hold for all its forks together.
    if start.confined and start.role in (Role.PARENT, Role.SANDBOX):
        most = parse_most_threads(Path(f"/proc/{pid}/limits").read_text())
        limits.append(render_limit(resource.RLIMIT_NPROC, MAX_THREADS, most))
    return limits


def _opened(path: Path, how: int, closed_by: ExitStack) -> int:
    fd = os.open(path, how | os.O_CLOEXEC, 0o600)
    closed_by.callback(os.close, fd)
    return fd
