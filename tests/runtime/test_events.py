"""Events: kept in order, followed without queues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.runtime import events as events_module
from forkd.runtime.events import EventLog
from forkd.runtime.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    opened = Registry(tmp_path / "registry.db")
    yield opened
    opened.close()


def test_a_follower_gets_what_was_and_what_comes(registry: Registry) -> None:
    async def run() -> list[str]:
        log = EventLog(registry)
        log.emit("sandbox.created", sandbox_id="a")
        seen: list[str] = []

        async def follow() -> None:
            async for event in log.follow(since=0):
                seen.append(event.type)
                if len(seen) == 3:
                    return

        async with asyncio.timeout(5):
            task = asyncio.create_task(follow())
            await asyncio.sleep(0.01)
            log.emit("sandbox.running", sandbox_id="a")
            await asyncio.sleep(0.01)
            log.emit("sandbox.removed", sandbox_id="a")
            await task
        return seen

    assert asyncio.run(run()) == ["sandbox.created", "sandbox.running", "sandbox.removed"]


def test_without_since_only_news_is_told(registry: Registry) -> None:
    async def run() -> str:
        log = EventLog(registry)
        log.emit("daemon.started")
        follower = log.follow(type="sandbox.dead")
        first = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0.01)
        log.emit("sandbox.created", sandbox_id="a")
        log.emit("sandbox.dead", sandbox_id="a", data={"cause": "ü"})
        async with asyncio.timeout(5):
            event = await first
        await follower.aclose()
        return f"{event.type} {event.data['cause']}"

    assert asyncio.run(run()) == "sandbox.dead ü"


def test_an_event_of_a_transaction_that_failed_never_was(registry: Registry) -> None:
    async def run() -> None:
        log = EventLog(registry)
        with pytest.raises(RuntimeError), registry.transaction():
            log.emit("sandbox.created", sandbox_id="a")
            raise RuntimeError("crash")
        assert log.list() == []

    asyncio.run(run())


def test_old_events_are_forgotten(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "KEPT", 1000)

    async def run() -> None:
        log = EventLog(registry)
        with registry.transaction():
            for number in range(2600):
                log.emit("snapshot.progress", data={"n": number})
        kept = log.list(limit=5000)
        assert 1000 <= len(kept) < 1600
        assert kept[-1].data == {"n": 2599}

    asyncio.run(run())
