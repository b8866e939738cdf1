"""The parts of a run that are about forks of live VMs: each a section of the report, on one parent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.crowd import CrowdSpec, measure_crowd
from bench.endurance import EnduranceSpec, measure_endurance
from bench.ground import Ground
from bench.live import LiveSpec, measure_live
from bench.measure import Bench, begin_run, describe_guest, measure_snapshot, remove_snapshot
from bench.report import Round, Run, render_failure
from forkd.errors import ForkdError
from forkd.runtime.freeze import frozen_of

OnRound = Callable[[str, Run], object]

# How often each is done, at most.
MAX_ROUNDS = {"live": 5, "crowd": 3, "endurance": 1}


@dataclass(frozen=True)
class ForkSpecs:
    live: LiveSpec = field(default_factory=LiveSpec)
    crowd: CrowdSpec = field(default_factory=CrowdSpec)
    endurance: EnduranceSpec = field(default_factory=EnduranceSpec)


async def run_fork_parts(
    bench: Bench,
    parts: tuple[str, ...],
    specs: ForkSpecs,
    rounds: int,
    host: Mapping[str, Any],
    on_round: OnRound,
) -> None:
    """Makes the parent if there is none, and removes it."""
    try:
        if not bench.store.has(bench.tag):
            bench.progress.stage("the parent of the forks")
            await measure_snapshot(bench)
        with bench.store.held(bench.tag) as snapshot:
            ground = Ground(bench.engine, frozen_of(snapshot, bench.image), bench.directory, bench.progress)
            for part in parts:
                await _run_part(
                    ground, part, specs, min(rounds, MAX_ROUNDS[part]), begin_part(bench, part, specs, host), on_round
                )
    finally:
        remove_snapshot(bench)


def begin_part(bench: Bench, part: str, specs: ForkSpecs, host: Mapping[str, Any]) -> Run:
    return begin_run(host, {**describe_guest(bench.machine), **asdict(getattr(specs, part))})


async def _run_part(ground: Ground, part: str, specs: ForkSpecs, rounds: int, run: Run, on_round: OnRound) -> None:
    """Adds to `run` round by round. A failure is a finding."""
    measures: dict[str, Callable[[str], Awaitable[Round]]] = {
        "live": lambda title: measure_live(ground, specs.live, title),
        "crowd": lambda title: measure_crowd(ground, specs.crowd, title),
        "endurance": lambda title: measure_endurance(ground, specs.endurance, title),
    }
    for number in range(1, rounds + 1):
        title = f"{part}, round {number} of {rounds}" if rounds > 1 else part
        try:
            done = await measures[part](title)
        except ForkdError as error:
            done = Round({}, (render_failure(title, error),))
        run.rounds.append(done)
        on_round(part, run)
