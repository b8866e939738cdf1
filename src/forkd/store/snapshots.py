"""Snapshots on disk: one directory per tag, complete or absent.

    snapshots/<tag>/manifest.json   what it is, with size and checksum of each file
                    <files>         the engine's: memory, device state; of a layer, pages and extents instead of memory

The directory itself is the lock: shared while something forks from it or from a layer over it, and while such a layer
is published; exclusive to remove or replace it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forkd.errors import Conflict, ForkdError, HostLacks, InvalidInput, NotFound, SnapshotDamaged
from forkd.host.faults import fault_point
from forkd.host.files import (
    STAGING_PREFIX,
    digest_chunks,
    enough_disk,
    publish_directory,
    scratch_directory,
    staged_directory,
    sweep_staging,
    verify_files,
    verify_sizes,
)
from forkd.model.names import SnapshotTag, parse_tag
from forkd.store.chain import EXTENTS, MANIFEST, MEMORY, PAGES, Snapshot, check_depth, follow_chain, read_snapshot
from forkd.store.content import write_whole
from forkd.store.dependents import find_children, find_subtree, leaves_first, refuse_removal, refuse_replacement
from forkd.store.manifest import Manifest, Origin, Parent, find_image_id, find_parent, render_manifest, render_remedy

__all__ = ["Listing", "Snapshot", "SnapshotStore", "Unusable", "Verified"]


@dataclass(frozen=True)
class Unusable:
    """A tag whose snapshot cannot be forked, and why."""

    tag: SnapshotTag
    directory: Path
    error: ForkdError


@dataclass(frozen=True)
class Listing:
    snapshots: tuple[Snapshot, ...] = ()
    unusable: tuple[Unusable, ...] = ()


@dataclass(frozen=True)
class Verified:
    """All of it was read and is as it was written."""

    tag: SnapshotTag
    files: int
    bytes: int
    chain: tuple[SnapshotTag, ...]  # root first


class SnapshotStore:
    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self) -> Listing:
        """All tags, by name, damaged ones apart. The sizes of files are checked, their contents are not."""
        snapshots: list[Snapshot] = []
        unusable: list[Unusable] = []
        looked_at: dict[str, Snapshot | ForkdError] = {}
        for tag in self._tags():
            try:
                snapshots.append(follow_chain(tag, lambda name: self._look(name, looked_at)))
            except NotFound:
                continue
            except ForkdError as error:
                if self._path(tag).is_dir():  # else it was removed while we looked
                    unusable.append(Unusable(tag, self._path(tag), error))
        return Listing(tuple(snapshots), tuple(unusable))

    def images_in_use(self) -> dict[str, tuple[SnapshotTag, ...]]:
        """By id, the tags that were made from each, damaged ones too.

        Raises SnapshotDamaged when a manifest does not name its image.
        """
        tags: dict[str, tuple[SnapshotTag, ...]] = {}
        for tag in self._tags():
            try:
                image_id = find_image_id(self._read(tag))
            except NotFound:
                continue
            if image_id is None:
                raise SnapshotDamaged(
                    f"Which image snapshot {tag} was made from is unknown: its manifest is damaged",
                    hint=render_remedy(tag),
                )
            tags[image_id] = (*tags.get(image_id, ()), tag)
        return tags

    def has(self, tag: SnapshotTag) -> bool:
        return (self._path(tag) / MANIFEST).is_file()

    def get(self, tag: SnapshotTag) -> Snapshot:
        """Read a snapshot and its chain without looking into their files."""
        return follow_chain(tag, self._read_one)

    def dependents(self, tag: SnapshotTag) -> tuple[SnapshotTag, ...]:
        """The layers directly over it, damaged ones too."""
        return self._children().get(tag, ())

    def subtree(self, tag: SnapshotTag) -> tuple[SnapshotTag, ...]:
        """It, and all layers over it, each after what it lies over."""
        return find_subtree(tag, self._children())

    @contextlib.contextmanager
    def held(self, tag: SnapshotTag) -> Iterator[Snapshot]:
        """A verified snapshot that nobody can remove while the block runs, nor anything below it."""
        with self._chain_locked(tag) as snapshot:
            for link in (*snapshot.ancestors, snapshot):
                _verify(link, anew=False)
            _ = snapshot.runs  # damage is found here, not by whoever maps them
            yield snapshot

    def verify(self, tag: SnapshotTag) -> Verified:
        """Read everything. Raises SnapshotDamaged, which names the file, and the chunk where it has chunks."""
        with self._chain_locked(tag) as snapshot:
            chain = (*snapshot.ancestors, snapshot)
            for link in chain:
                _verify(link, anew=True)
            _ = snapshot.runs
        sums = [entry for link in chain for entry in link.manifest.files.values()]
        return Verified(tag, len(sums), sum(entry.size for entry in sums), tuple(link.manifest.tag for link in chain))

    @contextlib.contextmanager
    def created(self, tag: SnapshotTag, *, replace_existing: bool) -> Iterator[tuple[Path, Callable[[Manifest], None]]]:
        """Yield a staging directory and a function that takes the manifest; the tag appears when the block succeeds.

        A tag that layers lie over is not replaced. A layer's parent must be the one its manifest names, until the end.
        """
        final = self._path(tag)
        with contextlib.ExitStack() as locks:
            with _writable(self.root), enough_disk(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                sweep_staging(self.root)
            # Damaged or not: what has the tag is replaced only when asked for.
            if os.path.lexists(final) and not replace_existing:
                raise Conflict(f"Snapshot {tag} exists already", hint="Choose another tag or pass --replace")
            if replace_existing:
                self.refuse_to_replace_below_layers(tag)
            # The lock on the old one is released last, when the new one is in its place.
            with staged_directory(final, replace=replace_existing) as staging:

                def seal(manifest: Manifest) -> None:
                    if manifest.parent is not None:
                        locks.enter_context(self._parent_locked(manifest))
                    _seal(staging, manifest)
                    if manifest.parent is not None:
                        fault_point("layer.sealed")
                    if replace_existing and final.is_dir():
                        locks.enter_context(self._locked(tag, fcntl.LOCK_EX))
                        self.refuse_to_replace_below_layers(tag)

                yield staging, seal
                assert (staging / MANIFEST).is_file(), "a snapshot was not sealed"

    def read_manifest(self, tag: SnapshotTag) -> bytes:
        """As it is on disk: a layer knows its parent by the hash of it. Raises NotFound, SnapshotDamaged."""
        return self._read(tag)

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """A directory for snapshots that come from elsewhere, each in one of its own; for `adopt`."""
        with _writable(self.root), enough_disk(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            sweep_staging(self.root)
        with scratch_directory(self.root) as staging:
            yield staging

    def adopt(self, snapshot: Snapshot, manifest: bytes, *, replace_existing: bool) -> None:
        """Give its tag to a snapshot whose directory is in `staged`, with all files of this manifest."""
        tag, directory = snapshot.manifest.tag, snapshot.directory
        (directory / MANIFEST).write_bytes(manifest)
        for path in directory.iterdir():
            path.chmod(0o644)
        with contextlib.ExitStack() as locks, enough_disk(self.root):
            if snapshot.manifest.parent is not None:
                locks.enter_context(self._parent_locked(snapshot.manifest))
            if replace_existing and self._path(tag).is_dir():
                locks.enter_context(self._locked(tag, fcntl.LOCK_EX))
                self.refuse_to_replace_below_layers(tag)
            publish_directory(directory, self._path(tag), replace=replace_existing)

    def compact(self, tag: SnapshotTag, to: SnapshotTag) -> Snapshot:
        """The same as one root, under another tag: what it lies over is not needed for that."""
        with self.held(tag) as snapshot, self.created(to, replace_existing=False) as (staging, seal):
            for name in snapshot.manifest.files:
                if name not in (MEMORY, PAGES, EXTENTS):
                    with enough_disk(staging):
                        shutil.copyfile(snapshot.directory / name, staging / name)
            if snapshot.root_memory is not None:
                write_whole(snapshot, staging)
            fault_point("compact.written")
            old = snapshot.manifest.origin or Origin()
            origin = Origin(f"compact:{tag}", lineage=old.lineage, depth=old.depth)
            seal(replace(snapshot.manifest, tag=to, created_at_unix=int(time.time()), parent=None, origin=origin))
        return self.get(to)

    def remove(self, *tags: SnapshotTag, cascade: bool = False, force: bool = False) -> tuple[SnapshotTag, ...]:
        """All or none: unknown tags, tags in use and tags that layers lie over are found before anything is removed.

        `cascade`: the layers go too. `force`: they stay, and cannot be used any more. Returns what was removed.
        """
        if not cascade and not force:
            self._refuse_below_layers(tags)  # whoever uses it now: that they are there tells more
        with contextlib.ExitStack() as locks:
            # In the order they are locked. While we hold them no layer over them can appear.
            wanted: dict[SnapshotTag, None] = {}
            todo = list(dict.fromkeys(tags))
            while todo:
                for tag in todo:
                    locks.enter_context(self._locked(tag, fcntl.LOCK_EX))
                    wanted[tag] = None
                children = self._children()
                layers = {tag: [child for child in children.get(tag, ()) if child not in wanted] for tag in wanted}
                todo = list(dict.fromkeys(child for over in layers.values() for child in over))
                if todo and not cascade:
                    if not force:
                        raise refuse_removal(layers)
                    break
            for tag in leaves_first(wanted, children):
                # Renamed in one step, then removed: a crash between leaves only staging, which is swept.
                doomed = self.root / f"{STAGING_PREFIX}{secrets.token_hex(6)}"
                with _writable(self.root):
                    self._path(tag).rename(doomed)
                    fault_point("delete.renamed")
                    shutil.rmtree(doomed)
            return tuple(wanted)

    def _refuse_below_layers(self, tags: Sequence[SnapshotTag]) -> None:
        children = self._children()
        layers = {tag: [child for child in children.get(tag, ()) if child not in tags] for tag in tags}
        if any(layers.values()):
            raise refuse_removal(layers)

    def _path(self, tag: SnapshotTag) -> Path:
        return self.root / tag

    def _tags(self) -> Iterator[SnapshotTag]:
        """Directories with other names are not snapshots."""
        if not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            with contextlib.suppress(InvalidInput):
                tag = parse_tag(path.name)
                if path.is_dir() and not path.is_symlink():
                    yield tag

    def _read(self, tag: SnapshotTag) -> bytes:
        """The manifest as it is on disk."""
        try:
            return (self._path(tag) / MANIFEST).read_bytes()
        except OSError as error:
            if not self._path(tag).is_dir():
                raise _absent(tag) from None
            raise SnapshotDamaged(
                f"The manifest of snapshot {tag} cannot be read: {error.strerror}", hint=render_remedy(tag)
            ) from error

    def _read_one(self, tag: str) -> Snapshot:
        """Alone, without what it lies over."""
        name = SnapshotTag(tag)
        return read_snapshot(self._read(name), self._path(name), tag)

    def _look(self, tag: str, looked_at: dict[str, Snapshot | ForkdError]) -> Snapshot:
        """Alone, its files there and of the right size; each is looked at once."""
        if tag not in looked_at:
            try:
                snapshot = self._read_one(tag)
                _verify_sizes(snapshot)
                looked_at[tag] = snapshot
            except ForkdError as error:
                looked_at[tag] = error
        found = looked_at[tag]
        if isinstance(found, ForkdError):
            raise found
        return found

    def _children(self) -> dict[SnapshotTag, tuple[SnapshotTag, ...]]:
        """By tag, the layers directly over it."""
        parents: dict[SnapshotTag, Parent] = {}
        hashes: dict[SnapshotTag, str | None] = {}
        for tag in self._tags():
            try:
                data = self._read(tag)
            except NotFound:
                continue
            except SnapshotDamaged:
                hashes[tag] = None
                continue
            hashes[tag] = hashlib.sha256(data).hexdigest()
            if (parent := find_parent(data)) is not None:
                parents[tag] = parent
        return find_children(hashes, parents)

    @contextlib.contextmanager
    def _chain_locked(self, tag: SnapshotTag) -> Iterator[Snapshot]:
        """Shared, from the head down: each is locked before it is read."""
        with contextlib.ExitStack() as locks:

            def read(name: str) -> Snapshot:
                locks.enter_context(self._locked(SnapshotTag(name), fcntl.LOCK_SH))
                return self._read_one(name)

            yield follow_chain(tag, read)

    @contextlib.contextmanager
    def _parent_locked(self, manifest: Manifest) -> Iterator[None]:
        """It is the one a new layer was made of, stays so, and is not too deep."""
        parent = manifest.parent
        assert parent is not None
        with contextlib.ExitStack() as locks:
            try:
                found = locks.enter_context(self._chain_locked(parent.tag))
            except NotFound as error:
                raise Conflict(f"Snapshot {parent.tag} was removed while a layer over it was made") from error
            if found.hash != parent.hash:
                raise Conflict(f"Snapshot {parent.tag} was replaced while a layer over it was made")
            check_depth(found)
            yield

    def refuse_to_replace_below_layers(self, tag: SnapshotTag) -> None:
        if layers := self.dependents(tag):
            raise refuse_replacement(tag, layers)

    @contextlib.contextmanager
    def _locked(self, tag: SnapshotTag, kind: int) -> Iterator[None]:
        path = self._path(tag)
        while True:
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                raise _absent(tag) from None
            try:
                _lock(fd, kind, tag)
                # It may have been replaced between opening and locking: then we hold the lock of the old one.
                if _is_still(fd, path):
                    yield
                    return
            finally:
                os.close(fd)


def _seal(staging: Path, manifest: Manifest) -> None:
    names = sorted(p.name for p in staging.iterdir())
    sums = {name: digest_chunks(staging / name) for name in names}
    for name in names:
        # Others may read, for a jailed VMM that is given the file; the directory lets only the owner in.
        # The owner may write: QEMU opens a memory file for writing even where it maps it privately.
        (staging / name).chmod(0o644)
    (staging / MANIFEST).write_bytes(render_manifest(replace(manifest, files=sums)))


def _verify(snapshot: Snapshot, *, anew: bool) -> None:
    tag = snapshot.manifest.tag
    verify_files(
        snapshot.directory, snapshot.manifest.files, what=f"snapshot {tag}", hint=render_remedy(tag), anew=anew
    )


def _verify_sizes(snapshot: Snapshot) -> None:
    tag = snapshot.manifest.tag
    verify_sizes(snapshot.directory, snapshot.manifest.files, what=f"snapshot {tag}", hint=render_remedy(tag))


def _lock(fd: int, kind: int, tag: SnapshotTag) -> None:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Conflict(
            f"Snapshot {tag} is in use: a fork or a template of it is being made", hint="Try again when that is done"
        ) from None


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _writable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise HostLacks(
            f"The snapshots in {root} cannot be changed: {error.strerror}",
            hint="Set FORKD_HOME to a directory you may write to",
        ) from error


def _absent(tag: SnapshotTag) -> NotFound:
    return NotFound(f"There is no snapshot {tag}", hint="List them with: forkd snapshot ls")
