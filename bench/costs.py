"""What the daemon costs on top of the engine and the agent, request by request.

The engine's or the agent's part is stamped inside the daemon (bench.stamped) and taken off what the client waited: of
one request, not of two that met different moments of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench import service_figures as figures
from bench.figures import Figure
from bench.report import shares
from bench.rest import Rest
from bench.served import TAG, Served, StampReader
from forkd.client.controller import Controller
from forkd.engines.base import Engine, Frozen
from forkd.errors import ContractBroken
from forkd.host.memory import cpu_seconds
from forkd.runtime.spawn import fork_children, kill_all, new_identities
from forkd.runtime.templates import Template

_WARMING_SPAWNS = 3
_WARMING = 10


@dataclass(frozen=True)
class CostSpec:
    """How often each is done in one round; `spawns` by the number of sandboxes."""

    spawns: dict[int, int]
    execs: int
    evals: int


@dataclass(frozen=True)
class Direct:
    """The engine without a daemon: the same snapshot, forked by ourselves, as the daemon does it."""

    engine: Engine
    frozen: Frozen
    directory: Path
    template: Template | None

    async def fork_ms(self, n: int) -> float:
        begun = time.perf_counter()
        forked = await fork_children(
            self.engine, self.frozen, new_identities(n), self.directory, template=self.template
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
    engine = daemon.engine
    own = [whole - part for whole, part in zip(total, fork, strict=True)]
    readings: dict[Figure, float] = {}
    for figure, values in (
        (figures.spawn_total, total),
        (figures.spawn_fork, fork),
        (figures.spawn_own, own),
        (figures.spawn_direct, without),
    ):
        readings |= {figure(engine, n, share): value for share, value in shares(values).items()}
    ratio = shares(total)["p50"] / shares(without)["p50"]
    return {**readings, figures.spawn_to_direct(engine, n): ratio}


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
    engine = daemon.engine
    readings = {figures.call_cpu(engine, kind): cpu_ms}
    readings |= {figures.call_agent(engine, kind, share): value for share, value in shares(agent).items()}
    for way in ways:
        readings |= {figures.call_total(engine, kind, way, at): value for at, value in shares(total[way]).items()}
        readings |= {figures.call_more(engine, kind, way, at): value for at, value in shares(more[way]).items()}
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
    """A wrong answer is no measurement."""
    assert isinstance(answer, dict)
    if answer["exit_code"] != 0 or (kind == "eval" and answer["result"] != "42"):
        raise ContractBroken(f"The guest answered {answer}")


def _measure_floor(engine: str, rest: Rest, count: int) -> dict[Figure, float]:
    taken = []
    for _ in range(count):
        rest.ask("GET", "/healthz")
        taken.append(rest.took_ms)
    return {figures.floor(engine, share): value for share, value in shares(taken).items()}
