"""What a pack says it holds: a chain of snapshots, root first, and the image they run on. Pure.

A pack comes from somewhere else, so nothing here is believed: every name, size and place is checked before it is used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forkd.errors import ForkdError, SnapshotDamaged, SnapshotIncompatible
from forkd.model.names import parse_tag
from forkd.store.chain import MANIFEST, MAX_DEPTH
from forkd.store.manifest import Manifest, Parent, parse_manifest

KIND = "forkd-pack"
VERSION = 1
BLOCK = 64 * 1024  # a block of zeros is not in the pack
MAX_MANIFEST_BYTES = 8 << 20
MAX_CHAIN = MAX_DEPTH + 1
MAX_FILES = 16
MAX_FILE_BYTES = 1 << 38  # zeros that are not in the pack are hashed too
ROLES = ("root", "kernel", "initrd")

_FILE = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_IMAGE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)

Extent = tuple[int, int]  # start and length, in bytes


@dataclass(frozen=True)
class PackedFile:
    """A file, and which parts of it are in the pack; the rest are zeros. `chunks` as in a manifest."""

    size: int
    sha256: str
    extents: tuple[Extent, ...]
    chunks: tuple[str, ...] = ()

    @property
    def stored(self) -> int:
        return sum(length for _, length in self.extents)


@dataclass(frozen=True)
class PackedSnapshot:
    """`text` is its manifest.json, byte for byte: the hash of it is what a layer knows its parent by."""

    tag: str
    text: str
    manifest: Manifest
    files: Mapping[str, PackedFile]

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass(frozen=True)
class PackedImage:
    """`facts` are its manifest without files; `files` by role, None when the pack leaves them out."""

    id: str
    facts: Mapping[str, Any]
    files: Mapping[str, PackedFile] | None


@dataclass(frozen=True)
class PackManifest:
    chain: tuple[PackedSnapshot, ...]
    image: PackedImage

    @property
    def head(self) -> PackedSnapshot:
        return self.chain[-1]

    def members(self) -> Iterator[tuple[str, PackedFile]]:
        """In the order of the pack: what is most likely to be there already comes first."""
        for role in ROLES if self.image.files is not None else ():
            assert self.image.files is not None
            yield f"+image/{role}", self.image.files[role]
        for snapshot in self.chain:
            for name in sorted(snapshot.files):
                yield f"{snapshot.tag}/{name}", snapshot.files[name]


@dataclass(frozen=True)
class _Raw:
    """A JSON object of which every key is asked for by its type."""

    value: Mapping[str, Any]
    where: str = "the manifest"

    def get(self, key: str, kind: type) -> Any:
        found = self.value.get(key)
        if type(found) is not kind:
            raise ValueError(f"{key} of {self.where} is not of the type {kind.__name__}")
        return found


def render_pack_manifest(manifest: PackManifest) -> bytes:
    """The same content is the same bytes."""
    image = manifest.image
    value = {
        "kind": KIND,
        "version": VERSION,
        "head": manifest.head.tag,
        "chain": [
            {"tag": each.tag, "manifest": each.text, "files": {name: _render(each.files[name]) for name in each.files}}
            for each in manifest.chain
        ],
        "image": {
            "id": image.id,
            "facts": image.facts,
            "files": None if image.files is None else {role: _render(image.files[role]) for role in ROLES},
        },
    }
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def parse_pack_manifest(data: bytes) -> PackManifest:
    """Raises SnapshotDamaged for what no forkd wrote, SnapshotIncompatible for what a newer one did."""
    try:
        raw = _Raw(_parse_object(data))
        if raw.value.get("kind") != KIND:
            raise ValueError("it is of another kind")
        if (version := raw.get("version", int)) != VERSION:
            raise SnapshotIncompatible(
                f"The pack has version {version}, this forkd reads version {VERSION}", hint="Use a newer forkd"
            )
        chain = tuple(_parse_snapshot(_Raw(each)) for each in _objects(raw.get("chain", list), MAX_CHAIN))
        manifest = PackManifest(chain, _parse_image(_Raw(raw.get("image", dict), "the image")))
        _check_chain(manifest, raw.get("head", str))
        return manifest
    except SnapshotIncompatible:
        raise
    except (ValueError, RecursionError, ForkdError) as error:
        raise refused(f"its manifest is not valid: {ascii(str(error))[1:-1][:200]}") from error


def refused(why: str) -> SnapshotDamaged:
    return SnapshotDamaged(f"The pack was refused: {why}", hint="Nothing of it was kept. Get the pack again")


def find_extents(size: int, extents: Iterator[Extent]) -> tuple[Extent, ...]:
    """Neighbours joined."""
    found: list[Extent] = []
    for start, length in extents:
        if found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((start, length))
    assert not found or sum(found[-1]) <= size
    return tuple(found)


def render_extents(extents: tuple[Extent, ...]) -> str:
    """Blocks of zeros and blocks that are there, in turns: `0,3,5,1`."""
    numbers, at = [], 0
    for start, length in extents:
        last = -(-(start + length) // BLOCK)
        numbers += [start // BLOCK - at, last - start // BLOCK]
        at = last
    return ",".join(map(str, numbers))


def parse_extents(text: str, size: int) -> tuple[Extent, ...]:
    if not text:
        return ()
    numbers = [int(each) for each in text.split(",")] if re.fullmatch(r"[0-9,]+", text, re.ASCII) else []
    if not numbers or len(numbers) % 2:
        raise ValueError("bad extents")
    extents: list[Extent] = []
    at = 0
    for zeros, blocks in zip(numbers[::2], numbers[1::2], strict=True):
        if blocks < 1 or (extents and zeros < 1):
            raise ValueError("bad extents")
        start = (at + zeros) * BLOCK
        at += zeros + blocks
        if start >= size or (at - 1) * BLOCK >= size:
            raise ValueError("extents beyond the end of a file")
        extents.append((start, min(at * BLOCK, size) - start))
    return tuple(extents)


def _render(file: PackedFile) -> dict[str, Any]:
    return {"size": file.size, "sha256": file.sha256, "data": render_extents(file.extents)}


def _parse_object(data: bytes) -> dict[str, Any]:
    value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key is there twice")
    return made


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a number")


def _objects(value: list[Any], most: int) -> list[dict[str, Any]]:
    if not 1 <= len(value) <= most:
        raise ValueError(f"a chain has 1 to {most} snapshots, this one has {len(value)}")
    if not all(isinstance(each, dict) for each in value):
        raise ValueError("a snapshot is not an object")
    return value


def _parse_snapshot(raw: _Raw) -> PackedSnapshot:
    tag, text = parse_tag(raw.get("tag", str)), raw.get("manifest", str)
    manifest = parse_manifest(text.encode(), tag)
    listed = raw.get("files", dict)
    if set(listed) != set(manifest.files) or len(listed) > MAX_FILES:
        raise ValueError(f"the files of {tag} are not those of its manifest")
    files = {}
    for name in sorted(listed):
        if _FILE.fullmatch(name) is None or name == MANIFEST:
            raise ValueError(f"{name!r} is not the name of a file of a snapshot")
        wanted = manifest.files[name]
        files[name] = _parse_file(listed[name], name, wanted.chunks)
        if (files[name].size, files[name].sha256) != (wanted.size, wanted.sha256):
            raise ValueError(f"{name} of {tag} differs from its manifest")
    memory = files.get("memory")
    if memory is not None and memory.size > (manifest.machine.memory_mib << 20) + (1 << 30):
        raise ValueError(f"the memory of {tag} is larger than its machine's")
    return PackedSnapshot(tag, text, manifest, files)


def _parse_file(value: object, name: str, chunks: tuple[str, ...] = ()) -> PackedFile:
    raw = _Raw(value if isinstance(value, dict) else {}, f"the file {name}")
    size, sha256 = raw.get("size", int), raw.get("sha256", str)
    if not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"{name} has an absurd size")
    if _DIGEST.fullmatch(sha256) is None:
        raise ValueError(f"{name} has no digest")
    return PackedFile(size, sha256, parse_extents(raw.get("data", str), size), chunks)


def _parse_image(raw: _Raw) -> PackedImage:
    image_id, files = raw.get("id", str), raw.value.get("files")
    if _IMAGE_ID.fullmatch(image_id) is None:
        raise ValueError("the image has no id")
    if files is None:
        return PackedImage(image_id, raw.get("facts", dict), None)
    if not isinstance(files, dict) or set(files) != set(ROLES):
        raise ValueError("an image has a root, a kernel and an initrd")
    parsed = {role: _parse_file(files[role], role) for role in ROLES}
    return PackedImage(image_id, raw.get("facts", dict), parsed)


def _check_chain(manifest: PackManifest, head: str) -> None:
    if manifest.head.tag != head:
        raise ValueError("the head is not the last of the chain")
    if len({each.tag for each in manifest.chain}) != len(manifest.chain):
        raise ValueError("a tag is there twice")
    above: PackedSnapshot | None = None
    for each in manifest.chain:
        if each.manifest.parent != (None if above is None else Parent(above.manifest.tag, above.hash)):
            raise ValueError(f"{each.tag} does not follow from the one before it")
        if each.manifest.image_id != manifest.image.id:
            raise ValueError(f"{each.tag} was made from another image")
        above = each
