"""What is measured of an engine, round by round. Probes call what `forkd` itself calls; only the stamps are ours."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.figures import Bound, Family, Figure, Readings, Round, Row, Run, by_name, joined, ratio, step_lengths
from bench.forks import (
    FIRST_EVAL,
    FORK,
    FORKABLE,
    FORKS,
    START,
    WAYS,
    Children,
    Probe,
    at_target,
    forked,
    measure_fork,
    stepped,
)
from bench.ground import Ground, evaluate, sandboxed
from bench.live import LiveSpec, measure_live
from bench.many import CrowdSpec, EnduranceSpec, measure_crowd, measure_endurance
from forkd.engines.base import Engine
from forkd.errors import ContractBroken, ForkdError
from forkd.guest.agent import Agent
from forkd.host.files import scratch_directory
from forkd.image import Image, Progress
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.runtime import demo
from forkd.runtime.freeze import boot_spec, booted, create_snapshot, frozen_of, warm_up
from forkd.runtime.templates import Templates
from forkd.store.snapshots import SnapshotStore

PARTS = ("cold", "snapshot", "fork", "trip")
FORK_PARTS = ("live", "crowd", "endurance")
TAG = parse_tag("bench")

_WARMING_TRIPS = 20
_EVAL_TRIPS = 300
_EXEC_TRIPS = 50
# How often each part about forks of live VMs is done, at most.
_MAX_ROUNDS = {"live": 5, "crowd": 3, "endurance": 1}

_ON_DISK = "image built, its files in the page cache; no snapshot, no process"
_CHILD = "a child whose eval was answered before"
_EARLIER = "all steps before it"
_NO_FILE = "pages of its VMM process that belong to no file; shared with its children until one of them writes"
ENGINE = Family(
    "",
    "",
    _ON_DISK,
    {
        "cold_boot.total": Row(
            "cold boot of one VM, warmed, first eval", "s", "the answer to the first evaluation is on the host"
        ),
        "cold_boot.step.{step}": Row("cold boot: {step}", "s", "{end}", prepared=_EARLIER),
        "snapshot.total": Row("snapshot: created in all", "s", "the snapshot is synced and stands under its tag"),
        "snapshot.step.{step}": Row("snapshot: {step}", "s", "the runtime reports its next step", prepared=_EARLIER),
        "template.made": Row(
            "template: made in all",
            "s",
            "it has rehearsed what every child does, and stands still",
            prepared=FORKABLE,
        ),
        "template.memory": Row(
            "template: memory of its own",
            "MiB",
            "it stands still",
            prepared=_NO_FILE,
        ),
        "trip.eval": Row(
            "eval round trip on a warm child",
            "ms",
            "the value is on the host",
            (Bound("eval round trip on a warm child, p50", "<=", 2.0, share="p50"),),
            f"{_CHILD}, several times; the only VM",
        ),
        "trip.exec": Row(
            "exec of /bin/true on a warm child",
            "ms",
            "the exit status is on the host",
            prepared=f"{_CHILD}; the command was run before; the only VM",
        ),
    },
)
RATIOS = Family(
    "ratio",
    "",
    "",
    {
        "fork_{n}{low_way}_to_cold_boot": ratio(
            "fork of {n}{by} / cold boot of one",
            Bound("fork of {n}{by} / cold boot of one", "<=", 0.2, at_target(FORK)),
            Bound("fork of {n}{by} / cold boot of one", "<", 1, at_target(START)),
        ),
        "fork.{n}.fork_to_start.{rest}": ratio(f"{{what}}, {WAYS[FORK]} / {WAYS[START]}"),
    },
)

_FORKED = re.compile(rf"fork\.(?P<n>\d+)\.{FORK}\.(?P<rest>.+)")


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
    probe: Probe = field(default_factory=Probe)
    tag: SnapshotTag = TAG
    # How often a fork of one is repeated in a round: percentiles are over all of them.
    singles: int = 1
    # How children come to be (see bench.forks); in one way that needs no name, unless several are compared.
    ways: tuple[str, ...] = ("",)
    # Whether those of the way without a name come from a template.
    templated: bool = False
    # Forks of a running VM at the end of a round, if any.
    live: LiveSpec | None = None


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


async def run_rounds(bench: Bench, run: Run, count: int, on_round: Callable[[Run], object]) -> None:
    """Adds to `run` round by round: what was measured is kept when a later round cannot be."""
    try:
        for number in range(1, count + 1):
            done = joined([part async for part in round_parts(bench, f"round {number} of {count}")])
            run.rounds.append(Round(with_ratios(done.readings, bench.sizes), done.failures))
            on_round(run)
    finally:
        remove_snapshot(bench)


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
        ground = Ground(bench.engine, frozen_of(snapshot, bench.image), bench.directory, bench.progress)
        if "fork" in bench.parts:
            async with aclosing(_fork_parts(bench, ground, title)) as parts:
                async for part in parts:
                    yield part
        if bench.live is not None:
            yield await measure_live(ground, bench.live, f"{title}: live forks")
        if "trip" in bench.parts:
            bench.progress.stage(f"{title}: round trips")
            yield Round(await measure_trips(ground))


async def _fork_parts(bench: Bench, ground: Ground, title: str) -> AsyncGenerator[Round, None]:
    """Of each size in all ways, one after the other; without a template in those that need none."""
    templates, ways = Templates(bench.engine, bench.directory), bench.ways
    from_template = {FORK, ""} if bench.templated else {FORK}
    try:
        if from_template.intersection(ways):
            bench.progress.stage(f"{title}: template")
            made = await _try_template(templates, ground, bench.tag, title)
            ways = ways if made.readings else tuple(way for way in ways if way not in from_template)
            yield made
        for n in bench.sizes:
            for way in ways:
                name = f"{title}: fork of {n}{way and f' {WAYS[way]}'}"
                bench.progress.stage(name)
                template = templates.find(ground.frozen) if way in from_template else None
                yield await _try_fork(bench, ground, Children(n, way, bench.probe, template), name)
    finally:
        await templates.close()


async def _try_template(templates: Templates, ground: Ground, tag: SnapshotTag, title: str) -> Round:
    try:
        made = await templates.warm(ground.frozen, tag)
    except ForkdError as error:
        return Round.failed(f"{title}: template", error)
    return Round(ENGINE.read({"template.made": made.made_in_s, "template.memory": made.memory_bytes / 2**20}))


async def _try_fork(bench: Bench, ground: Ground, children: Children, title: str) -> Round:
    n, way = children.n, children.way
    try:
        # What children cost by being there, of one size: idling costs seconds of waiting, and says little of few.
        held = n == max(bench.sizes)
        return await measure_fork(ground, children, title, times=bench.singles if n == 1 else 1, held=held)
    except ForkdError as error:
        return Round.failed(title, error, FORKS.read({"ok": 0}, **forked(n, way)))


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
    return ENGINE.read({"cold_boot.total": ended - begun}) | _read_steps("cold_boot", step_lengths(begun, marks))


def _read_steps(of: str, lengths: Mapping[str, float]) -> dict[Figure, float]:
    read: dict[Figure, float] = {}
    for step, length in lengths.items():
        read |= ENGINE.read({f"{of}.step.{{step}}": length}, **stepped(step))
    return read


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
    lengths = step_lengths(starts[0], dict(zip(names, [*starts[1:], ended], strict=True)))
    return ENGINE.read({"snapshot.total": ended - starts[0]}) | _read_steps("snapshot", lengths)


async def measure_trips(ground: Ground) -> dict[Figure, float]:
    async with sandboxed(ground) as child:
        await _trips(child.agent, evaluate, _WARMING_TRIPS)
        evals = await _trips(child.agent, evaluate, _EVAL_TRIPS)
        await _trips(child.agent, _run_true, _WARMING_TRIPS)
        execs = await _trips(child.agent, _run_true, _EXEC_TRIPS)
    return ENGINE.read({"trip.eval": evals, "trip.exec": execs})


async def _trips(agent: Agent, ask: Callable[[Agent], Awaitable[None]], count: int) -> list[float]:
    taken = []
    for _ in range(count):
        begun = time.monotonic()
        await ask(agent)
        taken.append((time.monotonic() - begun) * 1000)
    return taken


async def _run_true(agent: Agent) -> None:
    result = await agent.run(["/bin/true"])
    if result.exit_code != 0:
        raise ContractBroken(f"/bin/true ended with {result.exit_code}")


def with_ratios(readings: Readings, sizes: Sequence[int]) -> dict[Figure, float]:
    """The readings of a round, with the ratios between them. Pure."""
    values = by_name(readings)
    cold, read = values.get("cold_boot.total"), dict(readings)
    for where in (forked(n, way) for n in sizes for way in ("", *WAYS)):
        wall = values.get(FORKS.name("wall", **where))
        if wall is not None and cold:
            read |= RATIOS.read({"fork_{n}{low_way}_to_cold_boot": wall / cold}, **where)
    for figure, value in readings.items():
        found = _FORKED.fullmatch(figure.name) if figure.is_amount else None
        if found and (started := values.get(f"fork.{found['n']}.{START}.{found['rest']}")):
            words = {"what": without_way(figure.what, FORK), **found.groupdict()}
            read |= RATIOS.read({"fork.{n}.fork_to_start.{rest}": value / started}, **words)
    return read


def without_way(what: str, way: str) -> str:
    return what.replace(f" made {WAYS[way]}", "").replace(f" {WAYS[way]}", "")


@dataclass(frozen=True)
class ForkSpecs:
    live: LiveSpec = field(default_factory=LiveSpec)
    crowd: CrowdSpec = field(default_factory=CrowdSpec)
    endurance: EnduranceSpec = field(default_factory=EnduranceSpec)


async def run_fork_parts(
    bench: Bench,
    parts: tuple[str, ...],
    specs: ForkSpecs,
    rounds: int,
    host: Mapping[str, Any],
    on_round: Callable[[str, Run], object],
) -> None:
    """Of forks of live VMs, all of one parent. Makes it if there is none, and removes it."""
    try:
        if not bench.store.has(bench.tag):
            bench.progress.stage("the parent of the forks")
            await measure_snapshot(bench)
        with bench.store.held(bench.tag) as snapshot:
            ground = Ground(bench.engine, frozen_of(snapshot, bench.image), bench.directory, bench.progress)
            for part in parts:
                run = begin_run(host, {**describe_guest(bench.machine), **asdict(getattr(specs, part))})
                count = min(rounds, _MAX_ROUNDS[part])
                for number in range(1, count + 1):
                    title = f"{part}, round {number} of {count}" if count > 1 else part
                    run.rounds.append(await _try_part(ground, part, specs, title))
                    on_round(part, run)
    finally:
        remove_snapshot(bench)


async def _try_part(ground: Ground, part: str, specs: ForkSpecs, title: str) -> Round:
    try:
        if part == "live":
            return await measure_live(ground, specs.live, title)
        if part == "crowd":
            return await measure_crowd(ground, specs.crowd, title)
        return await measure_endurance(ground, specs.endurance, title)
    except ForkdError as error:
        return Round.failed(title, error)
