"""Roots of images to put more on: one of busybox that needs no network, wheels to install, and a way to build."""

import hashlib
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

from forkd.host.tools import find_tool
from forkd.image.directory import build_directory_root, scan_copied, scan_directory
from forkd.image.layer import Layer, build_layer
from forkd.image.pack import TREE_FILE, render_tar
from forkd.image.spec import Silent
from forkd.image.steps import Copy, Step

_APPLETS = ("sh", "cat", "chmod", "echo", "id", "ip", "ln", "ls", "mkdir", "mknod", "mount", "rm", "sleep", "touch")


def make_busybox_root(root: Path) -> Path:
    """It runs shell commands, and has what looks like a Python."""
    for name in ("bin", "etc", "usr/bin", "usr/lib/python3.11/json"):
        (root / name).mkdir(parents=True)
    (root / "bin/busybox").write_bytes(find_tool("busybox").read_bytes())
    (root / "bin/busybox").chmod(0o755)
    for name in (*_APPLETS, "chroot", "dd", "kill", "nc", "setsid", "stat", "yes"):
        (root / "bin" / name).symlink_to("busybox")
    for name in ("os.py", "json/__init__.py"):
        (root / "usr/lib/python3.11" / name).write_text("")
    (root / "usr/bin/python3.11").write_bytes(b"\x7fELF")
    (root / "usr/bin/python3.11").chmod(0o755)
    (root / "usr/bin/python3").symlink_to("python3.11")
    return root


def layer_on(root: Path, steps: Sequence[Step], where: Path, progress: object = None) -> Path:
    """A directory with root.erofs: `root` with the steps done."""
    base, out, work = where / "base", where / "out", where / "out/work"
    for directory in (base, out, work):
        directory.mkdir(parents=True)
    build_directory_root(root, scan_directory(root), render_tar, base, Silent())
    digests = [scan_copied(step.source) for step in steps if isinstance(step, Copy)]
    layer = Layer(base / TREE_FILE, "/usr/bin/python3", where, (), steps, digests)
    build_layer(layer, out, work, progress or Silent())  # type: ignore[arg-type]
    return out


def make_wheel(
    directory: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
) -> Path:
    """The least that pip installs."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    content = {
        **files,
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in content.items())
    directory.mkdir(exist_ok=True)
    wheel = directory / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in {**content, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return wheel


def _digest(data: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
