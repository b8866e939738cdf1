"""An image on its way to another machine: what it is, and its files. Pure."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.host.files import FileSum
from forkd.image.manifest import ROLES, FileRef, Manifest, digest_id

IMPORTED = "import"  # the kind of the one piece that all files of such an image are in
SOURCE = "pack"
_TEXTS = ("kernel_version", "python")
_TABLES = ("packages", "pip")
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,200}", re.ASCII)


@dataclass(frozen=True)
class Parts:
    """`files` by role: where each is, with its size and digest."""

    facts: Mapping[str, Any]
    files: Mapping[str, tuple[Path, FileSum]]


def describe_facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "created": manifest.created,
        **{key: getattr(manifest, key) for key in _TEXTS},
        **{key: dict(getattr(manifest, key)) for key in _TABLES},
    }


def parse_facts(image_id: str, facts: Mapping[str, Any], sums: Mapping[str, FileSum]) -> Manifest:
    """The manifest of an image from elsewhere. Raises ValueError for one that is not what it says."""
    if digest_id({role: sums[role].sha256 for role in ROLES}) != image_id:
        raise ValueError("the id of the image is not that of its files")
    created: Any = facts.get("created")
    if type(created) not in (int, float) or not 0 <= created < 253_402_300_799:
        raise ValueError("the image was made at no time")
    for key, kind in (*((key, str) for key in _TEXTS), *((key, dict) for key in _TABLES)):
        if not isinstance(facts.get(key), kind):
            raise ValueError(f"{key} of the image is not of the type {kind.__name__}")
    if not all(_PRINTABLE.fullmatch(facts[key]) for key in _TEXTS):
        raise ValueError("the image has a version that cannot be shown")
    for name, value in facts["packages"].items():
        if not isinstance(value, str):
            raise ValueError(f"the version of {name} is not text")
    for name, value in facts["pip"].items():
        if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
            raise ValueError(f"the wheel of {name} is not a table of texts")
    piece = f"{IMPORTED}-{image_id[:24]}-{secrets.token_hex(4)}"
    return Manifest(
        id=image_id,
        created=float(created),
        kernel_version=facts["kernel_version"],
        python=facts["python"],
        # How it was built is known where it was built: here its recipe finds no pieces.
        source={"kind": SOURCE},
        packages=facts["packages"],
        pip=facts["pip"],
        files={role: FileRef(piece, role, sums[role]) for role in ROLES},
        inputs=(),
    )
