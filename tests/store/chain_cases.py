"""Snapshots and layers over them, of real processes that have a guest's memory."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support_memory import Guest, running_guest

from forkd.model.machine import MachineSpec
from forkd.model.memory import PAGE
from forkd.model.names import parse_tag
from forkd.store.content import opened_content
from forkd.store.layers import LayerStats, write_layer
from forkd.store.manifest import Manifest, Origin, Parent
from forkd.store.snapshots import Snapshot, SnapshotStore

PAGES = 256
SIZE = PAGES * PAGE
IMAGE = "0123456789abcdef" * 2


def manifest(tag: str, parent: Snapshot | None = None) -> Manifest:
    return Manifest(
        parse_tag(tag),
        1_700_000_000,
        "fake",
        IMAGE,
        MachineSpec(256),
        "import this",
        {"python": "3"},
        {},
        parent=None if parent is None else Parent(parent.manifest.tag, parent.hash),
        settled=parent is None,
        origin=None if parent is None else Origin("sb-1", "sb-1", parent.depth + 1, mode="live"),
    )


def noise(pages: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(pages * PAGE)


def make_root(store: SnapshotStore, tag: str = "root", *, replace: bool = False, seed: int = 0) -> Snapshot:
    """The first half of its memory is filled, the second is a hole."""
    with store.created(parse_tag(tag), replace_existing=replace) as (staging, seal):
        with (staging / "memory").open("wb") as file:
            file.write(noise(PAGES // 2, seed))
            file.truncate(SIZE)
        (staging / "state").write_text(f"state of {tag}")
        seal(manifest(tag))
    return store.get(parse_tag(tag))


def make_layer(
    store: SnapshotStore, tag: str, parent: str, change: Callable[[Guest], None] = lambda guest: None
) -> LayerStats:
    """Fork a VM from a snapshot, change it, branch."""
    with (
        store.held(parse_tag(parent)) as below,
        started(below) as guest,
        store.created(parse_tag(tag), replace_existing=False) as (staging, seal),
    ):
        change(guest)
        stats = write_layer(guest.memory(), below, staging)
        (staging / "state").write_text(f"state of {tag}")
        seal(manifest(tag, below))
    return stats


@contextmanager
def started(snapshot: Snapshot) -> Iterator[Guest]:
    assert snapshot.root_memory is not None
    with running_guest(snapshot.root_memory, snapshot.runs) as guest:
        yield guest


def read_content(snapshot: Snapshot) -> bytes:
    data = bytearray(snapshot.memory_bytes)
    with opened_content(snapshot) as content:
        content.read_into(0, memoryview(data))
    return bytes(data)


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())
