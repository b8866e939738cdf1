"""What an image is built from: Debian packages or a directory, and what is put on top. And who hears of progress."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from forkd.errors import InvalidInput, NotFound
from forkd.image.requirements import check_requirements
from forkd.image.steps import MAX_STEPS, Step

DEFAULT_SUITE = "bookworm"
MAX_PACKAGES = 500

# Debian policy 5.6.1: lower case letters, digits, plus, minus, dot; two characters or more.
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}", re.ASCII)
_SUITE = re.compile(r"[a-z][a-z0-9.-]{0,31}", re.ASCII)
# Goes into a sources.list: one word, no quotes, no options in brackets.
_MIRROR = re.compile(r"(https?|file)://[A-Za-z0-9._~:/@%+-]{1,500}", re.ASCII)

_RECIPES = {"python": ("python3", "python3-numpy")}


@dataclass(frozen=True)
class DebianSource:
    packages: tuple[str, ...]
    suite: str = DEFAULT_SUITE
    mirror: str | None = None

    def __post_init__(self) -> None:
        if len(self.packages) > MAX_PACKAGES:
            raise InvalidInput(f"{len(self.packages)} packages are more than the {MAX_PACKAGES} an image may name")
        for package in self.packages:
            _check(
                _PACKAGE,
                package,
                "Debian package name",
                "Use names as apt prints them, such as python3-numpy",
            )
        _check(_SUITE, self.suite, "Debian suite", "Use a release name such as bookworm")
        if self.mirror is not None:
            _check(_MIRROR, self.mirror, "mirror address", "Use http://, https:// or file:// and a path")
        # The order of packages does not matter.
        object.__setattr__(self, "packages", tuple(sorted(set(self.packages))))


@dataclass(frozen=True)
class DirectorySource:
    path: Path

    def __post_init__(self) -> None:
        if "\0" in str(self.path):
            raise InvalidInput("The directory's path contains a null character")
        object.__setattr__(self, "path", self.path.absolute())


@dataclass(frozen=True)
class ImageSpec:
    """A root, with Python packages installed on top and then steps done, in their order."""

    source: DebianSource | DirectorySource
    pip: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pip", check_requirements(self.pip))
        if len(self.steps) > MAX_STEPS:
            raise InvalidInput(f"{len(self.steps)} steps are more than the {MAX_STEPS} an image may have")

    @property
    def is_layered(self) -> bool:
        return bool(self.pip or self.steps)


def recipe_names() -> tuple[str, ...]:
    return tuple(_RECIPES)


def get_recipe(name: str) -> tuple[str, ...]:
    """The packages of a ready-made recipe."""
    try:
        return _RECIPES[name]
    except KeyError:
        known = ", ".join(_RECIPES)
        raise NotFound(
            f"There is no recipe {_shown(name)}", hint=f"Known recipes: {known}; --name names the image"
        ) from None


def debian_spec(
    packages: Iterable[str],
    *,
    suite: str = DEFAULT_SUITE,
    mirror: str | None = None,
    pip: Iterable[str] = (),
    steps: Iterable[Step] = (),
) -> ImageSpec:
    return ImageSpec(DebianSource(tuple(packages), suite, mirror), tuple(pip), tuple(steps))


def directory_spec(path: Path, *, pip: Iterable[str] = (), steps: Iterable[Step] = ()) -> ImageSpec:
    return ImageSpec(DirectorySource(path), tuple(pip), tuple(steps))


def _check(pattern: re.Pattern[str], text: str, what: str, hint: str) -> None:
    if pattern.fullmatch(text) is None:
        raise InvalidInput(f"{_shown(text)} is not a legal {what}", hint=hint)


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 70 else text[:67] + "...")


class Progress(Protocol):
    def stage(self, text: str) -> None:
        """A new part of the work begins."""

    def line(self, text: str) -> None:
        """One line a tool printed."""


class Silent:
    def stage(self, text: str) -> None: ...

    def line(self, text: str) -> None: ...
