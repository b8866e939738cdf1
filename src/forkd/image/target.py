"""Which wheels fit an image: its Python's version and its C library's, both found without running anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.image.root import Tree, resolve

# PEP 600: the first glibc that wheels name. PEP 656: the musl versions that wheels are made for.
_FIRST_GLIBC = 5
_USUAL_GLIBC = 17
_MUSL_PLATFORMS = ("musllinux_1_2_x86_64", "musllinux_1_1_x86_64")
_MUSL_LOADER = "lib/ld-musl-x86_64.so.1"
_GLIBC_PLACES = ("lib/x86_64-linux-gnu", "lib64", "usr/lib64", "usr/lib")
_GLIBC_VERSION = re.compile(rb"stable release version 2\.(\d{1,3})")
_MAX_LIBC_BYTES = 16 << 20


@dataclass(frozen=True)
class Target:
    """`platforms` as wheels name them, the best first."""

    minor: int
    platforms: tuple[str, ...]

    @property
    def version(self) -> str:
        return f"3.{self.minor}"

    def markers(self) -> dict[str, str]:
        """What requirements may ask about the Python they are installed for. Its last number is not known here."""
        return {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{self.version}.0",
            "python_version": self.version,
            "sys_platform": "linux",
        }

    def as_json(self) -> dict[str, Any]:
        return {"minor": self.minor, "platforms": list(self.platforms)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Target:
        return cls(int(value["minor"]), tuple(map(str, value["platforms"])))


def debian_target(minor: int, libc_version: str) -> Target:
    match = re.match(r"2\.(\d{1,3})", libc_version)
    return Target(minor, _glibc_platforms(int(match[1]) if match else _USUAL_GLIBC))


def directory_target(directory: Path, tree: Tree, minor: int) -> Target:
    if resolve(tree, _MUSL_LOADER) is not None:
        return Target(minor, _MUSL_PLATFORMS)
    return Target(minor, _glibc_platforms(_find_glibc(directory, tree)))


def _glibc_platforms(minor: int) -> tuple[str, ...]:
    named = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}
    platforms = []
    for number in range(minor, _FIRST_GLIBC - 1, -1):
        platforms += [f"manylinux_2_{number}_x86_64", *([named[number]] if number in named else [])]
    return (*platforms, "linux_x86_64")


def _find_glibc(directory: Path, tree: Tree) -> int:
    for place in _GLIBC_PLACES:
        found = resolve(tree, f"{place}/libc.so.6")
        if found is None:
            continue
        try:
            with (directory / found).open("rb") as file:
                match = _GLIBC_VERSION.search(file.read(_MAX_LIBC_BYTES))
        except OSError:
            continue
        if match is not None:
            return int(match[1])
    return _USUAL_GLIBC
