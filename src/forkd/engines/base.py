"""The seam between forkd and what runs the VM: the rules an engine keeps, and what engines share.

An engine is a module with a class that has the methods of Engine, a class of its VMs that has those of Machine (most
derive it from machine.ProcessMachine), and an ENTRY; table.py has a row for it. Engines do not import each other.
tests/engines runs the same tests over all rows of the table. What they hold an engine to:

1. A VM is one process (and what that starts), marked with its directory (host.marked), so that a later daemon finds
   it by looking at processes. The directory is made by the engine and holds all of the VM's sockets and logs.
2. `boot` and `fork` return once the process exists; `running` waits for the guest. When one of them raises, no
   process, directory or control group is left.
3. `fork` maps the parent's memory privately, and over it the runs of layers: no child can change what another one
   reads. The files of a snapshot are never written to after `freeze` or `save`.
4. The stream of `connect` takes bytes before the guest runs, where the engine can: a child finds its new identity
   waiting when it wakes up. A second stream is served once the first one is closed.
5. `death` is set exactly once, however the VM ended, with a reason a user can act on. OUT_OF_MEMORY only when its
   control group says so.
6. `kill` ends it all (process, group, directory), may be repeated, and finishes though its caller is cancelled.
   `release` ends nothing: another process can `adopt` the VM, paused or not, and everything works on.
7. A limit that this host cannot enforce is refused with Unsupported. It is never dropped.
8. Parents and templates die with us. Forks do too, unless the engine was opened with `outlive`.
9. A snapshot of another host or VMM version is refused by `check`, before a VM is started, with what was expected
   and what was found.
10. A VM that was saved is paused as before: it can go on, be forked, adopted and saved again. What was saved and its
    memory at that time are one instant. A host that cannot save says so with Unsupported; `fork` of a layer too.
11. A VM has the network interface it was given and no other: what is sent there leaves by its tap alone. Without one
    nothing leaves it, and nothing of its source's comes to a fork. A snapshot made without is `nic`-less for good.
12. Errors are EngineFailed, GuestDied, GuestTimeout, NotForkable, SnapshotIncompatible or Unsupported (errors.py). What
    the VMM printed goes into `details`.
"""

from __future__ import annotations

import asyncio
import enum
import os
import re
import socket
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from forkd.errors import SnapshotIncompatible, Unsupported
from forkd.host.cell import Cell
from forkd.host.finding import Finding, Status
from forkd.host.id_maps import UserRange
from forkd.host.marked import Marked
from forkd.host.pages import LiveMemory
from forkd.model.machine import NO_LIMITS, Limits, MachineSpec
from forkd.model.memory import Run
from forkd.model.sandbox import Way as Way

CONSOLE_TAIL_BYTES = 4096
# What the files of a frozen VM are called, of engines that have them.
MEMORY_FILE = "memory"
STATE_FILE = "state"

_PLAIN = "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic no_timer_check tsc=reliable random.trust_cpu=on"
# What wakes an idle guest for its own sake: watchdogs (which also take a slow host for a hung one), statistics of
# every second, compaction of every half second, pressure accounting.
_IDLE = "nowatchdog psi=0 sysctl.vm.stat_interval=600 sysctl.vm.compaction_proactiveness=0"
# Ten seconds after the last module was loaded the kernel looks for late drivers, once. A parent is frozen before that,
# and each of its forks would do it (measured: 10 ms and 2.7 MiB).
_ONCE = "deferred_probe_timeout=0"
# What every guest's kernel is told, whichever engine runs it.
KERNEL_ARGS = f"{_PLAIN} {_IDLE} {_ONCE}"

# Cursor movements, colours, resets: firmware and guests may write them, our reader's terminal must not obey them.
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[ -~])")
_SLICES = re.compile(rb".{0,32767}(?:\n|\Z)|.{32768}", re.DOTALL)  # as many whole lines as fit


@dataclass(frozen=True)
class BootSpec:
    """What a VM is made of: its shape, the kernel and initramfs it boots, its read-only root."""

    machine: MachineSpec
    kernel: Path
    initrd: Path
    root: Path


@dataclass(frozen=True)
class Frozen:
    """A frozen VM on disk. `platform` is what the engine needs to find again to run it."""

    directory: Path
    boot: BootSpec
    platform: Mapping[str, str]
    rehearsal: str | None = None  # what a template of it evaluates, so that its forks find that warm
    memory: Path | None = None  # the root's memory file; None: it is in the directory
    runs: tuple[Run, ...] = ()  # what lies over it, of layers
    settled: bool = True  # frozen after its agent prepared for that; see Engine.fork_live

    @property
    def memory_file(self) -> Path:
        return self.memory or self.directory / MEMORY_FILE


@dataclass(frozen=True)
class Nic:
    """The host's end of a VM's network interface: a tap in a network namespace that the VM has for itself.

    `tap`: a descriptor of it, which the engine duplicates; it stays the caller's. `namespace`: a path that another
    process of ours can open, for engines that take a tap by its name.
    """

    tap: int
    tap_name: str
    namespace: str


@dataclass(frozen=True)
class Saved:
    """What is to know about a VM that was saved. `memory`: where its memory is; None where the engine has none."""

    platform: Mapping[str, str]
    memory: LiveMemory | None


class ExitReason(enum.Enum):
    KILLED = "killed"  # forkd ended it
    POWERED_OFF = "powered off"  # the guest shut down
    OUT_OF_MEMORY = "used more memory than its limit"
    PANICKED = "kernel panic"
    CRASHED = "crashed"  # the VMM died without being asked
    UNKNOWN = "ended"  # it was not our child, and its console does not say


@dataclass(frozen=True)
class Death:
    reason: ExitReason
    status: str
    vmm_output: str = ""  # what the VMM itself printed, at its end


@dataclass
class Phases:
    """When each step of a fork was over, in seconds of the monotonic clock."""

    begun: float
    steps: dict[str, float] = field(default_factory=dict)
    way: Way = Way.START
    # How long the source of a live fork stood still.
    pause_s: float | None = None

    def mark(self, step: str, at: float) -> None:
        self.steps[step] = at


class Findings(dict[str, Finding]):
    """What doctor's checks found, by their names."""

    def status(self, name: str) -> Status | None:
        """None: it was not looked at."""
        finding = self.get(name)
        return finding.status if finding else None

    def text(self, name: str) -> str:
        finding = self.get(name)
        return finding.found if finding else "was not looked at"


@dataclass(frozen=True)
class Verdict:
    """Whether an engine runs on this host. With a `lack`, the name of a check, it does not.

    `why` goes on from "asked for" or "the first choice"; with a lack it is what was found.
    """

    why: str
    accelerator: str | None = None
    isolation: str | None = None
    lack: str | None = None


CellWish = Literal["required", "best-effort"]


@dataclass(frozen=True)
class Opening:
    """How an engine is opened. None: as it thinks best."""

    outlive: bool = False  # forks go on when we end
    cell: CellWish | None = None  # whether a VM must be confined
    users: UserRange | None = None  # whom VMs run as, for root


@dataclass(frozen=True)
class Entry:
    """What the table knows about an engine."""

    name: str
    checks: tuple[str, ...]  # those of host/probe.py that it depends on
    judge: Callable[[Findings, bool], Verdict]  # pure; of those checks, and whether it was asked for by name
    open: Callable[[str | None, Opening], Engine]  # with the verdict's accelerator; may raise HostLacks
    runs_vms: bool = True


class Machine(Protocol):
    """One VM and the process it lives in."""

    @property
    def pid(self) -> int: ...

    @property
    def directory(self) -> Path: ...

    @property
    def phases(self) -> Phases: ...

    @property
    def death(self) -> asyncio.Future[Death]:
        """Set once, when the VM is gone, for any reason."""

    @property
    def paused(self) -> bool: ...

    @property
    def cell(self) -> Cell | None:
        """What keeps its process in, as the kernel says; None: it ended before anybody looked."""

    async def connect(self) -> socket.socket:
        """A stream to the agent, served once the one before is closed. Raises GuestDied, EngineFailed.

        Where the engine can, the first one is there before the guest runs, and takes bytes.
        """

    async def running(self) -> None:
        """Wait until the VMM has loaded everything and the guest executes; raises when it cannot."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def plug(self, nic: Nic | None) -> None:
        """Give it another network interface while it runs (or is paused), or take it away.

        What the guest makes of it its agent has to be told. Raises Unsupported where the engine or the VM cannot.
        """

    async def learn_from(self, fork: Machine) -> None:
        """Of a template: its forks are made ready for what this one has written. Where the engine `learns`."""

    def find_tap(self) -> int | None:
        """A descriptor of our own for the tap that its VMM has open; the caller closes it. None: it has none."""

    async def kill(self) -> None:
        """End it and release all it held. Safe to repeat, cannot be cancelled half-way."""

    async def release(self) -> None:
        """Leave it running, to be adopted by another process: close what we hold of it, end and remove nothing."""

    def console_tail(self) -> str:
        """The last lines the guest wrote to its console."""


class Engine(Protocol):
    name: str
    isolation: str
    opens_taps: bool  # by their names, with a header before each packet; else it takes descriptors
    streams_go_on: bool  # of a source's agent, in its forks; else a fork waits for another one, as after a freeze
    learns: bool  # whether forks are quicker once their template has learned from one; see Machine.learn_from

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path, nic: Nic | None = None) -> Machine:
        """Start a VM from its kernel; files of its memory are made in `memory_in`."""

    async def freeze(self, machine: Machine, into: Path) -> Mapping[str, str]:
        """Stop a booted VM for good, complete `into` (its `memory_in`) and return the platform it needs."""

    def check(self, frozen: Frozen) -> None:
        """Raise SnapshotIncompatible when this host cannot run what was frozen elsewhere."""

    async def fork(
        self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        """Start one child. The caller bounds how many start at once.

        Raises Unsupported for a limit that cannot be, and for a network interface of a VM that was made without.
        """

    def check_nic(self, frozen: Frozen) -> None:
        """Raise Unsupported when its VMs can have no network interface, before one is made for them."""

    def why_no_live_forks(self) -> str | None:
        """Why `template` and `fork_live` raise Unsupported on this host; None where they work."""

    async def template(self, frozen: Frozen, directory: Path, *, run: bool = True) -> Machine:
        """A child whose guest runs and which is only there to be forked, by `fork_live`. It dies with us.

        Without `run` its guest stands still where it was frozen.
        """

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
        """A new VM at the same instant of memory and disk as a live one, which goes on (or stays paused).

        Where `streams_go_on`, the fork goes on in the stream of its source's agent, with us at the other end.
        `settled`: of a paused source whose agent prepared for a freeze, so that nothing is under way in that stream.
        Otherwise a frame may be half sent, and the first thing to send is `wire.agent.padding()`, which completes it;
        where the source had no client just then, a hello, which is repeated. `paused`: the fork does not run yet.
        Raises NotForkable, and the source is as it was; Unsupported where the engine cannot.
        """

    async def save(self, machine: Machine, into: Path) -> Saved:
        """The device state of a paused VM into `into` (a file `state`; fake: `journal`).

        It stays paused, and can go on, be forked or saved again afterwards. Its memory is for the caller to read before
        it goes on. Raises Unsupported, with the reason, where a VM cannot be saved.
        """

    async def adopt(self, directory: Path, leader: Marked | None = None) -> Machine:
        """Take over a VM that another process left in `directory`. `leader` saves the search where it is known already.

        Raises GuestDied when its process is gone, EngineFailed when it does not answer; the VM is then as it was.
        """


class WithoutLiveForks:
    """Of an engine that cannot fork a live VM yet."""

    name: str

    def why_no_live_forks(self) -> str | None:
        return f"the engine {self.name} cannot do it yet"

    async def template(self, frozen: Frozen, directory: Path, *, run: bool = True) -> Machine:
        raise self._unsupported()

    async def fork_live(self, *_: Any, **__: Any) -> Machine:
        raise self._unsupported()

    def _unsupported(self) -> Unsupported:
        return Unsupported(f"The engine {self.name} cannot fork a live VM yet", hint="Use the engine qemu")


def check_same(what: str, wanted: str | None, found: str | None) -> None:
    """Raise SnapshotIncompatible unless this host has what a snapshot was made with."""
    if found != wanted:
        raise SnapshotIncompatible(
            f"The snapshot was made with {what} {wanted}, this host has {found}",
            hint="Make the snapshot again on this host: forkd snapshot create",
        )


def tail_of(path: Path, limit_bytes: int = CONSOLE_TAIL_BYTES) -> str:
    """The end of a console log, made safe to print on a terminal."""
    try:
        # No link and no pipe: a hostile VMM may have put either in place of its log.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ""
        file.seek(0, 2)
        file.seek(max(0, file.tell() - limit_bytes))
        data = file.read(limit_bytes)
    return printable(data)


def printable(output: bytes) -> str:
    """Safe to print on a terminal. In slices: between them other threads get the interpreter."""
    return "".join(map(_printable, _SLICES.findall(output)))


def _printable(output: bytes) -> str:
    text = _ESCAPES.sub("", output.decode("utf-8", "replace").replace("\r", ""))
    # As many steps of Python as there are different characters, not as there are characters.
    return text.translate({ord(c): "?" for c in set(text) if not c.isprintable() and c != "\n"})


def refuse_cpu_template(machine: MachineSpec, engine: str) -> None:
    """CPU templates are Firecracker's; the other engines say so."""
    if machine.cpu_template is not None:
        raise Unsupported(
            f"The engine {engine} has no CPU template {machine.cpu_template}",
            hint="Leave it out, or use the engine firecracker",
        )
