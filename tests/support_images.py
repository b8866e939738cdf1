"""Homes of tests, and what they hold: an image that only the fake engine boots, a snapshot that others share."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forkd.host.files import digest_file
from forkd.host.marked import find_marked, kill_marked
from forkd.host.paths import Home
from forkd.image import Image, ImageStore
from forkd.image.manifest import MANIFEST_FILE, compose_manifest, render_manifest
from forkd.image.pieces import Piece

_FACTS = {"python": "/usr/bin/python3", "kernel_version": "6.1.0-test"}


@contextmanager
def made_home(root: Path, images: Path | None = None) -> Iterator[Home]:
    """With the images of another, if given. Its runtime directory's path is short: sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        home = Home(root, Path(runtime))
        root.mkdir(mode=0o700, exist_ok=True)
        if images is not None:
            home.images.symlink_to(images, target_is_directory=True)
        yield home
        left = find_marked(home.runtime)
        kill_marked(home.runtime)
        assert left == {}, "VMs were left running"
        assert [path.name for path in home.vms.glob("*")] == []


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


def link_snapshot(snapshot: Path, home: Home) -> None:
    """Give a home a snapshot made elsewhere. Its files are not copied: nobody writes to them."""
    home.snapshots.mkdir(parents=True)
    subprocess.run(["cp", "-al", str(snapshot), str(home.snapshots)], check=True)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
