"""What a branch is asked to be, and what is written of it."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import InvalidInput
from forkd.host.pages import LiveMemory
from forkd.model.names import SnapshotTag, parse_tag
from forkd.runtime.origin import Branch
from forkd.runtime.registry import SandboxRecord
from forkd.runtime.snapshot_view import Described
from forkd.store.content import write_whole
from forkd.store.layers import LayerStats
from forkd.store.manifest import Manifest, Parent
from forkd.store.manifest import Origin as BranchedFrom
from forkd.store.snapshots import Snapshot, SnapshotStore

PREFIX = "branch-"


class Mode(enum.Enum):
    FULL = "full"  # the snapshot needs no other
    DIFF = "diff"  # a layer over its parent
    LIVE = "live"  # the same; forkd's word where the source is not to pause for the writing


@dataclass(frozen=True)
class BranchRequest:
    tag: SnapshotTag | None = None  # None: one is made up
    mode: Mode = Mode.LIVE
    parent_tag: SnapshotTag | None = None  # None: what the sandbox was forked from
    checkpoint: str | None = None
    settled: bool = False  # nothing else talks to the guest, which prepares for a freeze first
    auto: bool = False
    eager: bool = False  # somebody waits for it to be on disk; else its first children come first


@dataclass(frozen=True)
class Written:
    diff_ms: int
    bytes_dirty: int
    bytes_written: int


def render_manifest(
    branch: Branch,
    record: SandboxRecord,
    request: BranchRequest,
    source: Described,
    engine: str,
    platform: Mapping[str, str],
    parent: Snapshot | None,
    written: Written,
) -> Manifest:
    return Manifest(
        tag=branch.tag,
        created_at_unix=int(branch.ancestry.forked_at_unix or time.time()),
        engine=engine,
        image_id=source.image_id,
        machine=source.machine,
        warm=source.warm,
        platform=platform,
        files={},
        rehearsal=source.rehearsal,
        parent=None if parent is None else Parent(parent.manifest.tag, parent.hash),
        settled=request.settled,
        network=record.network,
        origin=BranchedFrom(
            branched_from=record.id,
            lineage=record.lineage,
            depth=record.depth,
            at_unix=branch.ancestry.forked_at_unix,
            mode=request.mode.value,
            pause_ms=round(branch.pause_s * 1000),
            diff_ms=written.diff_ms,
            bytes_dirty=written.bytes_dirty,
            bytes_written=written.bytes_written,
            checkpoint=request.checkpoint,
            auto=branch.auto,
        ),
    )


def write_memory(
    memory: LiveMemory | None, parent: Snapshot | None, staging: Path, write: Callable[..., LayerStats]
) -> tuple[int, int]:
    """How many bytes were dirty, and how many were written."""
    if memory is None:
        return 0, 0
    if parent is not None:
        layer = write(memory, parent, staging)
        return layer.bytes_dirty, layer.bytes_written
    whole = write_whole(memory, staging)
    return whole.bytes_written, whole.bytes_written


def is_root_of(parent: Snapshot, memory: LiveMemory) -> bool:
    root = parent.root_memory
    return root is not None and root.samefile(memory.file)


def read_back(store: SnapshotStore, tag: SnapshotTag) -> None:
    with store.held(tag):
        pass


def new_tag(sandbox_id: str, prefix: str = PREFIX) -> SnapshotTag:
    return parse_tag(f"{prefix}{sandbox_id}-{int(time.time())}-{secrets.token_hex(2)}")


def check_parent(request: BranchRequest, record: SandboxRecord) -> None:
    if request.parent_tag is not None and request.parent_tag != record.snapshot_tag and not request.auto:
        raise InvalidInput(
            f"parent_tag must be what the sandbox was forked from, {record.snapshot_tag}, got {request.parent_tag}"
        )
