"""What happened, in order: kept in the registry, and sent to followers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from forkd.runtime.registry import EventRecord as EventRecord
from forkd.runtime.registry import Registry

KEPT = 10_000
_FORGET_EVERY = 500
_PAGE = 500


class EventLog:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._waiting: dict[asyncio.Event, str | None] = {}  # followers, each with the type it wants

    def emit(
        self,
        type: str,
        *,
        sandbox_id: str | None = None,
        snapshot_tag: str | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """A part of the transaction under way, if there is one."""
        number = self._registry.insert_event(
            EventRecord(0, time.time(), type, sandbox_id, snapshot_tag, dict(data or {}))
        )
        if number % _FORGET_EVERY == 0:
            self._registry.forget_events_through(number - KEPT)
        for news, wanted in self._waiting.items():
            if wanted in (None, type):
                news.set()

    def list(
        self, *, since: int = 0, type: str | None = None, sandbox_id: str | None = None, limit: int = 1000
    ) -> list[EventRecord]:
        return self._registry.list_events(since, type, sandbox_id, limit)

    async def follow(
        self, *, since: int | None = None, type: str | None = None, sandbox_id: str | None = None
    ) -> AsyncGenerator[EventRecord, None]:
        """Those after `since`, or from now on. A slow follower reads later: nothing is queued for it.

        What a filter left out is not looked at again: with each event a follower looks at what is new since the last
        one, and only if it is of the type it wants.
        """
        cursor = self._registry.last_event_id() if since is None else since
        news = asyncio.Event()
        self._waiting[news] = type
        try:
            while True:
                news.clear()
                latest = self._registry.last_event_id()
                page = self.list(since=cursor, type=type, sandbox_id=sandbox_id, limit=_PAGE)
                for event in page:
                    cursor = event.id
                    yield event
                if len(page) < _PAGE:
                    cursor = max(cursor, latest)
                    await news.wait()
        finally:
            del self._waiting[news]
