"""Homes with chains of snapshots, packs of them, and packs that no forkd would make."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from support_images import made_home, make_image

from forkd.engines.fake import FakeEngine
from forkd.host.paths import Home
from forkd.image import ImageStore
from forkd.model.machine import MachineSpec
from forkd.model.memory import PAGE
from forkd.model.names import parse_tag
from forkd.runtime.packing import Packing
from forkd.runtime.unpacking import Import, Imported, ImportOptions
from forkd.store.extents import render_extents as render_layer
from forkd.store.keys import FILES, UNSIGNED, SigningKey, TrustList
from forkd.store.manifest import Manifest, Parent
from forkd.store.pack_frames import END, FRAME, make_frame, padding, render_header
from forkd.store.pack_write import render_head
from forkd.store.snapshots import SnapshotStore

MEMORY_BYTES = 32 << 20
PLATFORM = {"python": sys.version.split()[0]}


@contextmanager
def made(root: Path, *, image: bool = True) -> Iterator[Home]:
    with made_home(root) as home:
        if image:
            make_image(home)
        yield home


def store_of(home: Home) -> SnapshotStore:
    return SnapshotStore(home.snapshots)


def image_id(home: Home) -> str:
    return ImageStore(home).open("small").id


def describe(home: Home, tag: str, **changed: Any) -> Manifest:
    plain = Manifest(parse_tag(tag), 1_700_000_000, "fake", image_id(home), MachineSpec(32), "x", PLATFORM, {})
    return replace(plain, **changed)


def add_root(home: Home, tag: str = "root", *, text: bytes = b"memory of the root", **changed: Any) -> None:
    """Its memory is mostly holes."""
    with store_of(home).created(parse_tag(tag), replace_existing=False) as (staging, seal):
        with (staging / "memory").open("wb") as file:
            file.write(text)
            file.seek(9 << 20)
            file.write(b"further on" * 20_000)
            file.truncate(MEMORY_BYTES)
        (staging / "state").write_bytes(b"state of " + tag.encode())
        seal(describe(home, tag, **changed))


def add_layer(home: Home, tag: str, parent: str, page: int = 3) -> None:
    below = store_of(home).get(parse_tag(parent))
    with store_of(home).created(parse_tag(tag), replace_existing=False) as (staging, seal):
        (staging / "pages").write_bytes(tag.encode().ljust(PAGE, b"."))
        (staging / "extents").write_bytes(render_layer([(page, 1, 0)]))
        (staging / "state").write_bytes(b"state of " + tag.encode())
        seal(describe(home, tag, parent=Parent(below.manifest.tag, below.hash)))


def add_chain(home: Home, *tags: str) -> None:
    add_root(home, tags[0])
    for number, (parent, tag) in enumerate(pairwise(tags)):
        add_layer(home, tag, parent, page=3 + number)


def packing_of(home: Home) -> Packing:
    return Packing(store_of(home), ImageStore(home), SigningKey(home.signing_key))


def pack(home: Home, tag: str, *, image: bool = True) -> bytes:
    with packing_of(home).opened(parse_tag(tag), image=image) as opened:
        return b"".join(opened.stream())


def key_of(home: Home) -> str:
    return SigningKey(home.signing_key).public()


def trusted_by(home: Home) -> TrustList:
    return TrustList(home.trust, SigningKey(home.signing_key))


def importing(home: Home, **options: Any) -> Import:
    chosen = ImportOptions(**({"origin": FILES, "trust": True} | options))
    return Import(FakeEngine(), store_of(home), ImageStore(home), trusted_by(home), chosen)


def unpack(home: Home, data: bytes, *, step: int = 70_000, **options: Any) -> Imported:
    work = importing(home, **options)
    try:
        for at in range(0, len(data), step):
            work.feed(data[at : at + step])
        return work.finish()
    finally:
        work.abort()


def files_of(home: Home) -> dict[str, bytes]:
    """Of all snapshots; without what is only remembered about them."""
    return {
        str(path.relative_to(home.snapshots)): path.read_bytes()
        for path in sorted(home.snapshots.rglob("*"))
        if path.is_file() and path.name != ".verified"
    }


def is_untouched(home: Home) -> bool:
    """No snapshot, no image but its own, and nothing of either half-way."""
    snapshots = [path.name for path in home.snapshots.iterdir()] if home.snapshots.exists() else []
    pieces = [path.name for path in home.images.glob("pieces/*")]
    left = [name for name in pieces if name.startswith((".staging", "import-"))]
    return snapshots == [] and left == []


Members = Sequence[tuple[str, bytes]]


def open_pack(data: bytes) -> tuple[dict[str, Any], list[tuple[str, bytes]]]:
    """The manifest, and the members as they are in it."""
    import io
    import tarfile

    import zstandard

    plain = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        members = []
        for info in archive:
            file = archive.extractfile(info)
            assert file is not None
            members.append((info.name, file.read()))
    return json.loads(members[0][1]), members[2:]


def forge(
    manifest: dict[str, Any] | bytes,
    members: Members,
    *,
    sign: Callable[[bytes], bytes] = lambda text: UNSIGNED,
    end: bytes = END,
) -> bytes:
    """A pack with anything in it, in frames that are right."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    body = b"".join(render_header(name, len(data)) + data + bytes(padding(len(data))) for name, data in members) + end
    return frames(render_head(text, sign(text))) + frames(body)


def frames(raw: bytes, size: int = FRAME) -> bytes:
    return b"".join(make_frame(raw[at : at + size]) for at in range(0, len(raw), size))
