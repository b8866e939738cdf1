"""The fleet over the fake engine: spawn, talk, pause, deadlines, deaths, keys, workspaces, snapshots."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support_limits import cannot_limit_memory

from forkd.engines.base import BootSpec, Frozen, Machine
from forkd.engines.fake import FakeEngine
from forkd.errors import Conflict, ForkdError, GuestDied, InvalidInput, NotFound, NotRunning, Unsupported, WarmupFailed
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.model.limits import NO_LIMITS, Limits
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.model.sandbox import OnTimeout, SandboxSpec, State
from forkd.runtime.fleet import Fleet, FleetOptions
from forkd.runtime.registry import IdempotencyKey, SandboxQuery
from forkd.runtime.snapshots import SnapshotRequest
from forkd.runtime.warmup import Warmup

pytestmark = pytest.mark.usefixtures("nothing_left")

TAG = parse_tag("warm")
KILL = FleetOptions(on_stop="kill")
SPEC = SandboxSpec(TAG)


class HeldEngine(FakeEngine):
    """One whose work can be held before it begins: how long a start takes must not decide what a test sees."""

    def __init__(self) -> None:
        super().__init__(outlive=True)
        self._may = asyncio.Event()
        self._may.set()
        self._asked = asyncio.Semaphore(0)

    def hold(self) -> None:
        self._may.clear()

    def let_go(self) -> None:
        self._may.set()

    async def held(self, times: int = 1) -> None:
        """Until it was asked to boot or fork so often, and does not."""
        for _ in range(times):
            await self._asked.acquire()

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path) -> Machine:
        await self._wait()
        return await super().boot(spec, directory, memory_in)

    async def fork(self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS) -> Machine:
        await self._wait()
        return await super().fork(frozen, directory, limits)

    async def _wait(self) -> None:
        if not self._may.is_set():
            self._asked.release()
            await self._may.wait()


def request(warm: str = "x = 41", tag: str = "warm", **fields: object) -> SnapshotRequest:
    return SnapshotRequest(parse_tag(tag), "python", MachineSpec(128), Warmup(warm), **fields)  # type: ignore[arg-type]


async def make(fleet: Fleet, **fields: object) -> None:
    await fleet.snapshots.create(request(**fields))  # type: ignore[arg-type]
    await fleet.snapshots.wait(str(fields.get("tag", "warm")))


def run(
    home: Home,
    work: Callable[[Fleet], Awaitable[None]],
    options: FleetOptions = KILL,
    engine: FakeEngine | None = None,
) -> None:
    """`work` over a fleet with the snapshot `warm`; whatever it leaves is killed."""

    async def inside() -> None:
        async with asyncio.timeout(120), Fleet.opened(home, engine or FakeEngine(outlive=True), options) as fleet:
            await make(fleet)
            await work(fleet)

    asyncio.run(inside())
    assert find_marked(home.runtime) == {}
    assert list(home.vms.iterdir()) == []


async def until(condition: Callable[[], bool], what: str, within_s: float = 15.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.05)


def test_spawned_sandboxes_answer_and_are_recorded(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        spawned = await fleet.spawn(SandboxSpec(TAG, n=3, labels={"a": "b"}))
        assert len(spawned.records) == 3 and spawned.failed == 0 and len(spawned.contract_s) == 3
        assert len({record.agent_port for record in spawned.records}) == 3
        for record in spawned.records:
            assert record.state is State.RUNNING and record.pid
            async with fleet.use(record.id) as live:
                assert (await live.agent.eval("x + 1")).repr == "42"
        page, after = fleet.find(SandboxQuery(limit=2))
        rest, end = fleet.find(SandboxQuery(limit=2, after=after or 0))
        assert [record.id for record in page + rest] == [record.id for record in spawned.records]
        assert end is None

    run(fake_home, work)


def test_a_killed_sandbox_is_gone_and_a_second_kill_finds_nothing(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        (record,) = (await fleet.spawn(SPEC)).records
        outcomes = await asyncio.gather(fleet.kill(record.id), fleet.kill(record.id), return_exceptions=True)
        assert sorted(type(outcome) for outcome in outcomes if outcome) == [NotFound]
        with pytest.raises(NotFound):
            fleet.get(record.id)
        assert record.pid and not os.path.exists(f"/proc/{record.pid}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", record.agent_port), timeout=5)

    run(fake_home, work)


@pytest.mark.parametrize("name", ["", "sb-", "../../etc", "sb-00000000000", "sb-0000000000", "sb-zzzzzzzzzz", "a\0b"])
def test_what_is_no_id_is_not_found(fake_home: Home, name: str) -> None:
    async def work(fleet: Fleet) -> None:
        with pytest.raises(NotFound):
            fleet.get(name)
        with pytest.raises(NotFound):
            await fleet.kill(name)
        with pytest.raises(NotFound):
            fleet.use(name)

    run(fake_home, work)


def test_a_paused_sandbox_refuses_and_goes_on_where_it_was(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        (record,) = (await fleet.spawn(SPEC)).records
        assert (await fleet.pause(record.id)).state is State.PAUSED
        assert (await fleet.pause(record.id)).state is State.PAUSED
        with pytest.raises(NotRunning, match="paused"):
            fleet.use(record.id)
        assert (await fleet.resume(record.id)).state is State.RUNNING
        async with fleet.use(record.id) as live:
            assert (await live.agent.eval("x")).repr == "41"

    run(fake_home, work)


def test_a_vm_that_dies_by_itself_stays_as_dead_with_its_cause(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        (record,) = (await fleet.spawn(SPEC)).records
        assert record.pid
        os.kill(record.pid, signal.SIGKILL)
        await until(lambda: fleet.get(record.id).state is State.DEAD, "its death")
        dead = fleet.get(record.id)
        assert dead.cause and dead.pid is None
        with pytest.raises(GuestDied) as caught:
            fleet.use(record.id)
        assert caught.value.status == 409
        assert [event.type for event in fleet.events.list(sandbox_id=record.id)][-1] == "sandbox.dead"
        await fleet.kill(record.id)
        with pytest.raises(NotFound):
            fleet.get(record.id)

    run(fake_home, work)


def test_a_vm_that_dies_during_a_call_says_so(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        (record,) = (await fleet.spawn(SPEC)).records
        assert record.pid
        with pytest.raises(GuestDied, match="ended while"):
            async with fleet.use(record.id) as live:
                # Its own command does it: then the call is under way for certain.
                await live.agent.run(f"kill -KILL {record.pid}; sleep 30")

    run(fake_home, work)


def test_a_lost_channel_is_made_anew(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        (record,) = (await fleet.spawn(SPEC)).records
        async with fleet.use(record.id) as live:
            live.agent.close()
        async with fleet.use(record.id) as live:
            assert (await live.agent.eval("x")).repr == "41"

    run(fake_home, work)


def test_a_deadline_kills_or_pauses(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        (killed,) = (await fleet.spawn(SandboxSpec(TAG, timeout_s=0.3))).records
        (paused,) = (await fleet.spawn(SandboxSpec(TAG, timeout_s=0.3, on_timeout=OnTimeout.PAUSE))).records
        (kept,) = (await fleet.spawn(SandboxSpec(TAG, timeout_s=0.3))).records
        fleet.set_timeout(kept.id, 300)
        await until(lambda: fleet.get(paused.id).state is State.PAUSED, "the pause")
        assert fleet.get(paused.id).deadline_unix is None
        await until(lambda: killed.id not in {one.id for one in fleet.find(SandboxQuery())[0]}, "the kill")
        assert fleet.get(kept.id).state is State.RUNNING
        assert [event.type for event in fleet.events.list(type="sandbox.timeout")] == ["sandbox.timeout"] * 2

    run(fake_home, work)


@cannot_limit_memory
def test_a_daemon_that_is_told_so_starts_without_what_it_cannot_enforce_and_says_so(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        (record,) = (await fleet.spawn(SandboxSpec(TAG, limits=Limits(memory_mib=64)))).records
        assert fleet.get(record.id).limits == NO_LIMITS

    run(fake_home, work, FleetOptions("kill", unenforced_limits="drop"))


@cannot_limit_memory
def test_a_limit_that_this_host_cannot_enforce_is_refused_and_nothing_is_left(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        for allow_partial in (False, True):
            with pytest.raises(Unsupported, match="A memory limit cannot be enforced on this host"):
                await fleet.spawn(SandboxSpec(TAG, n=2, limits=Limits(memory_mib=64), allow_partial=allow_partial))
        with pytest.raises(Unsupported):
            await fleet.workspaces.create("desk", TAG, Limits(memory_mib=64))
        assert fleet.workspaces.list() == []
        assert fleet.find(SandboxQuery())[0] == []
        assert list(fake_home.vms.iterdir()) == []

    run(fake_home, work)


def test_one_key_spawns_once_however_often_it_is_sent(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        key = IdempotencyKey("k", "", "digest")
        spec = SandboxSpec(TAG, n=2)
        first, second = await asyncio.gather(fleet.spawn(spec, key=key), fleet.spawn(spec, key=key))
        third = await fleet.spawn(spec, key=key)
        ids = [[record.id for record in spawned.records] for spawned in (first, second, third)]
        assert ids[0] == ids[1] == ids[2]
        assert fleet.counts()[State.RUNNING] == 2
        with pytest.raises(Conflict, match="another request"):
            await fleet.spawn(spec, key=IdempotencyKey("k", "", "other"))
        for sandbox_id in ids[0]:
            await fleet.kill(sandbox_id)
        with pytest.raises(Conflict, match="removed since"):
            await fleet.spawn(spec, key=key)

    run(fake_home, work)


def test_a_spawn_that_fails_leaves_no_row_port_or_key(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        await make(fleet, tag="bad", warm="import forkd\nforkd.on_fork(lambda identity: 1/0)")
        key = IdempotencyKey("k", "", "digest")
        for _ in range(2):
            with pytest.raises(ForkdError):
                await fleet.spawn(SandboxSpec(parse_tag("bad"), n=2), key=key)
        assert fleet.find(SandboxQuery())[0] == []
        assert fleet.registry.find_spawn(key) is None

    run(fake_home, work)


def test_a_port_can_be_chosen_and_is_not_given_twice(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(Conflict):
                await fleet.spawn(SandboxSpec(TAG, agent_port=port))
        assert fleet.find(SandboxQuery())[0] == []
        (record,) = (await fleet.spawn(SandboxSpec(TAG, agent_port=port))).records
        assert record.agent_port == port
        with pytest.raises(Conflict):
            await fleet.spawn(SandboxSpec(TAG, agent_port=port))

    run(fake_home, work)


def test_a_caller_that_goes_away_leaves_no_half_made_sandbox(fake_home: Home) -> None:
    engine = HeldEngine()

    async def work(fleet: Fleet) -> None:
        engine.hold()
        spawning = asyncio.create_task(fleet.spawn(SandboxSpec(TAG, n=2)))
        await engine.held(2)
        assert fleet.counts()[State.STARTING] == 2
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        engine.let_go()
        await until(lambda: fleet.counts()[State.RUNNING] == 2, "the rest of the spawn")

    run(fake_home, work, engine=engine)


def test_a_sandbox_that_is_starting_refuses(fake_home: Home) -> None:
    engine = HeldEngine()

    async def work(fleet: Fleet) -> None:
        engine.hold()
        spawning = asyncio.create_task(fleet.spawn(SPEC))
        await engine.held()
        (record,) = fleet.find(SandboxQuery())[0]
        assert record.state is State.STARTING
        for refused in (fleet.kill, fleet.pause, fleet.resume):
            with pytest.raises(NotRunning, match="starting"):
                await refused(record.id)
        with pytest.raises(NotRunning, match="starting"):
            fleet.use(record.id)
        engine.let_go()
        (spawned,) = (await spawning).records
        async with fleet.use(spawned.id) as live:
            assert (await live.agent.eval("x")).repr == "41"

    run(fake_home, work, engine=engine)


def test_a_second_daemon_for_the_same_home_is_refused(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        with pytest.raises(Conflict, match="runs already"):
            async with Fleet.opened(fake_home, FakeEngine(outlive=True)):
                pass

    run(fake_home, work)


def test_a_workspace_lives_through_suspend_resume_and_the_loss_of_its_vm(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        made = await fleet.workspaces.create("desk", "warm")
        assert made.status == "running" and made.live_sandbox_id
        with pytest.raises(Conflict):
            await fleet.workspaces.create("desk", "warm")
        async with fleet.use(made.live_sandbox_id) as live:
            await live.agent.eval("x = 'mine'")
        with pytest.raises(InvalidInput):
            await fleet.workspaces.resume("desk")
        assert (await fleet.workspaces.suspend("desk")).status == "suspended"
        with pytest.raises(InvalidInput):
            await fleet.workspaces.suspend("desk")
        resumed = await fleet.workspaces.resume("desk")
        assert resumed.live_sandbox_id == made.live_sandbox_id
        async with fleet.use(made.live_sandbox_id) as live:
            assert (await live.agent.eval("x")).value == "mine"
        await fleet.kill(made.live_sandbox_id)
        stale = fleet.workspaces.get("desk")
        assert stale.status == "stale" and stale.live_sandbox_id is None
        again = await fleet.workspaces.resume("desk")
        assert again.status == "running" and again.live_sandbox_id != made.live_sandbox_id
        await fleet.workspaces.remove("desk")
        assert fleet.find(SandboxQuery())[0] == [] and fleet.workspaces.list() == []

    run(fake_home, work)


def test_a_workspace_whose_spawn_fails_does_not_keep_its_name(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        with pytest.raises(NotFound):
            await fleet.workspaces.create("desk", "nothing")
        assert fleet.workspaces.list() == []

    run(fake_home, work)


def test_a_snapshot_is_writing_then_ready_and_tells_its_progress(fake_home: Home) -> None:
    engine = HeldEngine()

    async def work(fleet: Fleet) -> None:
        engine.hold()
        view = await fleet.snapshots.create(request(tag="second"))
        assert view.status == "writing"
        with pytest.raises(Conflict, match="already"):
            await fleet.snapshots.create(request(tag="second"))
        with pytest.raises(Conflict, match="still being made"):
            await fleet.spawn(SandboxSpec(parse_tag("second")))
        engine.let_go()
        assert (await fleet.snapshots.wait("second")).status == "ready"
        assert [view.tag for view in fleet.snapshots.list()] == ["second", "warm"]
        stages = [event.data["stage"] for event in fleet.events.list(type="snapshot.progress")]
        assert "freezing" in stages
        with pytest.raises(Conflict, match="exists already"):
            await fleet.snapshots.create(request(tag="second"))
        await fleet.snapshots.remove("second")
        with pytest.raises(NotFound):
            fleet.snapshots.get("second")
        with pytest.raises(NotFound):
            await fleet.snapshots.remove("second")

    run(fake_home, work, engine=engine)


def test_a_snapshot_that_fails_says_why_and_a_failed_replacement_changes_nothing(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.snapshots.create(request(tag="bad", warm="1/0"))
        with pytest.raises(WarmupFailed):
            await fleet.snapshots.wait("bad")
        view = fleet.snapshots.get("bad")
        assert view.status == "failed" and view.code == "warmup_failed"
        with pytest.raises(ForkdError):
            await fleet.spawn(SandboxSpec(parse_tag("bad")))
        await fleet.snapshots.create(request(warm="1/0", replace=True))
        with pytest.raises(WarmupFailed):
            await fleet.snapshots.wait("warm")
        kept = fleet.snapshots.get("warm")
        assert kept.status == "ready" and kept.code == "warmup_failed"
        (record,) = (await fleet.spawn(SPEC)).records
        async with fleet.use(record.id) as live:
            assert (await live.agent.eval("x")).repr == "41"
        await fleet.snapshots.remove("bad")

    run(fake_home, work)


def test_a_snapshot_in_the_making_can_be_given_up(fake_home: Home) -> None:
    async def work(fleet: Fleet) -> None:
        await fleet.snapshots.create(request(tag="slow", warm="import time; time.sleep(60)"))
        await asyncio.sleep(0.5)
        await fleet.snapshots.remove("slow")
        with pytest.raises(NotFound):
            fleet.snapshots.get("slow")

    run(fake_home, work)


def test_sandboxes_outlive_their_daemon_and_the_next_one_adopts_them(fake_home: Home) -> None:
    async def first() -> list[str]:
        async with Fleet.opened(fake_home, FakeEngine(outlive=True)) as fleet:
            await make(fleet)
            records = (await fleet.spawn(SandboxSpec(TAG, n=3, labels={"l": "1"}, timeout_s=600))).records
            async with fleet.use(records[0].id) as live:
                await live.agent.eval("x = 'kept'")
            await fleet.pause(records[1].id)
            return [record.id for record in records]

    async def second(ids: list[str]) -> None:
        async with asyncio.timeout(60), Fleet.opened(fake_home, FakeEngine(outlive=True), KILL) as fleet:
            states = [fleet.get(sandbox_id).state for sandbox_id in ids]
            assert states == [State.RUNNING, State.PAUSED, State.DEAD]
            assert fleet.get(ids[0]).labels == {"l": "1"} and fleet.get(ids[0]).deadline_unix
            async with fleet.use(ids[0]) as live:
                assert (await live.agent.eval("x")).value == "kept"
            await fleet.resume(ids[1])
            async with fleet.use(ids[1]) as live:
                assert (await live.agent.eval("x")).value == 41

    ids = asyncio.run(first())
    leaders = find_marked(fake_home.vms)
    assert len(leaders) == 3
    os.kill(leaders[fake_home.vms / ids[2]].pid, signal.SIGKILL)
    asyncio.run(second(ids))
    assert find_marked(fake_home.runtime) == {}
    for leader in leaders.values():  # the first fleet was us, and let go of children that were ours
        with contextlib.suppress(ChildProcessError):
            os.waitpid(leader.pid, 0)
