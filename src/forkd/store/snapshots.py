"""Snapshots on disk: one directory per tag, complete or absent.

    snapshots/<tag>/manifest.json   what it is, with size and checksum of each file
                    <files>         the engine's: memory, device state

The directory itself is the lock: shared while something forks from it, exclusive to remove or replace it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from forkd.errors import Conflict, ForkdError, HostLacks, InvalidInput, NotFound, SnapshotDamaged
from forkd.host.files import (
    STAGING_PREFIX,
    digest_file,
    enough_disk,
    publish_directory,
    scratch_directory,
    staged_directory,
    sweep_staging,
    verify_files,
    verify_sizes,
)
from forkd.model.names import SnapshotTag, parse_tag
from forkd.store.manifest import Manifest, find_image_id, parse_manifest, render_manifest, render_remedy

_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Snapshot:
    manifest: Manifest
    directory: Path

    def disk_bytes(self) -> int:
        """What its files occupy on disk: guest memory that was never touched is a hole."""
        return sum((self.directory / name).stat().st_blocks * 512 for name in self.manifest.files)


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


class SnapshotStore:
    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self) -> Listing:
        """All tags, by name, damaged ones apart. The sizes of files are checked, their contents are not."""
        snapshots: list[Snapshot] = []
        unusable: list[Unusable] = []
        for tag in self._tags():
            try:
                snapshot = self.get(tag)
                verify_sizes(
                    snapshot.directory, snapshot.manifest.files, what=f"snapshot {tag}", hint=render_remedy(tag)
                )
                snapshots.append(snapshot)
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
        return (self._path(tag) / _MANIFEST).is_file()

    def get(self, tag: SnapshotTag) -> Snapshot:
        """Read a snapshot without looking into its files."""
        return Snapshot(parse_manifest(self._read(tag), tag), self._path(tag))

    @contextlib.contextmanager
    def held(self, tag: SnapshotTag) -> Iterator[Snapshot]:
        """A verified snapshot that nobody can remove while the block runs."""
        with self._locked(tag, fcntl.LOCK_SH):
            snapshot = self.get(tag)
            verify_files(snapshot.directory, snapshot.manifest.files, what=f"snapshot {tag}", hint=render_remedy(tag))
            yield snapshot

    @contextlib.contextmanager
    def created(self, tag: SnapshotTag, *, replace_existing: bool) -> Iterator[tuple[Path, Callable[[Manifest], None]]]:
        """Yield a staging directory and a function that takes the manifest; the tag appears when the block succeeds."""
        final = self._path(tag)
        with contextlib.ExitStack() as old:
            with _writable(self.root), enough_disk(self.root):
                self.root.mkdir(parents=True, exist_ok=True)
                sweep_staging(self.root)
            # Damaged or not: what has the tag is replaced only when asked for.
            if os.path.lexists(final) and not replace_existing:
                raise Conflict(f"Snapshot {tag} exists already", hint="Choose another tag or pass --replace")
            # The lock on the old one is released last, when the new one is in its place.
            with staged_directory(final, replace=replace_existing) as staging:

                def seal(manifest: Manifest) -> None:
                    _seal(staging, manifest)
                    if replace_existing and final.is_dir():
                        old.enter_context(self._locked(tag, fcntl.LOCK_EX))

                yield staging, seal
                assert (staging / _MANIFEST).is_file(), "a snapshot was not sealed"

    def read_manifest(self, tag: SnapshotTag) -> bytes:
        """As it is on disk: a layer knows its parent by the hash of it. Raises NotFound, SnapshotDamaged."""
        return self._read(tag)

    def verify_whole(self, tag: SnapshotTag) -> None:
        """Raises SnapshotDamaged unless all its files are there and unaltered."""
        with self.held(tag):
            pass

    @contextlib.contextmanager
    def staged(self) -> Iterator[Path]:
        """A directory for snapshots that are made elsewhere, each in one of its own; for `adopt`."""
        with _writable(self.root), enough_disk(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            sweep_staging(self.root)
        with scratch_directory(self.root) as staging:
            yield staging

    def adopt(self, tag: SnapshotTag, directory: Path, manifest: bytes, *, replace_existing: bool) -> None:
        """Give a tag to a directory of `staged` that has all files of this manifest."""
        final = self._path(tag)
        (directory / _MANIFEST).write_bytes(manifest)
        for path in directory.iterdir():
            path.chmod(0o644)
        directory.chmod(0o700)
        with contextlib.ExitStack() as old, enough_disk(self.root):
            if os.path.lexists(final):
                if not replace_existing:
                    raise Conflict(f"Snapshot {tag} exists already", hint="Choose another tag or pass --force")
                old.enter_context(self._locked(tag, fcntl.LOCK_EX))
            publish_directory(directory, final, replace=replace_existing)

    def remove(self, *tags: SnapshotTag) -> None:
        """All or none: unknown tags and tags in use are found before anything is removed."""
        with contextlib.ExitStack() as locks:
            wanted = list(dict.fromkeys(tags))
            for tag in wanted:
                locks.enter_context(self._locked(tag, fcntl.LOCK_EX))
            for tag in wanted:
                # Renamed in one step, then removed: a crash between leaves only staging, which is swept.
                doomed = self.root / f"{STAGING_PREFIX}{secrets.token_hex(6)}"
                with _writable(self.root):
                    self._path(tag).rename(doomed)
                    shutil.rmtree(doomed)

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
            return (self._path(tag) / _MANIFEST).read_bytes()
        except OSError as error:
            if not self._path(tag).is_dir():
                raise _absent(tag) from None
            raise SnapshotDamaged(
                f"The manifest of snapshot {tag} cannot be read: {error.strerror}", hint=render_remedy(tag)
            ) from error

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
    sums = {name: digest_file(staging / name) for name in names}
    for name in names:
        # Others may read, for a jailed VMM that is given the file; the directory lets only the owner in.
        # The owner may write: QEMU opens a memory file for writing even where it maps it privately.
        (staging / name).chmod(0o644)
    (staging / _MANIFEST).write_bytes(render_manifest(replace(manifest, files=sums)))


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
