"""Forks of a snapshot: how soon children answer, step by step, and what they cost beside time."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.figures import SAME_ROUND, SEE_BOTH, Bound, Family, Figure, Round, Row, Settings, step_lengths
from bench.ground import Ground, evaluate
from forkd.engines.base import Frozen, Way
from forkd.errors import EngineFailed, GuestDied
from forkd.host.cgroup import Group, find_group
from forkd.host.system import MemoryUse, memory_use
from forkd.model.machine import NO_LIMITS, Limits
from forkd.runtime import demo
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_children, kill_all, new_identities
from forkd.runtime.origin import Template

# How children come to be, where that is measured in more than one way. The others are started, as in the lab.
START, FORK = Way.START.value, Way.FORK.value
WAYS = {FORK: "from a template", START: "by start"}
FORKABLE = "snapshot made and verified, its memory file in the page cache; no process started ahead"
FIRST_EVAL = "first eval"
# How many children the targets speak of.
TARGET_N = 100

# Where each step of a fork or a cold boot is over; the steps are the engine's and the runtime's own marks.
STEP_ENDS = {
    "process start": "the VMM has answered on its monitor",
    "confine": "the VMM has mapped its memory privately, and has the filter under which it starts no process",
    "state load": "the VMM has loaded the device state",
    "quiescence": "every thread of the template rests where it can be forked, the forks before this one being done",
    "clone": "the template's process has been duplicated",
    "namespaces": "the child is a user of its own, in namespaces of its own",
    "descriptors": "the child has sockets, logs and files of its own",
    "threads": "the child has threads of its own, all at rest",
    "resume": "the VMM has confirmed that the guest runs",
    "contract": "the host has checked the child's proof of the fork contract",
    "agent answers": "the agent's answer to the first greeting is on the host",
    "warm-up": "the agent's answer to the warm-up is on the host",
    FIRST_EVAL: "the answer to the child's first evaluation is on the host",
}

_ALL_ANSWERED = "all {n} children have answered their first evaluation"
_CLEAN = "A clean page of the memory file counts where one child alone maps it"
_VMM_PAGES = f"private pages of the VMM process. {_CLEAN}"
_GROUP_PAGES = f"private pages of all processes of a child. {_CLEAN}"
SETTLE_S = 2.0
_SETTLED = f"{_ALL_ANSWERED}, and {SETTLE_S:g} s have passed"


def forked(n: int, way: str = "") -> dict[str, Any]:
    """The words for forks of `n`, made in one way; a way without a name is whatever the engine does."""
    by = f" {WAYS[way]}" if way else ""
    begins = "its process is started" if way == START else "the engine is asked for it, before it waits for its turn"
    ready = FORKABLE if way == START else f"{FORKABLE} but its template, made before and kept for all forks"
    ready += "" if way else ", if there is one"
    words = {"dot_way": way and f".{way}", "low_way": way and f"_{way}", "by": by, "made": by and f" made{by}"}
    return {"n": n, **words, "begins": begins, "ready": ready}


def stepped(step: str) -> dict[str, str]:
    return {"step": step, "end": STEP_ENDS.get(step, f"the step '{step}' is over")}


def at_target(*ways: str) -> Callable[[Settings], list[dict[str, Any]]]:
    """Where forks in these ways are judged."""
    return lambda _: [forked(TARGET_N, way) for way in ways]


FORKS = Family(
    "fork.{n}{dot_way}",
    "fork of {n}{by}: ",
    "{ready}",
    {
        "wall": Row(", all ready", "s", _ALL_ANSWERED, title="fork of {n}{by}"),
        "ok": Row(
            "children that answered right",
            "children",
            "the fork returned or failed",
            (Bound("{n} of {n} children{by} succeed in every round", "=", "n", at_target(FORK, START)),),
        ),
        "child": Row(
            "one child",
            "ms",
            "the answer to this child's first evaluation is on the host; starts when {begins}",
            (Bound("fork of 1 from a template: one child, p50", "<=", 25.0, lambda _: [forked(1, FORK)], "p50"),),
        ),
        "step.{step}": Row("{step}", "ms", "{end}", prepared="all steps of this child before it"),
        "cpu": Row("CPU time of {of} per child until ready, mean", "ms", "the child's first evaluation was answered"),
        "host_cpu": Row("CPU time of this process and the template per child, mean", "ms", _ALL_ANSWERED),
        "cpu_in_all": Row("CPU time of {of}, this one and the template per child, mean", "ms", _ALL_ANSWERED),
        "unique.mean": Row("unique memory per child, mean", "MiB", _ALL_ANSWERED, prepared=_VMM_PAGES),
        "unique.largest": Row(
            "unique memory per child, largest",
            "MiB",
            _ALL_ANSWERED,
            (
                Bound("unique memory of the largest of {n} children{by}", "<=", 7.0, at_target(FORK)),
                Bound("unique memory of the largest of {n} children{by}", "<=", 24.0, at_target(START)),
            ),
            _VMM_PAGES,
        ),
        "idle": Row(
            "idle CPU per child, mean",
            "% of a core",
            "{window_s:g} s later, without a request in between",
            (Bound("idle CPU per child{by}", "<", 0.5, at_target(FORK, START)),),
            "all children alive, each after its first eval",
        ),
        "idle_unique.mean": Row("unique memory per idle child, mean", "MiB", _SETTLED, prepared=_GROUP_PAGES),
        "idle_unique.largest": Row("unique memory per idle child, largest", "MiB", _SETTLED, prepared=_GROUP_PAGES),
        "unique_share": Row(
            "unique memory of the largest idle child, of the guest's resident", "%", SAME_ROUND, prepared=SEE_BOTH
        ),
        "kill": Row(
            "end of all {n} children{made}",
            "s",
            "every process is reaped, its sockets and directory are gone",
            prepared="{n} idle children",
            title="",
        ),
    },
)
RESIDENT = Family(
    "snapshot",
    "snapshot: ",
    "its memory file without the holes, which are pages it never touched",
    {"resident": Row("resident memory of the guest", "MiB", "the parent is frozen")},
)

# With any limit a child of every engine has a group; no child reaches this one.
GROUPED = Limits(pids=10_000)

_MIB = 2**20
_BLOCK_BYTES = 512
# Of a process, by its number: see clock_getcpuclockid(3).
_CPU_CLOCK = 2
# Both engines that have one call it so.
_MEMORY_FILE = "memory"
_MAPPING = re.compile("[0-9a-f]+-[0-9a-f]+ ")


class Probe:
    """What children cost beside time, of the VMM's process alone."""

    # What children are forked with, so that this can look at them.
    limits = NO_LIMITS
    # What its CPU time is of.
    of = "the VMM"

    def cpu_seconds(self, child: Child) -> float:
        return exact_cpu_seconds(child.machine.pid)

    def unique_mib(self, children: Sequence[Child]) -> list[float]:
        """Memory that each child has to itself; nothing where `held` reads it, later."""
        return [unique_mib(child.machine.pid) for child in children]

    async def held(self, children: Sequence[Child], frozen: Frozen, where: dict[str, Any]) -> dict[Figure, float]:
        """What children cost by being there, each after its first evaluation."""
        window_s = demo.IDLE_S
        return FORKS.read({"idle": await demo.idle_cpu_percent(list(children))}, window_s=window_s, **where)


class GroupProbe(Probe):
    """Of all processes of a child: its gate and its keeper, what mounts for it, the jailer."""

    limits = GROUPED
    of = "all processes"

    def __init__(self, directory: Path) -> None:
        """`directory` is where VMs are."""
        self.directory = directory

    def cpu_seconds(self, child: Child) -> float:
        return self._group(child).cpu_seconds()

    def unique_mib(self, children: Sequence[Child]) -> list[float]:
        return []

    async def held(self, children: Sequence[Child], frozen: Frozen, where: dict[str, Any]) -> dict[Figure, float]:
        before = [self.cpu_seconds(child) for child in children]
        await asyncio.sleep(SETTLE_S)
        spent = [self.cpu_seconds(child) - at for child, at in zip(children, before, strict=True)]
        unique = [self._unique_bytes(child) for child in children]
        resident = resident_bytes(frozen)
        values = {
            "idle": statistics.mean(spent) / SETTLE_S * 100,
            "idle_unique.mean": statistics.mean(unique) / _MIB,
            "idle_unique.largest": max(unique) / _MIB,
            "unique_share": max(unique) / resident * 100,
        }
        return {**FORKS.read(values, window_s=SETTLE_S, **where), **RESIDENT.read({"resident": resident / _MIB})}

    def _unique_bytes(self, child: Child) -> int:
        pids = (self._group(child).path / "cgroup.procs").read_text().split()
        return sum(_unique_bytes(int(pid)) for pid in pids)

    def _group(self, child: Child) -> Group:
        group = find_group(self.directory / child.id)
        if group is None:
            raise EngineFailed(f"{child.id} has no control group to be measured by")
        return group


def _unique_bytes(pid: int) -> int:
    try:
        return memory_use(pid).unique_bytes
    except ProcessLookupError:
        return 0  # KVM has threads of the kernel in a VM's group; those have no memory of their own


def unique_mib(pid: int) -> float:
    return _memory_use(pid).unique_bytes / _MIB


def anonymous_mib(pid: int) -> float:
    """Pages that belong to no file: as many, however many processes map the files."""
    return _memory_use(pid).anonymous_bytes / _MIB


def guest_written_mib(pid: int, frozen: Frozen) -> float:
    """What the guest of a VMM has written to, of the memory that was frozen."""
    path = frozen.directory / _MEMORY_FILE
    total, counts = 0.0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            counts = line.endswith(f" {path}")
        elif counts and line.startswith("Anonymous:"):
            total += int(line.split()[1]) / 1024
    return total


def _memory_use(pid: int) -> MemoryUse:
    try:
        return memory_use(pid)
    except (FileNotFoundError, ProcessLookupError):
        raise GuestDied(f"Process {pid} ended while it was measured") from None


def exact_cpu_seconds(pid: int) -> float:
    """Of all its threads. /proc/<pid>/stat rounds down to ticks of 10 ms, as much as a fork needs in all."""
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        raise GuestDied(f"Process {pid} ended while it was measured") from None


def resident_bytes(frozen: Frozen) -> int:
    """What the guest had touched when it was frozen: the rest of its memory file is holes."""
    return (frozen.directory / _MEMORY_FILE).stat().st_blocks * _BLOCK_BYTES


@dataclass
class Children:
    """Stamps and samples of one fork of `n`, or of the same one repeated."""

    n: int
    way: str
    probe: Probe
    template: Template | None = None
    wall_s: list[float] = field(default_factory=list)
    host_cpu_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)
    steps_ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: list[float] = field(default_factory=list)
    unique_mib: list[float] = field(default_factory=list)
    kill_s: list[float] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)
    _begun_s: float = 0.0
    _begun_cpu_s: float = 0.0

    def begin(self) -> None:
        self._begun_s, self._begun_cpu_s = time.monotonic(), self._host_cpu_s()

    def all_ready(self, sandboxes: Sequence[Child]) -> None:
        self.wall_s.append(time.monotonic() - self._begun_s)
        self.host_cpu_ms.append((self._host_cpu_s() - self._begun_cpu_s) / self.n * 1000)
        self.unique_mib += self.probe.unique_mib(sandboxes)

    def _host_cpu_s(self) -> float:
        forked = exact_cpu_seconds(self.template.machine.pid) if self.template else 0.0
        return time.process_time() + forked

    async def ready(self, sandbox: Child) -> None:
        await evaluate(sandbox.agent)
        now = time.monotonic()
        phases = sandbox.machine.phases
        self.ways[phases.way.value] += 1
        self.total_ms.append((now - phases.begun) * 1000)
        for step, length in step_lengths(phases.begun, {**phases.steps, FIRST_EVAL: now}).items():
            self.steps_ms.setdefault(step, []).append(length * 1000)
        self.cpu_ms.append(self.probe.cpu_seconds(sandbox) * 1000)

    @contextmanager
    def killing(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.kill_s.append(time.monotonic() - begun)

    def readings(self) -> dict[Figure, float]:
        """Of what was repeated, the median of whole forks; percentiles and means are over all children."""
        where = forked(self.n, self.way)
        values: dict[str, float | list[float]] = {
            "wall": statistics.median(self.wall_s),
            "ok": len(self.total_ms) / len(self.wall_s),
            "child": self.total_ms,
            "cpu": statistics.mean(self.cpu_ms),
            "kill": statistics.median(self.kill_s),
        }
        host_cpu = statistics.mean(self.host_cpu_ms)
        if self.way:
            values["host_cpu"] = host_cpu
        else:
            values["cpu_in_all"] = statistics.mean(self.cpu_ms) + host_cpu
        if self.unique_mib:
            values |= {"unique.mean": statistics.mean(self.unique_mib), "unique.largest": max(self.unique_mib)}
        read = FORKS.read(values, of=self.probe.of, **where)
        for step, lengths in self.steps_ms.items():
            read |= FORKS.read({"step.{step}": lengths}, **stepped(step), **where)
        return read

    def failures(self, title: str) -> tuple[str, ...]:
        """A child that was to come from a template and was started is a failure."""
        from_template = self.way == FORK or self.template is not None
        started = sum(self.ways.values()) - self.ways[FORK] if from_template else 0
        return (f"{title}: {started} children did not come from the template",) if started else ()


async def measure_fork(ground: Ground, children: Children, title: str, *, times: int = 1, held: bool = False) -> Round:
    """The same fork `times` times; with `held`, also what the children of the first cost by being there."""
    cost: dict[Figure, float] = {}
    for _ in range(times):
        children.begin()
        made = await fork_children(
            ground.engine,
            ground.frozen,
            new_identities(children.n),
            ground.directory,
            limits=children.probe.limits,
            template=children.template,
            after=children.ready,
        )
        try:
            children.all_ready(made.sandboxes)
            if held and not cost:
                cost = await children.probe.held(made.sandboxes, ground.frozen, forked(children.n, children.way))
        finally:
            with children.killing():
                await kill_all(made.sandboxes)
    return Round({**children.readings(), **cost}, children.failures(title))
