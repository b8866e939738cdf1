"""An image that no VM could boot, but that its store opens: for tests over the fake engine."""

from __future__ import annotations

from pathlib import Path

from forkd.host.integrity import digest_file
from forkd.host.paths import Home
from forkd.image import Image, ImageStore
from forkd.image.manifest import MANIFEST_FILE, compose_manifest, render_manifest
from forkd.image.pieces import Piece

_FACTS = {"python": "/usr/bin/python3", "kernel_version": "6.1.0-test"}


def make_image(home: Home, name: str = "small") -> Image:
    chosen = {}
    for role in ("root", "kernel", "initrd"):
        directory = home.images / f"pieces/{role}-0"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "file").write_text(f"the {role} of {name}")
        chosen[role] = (Piece(directory, 0.0, {"file": digest_file(directory / "file")}, _FACTS), "file")
    manifest = compose_manifest(chosen, {"kind": "directory", "path": "/nowhere"}, 0.0)
    _write(home.images / manifest.id / MANIFEST_FILE, render_manifest(manifest))
    _write(home.images / "names" / name, manifest.id.encode())
    return ImageStore(home).open(name)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
