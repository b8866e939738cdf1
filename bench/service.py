"""The parts of a run that are about the daemon, each with daemons of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import service_figures as figures
from bench.costs import CostSpec, Direct, measure_costs
from bench.cycles import CycleSpec, measure_cycles
from bench.ground import Ground, templated
from bench.load import Answers, LoadSpec, measure_load
from bench.measure import begin_run
from bench.report import Round, Run, joined, render_failure, shares
from bench.served import IMAGE, TAG, Served, make_snapshot, served
from forkd.errors import ForkdError
from forkd.host.files import scratch_directory
from forkd.host.paths import Home
from forkd.image import ImageStore, Progress
from forkd.model.names import parse_tag
from forkd.runtime import demo
from forkd.runtime.engines import open_engine
from forkd.runtime.freeze import frozen_of
from forkd.store.snapshots import SnapshotStore

OnRound = Callable[[Run], object]

FAKE = "fake"
_SHOWN_ERRORS = 5


@dataclass(frozen=True)
class Service:
    """What is measured, how often, and where. `directory` is for VMs of our own."""

    home: Home
    directory: Path
    progress: Progress
    engines: tuple[str, ...]
    costs: Mapping[str, CostSpec]
    load: LoadSpec
    cycles: Mapping[str, CycleSpec]
    rounds: int
    warm: Mapping[str, str]


def default_costs(engine: str, sizes: tuple[int, ...]) -> CostSpec:
    one, many = min(sizes), max(sizes)
    if engine == FAKE:
        return CostSpec(spawns={one: 30, many: 2}, execs=200, evals=300)
    return CostSpec(spawns={one: 20, many: 1}, execs=40, evals=200)


def default_warm(engine: str) -> str:
    """The fake engine evaluates its past again in every child: numpy would be most of its fork."""
    return "import json" if engine == FAKE else demo.WARMUP.code or ""


def default_cycles(engine: str) -> CycleSpec:
    return CycleSpec(cycles=1000 if engine == FAKE else 100, at_once=4)


def begin_part(service: Service, part: str, host: Mapping[str, Any]) -> Run:
    settings: dict[str, Any] = {"engines": list(service.engines)}
    if part == "daemon":
        settings["rounds"] = service.rounds
        settings["each_round"] = {engine: asdict(service.costs[engine]) for engine in service.engines}
    elif part == "load":
        settings |= {"engines": [FAKE], **asdict(service.load)}
    else:
        settings["each"] = {engine: asdict(service.cycles[engine]) for engine in service.engines}
    return begin_run(host, settings)


async def run_part(service: Service, part: str, run: Run, on_round: OnRound) -> None:
    """Adds to `run` as it goes. A failure is a finding, and ends the part of that engine only."""
    measures = {"daemon": _run_costs, "load": _run_load, "cycles": _run_cycles}
    for engine in run.settings["engines"]:
        try:
            async with _daemon(service, engine, f"{part}, {engine}") as daemon:
                await measures[part](service, daemon, run, on_round)
        except ForkdError as error:
            _add(run, 1, Round({}, (render_failure(f"{part}, {engine}", error),)))
            on_round(run)


@asynccontextmanager
async def _daemon(service: Service, engine: str, title: str) -> AsyncIterator[Served]:
    service.progress.stage(f"{title}: daemon and snapshot")
    with scratch_directory(service.home.root) as root, served(engine, service.home.images, root) as daemon:
        make_snapshot(daemon, service.warm[engine])
        yield daemon


async def _run_costs(service: Service, daemon: Served, run: Run, on_round: OnRound) -> None:
    engine = open_engine(daemon.engine, outlive=True)
    image = ImageStore(daemon.home).open(IMAGE)
    with SnapshotStore(daemon.home.snapshots).held(parse_tag(TAG)) as snapshot:
        async with AsyncExitStack() as stack:
            ground = Ground(engine, frozen_of(snapshot, image), service.directory, service.progress)
            lack = engine.why_no_live_forks()
            template = None if lack else await stack.enter_async_context(templated(ground))
            direct = Direct(engine, ground.frozen, service.directory, template)
            for number in range(1, service.rounds + 1):
                service.progress.stage(f"daemon, {daemon.engine}: round {number} of {service.rounds}")
                _add(run, number, Round(await measure_costs(daemon, direct, service.costs[daemon.engine])))
                on_round(run)


def _add(run: Run, number: int, done: Round) -> None:
    """To the round of that number, which another engine may have begun."""
    if number <= len(run.rounds):
        run.rounds[number - 1] = joined([run.rounds[number - 1], done])
    else:
        run.rounds.append(done)


async def _run_load(service: Service, daemon: Served, run: Run, on_round: OnRound) -> None:
    spec = service.load
    service.progress.stage(f"load: {spec.clients} clients for {spec.seconds:g} s")
    load = await measure_load(daemon, spec)
    values = {
        "requests": len(load.answers.took_ms),
        **_answered(load.answers, load.seconds),
        "resident.before": load.before.resident_mib,
        "resident.early": load.early.resident_mib,
        "resident.late": load.late.resident_mib,
        "growth": load.late.resident_mib - load.early.resident_mib,
        "left": len(load.leaks),
    }
    readings = {figures.load(name): value for name, value in values.items()}
    _add(run, 1, Round(readings, _failures("load", load.answers, load.leaks)))
    on_round(run)


async def _run_cycles(service: Service, daemon: Served, run: Run, on_round: OnRound) -> None:
    spec = service.cycles[daemon.engine]
    service.progress.stage(f"cycles, {daemon.engine}: {spec.cycles}, {spec.at_once} at once")
    cycles = await measure_cycles(daemon, spec)
    values = {
        "done": len(cycles.answers.took_ms),
        **_answered(cycles.answers, cycles.seconds),
        "growth": cycles.after.resident_mib - cycles.before.resident_mib,
        "left": len(cycles.leaks),
    }
    readings = {figures.cycles(daemon.engine, name): value for name, value in values.items()}
    _add(run, 1, Round(readings, _failures(f"cycles, {daemon.engine}", cycles.answers, cycles.leaks)))
    on_round(run)


def _answered(answers: Answers, seconds: float) -> dict[str, float]:
    """No shares of nothing: that nobody was answered is said by the errors."""
    count = len(answers.took_ms)
    return {
        "errors": len(answers.errors),
        "rate": count / seconds,
        **(shares(answers.took_ms) if answers.took_ms else {}),
    }


def _failures(title: str, answers: Answers, leaks: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{title}: {what}" for what in (*answers.errors[:_SHOWN_ERRORS], *leaks[:_SHOWN_ERRORS]))
