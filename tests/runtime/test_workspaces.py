"""Changes of one workspace wait for each other: it never has two sandboxes, and a removed one has none."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from runtime_cases import opened, until

from forkd.engines.base import Frozen, Machine, Nic
from forkd.engines.fake import FakeEngine
from forkd.errors import InvalidInput
from forkd.host.paths import Home
from forkd.model.machine import NO_LIMITS, Limits
from forkd.runtime.runtime import Runtime

pytestmark = pytest.mark.usefixtures("nothing_left")


class SlowEngine(FakeEngine):
    """Forks when it may."""

    def __init__(self) -> None:
        super().__init__(outlive=True)
        self.may_fork = asyncio.Event()
        self.forking = 0

    async def fork(
        self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        self.forking += 1
        await self.may_fork.wait()
        return await super().fork(frozen, directory, limits, nic)


@pytest.fixture
async def engine() -> SlowEngine:
    return SlowEngine()


@pytest.fixture
async def runtime(fake_home: Home, engine: SlowEngine) -> AsyncIterator[Runtime]:
    async with opened(fake_home, engine) as runtime:
        yield runtime
        assert runtime.registry.list_sandboxes() == [] and runtime.workspaces.list() == []


async def test_five_that_resume_at_once_get_one_sandbox(runtime: Runtime, engine: SlowEngine) -> None:
    engine.may_fork.set()
    made = await runtime.workspaces.create("desk", "warm")
    assert made.live_sandbox_id
    await runtime.sandboxes.kill(made.live_sandbox_id)
    outcomes = await asyncio.gather(*(runtime.workspaces.resume("desk") for _ in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes].count(InvalidInput) == 4, outcomes
    [record] = runtime.registry.list_sandboxes()
    assert runtime.workspaces.get("desk").live_sandbox_id == record.id
    await runtime.workspaces.remove("desk")


async def test_one_that_is_removed_while_it_is_made_leaves_no_orphan(runtime: Runtime, engine: SlowEngine) -> None:
    making = asyncio.create_task(runtime.workspaces.create("desk", "warm"))
    await until(lambda: engine.forking, "the fork")
    removing = asyncio.create_task(runtime.workspaces.remove("desk"))
    again = asyncio.create_task(runtime.workspaces.create("desk", "warm"))
    engine.may_fork.set()
    assert (await making).status == "running"
    await removing
    # They take turns in the order in which they came.
    assert (await again).live_sandbox_id in runtime.sandboxes.live
    assert len(runtime.registry.list_sandboxes()) == 1
    await runtime.workspaces.remove("desk")


async def test_a_caller_that_goes_away_leaves_a_whole_workspace(runtime: Runtime, engine: SlowEngine) -> None:
    making = asyncio.create_task(runtime.workspaces.create("desk", "warm"))
    await until(lambda: engine.forking, "the fork")
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    engine.may_fork.set()
    await until(lambda: runtime.workspaces.get("desk").status == "running", "the workspace")
    [record] = runtime.registry.list_sandboxes()
    await until(lambda: record.id in runtime.sandboxes.live, "its sandbox")
    await runtime.workspaces.remove("desk")


async def test_many_changes_at_once_never_leave_an_orphan(runtime: Runtime, engine: SlowEngine) -> None:
    engine.may_fork.set()
    for _ in range(3):
        calls = [
            *(runtime.workspaces.create("desk", "warm") for _ in range(2)),
            *(runtime.workspaces.remove("desk") for _ in range(2)),
            *(runtime.workspaces.suspend("desk") for _ in range(2)),
            *(runtime.workspaces.resume("desk") for _ in range(2)),
        ]
        await asyncio.gather(*calls, return_exceptions=True)
        assert len(runtime.registry.list_sandboxes()) == len(runtime.workspaces.list()) <= 1
    for workspace in runtime.workspaces.list():
        await runtime.workspaces.remove(workspace.name)
