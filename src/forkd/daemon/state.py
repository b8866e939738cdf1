"""What all requests share, and what each carries with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from forkd.daemon.audit import AuditLog
from forkd.daemon.connection import Link
from forkd.daemon.errors import CALL
from forkd.daemon.metrics import Metrics
from forkd.image import ImageStore
from forkd.runtime.fleet import Fleet


class Activity:
    """Whether anybody wants something of this daemon."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.draining = False
        self._last = time.monotonic()
        self._endless: set[asyncio.Task[Any]] = set()

    def begin(self) -> None:
        self.in_flight += 1

    def end(self) -> None:
        self.in_flight -= 1
        self._last = time.monotonic()

    def touch(self) -> None:
        """Somebody has something here, though nobody asks."""
        self._last = time.monotonic()

    def idle_s(self) -> float:
        return 0.0 if self.in_flight else time.monotonic() - self._last

    def add_endless(self, task: asyncio.Task[Any]) -> None:
        """One that ends only when told to."""
        self._endless.add(task)
        task.add_done_callback(self._endless.discard)

    def drain(self) -> None:
        self.draining = True
        for task in list(self._endless):
            task.cancel()


@dataclass(frozen=True)
class Daemon:
    fleet: Fleet
    images: ImageStore
    metrics: Metrics
    audit: AuditLog | None
    listeners: list[str] = field(default_factory=list)  # URLs, once there are any
    activity: Activity = field(default_factory=Activity)


@dataclass
class Call:
    """One request. `sandboxes` and `code` are filled in on the way, for the audit log and the metrics."""

    daemon: Daemon
    link: Link
    id: str
    headers: Mapping[bytes, bytes]
    token: str | None = None
    sandboxes: list[str] = field(default_factory=list)
    code: str | None = None

    @property
    def fleet(self) -> Fleet:
        return self.daemon.fleet


def call_of(request: Request) -> Call:
    call = request.scope[CALL]
    assert isinstance(call, Call)
    return call
