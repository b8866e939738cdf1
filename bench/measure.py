"""The measurements. They call what `forkd` itself calls; only the stamps are ours."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import figures
from bench.figures import FIRST_EVAL, Figure
from bench.probes import OF_VMM, Probe
from bench.report import Round, Run, joined, render_failure, shares, step_lengths
from forkd.engines.base import Engine, Frozen
from forkd.errors import ContractBroken, ForkdError
from forkd.guest.calls import Agent
from forkd.host.files import scratch_directory
from forkd.image import Image, Progress
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.runtime import demo
from forkd.runtime.freeze import boot_spec, create_snapshot, frozen_of
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.spawn import fork_children, fork_one, kill_all, new_identities
from forkd.runtime.warmup import booted, warm_up
from forkd.store.snapshots import SnapshotStore

PARTS = ("cold", "snapshot", "fork", "trip")
TAG = parse_tag("bench")

_WARMING_TRIPS = 20
_EVAL_TRIPS = 300
_EXEC_TRIPS = 50


@dataclass(frozen=True)
class Bench:
    """What is measured, on what, and where."""

    engine: Engine
    store: SnapshotStore
    image: Image
    directory: Path
    progress: Progress
    sizes: tuple[int, ...] = (1, 10, 100)
    parts: frozenset[str] = frozenset(PARTS)
    machine: MachineSpec = demo.MACHINE
    probe: Probe = OF_VMM
    tag: SnapshotTag = TAG
    # How often a fork of one is repeated in a round, of which the median is taken.
    singles: int = 1


def begin_run(host: Mapping[str, Any], settings: Mapping[str, Any]) -> Run:
    return Run(time.strftime("%Y-%m-%dT%H:%M:%S%z"), host, settings)


def describe_work(rounds: int, sizes: Sequence[int], machine: MachineSpec) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "n": list(sizes),
        "memory_mib": machine.memory_mib,
        "vcpus": machine.vcpus,
        "warm_up": demo.WARMUP.describe(),
        "eval": demo.CODE,
    }


async def run_round(bench: Bench, title: str) -> Round:
    return joined([part async for part in round_parts(bench, title)])


async def round_parts(bench: Bench, title: str) -> AsyncGenerator[Round, None]:
    """Every part once, one after the other: what is compared ran on the same machine at nearly the same time."""
    if "cold" in bench.parts:
        bench.progress.stage(f"{title}: cold boot")
        yield Round(await measure_cold_boot(bench))
    if "snapshot" in bench.parts or not bench.store.has(bench.tag):
        bench.progress.stage(f"{title}: snapshot")
        taken = await measure_snapshot(bench)
        yield Round(taken if "snapshot" in bench.parts else {})
    with bench.store.held(bench.tag) as snapshot:
        frozen = frozen_of(snapshot, bench.image)
        for n in bench.sizes if "fork" in bench.parts else ():
            bench.progress.stage(f"{title}: fork of {n}")
            yield await _try_fork(bench, frozen, n, title)
        if "trip" in bench.parts:
            bench.progress.stage(f"{title}: round trips")
            yield Round(await measure_trips(bench, frozen))


async def _try_fork(bench: Bench, frozen: Frozen, n: int, title: str) -> Round:
    try:
        return Round(await measure_fork(bench, frozen, n))
    except ForkdError as error:
        # Fewer than n is a finding of this bench, not the end of it.
        return Round({figures.fork_ok(n): 0}, (render_failure(f"{title}: fork of {n}", error),))


def remove_snapshot(bench: Bench) -> None:
    if bench.store.has(bench.tag):
        bench.store.remove(bench.tag)


async def measure_cold_boot(bench: Bench) -> dict[Figure, float]:
    with scratch_directory(bench.store.root) as scratch:
        begun = time.monotonic()
        boot = boot_spec(bench.image, bench.machine)
        async with booted(bench.engine, boot, bench.directory / "cold", scratch) as (machine, agent):
            marks = {**machine.phases.steps, "agent answers": time.monotonic()}
            await warm_up(agent, demo.WARMUP)
            marks["warm-up"] = time.monotonic()
            await evaluate(agent)
            marks[FIRST_EVAL] = ended = time.monotonic()
    steps = {figures.cold_boot_step(step): length for step, length in step_lengths(begun, marks).items()}
    return {figures.cold_boot(): ended - begun, **steps}


class _StageClock:
    """Progress that notes when each stage of the work began."""

    def __init__(self) -> None:
        self.begun: dict[str, float] = {}

    def stage(self, text: str) -> None:
        self.begun.setdefault(text, time.monotonic())

    def line(self, text: str) -> None: ...


async def measure_snapshot(bench: Bench) -> dict[Figure, float]:
    """Leaves the snapshot that the forks of this round are made of."""
    clock = _StageClock()
    await create_snapshot(
        bench.engine,
        bench.store,
        bench.image,
        bench.tag,
        bench.machine,
        demo.WARMUP,
        bench.directory,
        replace=True,
        progress=clock,
    )
    ended = time.monotonic()
    names, starts = list(clock.begun), list(clock.begun.values())
    lengths = {name: end - start for name, start, end in zip(names, starts, [*starts[1:], ended], strict=True)}
    steps = {figures.snapshot_step(name): length for name, length in lengths.items()}
    return {figures.snapshot_total(): ended - starts[0], **steps}


@dataclass
class _Children:
    """Stamps of each child, taken as it becomes ready."""

    probe: Probe
    total_ms: list[float] = field(default_factory=list)
    steps_ms: dict[str, list[float]] = field(default_factory=dict)
    cpu_ms: list[float] = field(default_factory=list)

    async def ready(self, sandbox: Sandbox) -> None:
        await evaluate(sandbox.agent)
        now = time.monotonic()
        phases = sandbox.machine.phases
        self.total_ms.append((now - phases.begun) * 1000)
        for step, length in step_lengths(phases.begun, {**phases.steps, FIRST_EVAL: now}).items():
            self.steps_ms.setdefault(step, []).append(length * 1000)
        self.cpu_ms.append(self.probe.cpu_seconds(sandbox) * 1000)


async def measure_fork(bench: Bench, frozen: Frozen, n: int) -> dict[Figure, float]:
    times = bench.singles if n == 1 else 1
    return middle([await _measure_one_fork(bench, frozen, n) for _ in range(times)])


def middle(repeated: Sequence[Mapping[Figure, float]]) -> dict[Figure, float]:
    """The median of each figure; all of them read the same ones, and failed by raising."""
    return {figure: statistics.median(each[figure] for each in repeated) for figure in repeated[0]}


async def _measure_one_fork(bench: Bench, frozen: Frozen, n: int) -> dict[Figure, float]:
    probe = bench.probe
    stamps = _Children(probe)
    begun = time.monotonic()
    forked = await fork_children(
        bench.engine, frozen, new_identities(n), bench.directory, limits=probe.limits, after=stamps.ready
    )
    wall = time.monotonic() - begun
    children = forked.sandboxes
    try:
        # One size is enough: idling costs seconds of waiting, and memory means most where pages are shared by many.
        held = await probe.held(children, frozen) if n == max(bench.sizes) else {}
    finally:
        begun = time.monotonic()
        await kill_all(children)
        killed = time.monotonic() - begun
    return {
        figures.fork_wall(n): wall,
        figures.fork_ok(n): len(stamps.total_ms),
        **{figures.fork_child(n, share): value for share, value in shares(stamps.total_ms).items()},
        **{
            figures.fork_step(n, step, share): value
            for step, values in stamps.steps_ms.items()
            for share, value in shares(values).items()
        },
        probe.cpu_figure(n): statistics.mean(stamps.cpu_ms),
        **held,
        figures.kill(n): killed,
    }


async def measure_trips(bench: Bench, frozen: Frozen) -> dict[Figure, float]:
    child = await fork_one(bench.engine, frozen, new_identities(1)[0], bench.directory)
    try:
        await _eval_trips(child.agent, _WARMING_TRIPS)
        evals = await _eval_trips(child.agent, _EVAL_TRIPS)
        await _exec_trips(child.agent, _WARMING_TRIPS)
        execs = await _exec_trips(child.agent, _EXEC_TRIPS)
    finally:
        await child.kill()
    return {
        **{figures.trip("eval", share): value for share, value in shares(evals).items()},
        **{figures.trip("exec", share): value for share, value in shares(execs).items()},
    }


async def _eval_trips(agent: Agent, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.monotonic()
        await evaluate(agent)
        taken.append((time.monotonic() - begun) * 1000)
    return taken


async def _exec_trips(agent: Agent, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.monotonic()
        result = await agent.run(["/bin/true"])
        taken.append((time.monotonic() - begun) * 1000)
        if result.exit_code != 0:
            raise ContractBroken(f"/bin/true ended with {result.exit_code}")
    return taken


async def evaluate(agent: Agent) -> None:
    """The demo's expression, and its answer checked: a wrong answer is no measurement."""
    result = await agent.eval(demo.CODE)
    if result.value != demo.EXPECTED:
        raise ContractBroken(f"The guest answered {result.repr} instead of {demo.EXPECTED}")
