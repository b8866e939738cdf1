"""What a check of `forkd doctor` found."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from forkd.errors import HostLacks


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but worse than it could
    FAIL = "fail"  # a part of forkd does not work without it
    INFO = "info"  # nothing depends on it


@dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    found: str
    remedy: str | None = None

    @classmethod
    def lacking(cls, name: str, error: HostLacks) -> Finding:
        """A failure: the message, and the last line that a program printed."""
        lines = (error.details or "").splitlines()
        return cls(name, Status.FAIL, ": ".join([error.message, *lines[-1:]]), error.hint)
