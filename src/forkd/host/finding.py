"""What a probe says about one thing of the host."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but worse than it could
    FAIL = "fail"  # something of forkd does not work without it
    INFO = "info"  # nothing depends on it


@dataclass(frozen=True)
class Finding:
    name: str
    status: Status
    found: str
    remedy: str | None = None
