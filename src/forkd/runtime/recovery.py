"""A daemon's first look around: what should exist against what does. Pure; the fleet carries it out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from forkd.model.sandbox import SandboxRecord, State


@dataclass(frozen=True)
class Plan:
    adopt: tuple[SandboxRecord, ...]  # it runs, and should
    bury: tuple[SandboxRecord, ...]  # it should run, and does not: dead, for its owner to see
    drop: tuple[SandboxRecord, ...]  # half started or half removed: ended and forgotten
    keep: tuple[SandboxRecord, ...]  # dead already, not yet forgotten
    strays: frozenset[str]  # processes or directories that no row owns


def make_plan(records: Iterable[SandboxRecord], running: Collection[str], seen: Iterable[str]) -> Plan:
    """`running`: names of runtime directories with a live VM process; `seen`: of all directories and processes."""
    by_state: dict[State, list[SandboxRecord]] = {state: [] for state in State}
    for record in records:
        by_state[record.state].append(record)
    meant_to_run = by_state[State.RUNNING] + by_state[State.PAUSED]
    owned = {record.id for kept in by_state.values() for record in kept}
    return Plan(
        adopt=tuple(record for record in meant_to_run if record.id in running),
        bury=tuple(record for record in meant_to_run if record.id not in running),
        drop=tuple(by_state[State.STARTING] + by_state[State.STOPPING]),
        keep=tuple(by_state[State.DEAD]),
        strays=frozenset(seen) - owned,
    )
