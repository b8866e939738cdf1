"""What a daemon does without being asked: it goes on whatever fails, and no sandbox waits for another."""

import asyncio
import logging
import sqlite3
import time
from typing import Any

import pytest
from runtime_cases import make, opened, until

from forkd.engines.fake import FakeEngine, FakeMachine
from forkd.errors import Conflict, NotFound
from forkd.host.paths import Home
from forkd.model.names import parse_tag
from forkd.model.sandbox import OnTimeout, SandboxSpec, State
from forkd.runtime import upkeep
from forkd.runtime.ended import KEPT, RecentlyEnded, render_age
from forkd.runtime.registry import IdempotencyKey
from forkd.runtime.runtime import Runtime

pytestmark = pytest.mark.usefixtures("nothing_left")

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "TICK_S", 0.02)
    monkeypatch.setattr(upkeep, "RETRY_S", 0.05)


async def spawn(runtime: Runtime, n: int = 1, **more: Any) -> list[str]:
    spawned = await runtime.spawn(SandboxSpec(parse_tag("warm"), n, **more))
    return [record.id for record in spawned.records]


async def until_gone(runtime: Runtime, sandbox_id: str) -> None:
    await until(lambda: sandbox_id not in runtime.sandboxes.live, f"the end of {sandbox_id}")


async def test_a_slow_end_holds_up_no_other(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = await spawn(runtime, 2)
    may_end, kill = asyncio.Event(), FakeMachine.kill
    stuck = runtime.sandboxes.live[slow].machine

    async def wait_and_kill(machine: FakeMachine) -> None:
        if machine is stuck:
            await may_end.wait()
        await kill(machine)

    monkeypatch.setattr(FakeMachine, "kill", wait_and_kill)
    runtime.sandboxes.set_timeout(slow, 0.01)
    await until(lambda: runtime.sandboxes.live[slow].state is State.STOPPING, "the slow one to be ended")
    runtime.sandboxes.set_timeout(other, 0.01)
    await until_gone(runtime, other)
    assert runtime.sandboxes.get(slow).state is State.STOPPING
    may_end.set()
    await until_gone(runtime, slow)


@pytest.mark.parametrize("by_request", [False, True])
async def test_an_end_that_fails_is_tried_again_until_it_is_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, by_request: bool
) -> None:
    [sandbox_id] = await spawn(runtime)
    failures, kill = [TimeoutError(), OSError("no"), TimeoutError()], FakeMachine.kill

    async def fail_or_kill(machine: FakeMachine) -> None:
        if failures:
            raise failures.pop()
        await kill(machine)

    monkeypatch.setattr(FakeMachine, "kill", fail_or_kill)
    if by_request:
        with pytest.raises(TimeoutError):
            await runtime.sandboxes.kill(sandbox_id)
    else:
        runtime.sandboxes.set_timeout(sandbox_id, 0.01)
    await until_gone(runtime, sandbox_id)
    assert failures == []
    with pytest.raises(NotFound, match="was removed" if by_request else "ended at its timeout"):
        runtime.sandboxes.get(sandbox_id)
    timeouts = runtime.events.list(type="sandbox.timeout", sandbox_id=sandbox_id)
    assert len(timeouts) == (0 if by_request else 1)


async def test_a_pause_at_the_deadline_that_fails_is_tried_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    [sandbox_id] = await spawn(runtime)
    failures, pause = [OSError("no"), OSError("no")], FakeMachine.pause

    async def fail_or_pause(machine: FakeMachine) -> None:
        if failures:
            raise failures.pop()
        await pause(machine)

    monkeypatch.setattr(FakeMachine, "pause", fail_or_pause)
    runtime.sandboxes.set_timeout(sandbox_id, 0.01, OnTimeout.PAUSE)
    await until(lambda: runtime.sandboxes.get(sandbox_id).state is State.PAUSED, "the pause")
    await until(lambda: runtime.sandboxes.get(sandbox_id).deadline_unix is None, "the deadline to go")
    assert len(runtime.events.list(type="sandbox.timeout", sandbox_id=sandbox_id)) == 1


async def test_upkeep_survives_every_error_and_says_so_now_and_then(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks = []

    def fail(_: object) -> list[str]:
        looks.append(1)
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(upkeep, "_FORGET_EVERY_TICKS", 1)
    monkeypatch.setattr(runtime.registry, "list_ended_before", fail)
    [sandbox_id] = await spawn(runtime)
    with caplog.at_level(logging.WARNING, "forkd.runtime.upkeep"):
        await until(lambda: len(looks) > 5, "some failures")
    assert len(caplog.records) == 1
    runtime.sandboxes.set_timeout(sandbox_id, 0.01)
    await until_gone(runtime, sandbox_id)
    assert runtime.ready


async def test_a_daemon_whose_upkeep_has_ended_is_not_ready(runtime: Runtime) -> None:
    assert runtime.ready
    [task] = [task for task in asyncio.all_tasks() if task.get_name() == "upkeep"]
    task.cancel()
    await until(lambda: not runtime.ready, "it to be noticed")


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_a_jump_of_the_wall_clock_ends_and_extends_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    long, short, dead = await spawn(runtime, 3, timeout_s=60.0)
    await runtime.sandboxes.live[dead].machine.kill()
    await until(lambda: runtime.sandboxes.get(dead).state is State.DEAD, "its death")
    before = runtime.sandboxes.get(long).deadline_unix
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + jump_s)
    monkeypatch.setattr(upkeep, "_FORGET_EVERY_TICKS", 1)
    assert before is not None
    await until(lambda: abs((runtime.sandboxes.get(long).deadline_unix or 0) - before - jump_s) < 1, "the display")
    runtime.sandboxes.set_timeout(short, 0.01)
    await until_gone(runtime, short)
    assert {record.id for record in runtime.registry.list_sandboxes()} == {long, dead}


async def test_after_a_restart_what_is_stored_counts(fake_home: Home) -> None:
    async with Runtime.opened(fake_home, FakeEngine(outlive=True)) as runtime:
        await make(runtime, "warm")
        over, far = await spawn(runtime, 2, timeout_s=60.0)
        runtime.registry.change(over, deadline_unix=time.time() - 1)
    async with opened(fake_home, make_warm=False) as runtime:
        await until_gone(runtime, over)
        assert runtime.sandboxes.get(far).deadline_unix is not None
        left_s = (runtime.sandboxes.live[far].deadline_s or 0) - upkeep.steady_s()
        assert 0 < left_s <= 60.0


async def test_a_key_spawns_nothing_more_after_a_restart_though_its_sandboxes_are_gone(fake_home: Home) -> None:
    key = IdempotencyKey("k", "", "digest")
    spec = SandboxSpec(parse_tag("warm"))
    async with Runtime.opened(fake_home, FakeEngine(outlive=True)) as runtime:
        await make(runtime, "warm")
        [record] = (await runtime.spawn(spec, key)).records
        await runtime.sandboxes.kill(record.id)
        with pytest.raises(Conflict, match="removed since"):
            await runtime.spawn(spec, key)
    async with opened(fake_home, make_warm=False) as runtime:
        with pytest.raises(Conflict, match="removed since"):
            await runtime.spawn(spec, key)
        assert runtime.registry.list_sandboxes() == []


async def test_whoever_asks_for_one_that_has_ended_learns_why_and_when(runtime: Runtime) -> None:
    timed, removed = await spawn(runtime, 2)
    runtime.sandboxes.rename(timed, "web")
    runtime.sandboxes.set_timeout(timed, 0.01)
    await until_gone(runtime, timed)
    await runtime.sandboxes.kill(removed)
    for text, said in (
        (timed, rf"(?m)^Sandbox {timed} ended at its timeout \d+ s ago$"),
        ("web", rf"(?m)^Sandbox web \({timed}\) ended at its timeout \d+ s ago$"),
        (removed, rf"(?m)^Sandbox {removed} was removed \d+ s ago$"),
        ("nobody", "(?m)^There is no sandbox nobody$"),
    ):
        with pytest.raises(NotFound, match=said):
            runtime.sandboxes.get(text)
        with pytest.raises(NotFound, match=said):
            await runtime.sandboxes.kill(text)
        with pytest.raises(NotFound, match=said):
            runtime.sandboxes.use(text)


async def test_a_row_whose_vm_is_gone_can_be_removed_whatever_it_says(runtime: Runtime) -> None:
    [sandbox_id] = await spawn(runtime)
    live = runtime.sandboxes.live.pop(sandbox_id)
    await live.end()
    assert runtime.sandboxes.get(sandbox_id).state is State.RUNNING
    await runtime.sandboxes.kill(sandbox_id)
    assert runtime.registry.list_sandboxes() == []


async def test_the_record_of_what_has_ended_is_bounded() -> None:
    ended = RecentlyEnded()
    for number in range(KEPT + 5):
        ended.add(f"sb-{number}", None, "was removed")
    assert "There is no sandbox" in ended.absent("sb-0").message
    assert "was removed" in ended.absent(f"sb-{KEPT + 4}").message


@pytest.mark.parametrize(
    ("age_s", "said"), [(-1.0, "0 s"), (0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (200000, "2 d")]
)
async def test_an_age_is_said_in_its_largest_unit(age_s: float, said: str) -> None:
    assert render_age(age_s) == said
