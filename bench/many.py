"""Many VMs: a crowd alive at once, and thousands of forks one after the other. None fails, nothing is left."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bench.figures import EACH, Bound, Family, Figure, Round, Row, Settings, Values, Where, render_failure, shares
from bench.forks import anonymous_mib, guest_written_mib, unique_mib
from bench.ground import Ground, evaluate, expect, sandboxed, templated
from bench.inventory import settle, take_own_inventory
from bench.live import ANSWER, ANSWER_STOPS, PAUSE, PAUSE_STOPS, RUNNING, LiveTimes, forked_live
from bench.load import Answers
from forkd.engines.base import Way
from forkd.errors import ContractBroken, ForkdError
from forkd.guest.agent import Agent
from forkd.host.system import allow_open_files, available_mib
from forkd.model.machine import MAX_CHILDREN
from forkd.runtime import demo
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_children, kill_all, new_identities
from forkd.runtime.origin import Template

# How many VMs the targets of a crowd speak of.
CROWD_N = 1000


def _full_crowd(_: Settings) -> Iterable[Where]:
    return ({"n": CROWD_N},)


_ALIVE = "all alive, each after its first evaluation"
CROWD = Family(
    "crowd.{n}",
    "{n} VMs at once: ",
    "snapshot made and verified; a template made, which has rehearsed all that is asked of its children",
    {
        "made": Row(
            "made, all ready",
            "s",
            "all have kept the contract and answered their first evaluation",
            (Bound("{n} VMs made", "<=", 25.0, _full_crowd),),
        ),
        "ok": Row(
            "answered right, and forked from the template",
            "VMs",
            "the fork returned",
            (Bound("{n} of {n} VMs right in every round", "=", "n", _full_crowd),),
        ),
        "distinct": Row(
            "share nothing with any other",
            "VMs",
            "the last has said who it is",
            (Bound("{n} of {n} VMs distinct in every round", "=", "n", _full_crowd),),
        ),
        "unique.mean": Row("unique memory each, mean", "MiB", _ALIVE),
        "unique.largest": Row("unique memory each, largest", "MiB", _ALIVE),
        "all_memory": Row("memory of the machine for all", "MiB", f"{_ALIVE}; what is available less than before"),
        "idle": Row(
            "idle CPU each, mean",
            "% of a core",
            "some seconds later, without a request in between",
            (Bound("{n} VMs: idle CPU each", "<", 0.1, _full_crowd),),
        ),
        "killed": Row(
            "killed and cleaned up",
            "s",
            "every process is reaped, its sockets and directory are gone",
            (Bound("{n} VMs killed and cleaned up", "<=", 15.0, _full_crowd),),
        ),
    },
)

_ENDED = "the last is killed"
_ANONYMOUS = "; pages that belong to no file"
_GONE = "all are killed, and what was needed for them is put away"
_CYCLES, _LIVE = "fork, eval, kill", "live forks of a busy VM"


def _lasting(
    title: str, wrong: str, of: str, first: str, times: dict[str, Row], gained: dict[str, Row]
) -> dict[str, Row]:
    """What both kinds of forks that come and go are held to; `of` is the VM that they are forked from."""
    before = f"before the first {first}, after some that do not count{_ANONYMOUS}"
    left = "processes, descriptors, threads, tasks, files left"
    return {
        "done": Row("done", "", _ENDED),
        "errors": Row(f"errors and wrong {wrong}", "", _ENDED, (Bound(f"{title}: no error", "=", 0),)),
        "seconds": Row("time for all", "s", _ENDED),
        **times,
        "memory.first": Row(f"memory of the {of} before", "MiB", before),
        "memory.last": Row(f"memory of the {of} at the end", "MiB", _GONE + _ANONYMOUS),
        **gained,
        "left": Row(left, "", _GONE, (Bound(f"{title}: nothing is left", "=", 0),)),
    }


# A VM that is busy may need more of its memory as it goes on; a template stands still.
_STANDS_STILL = Bound(f"{_CYCLES}: memory the template gained", "<=", 1.0)
_WRITES_ON = f"{_GONE}; a guest that runs writes to more and more of its memory, forked or not"
CYCLES = Family(
    "endurance.cycles",
    f"{_CYCLES}: ",
    "a template, which all are forked from",
    _lasting(
        *(_CYCLES, "answers", "template", "cycle"),
        {
            "rate": Row("per second", "1/s", _ENDED),
            EACH: Row("one cycle", "ms", "its child is gone; starts when it is asked for"),
            "drift": Row("p50 of the last tenth / of the first", "", _ENDED),
        },
        {
            "gained": Row("memory the template gained", "MiB", _GONE + _ANONYMOUS, (_STANDS_STILL,)),
            "own_gained": Row("memory this process gained", "MiB", _GONE + _ANONYMOUS),
        },
    ),
)
LIVES = Family(
    "endurance.live",
    f"{_LIVE}: ",
    f"{RUNNING}; it writes to its memory all the time, and keeps checksums",
    _lasting(
        *(_LIVE, "checksums", "source", "fork"),
        {"pause": Row(PAUSE, "ms", PAUSE_STOPS), "answer": Row(ANSWER, "ms", ANSWER_STOPS)},
        {
            "gained": Row("memory the source gained", "MiB", _GONE + _ANONYMOUS),
            "guest_gained": Row("of which its guest wrote to", "MiB", _WRITES_ON),
        },
    ),
)

_WARMING = 8
_SHOWN = 5
# More than this many times wrong, and the rest will say nothing new.
_MAX_ERRORS = 20

# A thread that writes one page after the other, and a checksum of each; both under a lock, so that the one who has it
# sees all or nothing of a write.
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
class CrowdSpec:
    n: int = MAX_CHILDREN


async def measure_crowd(ground: Ground, spec: CrowdSpec, title: str) -> Round:
    allow_open_files()
    async with templated(ground) as template:
        return await _measure_crowd(ground, template, spec.n, title)


async def _measure_crowd(ground: Ground, template: Template, n: int, title: str) -> Round:
    ready = 0

    async def answer(sandbox: Child) -> None:
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
    return Round(CROWD.read(values, n=n), tuple(failures))


async def _look_at(ground: Ground, children: Sequence[Child], title: str) -> dict[str, float]:
    ground.progress.stage(f"{title}: what they hold, and use while idle")
    unique = [unique_mib(child.machine.pid) for child in children]
    return {
        "ok": sum(child.machine.phases.way is Way.FORK for child in children),
        "unique.mean": statistics.mean(unique),
        "unique.largest": max(unique),
        "idle": await demo.idle_cpu_percent(list(children)),
    }


async def _tell_apart(ground: Ground, children: Sequence[Child], values: dict[str, float], title: str) -> list[str]:
    """What was wrong with it."""
    ground.progress.stage(f"{title}: who they are")
    try:
        values["distinct"] = await demo.count_distinct(list(children))
    except ForkdError as error:
        return [render_failure(f"{title}: who they are", error)]
    same = len(children) - int(values["distinct"])
    return [f"{title}: {same} VMs share something with another"] if same else []


@dataclass(frozen=True)
class EnduranceSpec:
    """`cycles` of fork, eval and kill, `at_once` at a time; `live` forks of a VM that writes to `written_mib`."""

    cycles: int = 5000
    live: int = 500
    at_once: int = 4
    written_mib: int = 4


@dataclass
class _Done(Answers):
    """What was seen; `took_ms` in the order of the ends."""

    live: list[LiveTimes] = field(default_factory=list)


async def measure_endurance(ground: Ground, spec: EnduranceSpec, title: str) -> Round:
    before = take_own_inventory(ground.directory)
    async with templated(ground) as template:
        ground.progress.stage(f"{title}: {spec.cycles} times fork, eval, kill")
        cycles, failures = await _measure_cycles(ground, template, spec)
        ground.progress.stage(f"{title}: {spec.live} forks of a busy VM")
        async with sandboxed(ground, template) as source:
            live, more = await _measure_live(ground, source, spec)
    left = await settle(before, lambda: take_own_inventory(ground.directory))
    what = [*failures, *more, *(f"left in the end: {each}" for each in left[:_SHOWN])]
    return Round({**cycles, **live}, tuple(f"{title}: {each}" for each in what))


async def _measure_cycles(
    ground: Ground, template: Template, spec: EnduranceSpec
) -> tuple[dict[Figure, float], list[str]]:
    # Once before: pools and lazy imports are not leaks.
    await _cycle_all(ground, template, _WARMING, spec.at_once)
    with_template = [template.machine.pid]
    before = take_own_inventory(ground.directory, with_template)
    first, own = anonymous_mib(template.machine.pid), anonymous_mib(os.getpid())
    begun = time.monotonic()
    done = await _cycle_all(ground, template, spec.cycles, spec.at_once)
    seconds = time.monotonic() - begun
    left = await settle(before, lambda: take_own_inventory(ground.directory, with_template))
    last = anonymous_mib(template.machine.pid)
    values: Values = {
        "done": len(done.took_ms),
        "errors": len(done.errors),
        "seconds": seconds,
        "rate": len(done.took_ms) / seconds,
        EACH: done.took_ms,
        **drift(done.took_ms),
        "memory.first": first,
        "memory.last": last,
        "gained": last - first,
        "own_gained": anonymous_mib(os.getpid()) - own,
        "left": len(left),
    }
    return CYCLES.read(values), _failures(_CYCLES, done, left)


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


async def _measure_live(ground: Ground, source: Child, spec: EnduranceSpec) -> tuple[dict[Figure, float], list[str]]:
    await expect(source.agent, _SCRIBBLE % spec.written_mib + "len(sums)", spec.written_mib << 8)
    # Once before: it has then written to all that it ever will.
    await _fork_all(ground, source, _WARMING)
    with_source = [source.machine.pid]
    before, first = take_own_inventory(ground.directory, with_source), anonymous_mib(source.machine.pid)
    guest_first = guest_written_mib(source.machine.pid, ground.frozen)
    begun = time.monotonic()
    done = await _fork_all(ground, source, spec.live)
    seconds = time.monotonic() - begun
    left = await settle(before, lambda: take_own_inventory(ground.directory, with_source))
    values: Values = {
        "done": len(done.live),
        "errors": len(done.errors),
        "seconds": seconds,
        "pause": [each.pause_ms for each in done.live],
        "answer": [each.answer_ms for each in done.live],
        "left": len(left),
    }
    if not source.machine.death.done():
        last = anonymous_mib(source.machine.pid)
        values |= {"memory.first": first, "memory.last": last, "gained": last - first}
        values["guest_gained"] = guest_written_mib(source.machine.pid, ground.frozen) - guest_first
    return LIVES.read(values), _failures(_LIVE, done, left)


async def _fork_all(ground: Ground, source: Child, count: int) -> _Done:
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


def _failures(kind: str, done: _Done, left: Sequence[str]) -> list[str]:
    seen = (*done.errors[:_SHOWN], *(f"left: {each}" for each in left[:_SHOWN]))
    return [f"{kind}: {what}" for what in seen]
