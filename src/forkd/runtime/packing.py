"""A snapshot with all it stands on, as one stream of bytes."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from forkd.errors import SnapshotDamaged
from forkd.image import ImageStore
from forkd.model.names import SnapshotTag, parse_tag
from forkd.store.keys import SigningKey
from forkd.store.pack_manifest import MAX_CHAIN, PackedImage, PackedSnapshot, PackManifest, render_pack_manifest
from forkd.store.pack_write import Packer, scan_file
from forkd.store.snapshots import SnapshotStore

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
            chain = self._hold_chain(stack, tag)
            parts = self._images.get_parts(chain[-1].manifest.image_id)
            files: dict[str, Path] = {}
            for each in chain:
                files |= {f"{each.tag}/{name}": self._store.root / each.tag / name for name in each.files}
            packed = None
            if image:
                packed = {role: scan_file(path, total.sha256) for role, (path, total) in parts.files.items()}
                files |= {f"+image/{role}": path for role, (path, _) in parts.files.items()}
            manifest = PackManifest(chain, PackedImage(chain[-1].manifest.image_id, parts.facts, packed))
            packer = Packer(manifest, self._signing.sign(render_pack_manifest(manifest)), files)
            stack.callback(packer.close)
            yield OpenPack(packer, self._sizes.get(packer.etag), self._remember)

    def _hold_chain(self, stack: contextlib.ExitStack, tag: SnapshotTag) -> tuple[PackedSnapshot, ...]:
        chain: list[PackedSnapshot] = []
        wanted: SnapshotTag | None = tag
        while wanted is not None:
            if len(chain) == MAX_CHAIN or any(each.tag == wanted for each in chain):
                raise SnapshotDamaged(
                    f"The chain of snapshot {tag} has no end", hint="Compact it: forkd snapshot compact"
                )
            stack.enter_context(self._store.held(wanted))
            chain.append(self._describe(wanted))
            parent = chain[-1].parent
            wanted = None if parent is None else parse_tag(parent[0])
        return tuple(reversed(chain))

    def _describe(self, tag: SnapshotTag) -> PackedSnapshot:
        text = self._store.read_manifest(tag).decode()
        manifest, raw = self._store.get(tag).manifest, json.loads(text)
        files = {}
        for name, total in manifest.files.items():
            chunks = raw["files"][name].get("chunks")
            hashes = None if chunks is None else tuple(chunks)
            files[name] = scan_file(self._store.root / tag / name, total.sha256, hashes)
        parent = raw.get("parent")
        above = None if parent is None else (str(parent["tag"]), str(parent["hash"]))
        return PackedSnapshot(tag, text, manifest, above, files)

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
