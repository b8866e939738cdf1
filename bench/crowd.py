"""As many VMs as there may be, alive at once: made of one template, told apart, left alone, ended."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench import fork_figures as figures
from bench.figures import Figure
from bench.ground import Ground, templated
from bench.guest import evaluate
from bench.probes import unique_mib
from bench.report import Round, render_failure
from forkd.engines.base import Way
from forkd.errors import ForkdError
from forkd.host.capacity import allow_open_files
from forkd.host.memory import available_mib
from forkd.model.machine import MAX_CHILDREN
from forkd.runtime import demo
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.spawn import fork_children, kill_all, new_identities
from forkd.runtime.templates import Template

_SHOWN = 5


@dataclass(frozen=True)
class CrowdSpec:
    n: int = MAX_CHILDREN


async def measure_crowd(ground: Ground, spec: CrowdSpec, title: str) -> Round:
    allow_open_files()
    async with templated(ground) as template:
        return await _measure(ground, template, spec.n, title)


async def _measure(ground: Ground, template: Template, n: int, title: str) -> Round:
    ready = 0

    async def answer(sandbox: Sandbox) -> None:
        nonlocal ready
        await evaluate(sandbox.agent)
        ready += 1
        ground.progress.line(f"{ready} of {n}")

    ground.progress.stage(f"{title}: {n} VMs")
    available, begun = available_mib(), time.monotonic()
    forked = await fork_children(
        ground.engine,
        ground.frozen,
        new_identities(n),
        ground.directory,
        template=template,
        after=answer,
        allow_partial=True,
    )
    made_s = time.monotonic() - begun
    failures = [render_failure(f"{title}: {who}", error) for who, error in list(forked.errors.items())[:_SHOWN]]
    try:
        values: dict[str, float] = {"made": made_s, "all_memory": available - available_mib()}
        values |= await _look_at(ground, forked.sandboxes, title)
        if started := len(forked.sandboxes) - int(values["ok"]):
            failures.append(f"{title}: {started} VMs were started, and not forked from the template")
        failures += await _tell_apart(ground, forked.sandboxes, values, title)
    finally:
        ground.progress.stage(f"{title}: their end")
        begun = time.monotonic()
        await kill_all(forked.sandboxes)
    values["killed"] = time.monotonic() - begun
    return Round(read_crowd(n, values), tuple(failures))


async def _look_at(ground: Ground, children: Sequence[Sandbox], title: str) -> dict[str, float]:
    ground.progress.stage(f"{title}: what they hold, and use while idle")
    unique = [unique_mib(child.machine.pid) for child in children]
    return {
        "ok": sum(child.machine.phases.way is Way.FORK for child in children),
        "unique.mean": statistics.mean(unique),
        "unique.largest": max(unique),
        "idle": await demo.idle_cpu_percent(list(children)),
    }


async def _tell_apart(ground: Ground, children: Sequence[Sandbox], values: dict[str, float], title: str) -> list[str]:
    """What was wrong with it."""
    ground.progress.stage(f"{title}: who they are")
    try:
        values["distinct"] = await demo.count_distinct(list(children))
    except ForkdError as error:
        return [render_failure(f"{title}: who they are", error)]
    same = len(children) - int(values["distinct"])
    return [f"{title}: {same} VMs share something with another"] if same else []


def read_crowd(n: int, values: dict[str, float]) -> dict[Figure, float]:
    return {figures.crowd(n, name): values[name] for name in figures.CROWD if name in values}
