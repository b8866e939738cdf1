"""Who came from whom, and limits against forks that make forks that make forks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from forkd.errors import LimitReached
from forkd.host.system import memory_use
from forkd.model.sandbox import LIVE
from forkd.runtime.origin import Ancestry
from forkd.runtime.registry import SandboxRecord
from forkd.runtime.snapshot_view import SnapshotDetail

_MIB = 2**20
_HINT = "End some of them, or raise the setting {setting}"


@dataclass(frozen=True)
class LineagePolicy:
    """0: no limit. Memory is what only the VMs of a lineage, or of a token, hold."""

    fork_depth: int = 64
    fork_children: int = 1000
    lineage_sandboxes: int = 1000
    lineage_memory_mib: int = 0
    token_sandboxes: int = 0
    token_memory_mib: int = 0


DEFAULT_LINEAGE_POLICY = LineagePolicy()


@dataclass(frozen=True)
class Growth:
    """What `n` more sandboxes are added to."""

    ancestry: Ancestry
    owner: str | None
    n: int


def check_growth(policy: LineagePolicy, growth: Growth, records: Iterable[SandboxRecord]) -> None:
    """Raise LimitReached where `n` more would be too many. Memory is looked at only where it has a limit."""
    alive = [record for record in records if record.state in LIVE]
    ancestry, n = growth.ancestry, growth.n
    line = [record for record in alive if ancestry.lineage is not None and record.lineage == ancestry.lineage]
    owned = [record for record in alive if growth.owner is not None and record.owner == growth.owner]
    children = [record for record in line if record.parent_id == ancestry.parent_id]
    if ancestry.parent_id is not None:
        _check("A sandbox may be forked from a fork", ancestry.depth, policy.fork_depth, "times", "max_fork_depth")
        _check("A sandbox may have", len(children) + n, policy.fork_children, "live forks", "max_fork_children")
        _check("A lineage may have", len(line) + n, policy.lineage_sandboxes, "sandboxes", "max_lineage_sandboxes")
        if policy.lineage_memory_mib:
            held = _held_mib(line)
            _check("A lineage may hold", held + 1, policy.lineage_memory_mib, "MiB", "max_lineage_memory_mib")
    if growth.owner is not None:
        _check("A token may have", len(owned) + n, policy.token_sandboxes, "sandboxes", "max_token_sandboxes")
        if policy.token_memory_mib:
            _check("A token may hold", _held_mib(owned) + 1, policy.token_memory_mib, "MiB", "max_token_memory_mib")


def _check(what: str, wanted: int, most: int, unit: str, setting: str) -> None:
    if most and wanted > most:
        raise LimitReached(f"{what} {most} {unit}, this would be {wanted}", hint=_HINT.format(setting=setting))


def _held_mib(records: Iterable[SandboxRecord]) -> int:
    return sum(find_unique_bytes(record) or 0 for record in records) // _MIB


def find_unique_bytes(record: SandboxRecord) -> int | None:
    """What would be free without it; None where it has ended, or cannot be looked at."""
    if record.pid is None or record.state not in LIVE:
        return None
    try:
        return memory_use(record.pid).unique_bytes
    except (OSError, KeyError):
        return None


@dataclass(frozen=True)
class Descent:
    """A snapshot, and the sandboxes that were forked from it, each with what it holds alone."""

    detail: SnapshotDetail
    sandboxes: tuple[tuple[SandboxRecord, int | None], ...]


@dataclass(frozen=True)
class Lineage:
    snapshots: tuple[Descent, ...]
    orphans: tuple[tuple[SandboxRecord, int | None], ...]  # whose snapshot is gone


def find_lineage(details: Iterable[SnapshotDetail], records: Iterable[SandboxRecord]) -> Lineage:
    members: dict[str, list[tuple[SandboxRecord, int | None]]] = {}
    for record in records:
        members.setdefault(record.snapshot_tag, []).append((record, find_unique_bytes(record)))
    snapshots = tuple(Descent(each, tuple(members.pop(each.view.tag, ()))) for each in details)
    return Lineage(snapshots, tuple(member for orphans in members.values() for member in orphans))
