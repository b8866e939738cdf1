"""Thousands of forks one after the other, of a template and of a VM that never rests: none fails, nothing is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bench import fork_figures as figures
from bench.figures import Figure
from bench.ground import Ground, LiveTimes, forked_live, sandboxed, templated
from bench.guest import expect
from bench.inventory import settle_own, take_own_inventory
from bench.probes import anonymous_mib, guest_written_mib
from bench.report import Round, render_failure, shares
from forkd.errors import ContractBroken, ForkdError
from forkd.guest.calls import Agent
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.templates import Template

_WARMING = 8
_SHOWN = 5
# More than this many times wrong, and the rest will say nothing new.
_MAX_ERRORS = 20

# A thread that writes one page after the other, and a checksum of each; both under a lock, so that whoever has it sees
# all or nothing of a write.
_SCRIBBLE = """
import os, threading, zlib
pages = memoryview(bytearray(%d << 20))
sums = [zlib.crc32(bytes(4096))] * (len(pages) >> 12)
guard, writes = threading.Lock(), 0
def scribble():
    global writes
    while True:
        at, page = int.from_bytes(os.urandom(4), "little") %% len(sums), os.urandom(16) * 256
        with guard:
            pages[at << 12:at + 1 << 12] = page
            sums[at] = zlib.crc32(page)
            writes += 1
threading.Thread(target=scribble, daemon=True).start()
"""
_VERIFY = """
with guard:
    seen = [writes, sum(zlib.crc32(pages[at << 12:at + 1 << 12]) != sums[at] for at in range(len(sums)))]
seen
"""


@dataclass(frozen=True)
class EnduranceSpec:
    """`cycles` of fork, eval and kill, `at_once` at a time; `live` forks of a VM that writes to `written_mib`."""

    cycles: int = 5000
    live: int = 500
    at_once: int = 4
    written_mib: int = 4


@dataclass
class _Done:
    """What was seen. `took_ms` in the order of the ends."""

    took_ms: list[float] = field(default_factory=list)
    live: list[LiveTimes] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def measure_endurance(ground: Ground, spec: EnduranceSpec, title: str) -> Round:
    before = take_own_inventory(ground.directory)
    async with templated(ground) as template:
        ground.progress.stage(f"{title}: {spec.cycles} times fork, eval, kill")
        cycles, failures = await _measure_cycles(ground, template, spec)
        ground.progress.stage(f"{title}: {spec.live} forks of a busy VM")
        async with sandboxed(ground, template) as source:
            live, more = await _measure_live(ground, source, spec)
    left = await settle_own(ground.directory, before)
    what = [*failures, *more, *(f"left in the end: {each}" for each in left[:_SHOWN])]
    return Round({**cycles, **live}, tuple(f"{title}: {each}" for each in what))


async def _measure_cycles(
    ground: Ground, template: Template, spec: EnduranceSpec
) -> tuple[dict[Figure, float], list[str]]:
    # Once before: pools and lazy imports are no leak.
    await _cycle_all(ground, template, _WARMING, spec.at_once)
    with_template = [template.machine.pid]
    before = take_own_inventory(ground.directory, with_template)
    first, own = anonymous_mib(template.machine.pid), anonymous_mib(os.getpid())
    begun = time.monotonic()
    done = await _cycle_all(ground, template, spec.cycles, spec.at_once)
    seconds = time.monotonic() - begun
    left = await settle_own(ground.directory, before, with_template)
    last = anonymous_mib(template.machine.pid)
    values = {
        "done": len(done.took_ms),
        "errors": len(done.errors),
        "seconds": seconds,
        "rate": len(done.took_ms) / seconds,
        **(shares(done.took_ms) if done.took_ms else {}),
        **drift(done.took_ms),
        "memory.first": first,
        "memory.last": last,
        "gained": last - first,
        "own_gained": anonymous_mib(os.getpid()) - own,
        "left": len(left),
    }
    return _read("cycles", values), _failures("cycles", done, left)


async def _cycle_all(ground: Ground, template: Template, count: int, at_once: int) -> _Done:
    done, numbers = _Done(), iter(range(1, count + 1))
    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(_cycle(ground, template, numbers, count, done))
    return done


async def _cycle(ground: Ground, template: Template, numbers: Iterator[int], count: int, done: _Done) -> None:
    for number in numbers:
        if len(done.errors) > _MAX_ERRORS:
            return
        ground.progress.line(f"{number} of {count}")
        begun = time.monotonic()
        try:
            async with sandboxed(ground, template) as child:
                await expect(child.agent, f"{number} * 2", number * 2)
        except ForkdError as error:
            done.errors.append(render_failure(f"cycle {number}", error))
        else:
            done.took_ms.append((time.monotonic() - begun) * 1000)


async def _measure_live(ground: Ground, source: Sandbox, spec: EnduranceSpec) -> tuple[dict[Figure, float], list[str]]:
    await expect(source.agent, _SCRIBBLE % spec.written_mib + "len(sums)", spec.written_mib << 8)
    # Once before: it has then written to all that it ever will.
    await _fork_all(ground, source, _WARMING)
    with_source = [source.machine.pid]
    before, first = take_own_inventory(ground.directory, with_source), anonymous_mib(source.machine.pid)
    guest_first = guest_written_mib(source.machine.pid, ground.frozen)
    begun = time.monotonic()
    done = await _fork_all(ground, source, spec.live)
    seconds = time.monotonic() - begun
    left = await settle_own(ground.directory, before, with_source)
    values = {"done": len(done.live), "errors": len(done.errors), "seconds": seconds}
    if done.live:
        values |= _named("pause", [each.pause_ms for each in done.live])
        values |= _named("answer", [each.answer_ms for each in done.live])
    if not source.machine.death.done():
        last = anonymous_mib(source.machine.pid)
        values |= {"memory.first": first, "memory.last": last, "gained": last - first}
        values["guest_gained"] = guest_written_mib(source.machine.pid, ground.frozen) - guest_first
    values["left"] = len(left)
    return _read("live", values), _failures("live", done, left)


async def _fork_all(ground: Ground, source: Sandbox, count: int) -> _Done:
    """Each fork goes on from where its source was when it was forked, and its source goes on from there."""
    done, writes = _Done(), 0
    # The last one is the source's own, after all of its forks.
    for number in range(1, count + 2):
        ground.progress.line(f"{min(number, count)} of {count}")
        try:
            writes = await verify(source.agent, writes)
            if number <= count:
                async with forked_live(ground, source) as (agent, times):
                    await verify(agent, writes)
                done.live.append(times)
        except ForkdError as error:
            done.errors.append(render_failure(f"fork {number}" if number <= count else "its source", error))
            if source.machine.death.done() or len(done.errors) > _MAX_ERRORS:
                break
    return done


async def verify(agent: Agent, least: int) -> int:
    """How many writes there were. Raises when a page is not what its checksum says, or the past is another."""
    result = await agent.eval(_VERIFY)
    seen = result.value
    if not isinstance(seen, list) or len(seen) != 2:
        why = result.error.traceback if result.error else None
        raise ContractBroken(f"The guest answered {result.repr} instead of its checksums", details=why)
    writes, wrong = seen
    if wrong or writes < least:
        raise ContractBroken(f"The guest has {wrong} wrong pages after {writes} writes, of which {least} were known")
    return int(writes)


def drift(took_ms: Sequence[float]) -> dict[str, float]:
    """Whether it became slower; nothing of fewer than ten."""
    tenth = len(took_ms) // 10
    return {"drift": shares(took_ms[-tenth:])["p50"] / shares(took_ms[:tenth])["p50"]} if tenth else {}


def _named(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}.{share}": value for share, value in shares(values).items()}


def _read(kind: str, values: dict[str, float]) -> dict[Figure, float]:
    return {figures.endurance(kind, name): value for name, value in values.items()}


def _failures(kind: str, done: _Done, left: Sequence[str]) -> list[str]:
    seen = (*done.errors[:_SHOWN], *(f"left: {each}" for each in left[:_SHOWN]))
    return [f"{figures.TITLES[kind]}: {what}" for what in seen]
