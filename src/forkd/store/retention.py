"""Which snapshots to prune. Pure.

`max_age_s` and `max_bytes` say what goes, `keep_last` and `keep_tagged` what stays whatever its age and size. With
only the latter, all else goes. What a sandbox uses stays, and so does everything that lies below what stays.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from forkd.errors import InvalidInput
from forkd.model.names import SnapshotTag
from forkd.store.dependents import leaves_first


@dataclass(frozen=True)
class Policy:
    """None: no such rule."""

    keep_last: int | None = None  # the newest, of those that may go
    keep_tagged: bool = False  # tags that somebody chose
    max_age_s: float | None = None
    max_bytes: int | None = None  # on disk, of all snapshots together

    def __post_init__(self) -> None:
        for name in ("keep_last", "max_age_s", "max_bytes"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"{name} must be 0 or more, got {value}")
        if self.keep_last is None and not self.keep_tagged and self.max_age_s is None and self.max_bytes is None:
            raise InvalidInput(
                "Nothing says which snapshots to prune", hint="Use keep-last, keep-tagged, max-age or max-bytes"
            )


@dataclass(frozen=True)
class Stored:
    """What matters about a snapshot here."""

    tag: SnapshotTag
    created_at_unix: float
    bytes: int
    parent: SnapshotTag | None = None
    auto: bool = False  # nobody chose its tag


@dataclass(frozen=True)
class Pruned:
    tag: SnapshotTag
    bytes: int
    why: str


def choose_to_prune(
    snapshots: Iterable[Stored], policy: Policy, in_use: Collection[SnapshotTag], now_unix: float
) -> list[Pruned]:
    """In an order in which they can be removed one by one: layers before what they lie over."""
    stored = {snapshot.tag: snapshot for snapshot in snapshots}
    free = _not_needed(stored, _kept(stored, policy, in_use))
    reasons = _outlived(stored, free, policy, now_unix)
    if policy.max_bytes is not None:
        reasons |= _over_size(stored, free, set(reasons), policy.max_bytes)
    return [Pruned(tag, stored[tag].bytes, reasons[tag]) for tag in leaves_first(reasons, _children(stored))]


def _kept(stored: Mapping[SnapshotTag, Stored], policy: Policy, in_use: Collection[SnapshotTag]) -> set[SnapshotTag]:
    kept = {tag for tag, snapshot in stored.items() if tag in in_use or (policy.keep_tagged and not snapshot.auto)}
    if policy.keep_last:
        newest = sorted(
            (tag for tag in stored if tag not in kept), key=lambda tag: (stored[tag].created_at_unix, tag), reverse=True
        )
        kept.update(newest[: policy.keep_last])
    return kept


def _not_needed(stored: Mapping[SnapshotTag, Stored], kept: Iterable[SnapshotTag]) -> set[SnapshotTag]:
    """What is neither kept nor below what is."""
    needed: set[SnapshotTag] = set()
    for tag in kept:
        below: SnapshotTag | None = tag
        while below is not None and below in stored and below not in needed:
            needed.add(below)
            below = stored[below].parent
    return set(stored) - needed


def _outlived(
    stored: Mapping[SnapshotTag, Stored], free: set[SnapshotTag], policy: Policy, now_unix: float
) -> dict[SnapshotTag, str]:
    """Those that go for what they are. One whose layers stay, stays."""
    if policy.max_age_s is None:
        if policy.max_bytes is not None:
            return {}
        chosen = {tag: _not_kept(policy) for tag in free}
    else:
        limit = policy.max_age_s
        ages = {tag: now_unix - stored[tag].created_at_unix for tag in free}
        chosen = {tag: f"it is {_days(age)} old, more than {_days(limit)}" for tag, age in ages.items() if age > limit}
    removable = _not_needed(stored, set(stored) - set(chosen))
    return {tag: why for tag, why in chosen.items() if tag in removable}


def _over_size(
    stored: Mapping[SnapshotTag, Stored], free: set[SnapshotTag], gone: set[SnapshotTag], max_bytes: int
) -> dict[SnapshotTag, str]:
    """The oldest that no other needs, one after the other, until the rest fits."""
    left = sum(snapshot.bytes for tag, snapshot in stored.items() if tag not in gone)
    layers = Counter(snapshot.parent for tag, snapshot in stored.items() if tag not in gone)
    leaves = [(stored[tag].created_at_unix, tag) for tag in free - gone if not layers[tag]]
    heapq.heapify(leaves)
    chosen: dict[SnapshotTag, str] = {}
    while left > max_bytes and leaves:
        _, tag = heapq.heappop(leaves)
        chosen[tag] = f"all together are {left} bytes, more than {max_bytes}, and it is the oldest that can go"
        left -= stored[tag].bytes
        parent = stored[tag].parent
        layers[parent] -= 1
        if parent in free and parent not in gone and not layers[parent]:
            heapq.heappush(leaves, (stored[parent].created_at_unix, parent))
    return chosen


def _children(stored: Mapping[SnapshotTag, Stored]) -> dict[SnapshotTag, tuple[SnapshotTag, ...]]:
    children: dict[SnapshotTag, tuple[SnapshotTag, ...]] = {}
    for tag, snapshot in stored.items():
        if snapshot.parent is not None:
            children[snapshot.parent] = (*children.get(snapshot.parent, ()), tag)
    return children


def _not_kept(policy: Policy) -> str:
    rules = [f"is not among the newest {policy.keep_last}"] if policy.keep_last is not None else []
    rules += ["has a tag that nobody chose"] if policy.keep_tagged else []
    return f"it {' and '.join(rules)}"


def _days(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
