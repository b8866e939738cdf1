"""What happened, in order: kept in the registry, and told to whoever follows."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from forkd.runtime.registry import Registry

KEPT = 10_000
_FORGET_EVERY = 500
_PAGE = 500


@dataclass(frozen=True)
class EventRecord:
    id: int
    ts_unix: float
    type: str
    sandbox_id: str | None
    snapshot_tag: str | None
    data: dict[str, Any]


class EventLog:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._news = asyncio.Event()

    def emit(
        self,
        type: str,
        *,
        sandbox_id: str | None = None,
        snapshot_tag: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """A part of the transaction under way, if there is one."""
        number = self._registry.insert_event(time.time(), type, sandbox_id, snapshot_tag, data or {})
        if number % _FORGET_EVERY == 0:
            self._registry.forget_events_through(number - KEPT)
        self._news.set()
        self._news = asyncio.Event()

    def list(
        self, *, since: int = 0, type: str | None = None, sandbox_id: str | None = None, limit: int = 1000
    ) -> list[EventRecord]:
        return [_parse(row) for row in self._registry.list_events(since, type, sandbox_id, limit)]

    async def follow(
        self, *, since: int | None = None, type: str | None = None, sandbox_id: str | None = None
    ) -> AsyncIterator[EventRecord]:
        """Those after `since`, or from now on. Whoever is slow reads later: nothing is queued for them."""
        cursor = self._registry.last_event_id() if since is None else since
        while True:
            news = self._news
            page = self.list(since=cursor, type=type, sandbox_id=sandbox_id, limit=_PAGE)
            for event in page:
                cursor = event.id
                yield event
            if not page:
                await news.wait()


def _parse(row: sqlite3.Row) -> EventRecord:
    return EventRecord(
        row["id"], row["ts_unix"], row["type"], row["sandbox_id"], row["snapshot_tag"], json.loads(row["data"])
    )
