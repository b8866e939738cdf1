"""Small values the SDK's methods take."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, TypedDict


class BranchMode(enum.StrEnum):
    """How a running sandbox is frozen; texts, so that `mode="live"` says the same."""

    FULL = "full"
    DIFF = "diff"
    LIVE = "live"


class FileWritten(TypedDict):
    path: str
    size: int


@dataclass(frozen=True)
class EntryInfo:
    """A file or directory in a sandbox."""

    name: str
    path: str
    type: str  # file, dir, symlink, fifo, socket, char, block, unknown
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    target: str | None  # of a symlink

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class WriteInfo:
    """A file that was written."""

    name: str
    path: str
    size: int

    @classmethod
    def of(cls, body: FileWritten) -> Self:
        return cls(body["path"].rpartition("/")[2], body["path"], body["size"])


@dataclass(frozen=True)
class Process:
    """A command that was started in the background."""

    pid: int
    args: list[str] | None
    shell: str | None
    pty: bool
    running: bool
    exit_code: int | None
    signal: int | None
    timed_out: bool
    started_at_unix: float

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        return cls(**{name: body[name] for name in cls.__dataclass_fields__})
