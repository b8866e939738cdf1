"""What the daemon costs on top of the engine and the agent, and how it bears a load; each part with its own daemons.

The engine's or the agent's part is stamped inside the daemon (bench.served) and taken off what the client waited: of
one request, not of two that met different moments of the machine.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.engine import begin_run
from bench.figures import Bound, Family, Figure, Round, Row, Run, Settings, Values, Where, joined, shares
from bench.ground import Ground, templated
from bench.load import CLIENT_STOPS, CycleSpec, LoadSpec, each_engine, measure_cycles, measure_load
from bench.served import IMAGE, TAG, Rest, Served, StampReader, make_snapshot, served
from bench.siege import SiegeSpec, measure_siege
from forkd.client.controller import Controller
from forkd.engines.base import Opening
from forkd.errors import ContractBroken, ForkdError
from forkd.host.files import scratch_directory
from forkd.host.paths import Home
from forkd.host.system import cpu_seconds
from forkd.image import ImageStore, Progress
from forkd.model.names import parse_tag
from forkd.runtime import demo
from forkd.runtime.doctor import open_engine
from forkd.runtime.fork import fork_children, kill_all, new_identities
from forkd.runtime.freeze import frozen_of
from forkd.runtime.origin import Template
from forkd.store.snapshots import SnapshotStore

PARTS = ("daemon", "load", "cycles", "siege")
FAKE = "fake"
# How a client asks.
WAYS = {
    "unix": "plain HTTP, unix socket",
    "tcp": "plain HTTP, TCP",
    "sdk": "Controller, unix socket",
}
# By the number of sandboxes, and for a call: the most that the daemon's part may take, p50.
SPAWN_MS = {1: 5.0, 100: 40.0}
CALL_MS = 2.0

_DONE = {"exec": "exec of /bin/true", "eval": "eval"}


def called(engine: str, kind: str, way: str = "") -> dict[str, str]:
    """The words for calls of one kind."""
    return {"engine": engine, "kind": kind, "done": _DONE[kind], "way": way, "by": WAYS.get(way, "")}


def _each_spawn(n: int) -> Callable[[Settings], Iterable[Where]]:
    return lambda settings: ({**where, "n": n} for where in each_engine(settings))


def _each_plain_call(settings: Settings) -> Iterable[Where]:
    return (called(e, kind, way) for e in settings["engines"] for kind in _DONE for way in ("unix", "tcp"))


SPAWNS = Family(
    "daemon.{engine}.spawn.{n}",
    "{engine}, spawn of {n}: ",
    "daemon, snapshot and connection ready; a memory file in the page cache; "
    "no process started ahead but the template, where the engine can fork one",
    {
        "total": Row("POST /v1/sandboxes", "ms", CLIENT_STOPS),
        "fork": Row(
            "the engine's fork within it",
            "ms",
            "the engine's fork returns to the daemon; starts when it is called there",
        ),
        "own": Row(
            "the daemon's part",
            "ms",
            "as the request, less the engine's fork within the same request",
            tuple(
                Bound("{engine}: the daemon's part of a spawn of {n}, p50", "<=", limit, _each_spawn(n), "p50")
                for n, limit in SPAWN_MS.items()
            ),
        ),
        "direct": Row(
            "the same fork without a daemon",
            "ms",
            "fork_children returns, called without a daemon; each call follows one of POST /v1/sandboxes",
        ),
        "ratio": Row(
            "through the daemon / without",
            "",
            "p50 of POST /v1/sandboxes by p50 of the same fork without a daemon, taken in turns",
        ),
    },
)
CALLS = Family(
    "daemon.{engine}.{kind}",
    "{engine}, {done}: ",
    "one sandbox, the only one; the same call was made before; the ways take turns",
    {
        "cpu": Row(
            "CPU time of the daemon",
            "ms",
            "all calls of the round are answered; CPU time of the daemon, by the number of calls",
        ),
        "agent": Row(
            "the agent's round trip", "ms", "the agent's answer is with the daemon; starts when the daemon asks"
        ),
        "{way}.total": Row("{by}", "ms", CLIENT_STOPS),
        "{way}.more": Row(
            "{by}, on top of the agent",
            "ms",
            "as the request, less the agent's round trip within the same request",
            (Bound("{engine}: {kind} by {by}, on top of the agent, p50", "<=", CALL_MS, _each_plain_call, "p50"),),
        ),
    },
)
FLOOR = Family(
    "daemon.{engine}",
    "{engine}, ",
    "a connection ready",
    {"healthz.unix": Row(f"GET /healthz: {WAYS['unix']}", "ms", CLIENT_STOPS)},
)

_WARMING_SPAWNS = 3
_WARMING = 10

OnRound = Callable[[Run], object]
# Each with its number.
Rounds = AsyncGenerator[tuple[int, Round], None]


@dataclass(frozen=True)
class CostSpec:
    """How often each is done in one round; `spawns` by the number of sandboxes."""

    spawns: dict[int, int]
    execs: int
    evals: int


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
    siege: SiegeSpec
    rounds: int
    warm: Mapping[str, str]


def default_service(
    home: Home, directory: Path, progress: Progress, engine: str, sizes: tuple[int, ...], rounds: int
) -> Service:
    """Of this engine, and of the fake one, with which more can be done in the same time."""
    one, many = min(sizes), max(sizes)
    costs = {FAKE: CostSpec({one: 30, many: 2}, execs=200, evals=300)}
    cycles, warm = {FAKE: CycleSpec(cycles=1000)}, {FAKE: "import json"}
    if engine != FAKE:
        costs[engine] = CostSpec({one: 20, many: 1}, execs=40, evals=200)
        cycles[engine] = CycleSpec(cycles=100)
        # Not with the fake engine, which evaluates its past again in every child: numpy would be most of its fork.
        warm[engine] = demo.WARMUP.code or ""
    siege = SiegeSpec(rounds=min(rounds, SiegeSpec.rounds))
    return Service(home, directory, progress, tuple(costs), costs, LoadSpec(), cycles, siege, rounds, warm)


def begin_part(service: Service, part: str, host: Mapping[str, Any]) -> Run:
    settings: dict[str, Any] = {"engines": list(service.engines)}
    if part == "daemon":
        settings["rounds"] = service.rounds
        settings["each_round"] = {engine: asdict(service.costs[engine]) for engine in service.engines}
    elif part == "load":
        settings |= {"engines": [FAKE], **asdict(service.load)}
    elif part == "siege":
        settings |= {"engines": [FAKE], **asdict(service.siege)}
    else:
        settings["each"] = {engine: asdict(service.cycles[engine]) for engine in service.engines}
    return begin_run(host, settings)


async def run_part(service: Service, part: str, run: Run, on_round: OnRound) -> None:
    """Adds to `run` as it goes. A failure is a finding, and ends the part of that engine only."""
    for engine in run.settings["engines"]:
        try:
            async with _daemon(service, engine, f"{part}, {engine}") as daemon:
                async with aclosing(_MEASURES[part](service, daemon)) as rounds:
                    async for number, done in rounds:
                        _add(run, number, done)
                        on_round(run)
        except ForkdError as error:
            _add(run, 1, Round.failed(f"{part}, {engine}", error))
            on_round(run)


@asynccontextmanager
async def _daemon(service: Service, engine: str, title: str) -> AsyncIterator[Served]:
    service.progress.stage(f"{title}: daemon and snapshot")
    with scratch_directory(service.home.root) as root, served(engine, service.home.images, root) as daemon:
        make_snapshot(daemon, service.warm[engine])
        yield daemon


def _add(run: Run, number: int, done: Round) -> None:
    """To the round of that number, which another engine may have begun."""
    if number <= len(run.rounds):
        run.rounds[number - 1] = joined([run.rounds[number - 1], done])
    else:
        run.rounds.append(done)


async def _cost_rounds(service: Service, daemon: Served) -> Rounds:
    engine = open_engine(daemon.engine, Opening(outlive=True))
    image = ImageStore(daemon.home).open(IMAGE)
    with SnapshotStore(daemon.home.snapshots).held(parse_tag(TAG)) as snapshot:
        async with AsyncExitStack() as stack:
            ground = Ground(engine, frozen_of(snapshot, image), service.directory, service.progress)
            lack = engine.why_no_live_forks()
            template = None if lack else await stack.enter_async_context(templated(ground))
            direct = Direct(ground, template)
            for number in range(1, service.rounds + 1):
                service.progress.stage(f"daemon, {daemon.engine}: round {number} of {service.rounds}")
                yield number, Round(await measure_costs(daemon, direct, service.costs[daemon.engine]))


async def _load_rounds(service: Service, daemon: Served) -> Rounds:
    spec = service.load
    service.progress.stage(f"load: {spec.clients} clients for {spec.seconds:g} s")
    yield 1, (await measure_load(daemon, spec)).read(daemon.engine)


async def _cycle_rounds(service: Service, daemon: Served) -> Rounds:
    spec = service.cycles[daemon.engine]
    service.progress.stage(f"cycles, {daemon.engine}: {spec.cycles}, {spec.at_once} at once")
    yield 1, (await measure_cycles(daemon, spec)).read(daemon.engine)


async def _siege_rounds(service: Service, daemon: Served) -> Rounds:
    spec = service.siege
    for number in range(1, spec.rounds + 1):
        service.progress.stage(f"siege: round {number} of {spec.rounds}")
        yield number, await measure_siege(daemon, spec)


_MEASURES = {"daemon": _cost_rounds, "load": _load_rounds, "cycles": _cycle_rounds, "siege": _siege_rounds}


@dataclass(frozen=True)
class Direct:
    """The engine without a daemon: the same snapshot, forked by ourselves, as the daemon does it."""

    ground: Ground
    template: Template | None

    async def fork_ms(self, n: int) -> float:
        ground, begun = self.ground, time.perf_counter()
        forked = await fork_children(
            ground.engine, ground.frozen, new_identities(n), ground.directory, template=self.template
        )
        took = time.perf_counter() - begun
        await kill_all(forked.sandboxes)
        return took * 1000


async def measure_costs(daemon: Served, direct: Direct, spec: CostSpec) -> dict[Figure, float]:
    readings: dict[Figure, float] = {}
    with daemon.rest() as rest:
        for n, count in spec.spawns.items():
            readings |= await measure_spawns(daemon, direct, rest, n, count)
        (sandbox,) = rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG})
        try:
            readings |= measure_calls(daemon, rest, sandbox["id"], spec)
        finally:
            rest.ask("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        readings |= _measure_floor(daemon.engine, rest, spec.evals)
    return readings


async def measure_spawns(daemon: Served, direct: Direct, rest: Rest, n: int, count: int) -> dict[Figure, float]:
    stamps = StampReader(daemon.stamps)
    # The first of all finds things to import and files to read; of many, most do not.
    for _ in range(_WARMING_SPAWNS if n == 1 else 0):
        _spawn_ms(rest, n)
        await direct.fork_ms(n)
    total, fork, without = [], [], []
    for _ in range(count):
        stamps.take()
        total.append(_spawn_ms(rest, n))
        fork.append(stamps.take_one("fork"))
        without.append(await direct.fork_ms(n))
    values: Values = {
        "total": total,
        "fork": fork,
        "own": [whole - part for whole, part in zip(total, fork, strict=True)],
        "direct": without,
        "ratio": shares(total)["p50"] / shares(without)["p50"],
    }
    return SPAWNS.read(values, engine=daemon.engine, n=n)


def _spawn_ms(rest: Rest, n: int) -> float:
    made = rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "n": n})
    took = rest.took_ms
    for one in made:
        rest.ask("DELETE", f"/v1/sandboxes/{one['id']}")
    return took


def measure_calls(daemon: Served, rest: Rest, sandbox_id: str, spec: CostSpec) -> dict[Figure, float]:
    readings: dict[Figure, float] = {}
    with Rest.by_port(daemon.port) as tcp, Controller(f"unix://{daemon.socket}") as controller:
        for kind, count in (("exec", spec.execs), ("eval", spec.evals)):
            ways = {
                "unix": _plain(rest, sandbox_id, kind),
                "tcp": _plain(tcp, sandbox_id, kind),
                "sdk": _by_sdk(controller, sandbox_id, kind),
            }
            readings |= _measure_ways(daemon, kind, ways, count)
    return readings


Ask = Callable[[], float]


def _measure_ways(daemon: Served, kind: str, ways: dict[str, Ask], count: int) -> dict[Figure, float]:
    """In turns, so that a slow moment of the machine hits all ways."""
    stamps = StampReader(daemon.stamps)
    total: dict[str, list[float]] = {way: [] for way in ways}
    more: dict[str, list[float]] = {way: [] for way in ways}
    agent = []
    begun_s = cpu_seconds(daemon.pid)
    for number in range(-_WARMING, count):
        for way, ask in ways.items():
            stamps.take()
            took = ask()
            inside = stamps.take_one(kind)
            if number >= 0:
                total[way].append(took)
                more[way].append(took - inside)
                agent.append(inside)
    cpu_ms = (cpu_seconds(daemon.pid) - begun_s) * 1000 / ((count + _WARMING) * len(ways))
    readings = CALLS.read({"cpu": cpu_ms, "agent": agent}, **called(daemon.engine, kind))
    for way in ways:
        values = {"{way}.total": total[way], "{way}.more": more[way]}
        readings |= CALLS.read(values, **called(daemon.engine, kind, way))
    return readings


def _plain(rest: Rest, sandbox_id: str, kind: str) -> Ask:
    body = {"exec": {"args": ["/bin/true"]}, "eval": {"code": "6 * 7"}}[kind]

    def ask() -> float:
        _check(kind, rest.ask("POST", f"/v1/sandboxes/{sandbox_id}/{kind}", body))
        return rest.took_ms

    return ask


def _by_sdk(controller: Controller, sandbox_id: str, kind: str) -> Ask:
    def ask() -> float:
        begun = time.perf_counter()
        if kind == "exec":
            answer: object = controller.exec_command(sandbox_id, ["/bin/true"])
        else:
            answer = controller.eval_code(sandbox_id, "6 * 7")
        took = time.perf_counter() - begun
        _check(kind, answer)
        return took * 1000

    return ask


def _check(kind: str, answer: object) -> None:
    """A wrong answer is an error, not a measurement."""
    assert isinstance(answer, dict)
    if answer["exit_code"] != 0 or (kind == "eval" and answer["result"] != "42"):
        raise ContractBroken(f"The guest answered {answer}")


def _measure_floor(engine: str, rest: Rest, count: int) -> dict[Figure, float]:
    taken = []
    for _ in range(count):
        rest.ask("GET", "/healthz")
        taken.append(rest.took_ms)
    return FLOOR.read({"healthz.unix": taken}, engine=engine)
