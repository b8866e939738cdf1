"""An image, and the manifest that describes it on disk."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkd.errors import SnapshotDamaged
from forkd.host.files import FileSum
from forkd.image.pieces import Piece

FORMAT = 1
MANIFEST_FILE = "manifest.json"
ROLES = ("root", "kernel", "initrd")
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True)
class Image:
    """A root file system with the kernel and the initramfs it boots with."""

    id: str
    name: str | None
    dir: Path
    root: Path
    kernel: Path
    initrd: Path
    kernel_version: str
    python: str
    size: int
    created: float
    source: Mapping[str, Any]
    packages: Mapping[str, str] = field(repr=False)
    # By name: its version and the SHA-256 of its wheel.
    pip: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class FileRef:
    """A file of a piece, with its size and digest."""

    piece: str
    name: str
    sum: FileSum


@dataclass(frozen=True)
class Manifest:
    """`files` by role; `inputs` are the pieces that the root was made from, kept for the next build."""

    id: str
    created: float
    kernel_version: str
    python: str
    source: dict[str, Any]
    packages: dict[str, str]
    pip: dict[str, dict[str, str]]
    files: dict[str, FileRef]
    inputs: tuple[str, ...]

    @property
    def pieces(self) -> set[str]:
        return {*self.inputs, *(file.piece for file in self.files.values())}

    def image(self, directory: Path, pieces: Path, name: str | None) -> Image:
        paths = {role: pieces / file.piece / file.name for role, file in self.files.items()}
        return Image(
            id=self.id,
            name=name,
            dir=directory,
            root=paths["root"],
            kernel=paths["kernel"],
            initrd=paths["initrd"],
            kernel_version=self.kernel_version,
            python=self.python,
            size=sum(file.sum.size for file in self.files.values()),
            created=self.created,
            source=self.source,
            packages=self.packages,
            pip=self.pip,
        )


def is_image_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def compose_manifest(
    chosen: Mapping[str, tuple[Piece, str]], source: dict[str, Any], created: float, inputs: Sequence[Piece] = ()
) -> Manifest:
    """From one piece and file name per role. The id is a digest of the content only."""
    facts: dict[str, Any] = {}
    for piece, _ in chosen.values():
        facts |= piece.facts
    files = {}
    for role in ROLES:
        piece, name = chosen[role]
        files[role] = FileRef(piece.name, name, piece.files[name])
    return Manifest(
        id=digest_id({role: file.sum.sha256 for role, file in files.items()}),
        created=created,
        kernel_version=facts["kernel_version"],
        python=facts["python"],
        source=source,
        packages=facts.get("packages", {}),
        pip=facts.get("pip", {}),
        files=files,
        inputs=tuple(piece.name for piece in inputs),
    )


def digest_id(sums: Mapping[str, str]) -> str:
    """The id of the image whose files have these digests."""
    content = json.dumps([FORMAT, *(sums[role] for role in ROLES)])
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def render_manifest(manifest: Manifest) -> bytes:
    files = {
        role: {"piece": file.piece, "file": file.name, "size": file.sum.size, "sha256": file.sum.sha256}
        for role, file in manifest.files.items()
    }
    value = {
        "format": FORMAT,
        "id": manifest.id,
        "created": manifest.created,
        "kernel_version": manifest.kernel_version,
        "python": manifest.python,
        "source": manifest.source,
        "files": files,
        "packages": manifest.packages,
        "pip": manifest.pip,
        "inputs": list(manifest.inputs),
    }
    return json.dumps(value, indent=1).encode() + b"\n"


def parse_manifest(data: bytes, where: Path) -> Manifest:
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise SnapshotDamaged(
                f"The image manifest {where} has the unknown format {value['format']}",
                hint="Build the image again with this forkd",
            )
        files = {role: _parse_file(value["files"][role]) for role in ROLES}
        return Manifest(
            id=str(value["id"]),
            created=float(value["created"]),
            kernel_version=str(value["kernel_version"]),
            python=str(value["python"]),
            source=dict(value["source"]),
            packages=dict(value["packages"]),
            # Absent before images had them.
            pip={str(name): dict(wheel) for name, wheel in value.get("pip", {}).items()},
            files=files,
            inputs=tuple(map(str, value.get("inputs", ()))),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotDamaged(f"The image manifest {where} is damaged", hint="Build the image again") from error


def _parse_file(entry: dict[str, Any]) -> FileRef:
    piece, name = str(entry["piece"]), str(entry["file"])
    # They become paths, so each must be one plain name.
    if {piece, name} & {"", ".", ".."} or "/" in piece + name:
        raise ValueError(f"{piece}/{name}")
    return FileRef(piece, name, FileSum(int(entry["size"]), str(entry["sha256"])))
