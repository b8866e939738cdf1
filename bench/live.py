"""Forks of a running VM that has just written to its memory: how long it stands still, how soon the fork answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench import fork_figures as figures
from bench.figures import Figure
from bench.ground import Ground, LiveTimes, forked_live, sandboxed, templated
from bench.guest import expect
from bench.report import Round, render_failure, shares
from forkd.errors import ForkdError
from forkd.runtime.sandbox import Sandbox

_PAGE = 4096
# How many forks at either end of a chain are compared: one alone may meet a bad moment.
_ENDS = 5


@dataclass(frozen=True)
class LiveSpec:
    """`forks` of a VM with each amount written just before; `chain` of another one, the last against the first."""

    written_mib: tuple[int, ...] = (0, 64, 256)
    forks: int = 20
    chain: int = 50


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


async def _fork_often(ground: Ground, source: Sandbox, written_mib: int, count: int, forks: _Forks) -> None:
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


async def _fork_checked(ground: Ground, source: Sandbox, written_mib: int, mark: int) -> LiveTimes:
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


def read_forks(written_mib: int, times: Sequence[LiveTimes]) -> dict[Figure, float]:
    """No shares of nothing: that none answered is said by the failures."""
    readings: dict[Figure, float] = {figures.live_ok(written_mib): len(times)}
    for name, values in _amounts(times).items() if times else ():
        readings |= {figures.live(written_mib, name, share): value for share, value in shares(values).items()}
    return readings


def read_chain(times: Sequence[LiveTimes]) -> dict[Figure, float]:
    count = len(times)
    ends = max(1, min(_ENDS, count // 2))
    readings: dict[Figure, float] = {}
    for name, values in _amounts(times).items():
        first, last = shares(values[:ends])["p50"], shares(values[-ends:])["p50"]
        readings |= {
            figures.chain(name, f"1 to {ends}"): first,
            figures.chain(name, f"{count - ends + 1} to {count}"): last,
            figures.chain_ratio(name, count, ends): last / first,
        }
    return readings


def _amounts(times: Sequence[LiveTimes]) -> dict[str, list[float]]:
    return {"pause": [each.pause_ms for each in times], "answer": [each.answer_ms for each in times]}
