"""A snapshot with all it stands on, as one stream of bytes."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from forkd.image import ImageStore
from forkd.model.names import SnapshotTag
from forkd.store.keys import SigningKey
from forkd.store.pack_manifest import PackedImage, PackedSnapshot, PackManifest, render_pack_manifest
from forkd.store.pack_write import Packer, scan_file
from forkd.store.snapshots import Snapshot, SnapshotStore

_REMEMBERED = 32


class Packing:
    """Makes packs, and remembers how long their frames are: a download that was cut goes on at once."""

    def __init__(self, store: SnapshotStore, images: ImageStore, signing: SigningKey) -> None:
        self._store = store
        self._images = images
        self._signing = signing
        self._sizes: OrderedDict[str, list[int]] = OrderedDict()

    @contextlib.contextmanager
    def opened(self, tag: SnapshotTag, *, image: bool = True) -> Iterator[OpenPack]:
        """Nothing of it can be removed while the block runs."""
        with contextlib.ExitStack() as stack:
            head = stack.enter_context(self._store.held(tag))
            chain = tuple(self._describe(each) for each in (*head.ancestors, head))
            parts = self._images.get_parts(head.manifest.image_id)
            files: dict[str, Path] = {}
            for each in chain:
                files |= {f"{each.tag}/{name}": self._store.root / each.tag / name for name in each.files}
            packed = None
            if image:
                packed = {role: scan_file(path, total) for role, (path, total) in parts.files.items()}
                files |= {f"+image/{role}": path for role, (path, _) in parts.files.items()}
            manifest = PackManifest(chain, PackedImage(head.manifest.image_id, parts.facts, packed))
            packer = Packer(manifest, self._signing.sign(render_pack_manifest(manifest)), files)
            stack.callback(packer.close)
            yield OpenPack(packer, self._sizes.get(packer.etag), self._remember)

    def _describe(self, snapshot: Snapshot) -> PackedSnapshot:
        manifest = snapshot.manifest
        files = {name: scan_file(snapshot.directory / name, total) for name, total in manifest.files.items()}
        return PackedSnapshot(manifest.tag, self._store.read_manifest(manifest.tag).decode(), manifest, files)

    def _remember(self, etag: str, sizes: list[int]) -> None:
        self._sizes[etag] = sizes
        while len(self._sizes) > _REMEMBERED:
            self._sizes.popitem(last=False)


class OpenPack:
    """`size` is None until all frames were made once."""

    def __init__(self, packer: Packer, sizes: list[int] | None, remember: Callable[[str, list[int]], None]) -> None:
        self._packer = packer
        self._sizes = sizes
        self._remember = remember
        self.etag = packer.etag
        self.raw_bytes = packer.raw_bytes

    @property
    def size(self) -> int | None:
        return None if self._sizes is None else sum(self._sizes)

    def measure(self) -> int:
        """The size, for which all of it may have to be made."""
        if self._sizes is None:
            for _ in self.stream():
                pass
        assert self._sizes is not None
        return sum(self._sizes)

    def stream(self, offset: int = 0) -> Iterator[bytes]:
        """From one byte on. Its size has to be known for that."""
        first, skip = 0, 0
        if offset:
            assert self._sizes is not None
            ends = list(accumulate(self._sizes))
            first = next((number for number, end in enumerate(ends) if end > offset), len(ends))
            skip = offset - (ends[first - 1] if first else 0)
        made = []
        for frame in self._packer.stream(first):
            made.append(len(frame))
            yield frame[skip:]
            skip = 0
        if not first and self._sizes is None:
            self._sizes = made
            self._remember(self.etag, made)
