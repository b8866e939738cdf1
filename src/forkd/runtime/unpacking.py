"""A pack on its way into this home: all of it in staging, checked as it arrives, visible only when it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from forkd.engines.base import BootSpec, Engine, Frozen
from forkd.errors import Conflict, ForkdError, InvalidInput, NoCapacity, NotFound, SnapshotDamaged, SnapshotIncompatible
from forkd.host.faults import fault_point
from forkd.host.files import FileSum
from forkd.host.paths import nearest_existing
from forkd.image import ImageStore
from forkd.image.transfer import parse_facts
from forkd.model.names import SnapshotTag, parse_tag
from forkd.model.network import NO_NETWORK, Network
from forkd.store.chain import follow_chain, read_snapshot
from forkd.store.keys import TrustList, verify_signature
from forkd.store.manifest import render_manifest
from forkd.store.pack_manifest import PackedImage, PackedSnapshot, PackManifest, refused
from forkd.store.pack_read import Places, Unpacker
from forkd.store.snapshots import Snapshot, SnapshotStore

SPARE_BYTES = 512 << 20  # of the disk that no pack may fill


@dataclass(frozen=True)
class ImportOptions:
    """`tag` is the name of the head here; `origin` where the pack comes from, for which its key counts."""

    origin: str
    tag: SnapshotTag | None = None
    trust: bool = False
    unsigned: bool = False
    force: bool = False
    keep_anyway: bool = False


@dataclass(frozen=True)
class Imported:
    head: SnapshotTag
    made: tuple[SnapshotTag, ...]
    reused: tuple[SnapshotTag, ...]
    image_id: str
    image_reused: bool
    key: str | None
    warning: str | None
    network_dropped: tuple[SnapshotTag, ...] = ()  # those whose sandboxes would have had one by default


@dataclass(frozen=True)
class _Target:
    """A snapshot of the pack, as it will be here. Without a directory it is here already."""

    tag: SnapshotTag
    manifest: bytes
    packed: PackedSnapshot
    directory: Path | None


class Import:
    """Synchronous, one call at a time, from any thread. It ends with `finish` or `abort`."""

    def __init__(
        self,
        engine: Engine,
        store: SnapshotStore,
        images: ImageStore,
        trusted: TrustList,
        options: ImportOptions,
        check_free: Callable[[SnapshotTag], None] = lambda tag: None,
    ) -> None:
        """`check_free` raises Conflict for a tag that somebody is making just now."""
        self._engine = engine
        self._store = store
        self._images = images
        self._trusted = trusted
        self._options = options
        self._check_free = check_free
        self._stack = contextlib.ExitStack()
        self._targets: list[_Target] = []
        self._publish_image: Callable[[], None] | None = None
        self._warning: str | None = None
        self._network_dropped: list[SnapshotTag] = []
        self._new_key = False
        self.key: str | None = None
        self.unpacker = Unpacker(self._check_signature, self._accept)
        self._stack.callback(self.unpacker.close)

    def feed(self, data: bytes) -> None:
        self.unpacker.feed(data)

    def abort(self) -> None:
        self._stack.close()

    def finish(self) -> Imported:
        """Root first, head last: whatever is visible stands on what is complete."""
        with self._stack:
            manifest = self.unpacker.finish()
            snapshots = self._read_staged()
            fault_point("unpack.staged")
            if self._publish_image is not None:
                self._publish_image()
                fault_point("unpack.image")
            made, reused = [], []
            for target, snapshot in zip(self._targets, snapshots, strict=True):
                if target.directory is None:
                    self._hold_reused(target)
                    reused.append(target.tag)
                    continue
                self._check_free(target.tag)
                self._store.adopt(snapshot, target.manifest, replace_existing=self._options.force)
                made.append(target.tag)
                fault_point("unpack.published")
        if self._new_key and self.key is not None:
            self._trusted.remember(self.key, self._options.origin)
        return Imported(
            head=self._targets[-1].tag,
            made=tuple(made),
            reused=tuple(reused),
            image_id=manifest.image.id,
            image_reused=self._publish_image is None,
            key=self.key,
            warning=self._warning,
            network_dropped=tuple(self._network_dropped),
        )

    def _read_staged(self) -> list[Snapshot]:
        """The chain as it will be. What its layers say of pages is looked at before anybody can see it."""
        known = {target.tag: target for target in self._targets}

        def read(tag: str) -> Snapshot:
            target = known[SnapshotTag(tag)]
            return read_snapshot(target.manifest, target.directory or self._store.root / tag, tag)

        head = follow_chain(self._targets[-1].tag, read)
        try:
            _ = head.runs
        except SnapshotDamaged as error:
            raise refused(error.message) from error
        return [*head.ancestors, head]

    def _hold_reused(self, target: _Target) -> None:
        self._stack.enter_context(self._store.held(target.tag))
        if self._store.read_manifest(target.tag) != target.manifest:
            raise Conflict(f"Snapshot {target.tag} was replaced while the pack arrived", hint="Unpack it again")

    def _check_signature(self, manifest: bytes, signature: bytes) -> None:
        self.key = verify_signature(manifest, signature)
        options = self._options
        self._new_key = self._trusted.check(self.key, options.origin, trust=options.trust, unsigned=options.unsigned)

    def _accept(self, manifest: PackManifest) -> Places:
        """Everything that can be refused is refused here, before anything is written."""
        self._check_runs(manifest)
        if self._options.tag in [each.tag for each in manifest.chain[:-1]]:
            raise InvalidInput(f"The pack has a snapshot {self._options.tag} already", hint="Choose another --tag")
        planned: list[tuple[SnapshotTag, bytes, bool]] = []
        for each in manifest.chain:
            planned.append(self._plan(each, planned[-1][1] if planned else None, last=each is manifest.head))
        new = [each for (_, _, here), each in zip(planned, manifest.chain, strict=True) if not here]
        image_here = self._images.has(manifest.image.id)
        needed = [file for each in new for file in each.files.values()]
        needed += [] if image_here else (manifest.image.files or {}).values()
        self._check_space(sum(file.stored for file in needed))
        places = self._place_image(manifest.image, here=image_here)
        staging = self._stack.enter_context(self._store.staged())
        for number, ((tag, text, here), each) in enumerate(zip(planned, manifest.chain, strict=True)):
            directory = None if here else staging / str(number)
            if directory is not None:
                directory.mkdir(mode=0o700)
            places |= {f"{each.tag}/{name}": directory and directory / name for name in each.files}
            self._targets.append(_Target(tag, text, each, directory))
        return places

    def _check_runs(self, manifest: PackManifest) -> None:
        try:
            for each in manifest.chain:
                self._check_runs_one(each)
        except SnapshotIncompatible as error:
            if not self._options.keep_anyway:
                error.hint = "To keep it here all the same, for another host: --keep-anyway"
                raise
            self._warning = error.message

    def _check_runs_one(self, each: PackedSnapshot) -> None:
        wanted = each.manifest.engine
        if wanted != self._engine.name:
            raise SnapshotIncompatible(
                f"Snapshot {each.tag} needs the engine {wanted}, this daemon runs {self._engine.name}"
            )
        nowhere = Path("/nonexistent")
        boot = BootSpec(each.manifest.machine, nowhere, nowhere, nowhere)
        self._engine.check(Frozen(nowhere, boot, each.manifest.platform))

    def _plan(self, each: PackedSnapshot, below: bytes | None, *, last: bool) -> tuple[SnapshotTag, bytes, bool]:
        """Its tag and manifest here, and whether it is here already. `below`: the manifest of its parent here."""
        tag = self._options.tag if last and self._options.tag is not None else parse_tag(each.tag)
        as_packed = self._render(each, tag, below, each.manifest.network)
        text = self._render(each, tag, below, NO_NETWORK)
        self._check_free(tag)
        try:
            if (here := self._store.read_manifest(tag)) in (as_packed, text):
                with self._store.held(tag):
                    return tag, here, True
        except NotFound:
            self._note_network(each, tag)
            return tag, text, False
        except ForkdError:
            pass  # damaged: it is replaced when asked for
        if not self._options.force:
            more = ", or give the head another name: --tag" if last else ""
            raise Conflict(f"There is another snapshot {tag}", hint=f"Remove it, say --force to replace it{more}")
        self._store.refuse_to_replace_below_layers(tag)
        self._note_network(each, tag)
        return tag, text, False

    def _render(self, each: PackedSnapshot, tag: SnapshotTag, below: bytes | None, network: Network) -> bytes:
        """Its manifest as it is packed, byte for byte, unless something of it is another here."""
        parent = each.manifest.parent
        if parent is not None and below is not None:
            parent = replace(parent, hash=hashlib.sha256(below).hexdigest())
        manifest = replace(each.manifest, tag=tag, network=network, parent=parent)
        return each.text.encode() if manifest == each.manifest else render_manifest(manifest)

    def _note_network(self, each: PackedSnapshot, tag: SnapshotTag) -> None:
        """Who made a pack does not decide what sandboxes of this host reach."""
        if not each.manifest.network.off:
            self._network_dropped.append(tag)

    def _place_image(self, image: PackedImage, *, here: bool) -> dict[str, Path | None]:
        if image.files is None:
            if not here:
                raise NotFound(
                    f"The pack comes without its image {image.id}, and that is not here",
                    hint="Ask for a pack with the image",
                )
            return {}
        if here:
            return {f"+image/{role}": None for role in image.files}
        sums = {role: FileSum(file.size, file.sha256) for role, file in image.files.items()}
        try:
            manifest = parse_facts(image.id, image.facts, sums)
        except ValueError as error:
            raise refused(ascii(str(error))[1:-1][:200]) from error
        directory, self._publish_image = self._stack.enter_context(self._images.received(manifest))
        return {f"+image/{role}": directory / role for role in image.files}

    def _check_space(self, needed_bytes: int) -> None:
        free = shutil.disk_usage(nearest_existing(self._store.root)).free
        if needed_bytes + SPARE_BYTES > free:
            raise NoCapacity(
                f"The pack needs {needed_bytes >> 20} MiB of disk, and {free >> 20} MiB are free",
                hint="Free some space or set FORKD_HOME to another disk",
            )
