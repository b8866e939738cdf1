"""Events: kept in order, followed without queues."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from forkd.runtime import events as events_module
from forkd.runtime.events import EventLog, EventRecord
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


class Counting(Registry):
    """Keeps from where it was asked for events."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[int] = []

    def list_events(self, since: int, kind: str | None, sandbox_id: str | None, limit: int) -> list[EventRecord]:
        self.asked.append(since)
        return super().list_events(since, kind, sandbox_id, limit)


@pytest.mark.parametrize("wanted", [{"type": "sandbox.dead"}, {"sandbox_id": "sb-wanted"}])
async def test_a_filter_that_matches_nothing_looks_at_each_event_once(tmp_path: Path, wanted: dict[str, str]) -> None:
    with closing(Counting(tmp_path / "registry.db")) as registry:
        log = EventLog(registry)
        with registry.transaction():
            for _ in range(300):
                log.emit("snapshot.progress", sandbox_id="sb-other")
        follower = log.follow(since=0, **wanted)
        first = asyncio.ensure_future(anext(follower))
        for _ in range(50):
            await asyncio.sleep(0)
            log.emit("snapshot.progress", sandbox_id="sb-other")
        for _ in range(5):
            await asyncio.sleep(0)
        assert registry.asked[0] == 0
        assert all(since >= 300 for since in registry.asked[1:]), registry.asked
        assert len(registry.asked) == 1 or "type" not in wanted, "it is not woken for other types"
        log.emit("sandbox.dead", sandbox_id="sb-wanted")
        async with asyncio.timeout(5):
            assert (await first).sandbox_id == "sb-wanted"
        await follower.aclose()
        assert log._waiting == {}
