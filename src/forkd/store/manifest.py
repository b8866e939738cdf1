"""What a snapshot says about itself, in its manifest.json. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from forkd.errors import ForkdError, SnapshotDamaged, SnapshotIncompatible
from forkd.host.files import FileSum, dump_sums, parse_sums
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.model.network import NO_NETWORK, Network, parse_network

FORMAT = 2
# 1: before there were layers and chunks.
_OLDEST_FORMAT = 1
# The end of the year 9999, the last that calendar functions know.
_LATEST_UNIX = 253_402_300_799

_MAX_TEXT = 256
_MAX_NUMBER = 1 << 63
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)

T = TypeVar("T")


@dataclass(frozen=True)
class Parent:
    """What a layer lies over: a tag, and the SHA-256 of its manifest.json, as another may get that tag."""

    tag: SnapshotTag
    hash: str


@dataclass(frozen=True)
class Origin:
    """Where a snapshot of a running sandbox came from, and what it cost."""

    branched_from: str | None = None  # a sandbox; or "compact:<tag>"
    lineage: str | None = None
    depth: int = 0
    at_unix: float | None = None  # when it was frozen, to the microsecond
    mode: str | None = None
    pause_ms: float | None = None
    diff_ms: float | None = None
    bytes_dirty: int | None = None
    bytes_written: int | None = None
    checkpoint: str | None = None
    auto: bool = False  # nobody chose the tag


@dataclass(frozen=True)
class Manifest:
    tag: SnapshotTag
    created_at_unix: int
    engine: str
    image_id: str
    machine: MachineSpec
    warm: str
    platform: Mapping[str, str]
    files: Mapping[str, FileSum]
    rehearsal: str | None = None  # what a template evaluates before it is forked
    parent: Parent | None = None  # None: a root, which has all of its memory
    settled: bool = True  # frozen when its agent was prepared for it
    origin: Origin | None = None
    network: Network = NO_NETWORK  # of sandboxes that are forked from it, unless they ask for another


def render_manifest(manifest: Manifest) -> bytes:
    raw = {
        "format": FORMAT,
        "tag": manifest.tag,
        "created_at_unix": manifest.created_at_unix,
        "engine": manifest.engine,
        "image_id": manifest.image_id,
        "machine": {key: value for key, value in asdict(manifest.machine).items() if value is not None},
        "warm": manifest.warm,
        **({} if manifest.rehearsal is None else {"rehearsal": manifest.rehearsal}),
        "platform": dict(manifest.platform),
        **({} if manifest.parent is None else {"parent": asdict(manifest.parent)}),
        "settled": manifest.settled,
        **({} if manifest.origin is None else {"origin": _render_origin(manifest.origin)}),
        **({} if manifest.network.off else {"network": manifest.network.as_json()}),
        "files": dump_sums(manifest.files),
    }
    return json.dumps(raw, indent=2).encode() + b"\n"


def parse_manifest(data: bytes, tag: str) -> Manifest:
    damaged = SnapshotDamaged(f"The manifest of snapshot {tag} is damaged", hint=render_remedy(tag))
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise damaged from error
    if not isinstance(raw, dict) or type(raw.get("format")) is not int:
        raise damaged
    if not _OLDEST_FORMAT <= raw["format"] <= FORMAT:
        raise SnapshotIncompatible(
            f"Snapshot {tag} has format {raw['format']}, this forkd reads formats {_OLDEST_FORMAT} to {FORMAT}",
            hint="Make the snapshot again with this version of forkd",
        )
    try:
        manifest = _parse_fields(raw)
        if raw["format"] >= 2:
            manifest = _parse_branch(raw, manifest)
    except (KeyError, TypeError, ValueError, ForkdError) as error:
        raise damaged from error
    if manifest.tag != tag:
        raise SnapshotDamaged(
            f"The manifest of snapshot {tag} is for {manifest.tag}: it was copied or renamed by hand",
            hint=render_remedy(tag),
        )
    return manifest


def find_image_id(data: bytes) -> str | None:
    """The image of a manifest that may be damaged, or of a newer format."""
    try:
        return _typed(json.loads(data), "image_id", str)
    except (KeyError, TypeError, ValueError, RecursionError):
        return None


def find_parent(data: bytes) -> Parent | None:
    """The parent of a manifest that may be damaged, or of a newer format."""
    try:
        return _parse_parent(_typed(json.loads(data), "parent", dict))
    except (KeyError, TypeError, ValueError, RecursionError, ForkdError):
        return None


def render_remedy(tag: str) -> str:
    return f"Remove it and make it again: forkd snapshot rm {tag}"


def _parse_fields(raw: dict[str, Any]) -> Manifest:
    machine, platform = _typed(raw, "machine", dict), _typed(raw, "platform", dict)
    created_at_unix = _typed(raw, "created_at_unix", int)
    if not 0 <= created_at_unix <= _LATEST_UNIX:
        raise ValueError(f"created_at_unix is {created_at_unix}")
    return Manifest(
        tag=parse_tag(_typed(raw, "tag", str)),
        created_at_unix=created_at_unix,
        engine=_typed(raw, "engine", str),
        image_id=_typed(raw, "image_id", str),
        machine=MachineSpec(
            _typed(machine, "memory_mib", int),
            _typed(machine, "vcpus", int),
            _typed(machine, "cpu_template", str) if "cpu_template" in machine else None,
        ),
        warm=_typed(raw, "warm", str),
        platform={key: _typed(platform, key, str) for key in platform},
        files=parse_sums(raw["files"]),
        rehearsal=_typed(raw, "rehearsal", str) if "rehearsal" in raw else None,
    )


def _parse_branch(raw: dict[str, Any], manifest: Manifest) -> Manifest:
    """What format 2 added."""
    return replace(
        manifest,
        parent=_parse_parent(_typed(raw, "parent", dict)) if "parent" in raw else None,
        settled=_typed(raw, "settled", bool),
        origin=_parse_origin(_typed(raw, "origin", dict)) if "origin" in raw else None,
        network=parse_network(_typed(raw, "network", dict)) if "network" in raw else NO_NETWORK,
    )


def _parse_parent(raw: dict[str, Any]) -> Parent:
    digest = _typed(raw, "hash", str)
    if _SHA256.fullmatch(digest) is None:
        raise ValueError("the hash of a parent is not a SHA-256")
    return Parent(parse_tag(_typed(raw, "tag", str)), digest)


def _render_origin(origin: Origin) -> dict[str, Any]:
    return {key: value for key, value in asdict(origin).items() if value is not None}


def _parse_origin(raw: dict[str, Any]) -> Origin:
    """Fields of newer versions are ignored."""
    fields: dict[str, Any] = {"auto": _typed(raw, "auto", bool)}
    fields |= {key: _text(raw, key) for key in ("branched_from", "lineage", "mode", "checkpoint") if key in raw}
    fields |= {key: _number(raw, key, int, float) for key in ("at_unix", "pause_ms", "diff_ms") if key in raw}
    fields |= {key: _number(raw, key, int) for key in ("depth", "bytes_dirty", "bytes_written") if key in raw}
    return Origin(**fields)


def _text(raw: dict[str, Any], key: str) -> str:
    value = _typed(raw, key, str)
    if len(value) > _MAX_TEXT:
        raise ValueError(f"{key} has more than {_MAX_TEXT} characters")
    return value


def _number(raw: dict[str, Any], key: str, *kinds: type) -> Any:
    value = raw[key]
    if type(value) not in kinds or not 0 <= value < _MAX_NUMBER:  # NaN is neither
        raise ValueError(f"{key} is {value}")
    return value


def _typed(raw: dict[str, Any], key: str, kind: type[T]) -> T:
    value = raw[key]
    if type(value) is not kind:
        raise TypeError(f"{key} is not a {kind.__name__}")
    return value
