"""What is done to a root before it is packed, in the order given: commands that are run, files that are copied."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.errors import InvalidInput
from forkd.image.root import MOUNTED_OVER

MAX_STEPS = 200
_MAX_COMMAND = 65536
_MAX_DESTINATION = 1024


@dataclass(frozen=True)
class Run:
    """A command for /bin/sh."""

    command: str

    def __post_init__(self) -> None:
        if not self.command.strip() or "\0" in self.command:
            raise InvalidInput("--run takes a shell command, got an empty one or one with a null character")
        if len(self.command) > _MAX_COMMAND:
            raise InvalidInput(
                f"--run takes at most {_MAX_COMMAND} characters, got {len(self.command)}",
                hint="Copy a script with --copy and run that",
            )

    def render(self) -> str:
        return f"--run {_shown(self.command)}"

    def describe(self) -> dict[str, Any]:
        return {"run": self.command}

    def asked(self) -> dict[str, Any]:
        return self.describe()


@dataclass(frozen=True)
class Copy:
    """A file or the content of a directory of the host, to a path of the image."""

    source: Path
    destination: str

    def __post_init__(self) -> None:
        if "\0" in str(self.source):
            raise InvalidInput("The source of --copy contains a null character")
        object.__setattr__(self, "source", self.source.absolute())
        _check_destination(self.destination)

    def render(self) -> str:
        return f"--copy {_shown(f'{self.source}:{self.destination}')}"

    def describe(self) -> dict[str, Any]:
        return {"copy": str(self.source), "to": self.destination}

    def asked(self) -> dict[str, Any]:
        """What makes the result, besides the content: the same files may be somewhere else next time."""
        return {"copy": self.source.name, "to": self.destination}


Step = Run | Copy


def parse_copy(text: str) -> Copy:
    source, colon, destination = text.rpartition(":")
    if not colon or not source or not destination:
        raise InvalidInput(f"--copy takes SRC:DEST, got {text[:200]!a}", hint="For example: --copy ./app:/srv/app")
    return Copy(Path(source), destination)


def render_step(described: Mapping[str, Any]) -> str:
    """A step as a manifest has it, for people."""
    if "run" in described:
        return f"run {described['run']}"
    return f"copy {described.get('copy')} to {described.get('to')}"


def _check_destination(destination: str) -> None:
    hint = "Give a path in the image, such as /srv/app"
    parts = destination.split("/")
    if not posixpath.isabs(destination) or ".." in parts or "\0" in destination or len(destination) > _MAX_DESTINATION:
        raise InvalidInput(f"--copy takes an absolute DEST without '..', got {destination[:200]!a}", hint=hint)
    top = next((part for part in parts if part not in ("", ".")), "")
    if top in MOUNTED_OVER:
        raise InvalidInput(f"--copy to /{top} has no effect: the guest mounts its own there", hint=hint)


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."
