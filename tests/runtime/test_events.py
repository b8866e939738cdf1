"""Events: kept in order, followed without queues."""

import asyncio

import pytest

from forkd.runtime import events as events_module
from forkd.runtime.events import EventLog
from forkd.runtime.registry import Registry


async def test_a_follower_gets_what_was_and_what_comes(registry: Registry) -> None:
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
    assert seen == ["sandbox.created", "sandbox.running", "sandbox.removed"]


async def test_without_since_only_news_is_told(registry: Registry) -> None:
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
    assert (event.type, event.data["cause"]) == ("sandbox.dead", "ü")


async def test_an_event_of_a_transaction_that_failed_never_was(registry: Registry) -> None:
    log = EventLog(registry)
    with pytest.raises(RuntimeError), registry.transaction():
        log.emit("sandbox.created", sandbox_id="a")
        raise RuntimeError("crash")
    assert log.list() == []


async def test_old_events_are_forgotten(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "KEPT", 1000)
    log = EventLog(registry)
    with registry.transaction():
        for number in range(2600):
            log.emit("snapshot.progress", data={"n": number})
    kept = log.list(limit=5000)
    assert 1000 <= len(kept) < 1600
    assert kept[-1].data == {"n": 2599}
