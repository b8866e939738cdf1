"""Forks with a cell and a network against forks without, taken in turns; packets, throughput and leases beside them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from bench.engine import Bench, begin_run, describe_guest, measure_snapshot, remove_snapshot
from bench.figures import (
    SAME_ROUND,
    SEE_BOTH,
    Bound,
    Family,
    Figure,
    Readings,
    Round,
    Row,
    Run,
    Settings,
    Values,
    by_name,
    joined,
    ratio,
    step_lengths,
)
from bench.forks import STEP_ENDS, TARGET_N, exact_cpu_seconds, unique_mib
from bench.ground import Ground, evaluate, templated
from bench.leasing import RULES, Site, measure_leases, opened_site
from bench.packets import PacketSpec, measure_packets, measure_sending, turned
from bench.wires import Wires
from forkd.engines.base import Engine, Way
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import ContractBroken, ForkdError
from forkd.host.files import scratch_directory
from forkd.runtime.admission import look, starts_at_once
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_children, kill_all, new_identities
from forkd.runtime.freeze import frozen_of
from forkd.runtime.origin import Template

PART = "network"
ROUNDS = 5
PLAIN, CELL, NETWORK = "plain", "cell", "network"
VARIANTS = {PLAIN: "without", CELL: "in a cell", NETWORK: "in a cell, with a network"}
MOST_TIME, MOST_MIB = 1.3, 1.5


class PlainEngine(QemuEngine):
    """Its VMs have no cell: only to be compared with."""

    def _may_confine(self) -> bool:
        return False


def open_variants(engine: Engine) -> dict[str, Engine]:
    """By variant, the engine that makes its VMs; two that share an engine share a template."""
    assert isinstance(engine, QemuEngine), "no other engine forks live VMs"
    return {PLAIN: PlainEngine(engine.isolation.removeprefix("qemu-")), CELL: engine, NETWORK: engine}


def varied(n: int, variant: str) -> dict[str, Any]:
    """The words for forks of `n`."""
    return {"n": n, "variant": variant, "of": VARIANTS[variant]}


def _each(settings: Settings) -> Iterable[dict[str, Any]]:
    return [varied(settings["n"], variant) for variant in settings["variants"]]


def _judged(_: Settings) -> Iterable[dict[str, Any]]:
    return [varied(TARGET_N, NETWORK)]


def _judged_ratio(what: str) -> Row:
    return ratio(what, Bound(f"fork of {{n}} {{of}} / without: {what}", "<=", MOST_TIME, _judged))


_READY = "a snapshot made and verified, and its template; for those with a network a full pool, the rules expected"
_KEPT = "all {n} children have kept the fork contract"
_ANSWERED = "then all {n} have answered their first evaluation"
FORKED = Family(
    "network.fork.{n}.{variant}",
    "fork of {n} {of}: ",
    _READY,
    {
        "kept": Row("all contracts kept", "s", _KEPT),
        "ready": Row("all ready", "s", _ANSWERED),
        "ok": Row(
            "children that answered right",
            "children",
            "the fork returned or failed",
            (Bound("{n} of {n} children {of} succeed in every round", "=", "n", _each),),
        ),
        "child": Row(
            "one child",
            "ms",
            "the host has checked its proof of the contract; starts when the engine is asked for it",
        ),
        "step.{step}": Row("{step}", "ms", "{end}", prepared="all steps of this child before it"),
        "cpu": Row("CPU time of the VMM per child, mean", "ms", _KEPT),
        "host_cpu": Row("CPU time of this process and the template per child, mean", "ms", _KEPT),
        "hub_cpu": Row("CPU time of the hub per child, mean", "ms", _KEPT),
        "all_cpu": Row("CPU time of all these per child, mean", "ms", _KEPT),
        "unique.mean": Row("unique memory per child, mean", "MiB", _ANSWERED),
        "unique.largest": Row("unique memory per child, largest", "MiB", _ANSWERED),
        "kill": Row("end of all", "s", "every process is reaped, every network given back"),
    },
)
VERSUS = Family(
    "network.versus.{n}.{variant}",
    "fork of {n} {of} / without: ",
    "",
    {
        "kept": _judged_ratio("all contracts kept"),
        "ready": _judged_ratio("all ready"),
        "more": Row(
            "unique memory per child, more than without, mean",
            "MiB",
            SAME_ROUND,
            (Bound("unique memory per child {of}, more than without", "<=", MOST_MIB, _judged),),
            SEE_BOTH,
            title="fork of {n} {of}: ",
        ),
        "{rest}": ratio("{what}"),
    },
)
# What is compared turn by turn.
_OF_WHOLE_FORKS = ("kept", "ready")


@dataclass(frozen=True)
class NetworkSpec:
    """In each round `passes` of a fork of `n` in each variant, and `leases` of each kind."""

    n: int = TARGET_N
    passes: int = 3
    leases: int = 30
    packet: PacketSpec = field(default_factory=PacketSpec)


@dataclass
class Sample:
    """One fork of `n` in one variant."""

    values: dict[str, float] = field(default_factory=dict)
    child_ms: list[float] = field(default_factory=list)
    steps_ms: dict[str, list[float]] = field(default_factory=dict)


async def run_network(
    bench: Bench,
    wires: Wires,
    spec: NetworkSpec,
    rounds: int,
    host: Mapping[str, Any],
    on_round: Callable[[Run], object],
) -> None:
    """All of one parent and its templates. The calling thread is on the host of `wires`."""
    engines = open_variants(bench.engine)
    settings = {**describe_guest(bench.machine), "n": spec.n, "variants": list(engines), "passes": spec.passes}
    run = begin_run(host, {**settings, "leases": spec.leases, **asdict(spec.packet)})
    try:
        if not bench.store.has(bench.tag):
            bench.progress.stage("the parent of the forks")
            await measure_snapshot(bench)
        with bench.store.held(bench.tag) as snapshot, scratch_directory(bench.store.root) as scratch:
            ground = Ground(bench.engine, frozen_of(snapshot, bench.image), bench.directory, bench.progress)
            async with (
                opened_site(wires, scratch, pool=max(spec.n, spec.leases)) as site,
                _all_templated(ground, engines) as grounds,
            ):
                for number in range(1, rounds + 1):
                    run.rounds.append(await _measure_round(grounds, site, spec, f"round {number} of {rounds}"))
                    on_round(run)
    finally:
        remove_snapshot(bench)


Grounds = Mapping[str, tuple[Ground, Template]]


@asynccontextmanager
async def _all_templated(ground: Ground, engines: Mapping[str, Engine]) -> AsyncIterator[Grounds]:
    async with AsyncExitStack() as stack:
        templates: dict[int, Template] = {}
        for engine in engines.values():
            if id(engine) not in templates:
                ground.progress.stage("a template")
                templates[id(engine)] = await stack.enter_async_context(templated(replace(ground, engine=engine)))
        yield {variant: (replace(ground, engine=engine), templates[id(engine)]) for variant, engine in engines.items()}


async def _measure_round(grounds: Grounds, site: Site, spec: NetworkSpec, title: str) -> Round:
    ground, template = grounds[NETWORK]
    parts = [await measure_variants(grounds, site, spec, title)]
    ground.progress.stage(f"{title}: first packets")
    parts.append(await measure_packets(ground, template, site, spec.packet, f"{title}: first packets"))
    ground.progress.stage(f"{title}: throughput")
    parts.append(await measure_sending(ground, template, site, spec.packet, f"{title}: throughput"))
    ground.progress.stage(f"{title}: leases")
    try:
        with scratch_directory(ground.directory) as scratch:
            parts.append(Round(await measure_leases(site, scratch, spec.leases)))
    except ForkdError as error:
        parts.append(Round.failed(f"{title}: leases", error))
    return joined(parts)


async def measure_variants(grounds: Grounds, site: Site, spec: NetworkSpec, title: str) -> Round:
    """In turns, so that a slow minute hits all; a fork that fails is a finding."""
    samples: dict[str, list[Sample]] = {variant: [] for variant in grounds}
    failures: list[Round] = []
    for number in range(spec.passes):
        for variant in turned(grounds, number):
            name = f"{title}: fork of {spec.n} {VARIANTS[variant]}, {number + 1} of {spec.passes}"
            ground, template = grounds[variant]
            ground.progress.stage(name)
            try:
                samples[variant].append(await fork_all(ground, template, site if variant == NETWORK else None, spec.n))
            except ForkdError as error:
                failures.append(Round.failed(name, error, FORKED.read({"ok": 0}, **varied(spec.n, variant))))
    return joined([Round(compare_samples(samples, spec.n)), *failures])


async def fork_all(ground: Ground, template: Template, site: Site | None, n: int) -> Sample:
    """`n` children of the template, as a spawn of the daemon makes them; with a network where there is a site."""
    identities = new_identities(n)
    ids = [each.sandbox_id for each in identities]
    if site is not None:
        await site.ready()
    sample, before_s, hub_s = Sample(), _host_cpu_s(template), site.hub_cpu_s() if site else 0.0
    begun = time.monotonic()
    batch = site.leases.begin(ids, RULES) if site else None
    made: Sequence[Child] = ()
    try:
        forked = await fork_children(
            ground.engine,
            ground.frozen,
            identities,
            ground.directory,
            template=template,
            give_nic=None if batch is None else batch.give,
            network=batch is not None,
        )
        made = forked.sandboxes
        sample.values["kept"] = time.monotonic() - begun
        sample.values["host_cpu"] = (_host_cpu_s(template) - before_s) / n * 1000
        if site:
            sample.values["hub_cpu"] = (site.hub_cpu_s() - hub_s) / n * 1000
        _look_at(made, sample)
        sample.values["all_cpu"] = sum(sample.values.get(of, 0.0) for of in ("cpu", "host_cpu", "hub_cpu"))
        answering = time.monotonic()
        await _evaluate_all(made)
        sample.values["ready"] = sample.values["kept"] + time.monotonic() - answering
        unique = [unique_mib(child.machine.pid) for child in made]
        sample.values |= {"unique.mean": statistics.mean(unique), "unique.largest": max(unique), "ok": n}
    finally:
        ending = time.monotonic()
        await kill_all(made)
        if site:
            await site.leases.give_up(batch, ids)
        sample.values["kill"] = time.monotonic() - ending
    return sample


def _host_cpu_s(template: Template) -> float:
    return time.process_time() + exact_cpu_seconds(template.machine.pid)


def _look_at(children: Sequence[Child], sample: Sample) -> None:
    started = sum(child.machine.phases.way is not Way.FORK for child in children)
    if started:
        raise ContractBroken(f"{started} children did not come from the template")
    sample.values["cpu"] = statistics.mean(exact_cpu_seconds(child.machine.pid) * 1000 for child in children)
    for phases in (child.machine.phases for child in children):
        for step, length in step_lengths(phases.begun, phases.steps).items():
            sample.steps_ms.setdefault(step, []).append(length * 1000)
        sample.child_ms.append((phases.steps["contract"] - phases.begun) * 1000)


async def _evaluate_all(children: Sequence[Child]) -> None:
    """As many at once as are started at once."""
    gate = asyncio.Semaphore(starts_at_once(look()))

    async def answer(child: Child) -> None:
        async with gate:
            await evaluate(child.agent)

    async with asyncio.TaskGroup() as tasks:
        for child in children:
            tasks.create_task(answer(child))


def read_samples(samples: Mapping[str, Sequence[Sample]], n: int) -> dict[Figure, float]:
    """Medians of whole forks; percentiles over the children of all passes."""
    readings: dict[Figure, float] = {}
    for variant, passes in samples.items():
        where = varied(n, variant)
        if not passes:
            continue
        values: Values = {name: statistics.median(each.values[name] for each in passes) for name in passes[0].values}
        values["child"] = [each_ms for each in passes for each_ms in each.child_ms]
        readings |= FORKED.read(values, **where)
        for step in passes[0].steps_ms:
            lengths = [length for each in passes for length in each.steps_ms.get(step, ())]
            words = {"step": step, "end": STEP_ENDS.get(step, f"the step '{step}' is over")}
            readings |= FORKED.read({"step.{step}": lengths}, **words, **where)
    return readings


def compare_samples(samples: Mapping[str, Sequence[Sample]], n: int) -> dict[Figure, float]:
    """With the ratios to forks without: of whole forks the median of those within each turn. Pure."""
    readings = read_samples(samples, n)
    values, plain = by_name(readings), samples[PLAIN]
    read = dict(readings)
    for variant, taken in samples.items():
        # A turn that is missing in one would compare different minutes.
        if variant == PLAIN or not taken or len(taken) != len(plain):
            continue
        where = varied(n, variant)
        for name in _OF_WHOLE_FORKS:
            pairs = zip(taken, plain, strict=True)
            between = statistics.median(one.values[name] / other.values[name] for one, other in pairs)
            read |= VERSUS.read({name: between}, **where)
        more = values[FORKED.name("unique.mean", **where)] - values[FORKED.name("unique.mean", **varied(n, PLAIN))]
        read |= VERSUS.read({"more": more}, **where) | _other_ratios(readings, where)
    return read


def _other_ratios(readings: Readings, where: dict[str, Any]) -> dict[Figure, float]:
    read: dict[Figure, float] = {}
    values = by_name(readings)
    for figure, value in readings.items():
        rest = figure.name.removeprefix(f"network.fork.{where['n']}.{where['variant']}.")
        if rest in (figure.name, *_OF_WHOLE_FORKS) or not figure.is_amount:
            continue
        if plain := values.get(f"network.fork.{where['n']}.{PLAIN}.{rest}"):
            words = {"rest": rest, "what": figure.what.partition(": ")[2]}
            read |= VERSUS.read({"{rest}": value / plain}, **words, **where)
    return read
