"""The images of one home: build, open, list, remove.

images/
  pieces/<kind>-<key>-<nonce>/   roots, kernels, initramfs; shared between images
  <image id>/manifest.json       which pieces an image is made of, with their digests
  names/<name>                   holds an image id
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from forkd.errors import Conflict, HostLacks, InvalidInput, NotFound, SnapshotDamaged
from forkd.host.files import (
    STAGING_PREFIX,
    enough_disk,
    locked,
    publish_directory,
    scratch_directory,
    staged_directory,
    sweep_staging,
    verify_files,
    write_atomic,
)
from forkd.host.paths import Home
from forkd.host.trees import remove_directory
from forkd.image.build import build_pieces, describe_source
from forkd.image.manifest import (
    MANIFEST_FILE,
    Image,
    Manifest,
    compose_manifest,
    is_image_id,
    parse_manifest,
    render_manifest,
)
from forkd.image.pieces import collect_pieces, describe_piece, sweep_pieces
from forkd.image.spec import ImageSpec, Progress, Silent
from forkd.image.transfer import IMPORTED, Parts, describe_facts
from forkd.model.names import ImageName, parse_image_name

_NO_USE: Mapping[str, Sequence[str]] = MappingProxyType({})


class ImageStore:
    def __init__(self, home: Home) -> None:
        self._images = home.images
        self._pieces = home.images / "pieces"
        self._names = home.images / "names"
        # Builds hold it shared: while one runs, pieces that no image names are not garbage.
        self._building = home.images / ".building"
        # Held while names and manifests change.
        self._changing = home.images / ".changing"

    def build(self, spec: ImageSpec, name: str, progress: Progress | None = None, *, fresh: bool = False) -> Image:
        """Make the image, unless it exists, and give it the name. `fresh` makes every piece again."""
        checked, told, asked_at = _parse_new_name(name), progress or Silent(), time.time()
        self._prepare()
        with enough_disk(self._images):
            with locked(self._building, shared=True):
                made = build_pieces(spec, self._pieces, told, fresh=fresh)
                if all(piece.created < asked_at for piece, _ in made.roles.values()):
                    told.stage("Nothing to do: it is already built (--fresh builds it again)")
                manifest = compose_manifest(made.roles, describe_source(spec), time.time(), made.inputs)
                with locked(self._changing):
                    self._publish(manifest, checked)
        self._collect()
        return self._image(self._load(manifest.id), checked)

    def open(self, ref: str) -> Image:
        """The image with this name or id, its files verified."""
        image_id, name = self._find(ref)
        manifest = self._load(image_id)
        for file in manifest.files.values():
            verify_files(
                self._pieces / file.piece,
                {file.name: file.sum},
                what=f"image {ref} ({self._pieces / file.piece})",
                hint="Build it again: forkd image build --fresh",
            )
        return self._image(manifest, name)

    def list(self) -> list[Image]:
        """Every image, newest first, once for each of its names. Damaged ones are left out."""
        names = self._read_names()
        images = []
        for image_id in self._ids():
            try:
                manifest = self._load(image_id)
            except (SnapshotDamaged, NotFound):
                continue
            mine = [name for name, target in names.items() if target == image_id]
            images += [self._image(manifest, name) for name in mine or (None,)]
        return sorted(images, key=lambda image: image.created, reverse=True)

    def remove(self, ref: str, in_use: Mapping[str, Sequence[str]] = _NO_USE) -> None:
        """Remove the name, and with its last name the image; by id, remove the image and all its names.

        `in_use` has the ids that snapshots were made from, each with their tags.
        """
        self._prepare()
        with locked(self._changing):
            image_id, name = self._find(ref)
            names = {known for known, target in self._read_names().items() if target == image_id}
            if name is not None and not is_image_id(ref) and names - {name}:
                (self._names / name).unlink(missing_ok=True)
                return
            if image_id in in_use:
                tags = in_use[image_id]
                noun = "snapshot" if len(tags) == 1 else "snapshots"
                raise Conflict(
                    f"The image {ref} is in use by {noun} {', '.join(tags)}",
                    hint=f"Remove what was made from it first: forkd snapshot rm {' '.join(tags)}",
                )
            if image_id not in self._ids():
                raise NotFound(f"There is no image {ref}", hint="See forkd image ls")
            for known in names:
                (self._names / known).unlink(missing_ok=True)
            self._drop(image_id)
        self._collect()

    def prune(self, in_use: Collection[str] = frozenset()) -> tuple[str, ...]:
        """Remove the images whose name was given to a newer one and that are not in use; returns their ids."""
        self._prepare()
        with locked(self._changing):
            kept = {*in_use, *self._read_names().values()}
            dropped = tuple(image_id for image_id in self._ids() if image_id not in kept)
            for image_id in dropped:
                self._drop(image_id)
        self._collect()
        return dropped

    def get_parts(self, image_id: str) -> Parts:
        """What an image is, and its files by role, verified: for a pack."""
        self.open(image_id)
        manifest = self._load(image_id)
        files = {role: (self._pieces / file.piece / file.name, file.sum) for role, file in manifest.files.items()}
        return Parts(describe_facts(manifest), files)

    def has(self, image_id: str) -> bool:
        """Whether it is here, and whole."""
        try:
            self.open(image_id)
        except (NotFound, SnapshotDamaged):
            return False
        return True

    @contextmanager
    def received(self, manifest: Manifest) -> Iterator[tuple[Path, Callable[[], None]]]:
        """A directory for the files of an image from elsewhere, by their roles; and what publishes it, without a name.

        The caller has compared the files with the sums of the manifest.
        """
        self._prepare()
        piece = next(iter(manifest.files.values())).piece
        with enough_disk(self._images), locked(self._building, shared=True):
            sweep_staging(self._pieces)
            with scratch_directory(self._pieces) as staging:
                work = staging / piece
                work.mkdir()

                def publish() -> None:
                    describe_piece(work, {file.name: file.sum for file in manifest.files.values()})
                    publish_directory(work, self._pieces / piece)
                    with locked(self._changing):
                        self._publish_manifest(manifest)

                yield work, publish

    def drop_unused_imports(self, in_use: Collection[str]) -> None:
        """After a crash: images that came with a pack whose snapshots did not come."""
        if not any(path.name.startswith((IMPORTED, STAGING_PREFIX)) for path in self._pieces.glob("*")):
            return
        with locked(self._changing):
            kept = {*in_use, *self._read_names().values()}
            for image_id in [each for each in self._ids() if each not in kept]:
                try:
                    if all(piece.startswith(f"{IMPORTED}-") for piece in self._load(image_id).pieces):
                        self._drop(image_id)
                except (NotFound, SnapshotDamaged):
                    continue
        self._collect()

    def _prepare(self) -> None:
        try:
            with enough_disk(self._images):
                # Whoever makes the home first makes it for this user alone.
                self._images.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._names.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise HostLacks(
                f"Images cannot be kept in {self._images}: {error.strerror}",
                hint="Set FORKD_HOME to a directory you may write to",
            ) from error

    def _image(self, manifest: Manifest, name: ImageName | None) -> Image:
        return manifest.image(self._images / manifest.id, self._pieces, name)

    def _publish(self, manifest: Manifest, name: ImageName) -> None:
        self._publish_manifest(manifest)
        if self._read_names().get(name) != manifest.id:
            write_atomic(self._names / name, manifest.id.encode())

    def _publish_manifest(self, manifest: Manifest) -> None:
        directory = self._images / manifest.id
        try:
            # It may name other pieces with the same content, one of them damaged meanwhile.
            whole = self._load(manifest.id).pieces == manifest.pieces
        except (SnapshotDamaged, NotFound):
            whole = False
        if not whole:
            with staged_directory(directory, replace=True) as staging:
                write_atomic(staging / MANIFEST_FILE, render_manifest(manifest))
                staging.chmod(0o755)

    def _drop(self, image_id: str) -> None:
        # First, so that what is left when we are stopped half-way does not count as an image.
        (self._images / image_id / MANIFEST_FILE).unlink(missing_ok=True)
        remove_directory(self._images / image_id)

    def _find(self, ref: str) -> tuple[str, ImageName | None]:
        """The id behind a name or an id, and a name."""
        names = self._read_names()
        if is_image_id(ref):
            mine = [name for name, target in names.items() if target == ref]
            return ref, mine[0] if mine else None
        name = parse_image_name(ref)
        if name not in names:
            raise NotFound(f"There is no image {name}", hint="See forkd image ls, or make it with forkd image build")
        return names[name], name

    def _load(self, image_id: str) -> Manifest:
        where = self._images / image_id / MANIFEST_FILE
        try:
            data = where.read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"There is no image {image_id}", hint="See forkd image ls") from error
        return parse_manifest(data, where)

    def _ids(self) -> Iterator[str]:
        if self._images.is_dir():
            yield from (path.name for path in self._images.iterdir() if is_image_id(path.name))

    def _read_names(self) -> dict[ImageName, str]:
        if not self._names.is_dir():
            return {}
        names = {}
        for path in sorted(self._names.iterdir()):
            # Names being written have a leading dot.
            if not path.name.startswith("."):
                try:
                    names[ImageName(path.name)] = path.read_text().strip()
                except FileNotFoundError:
                    continue
        return names

    def _collect(self) -> None:
        """Remove pieces no image names, unless a build runs."""
        with _locked_if_free(self._building) as free:
            if not free:
                return
            sweep_staging(self._images)
            sweep_pieces(self._pieces)
            try:
                named = self._named_pieces()
            except SnapshotDamaged:
                # We do not know which pieces a damaged manifest names; they may be needed to repair it.
                return
            collect_pieces(self._pieces, named)

    def _named_pieces(self) -> set[str]:
        named: set[str] = set()
        for image_id in self._ids():
            try:
                named |= self._load(image_id).pieces
            except NotFound:
                continue
        return named


def _parse_new_name(text: str) -> ImageName:
    name = parse_image_name(text)
    if is_image_id(name):
        raise InvalidInput(f"{name} looks like an image id", hint="Choose a name that is not 32 hexadecimal digits")
    return name


@contextmanager
def _locked_if_free(path: Path) -> Iterator[bool]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(fd)
