"""Sandboxes that come and go, several at a time; afterwards everything has to be as before."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.inventory import Use, settle, take_inventory, take_use
from bench.load import Answers, ask, connected
from bench.served import TAG, Served
from forkd.errors import EngineFailed

_WARMING = 4


@dataclass(frozen=True)
class CycleSpec:
    cycles: int = 1000
    at_once: int = 4


@dataclass(frozen=True)
class Cycles:
    answers: Answers
    seconds: float
    before: Use
    after: Use
    leaks: list[str]


async def measure_cycles(daemon: Served, spec: CycleSpec) -> Cycles:
    """Of a daemon that has its snapshot. One cycle: fork one, have it compute something, kill it."""
    # Once before: pools, logs and lazy imports are no leak.
    await _cycle_all(daemon, CycleSpec(max(_WARMING, spec.at_once), spec.at_once))
    inventory, before = take_inventory(daemon), take_use(daemon.pid)
    begun = time.monotonic()
    answers = await _cycle_all(daemon, spec)
    seconds = time.monotonic() - begun
    leaks = settle(daemon, inventory)
    return Cycles(answers, seconds, before, take_use(daemon.pid), leaks)


async def _cycle_all(daemon: Served, spec: CycleSpec) -> Answers:
    answers = Answers()
    numbers = iter(range(spec.cycles))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(spec.at_once):
            tasks.create_task(_cycle(daemon, numbers, answers))
    return answers


async def _cycle(daemon: Served, numbers: Iterator[int], answers: Answers) -> None:
    async with connected(daemon.socket) as (reader, writer):
        for number in numbers:
            begun = time.perf_counter()
            try:
                made = json.loads(await ask(reader, writer, "POST", "/v1/sandboxes", {"snapshot_tag": TAG}))
                place = f"/v1/sandboxes/{made[0]['id']}"
                result = json.loads(await ask(reader, writer, "POST", f"{place}/eval", {"code": f"{number} * 2"}))
                await ask(reader, writer, "DELETE", place)
            except EngineFailed as error:
                answers.errors.append(f"cycle {number}: {error.message}")
                continue
            answers.took_ms.append((time.perf_counter() - begun) * 1000)
            if result["value"] != number * 2:
                answers.errors.append(f"cycle {number} computed {result}")
