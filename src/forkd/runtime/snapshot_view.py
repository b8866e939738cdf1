"""A snapshot as the daemon shows it, on disk or on its way there; and what can be told from that. Pure, mostly."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import Conflict, ForkdError
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag
from forkd.runtime.origin import Ancestry, Branch
from forkd.runtime.registry import SandboxRecord
from forkd.store.manifest import Manifest
from forkd.store.retention import Stored
from forkd.store.snapshots import Snapshot

WRITING, READY, FAILED = "writing", "ready", "failed"
# Of tags that only the forks of one call need, on engines that fork from files.
FORK_PREFIX = "fork-"
# Those, states of workspaces, and checkpoints of a sandbox.
_MADE_UP = re.compile(rf"{FORK_PREFIX}sb-|ws-[0-9a-f]{{16}}-|(?P<checkpointed>sb-[0-9a-f]{{10}})-")


@dataclass(frozen=True)
class SnapshotView:
    tag: SnapshotTag
    directory: Path
    created_at_unix: int
    status: str
    warning: str | None = None
    code: str | None = None
    manifest: Manifest | None = None
    progress: str | None = None
    branch: Branch | None = None  # not on disk yet

    @property
    def usable(self) -> bool:
        """Can be forked from now, on disk or not."""
        return self.status == READY or (self.branch is not None and self.branch.template is not None)


@dataclass(frozen=True)
class SnapshotDetail:
    view: SnapshotView
    memory_logical_bytes: int = 0
    memory_physical_bytes: int = 0
    vmstate_bytes: int = 0
    ancestors: tuple[SnapshotTag, ...] = ()  # root first
    dependents: tuple[SnapshotTag, ...] = ()
    unique_bytes: int = 0


@dataclass(frozen=True)
class Described:
    image_id: str
    machine: MachineSpec
    warm: str = ""
    rehearsal: str | None = None


def describe_shape(manifest: Manifest) -> dict[str, str]:
    """What a sandbox of it is made of, to be kept with the sandbox."""
    machine = manifest.machine
    shape = {"image_id": manifest.image_id, "memory_mib": str(machine.memory_mib), "vcpus": str(machine.vcpus)}
    return shape | ({"cpu_template": machine.cpu_template} if machine.cpu_template else {})


def parse_shape(record: SandboxRecord) -> Described:
    shape = record.made_of
    if "image_id" not in shape:
        raise Conflict(
            f"What sandbox {record.id} is made of is not known: an older forkd made it, and its snapshot is gone",
            hint="Fork its work anew",
        )
    machine = MachineSpec(int(shape["memory_mib"]), int(shape["vcpus"]), shape.get("cpu_template"))
    return Described(shape["image_id"], machine)


def find_ancestry(manifest: Manifest) -> Ancestry:
    origin = manifest.origin
    if origin is None:
        return Ancestry()
    return Ancestry(origin.branched_from, origin.lineage, origin.depth + 1, origin.at_unix)


def find_checkpoint(view: SnapshotView, sandbox_id: str) -> str | None:
    """The name of a snapshot that is a checkpoint of a sandbox."""
    if view.branch is not None:
        return view.branch.checkpoint if view.branch.ancestry.parent_id == sandbox_id else None
    origin = view.manifest.origin if view.manifest else None
    return origin.checkpoint if origin is not None and origin.branched_from == sandbox_id else None


def find_instant(view: SnapshotView) -> float:
    """When it was frozen."""
    if view.branch is not None:
        return view.branch.ancestry.forked_at_unix or 0.0
    origin = view.manifest.origin if view.manifest else None
    return view.created_at_unix if origin is None or origin.at_unix is None else origin.at_unix


def is_checkpoint(view: SnapshotView, alive: Collection[str]) -> bool:
    """Of one of these sandboxes."""
    origin = view.manifest.origin if view.manifest else None
    return origin is not None and origin.checkpoint is not None and origin.branched_from in alive


def is_left_over(view: SnapshotView, alive: Collection[str], used: Collection[str]) -> bool:
    """Pure. Only what nobody chose the tag of."""
    origin = view.manifest.origin if view.manifest else None
    if origin is None or not origin.auto or view.tag in used:
        return False
    return view.tag.startswith(FORK_PREFIX) or (origin.checkpoint is not None and origin.branched_from not in alive)


def is_nobodys(tag: SnapshotTag, alive: Collection[str]) -> bool:
    """Pure. Whether an attempt that failed was for a tag that nobody chose, and nobody asks for any more."""
    found = _MADE_UP.match(tag)
    return found is not None and (found["checkpointed"] is None or found["checkpointed"] not in alive)


def stored_of(snapshot: Snapshot) -> Stored:
    manifest = snapshot.manifest
    parent = None if manifest.parent is None else manifest.parent.tag
    auto = manifest.origin is not None and manifest.origin.auto
    return Stored(manifest.tag, manifest.created_at_unix, snapshot.disk_bytes(), parent, auto)


def on_disk(snapshot: Snapshot, *names: str) -> int:
    places = (snapshot.directory / name for name in names if name in snapshot.manifest.files)
    return sum(place.stat().st_blocks * 512 for place in places)


def ready_view(snapshot: Snapshot) -> SnapshotView:
    manifest = snapshot.manifest
    return SnapshotView(manifest.tag, snapshot.directory, manifest.created_at_unix, READY, manifest=manifest)


def unusable_view(tag: SnapshotTag, directory: Path, error: ForkdError) -> SnapshotView:
    try:
        modified_unix = int(directory.stat().st_mtime)
    except OSError:  # removed while we looked
        modified_unix = 0
    return SnapshotView(tag, directory, modified_unix, FAILED, error.message, error.code)
