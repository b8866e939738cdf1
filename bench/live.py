"""Forks of a running VM that has just written to its memory: how long it stands still, how soon the fork answers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from bench.figures import SEE_BOTH, Bound, Family, Figure, Round, Row, Settings, Where, render_failure, shares
from bench.ground import Ground, evaluate, expect, sandboxed, templated
from forkd.engines.base import Machine
from forkd.errors import EngineFailed, ForkdError
from forkd.guest.agent import Agent
from forkd.guest.identity import become
from forkd.model.names import Identity
from forkd.runtime.child import Child, explain
from forkd.runtime.fork import new_identities
from forkd.wire.agent import padding

RUNNING = "a running VM, itself a child of a template, whose last evaluation was answered"
PAUSE = "its source stands still"
PAUSE_STOPS = "the source runs again, by the VMM's own time stamp; starts before it is told to stop"
ANSWER = "it answers"
ANSWER_STOPS = (
    "it has kept the fork contract and the answer to its first evaluation is on the host; starts with the call"
)
# With how much just written pause and answer are judged, and the most their p50 may be.
JUDGED_MIB = 64
PAUSE_MS, ANSWER_MS = 10.0, 80.0


def after_writing(mib: int) -> dict[str, object]:
    """The words for forks of a VM that has just written that much."""
    return {
        "mib": mib,
        "ready": f"{RUNNING}, and which wrote to each page of that much memory in it" if mib else RUNNING,
    }


def _judged(_: Settings) -> Iterable[Where]:
    return (after_writing(JUDGED_MIB),)


def _each_amount(settings: Settings) -> Iterable[Where]:
    return ({**after_writing(mib), "forks": settings["forks"]} for mib in settings["written_mib"])


_PAUSE_TARGET = "live fork, {mib} MiB just written: pause of the source"
LIVE = Family(
    "live.{mib}",
    "live fork, {mib} MiB just written: ",
    "{ready}",
    {
        "pause": Row(
            PAUSE,
            "ms",
            PAUSE_STOPS,
            (
                Bound(f"{_PAUSE_TARGET}, p50", "<=", PAUSE_MS, _judged, "p50"),
                Bound(f"{_PAUSE_TARGET}, p99", "<=", 30.0, _judged, "p99"),
            ),
        ),
        "answer": Row(
            ANSWER,
            "ms",
            ANSWER_STOPS,
            (Bound("live fork, {mib} MiB just written: answer, p50", "<=", ANSWER_MS, _judged, "p50"),),
        ),
        "ok": Row(
            "forks that were right, and so was their source",
            "forks",
            "fork and source have shown that each has its own memory",
            (Bound("live fork, {mib} MiB just written: all forks right in every round", "=", "forks", _each_amount),),
            RUNNING,
        ),
    },
)
CHAIN = Family(
    "live.chain",
    "live forks ",
    RUNNING,
    {
        "pause.{which}": Row(f"{{which}} of one VM: {PAUSE}, p50", "ms", PAUSE_STOPS),
        "answer.{which}": Row(f"{{which}} of one VM: {ANSWER}, p50", "ms", ANSWER_STOPS),
        "pause.ratio": Row(
            f"{{last}} of one VM / {{first}}: {PAUSE}", "", "the last fork has answered", prepared=SEE_BOTH
        ),
        "answer.ratio": Row(
            f"{{last}} of one VM / {{first}}: {ANSWER}", "", "the last fork has answered", prepared=SEE_BOTH
        ),
    },
)

_PAGE = 4096
# How many forks at either end of a chain are compared: one alone may meet a bad moment.
_ENDS = 5


@dataclass(frozen=True)
class LiveSpec:
    """`forks` of a VM with each amount written just before; `chain` of another one, the last against the first."""

    written_mib: tuple[int, ...] = (0, 64, 256)
    forks: int = 20
    chain: int = 50


@dataclass(frozen=True)
class LiveTimes:
    """`pause_ms`: how long the source stood still. `answer_ms`: from the call to the answer of the fork."""

    pause_ms: float
    answer_ms: float


@dataclass
class _Forks:
    """What was seen of the forks of one VM."""

    title: str
    times: list[LiveTimes] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


async def measure_live(ground: Ground, spec: LiveSpec, title: str) -> Round:
    readings: dict[Figure, float] = {}
    failures: list[str] = []
    async with templated(ground) as template:
        for written_mib in spec.written_mib:
            forks = _Forks(f"{title}: {written_mib} MiB written")
            async with sandboxed(ground, template) as source:
                await _fork_often(ground, source, written_mib, spec.forks, forks)
            readings |= read_forks(written_mib, forks.times)
            failures += forks.failures
        chain = _Forks(f"{title}: one after the other")
        async with sandboxed(ground, template) as source:
            await _fork_often(ground, source, 0, spec.chain, chain)
    # Where one of them failed there is no last one to compare.
    readings |= read_chain(chain.times) if len(chain.times) == spec.chain else {}
    return Round(readings, (*failures, *chain.failures))


async def _fork_often(ground: Ground, source: Child, written_mib: int, count: int, forks: _Forks) -> None:
    """A fork that fails is a finding, the end of its source is the end of it."""
    for number in range(1, count + 1):
        ground.progress.stage(forks.title)
        ground.progress.line(f"{number} of {count}")
        try:
            forks.times.append(await _fork_checked(ground, source, written_mib, number % 255 + 1))
        except ForkdError as error:
            forks.failures.append(render_failure(f"{forks.title}: fork {number}", error))
            if source.machine.death.done():
                return


async def _fork_checked(ground: Ground, source: Child, written_mib: int, mark: int) -> LiveTimes:
    """The fork has what its source wrote last; what the fork writes then, its source has not."""
    size = written_mib * 2**20
    written = sum_of(size, mark)
    await expect(source.agent, render_write(size, mark), written)
    async with forked_live(ground, source) as (agent, times):
        await expect(agent, _SUM, written)
        await expect(agent, render_write(size and _PAGE, 0), sum_of(size, mark) - (mark if size else 0))
    await expect(source.agent, _SUM, written)
    return times


_SUM = f"sum(written[::{_PAGE}])"


def sum_of(size: int, mark: int) -> int:
    return size // _PAGE * mark


def render_write(size: int, mark: int) -> str:
    """Code that writes to each page of an area, made at the first time, and answers with what is there now."""
    return f"""
if "written" not in globals():
    written = bytearray({size})
written[:{size}:{_PAGE}] = bytes([{mark}]) * {size // _PAGE}
{_SUM}
"""


def read_forks(mib: int, times: Sequence[LiveTimes]) -> dict[Figure, float]:
    return LIVE.read({"ok": len(times), **_samples(times)}, **after_writing(mib))


def read_chain(times: Sequence[LiveTimes]) -> dict[Figure, float]:
    count = len(times)
    ends = max(1, min(_ENDS, count // 2))
    words = {"first": f"1 to {ends}", "last": f"{count - ends + 1} to {count}"}
    readings: dict[Figure, float] = {}
    for name, values in _samples(times).items():
        first, last = shares(values[:ends])["p50"], shares(values[-ends:])["p50"]
        for which, value in ((words["first"], first), (words["last"], last)):
            readings |= CHAIN.read({f"{name}.{{which}}": value}, which=which)
        readings |= CHAIN.read({f"{name}.ratio": last / first}, **words)
    return readings


def _samples(times: Sequence[LiveTimes]) -> dict[str, list[float]]:
    return {"pause": [each.pause_ms for each in times], "answer": [each.answer_ms for each in times]}


@asynccontextmanager
async def forked_live(ground: Ground, source: Child) -> AsyncIterator[tuple[Agent, LiveTimes]]:
    """A fork of a running VM that has taken a new identity and answered; it is killed at the end."""
    identity = new_identities(1)[0]
    begun = time.monotonic()
    machine = await ground.engine.fork_live(source.machine, ground.directory / identity.sandbox_id)
    agent: Agent | None = None
    try:
        try:
            agent = await greet(machine, identity)
            await evaluate(agent)
            answered = time.monotonic()
            pause_s = machine.phases.pause_s
            if pause_s is None:
                raise EngineFailed(f"{identity.sandbox_id} does not say how long its source stood still")
            yield agent, LiveTimes(pause_s * 1000, (answered - begun) * 1000)
        except ForkdError as error:
            explained = await explain(error, machine, "it was forked from a live VM")
            raise explained from error
    finally:
        if agent is not None:
            agent.close()
        await machine.kill()


async def greet(machine: Machine, identity: Identity) -> Agent:
    """The stream of its source goes on, perhaps in the middle of a frame, which has to be completed first."""
    agent = Agent.attach(await machine.connect())
    try:
        agent.channel.send(padding())
        await become(agent, identity)
        await machine.running()
    except BaseException:
        agent.close()
        raise
    return agent
