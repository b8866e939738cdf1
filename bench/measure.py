"""The measurements. They call what `forkd` itself calls; only the stamps are ours."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import figures
from bench.children import Children
from bench.figures import FIRST_EVAL, FORK, Figure
from bench.guest import evaluate
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
from forkd.runtime.spawn import fork_children, fork_one, kill_all, new_identities
from forkd.runtime.templates import Template, Templates
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
    # How often a fork of one is repeated in a round: percentiles are over all of them.
    singles: int = 1
    # How children come to be (see bench.figures); in one way that needs no name, unless several are compared.
    ways: tuple[str, ...] = ("",)


def begin_run(host: Mapping[str, Any], settings: Mapping[str, Any]) -> Run:
    return Run(time.strftime("%Y-%m-%dT%H:%M:%S%z"), host, settings)


def describe_work(rounds: int, sizes: Sequence[int], machine: MachineSpec) -> dict[str, Any]:
    return {"rounds": rounds, "n": list(sizes), **describe_guest(machine)}


def describe_guest(machine: MachineSpec) -> dict[str, Any]:
    return {
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
        if "fork" in bench.parts:
            async with aclosing(_fork_parts(bench, frozen, title)) as parts:
                async for part in parts:
                    yield part
        if "trip" in bench.parts:
            bench.progress.stage(f"{title}: round trips")
            yield Round(await measure_trips(bench, frozen))


async def _fork_parts(bench: Bench, frozen: Frozen, title: str) -> AsyncGenerator[Round, None]:
    """Of each size in all ways, one after the other; without a template in those that need none."""
    templates, ways = Templates(bench.engine, bench.directory), bench.ways
    try:
        if FORK in ways:
            bench.progress.stage(f"{title}: template")
            made = await _try_template(templates, frozen, bench.tag, title)
            ways = ways if made.readings else tuple(way for way in ways if way != FORK)
            yield made
        for n in bench.sizes:
            for way in ways:
                name = f"{title}: fork of {n}{way and f' {figures.WAYS[way]}'}"
                bench.progress.stage(name)
                yield await _try_fork(bench, frozen, n, way, templates.find(frozen) if way == FORK else None, name)
    finally:
        await templates.close()


async def _try_template(templates: Templates, frozen: Frozen, tag: SnapshotTag, title: str) -> Round:
    try:
        made = await templates.warm(frozen, tag)
    except ForkdError as error:
        return Round({}, (render_failure(f"{title}: template", error),))
    return Round({figures.template_made(): made.made_in_s, figures.template_memory(): made.memory_bytes / 2**20})


async def _try_fork(bench: Bench, frozen: Frozen, n: int, way: str, template: Template | None, title: str) -> Round:
    try:
        return await measure_fork(bench, frozen, n, way, template, title)
    except ForkdError as error:
        # Fewer than n is a finding of this bench, not the end of it.
        return Round({figures.fork_ok(n, way): 0}, (render_failure(title, error),))


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


async def measure_fork(bench: Bench, frozen: Frozen, n: int, way: str, template: Template | None, title: str) -> Round:
    children = Children(n, way, bench.probe, template)
    held: dict[Figure, float] = {}
    for _ in range(bench.singles if n == 1 else 1):
        children.begin()
        forked = await fork_children(
            bench.engine,
            frozen,
            new_identities(n),
            bench.directory,
            limits=bench.probe.limits,
            template=template,
            after=children.ready,
        )
        try:
            children.all_ready(forked.sandboxes)
            # One size is enough: idling costs seconds of waiting, and says little of few.
            if n == max(bench.sizes) and not held:
                held = await bench.probe.held(forked.sandboxes, frozen, way)
        finally:
            with children.killing():
                await kill_all(forked.sandboxes)
    return Round({**children.readings(), **held}, children.failures(title))


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
