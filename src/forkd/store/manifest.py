"""What a snapshot says about itself, in its manifest.json. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from forkd.errors import ForkdError, SnapshotDamaged, SnapshotIncompatible
from forkd.host.files import FileSum, dump_sums, parse_sums
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag

FORMAT = 1
# The end of the year 9999, the last that calendar functions know.
_LATEST_UNIX = 253_402_300_799

T = TypeVar("T")


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
    if raw["format"] != FORMAT:
        raise SnapshotIncompatible(
            f"Snapshot {tag} has format {raw['format']}, this forkd reads format {FORMAT}",
            hint="Make the snapshot again with this version of forkd",
        )
    try:
        manifest = _parse_fields(raw)
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


def _typed(raw: dict[str, Any], key: str, kind: type[T]) -> T:
    value = raw[key]
    if type(value) is not kind:
        raise TypeError(f"{key} is not a {kind.__name__}")
    return value
