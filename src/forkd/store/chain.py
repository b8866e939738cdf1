"""A snapshot and what it lies over: its chain, from the root, which has all of the memory, to the head."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Generic, TypeVar

from forkd.errors import Conflict, NotFound, SnapshotDamaged
from forkd.model.memory import Run, lay_over
from forkd.store.extents import MAX_BYTES, parse_extents, runs_of
from forkd.store.manifest import Manifest, parse_manifest, render_remedy

MANIFEST = "manifest.json"
MEMORY, PAGES, EXTENTS = "memory", "pages", "extents"
# Ancestors. Each costs a spawn a lock and a few stats.
MAX_DEPTH = 64

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Snapshot:
    """`hash` is the SHA-256 of its manifest.json, and pins all of it: the files, and through its parent the chain."""

    manifest: Manifest
    directory: Path
    hash: str = ""
    # Root first. Not compared: each has ancestors of its own, and the hash says it all.
    ancestors: tuple[Snapshot, ...] = field(default=(), compare=False, repr=False)

    @property
    def depth(self) -> int:
        """0: a root."""
        return len(self.ancestors)

    @property
    def root(self) -> Snapshot:
        return self.ancestors[0] if self.ancestors else self

    @property
    def root_memory(self) -> Path | None:
        """The file that has all of the root's memory. None: its engine keeps none."""
        root = self.root
        return root.directory / MEMORY if MEMORY in root.manifest.files else None

    @property
    def memory_bytes(self) -> int:
        """Of the guest."""
        memory = self.root.manifest.files.get(MEMORY)
        return 0 if memory is None else memory.size

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """What the layers of the chain have over the root's memory. Raises SnapshotDamaged."""
        return _chain_runs(self)

    def disk_bytes(self) -> int:
        """What its own files occupy on disk: guest memory that was never touched is a hole. Layers share no files."""
        return sum((self.directory / name).stat().st_blocks * 512 for name in self.manifest.files)

    def chain_bytes(self) -> int:
        """What has to be there to start it."""
        return sum(snapshot.disk_bytes() for snapshot in (*self.ancestors, self))


def read_snapshot(data: bytes, directory: Path, tag: str) -> Snapshot:
    """Alone, without what it lies over."""
    digest = hashlib.sha256(data).hexdigest()
    manifest = _manifests.find((tag, digest))
    if manifest is None:
        manifest = parse_manifest(data, tag)
        _manifests.put((tag, digest), manifest)
    return Snapshot(manifest, directory, digest)


def join_chain(chain: list[Snapshot]) -> Snapshot:
    """The head of a chain that is given root first, each alone."""
    joined: list[Snapshot] = []
    for link in chain:
        joined.append(Snapshot(link.manifest, link.directory, link.hash, tuple(joined)))
    return joined[-1]


def follow_chain(tag: str, read: Callable[[str], Snapshot]) -> Snapshot:
    """`read` gives a snapshot alone.

    Raises SnapshotDamaged, naming what is wrong, when an ancestor is missing, is another than the layer was made of,
    or there are too many.
    """
    chain = [read(tag)]
    while (parent := chain[-1].manifest.parent) is not None:
        layer = chain[-1].manifest.tag
        if len(chain) > MAX_DEPTH:
            raise SnapshotDamaged(
                f"Snapshot {tag} has more than {MAX_DEPTH} snapshots below it", hint=render_remedy(tag)
            )
        if any(link.manifest.tag == parent.tag for link in chain):
            raise SnapshotDamaged(
                f"Snapshot {layer} is a layer over {parent.tag}, which is a layer over it", hint=render_remedy(tag)
            )
        try:
            below = read(parent.tag)
        except NotFound:
            raise SnapshotDamaged(
                f"Snapshot {layer} is a layer over {parent.tag}, which is missing", hint=render_remedy(tag)
            ) from None
        except SnapshotDamaged as error:
            raise SnapshotDamaged(
                f"Snapshot {layer} is a layer over {parent.tag}, which is damaged: {error.message}",
                hint=render_remedy(tag),
            ) from error
        if below.hash != parent.hash:
            raise SnapshotDamaged(
                f"Snapshot {layer} is a layer over a {parent.tag} that was replaced since", hint=render_remedy(tag)
            )
        _check_alike(chain[-1].manifest, below.manifest, tag)
        chain.append(below)
    return join_chain(chain[::-1])


def check_depth(parent: Snapshot) -> None:
    """Raise Conflict unless a layer can lie over it."""
    if parent.depth >= MAX_DEPTH:
        tag = parent.manifest.tag
        raise Conflict(
            f"Snapshot {tag} has {parent.depth} snapshots below it, and cannot have a layer over it",
            hint=f"Make one snapshot of them: forkd snapshot compact {tag}",
        )


def _check_alike(layer: Manifest, below: Manifest, tag: str) -> None:
    if (layer.engine, layer.machine, layer.image_id) != (below.engine, below.machine, below.image_id):
        raise SnapshotDamaged(
            f"Snapshot {layer.tag} is a layer over {below.tag}, which is of another engine, machine or image",
            hint=render_remedy(tag),
        )


def _chain_runs(head: Snapshot) -> tuple[Run, ...]:
    runs: tuple[Run, ...] = ()
    todo: list[Snapshot] = []
    for snapshot in (head, *reversed(head.ancestors)):
        known = _runs.find((str(snapshot.directory), snapshot.hash))
        if known is not None:
            runs = known
            break
        todo.append(snapshot)
    for snapshot in reversed(todo):
        if snapshot.ancestors and PAGES in snapshot.manifest.files:
            runs = lay_over(runs, read_layer(snapshot))
    if head.ancestors:
        _runs.put((str(head.directory), head.hash), runs)
    return runs


def read_layer(snapshot: Snapshot) -> list[Run]:
    """What one layer has by itself. Raises SnapshotDamaged."""
    tag, files = snapshot.manifest.tag, snapshot.manifest.files
    try:
        if EXTENTS not in files or files[EXTENTS].size > MAX_BYTES:
            raise ValueError("no extents, or too many")
        with (snapshot.directory / EXTENTS).open("rb") as file:
            data = file.read(files[EXTENTS].size + 1)
        extents = parse_extents(data, pages_bytes=files[PAGES].size, memory_bytes=snapshot.memory_bytes)
    except (OSError, ValueError) as error:
        raise SnapshotDamaged(
            f"The file {EXTENTS} of snapshot {tag} is damaged: {error}", hint=render_remedy(tag)
        ) from error
    return runs_of(extents, snapshot.directory / PAGES)


class _Remembered(Generic[K, V]):
    """What was made of bytes with a known hash is not made again; the oldest is forgotten."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: dict[K, V] = {}
        self._lock = threading.Lock()

    def find(self, key: K) -> V | None:
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            if len(self._values) > self._size:
                del self._values[next(iter(self._values))]


_manifests: _Remembered[tuple[str, str], Manifest] = _Remembered(512)
# Some are large: tens of thousands of runs.
_runs: _Remembered[tuple[str, str], tuple[Run, ...]] = _Remembered(16)
