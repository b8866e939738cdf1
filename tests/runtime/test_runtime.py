"""The runtime over the fake engine: spawn, talk, pause, deadlines, deaths, keys, workspaces, snapshots."""

import asyncio
import contextlib
import os
import signal
import socket
from pathlib import Path

import pytest
from runtime_cases import evaluate, make, opened, request, until
from support_limits import cannot_limit_memory

from forkd.engines.base import BootSpec, Frozen, Machine, Nic
from forkd.engines.fake import FakeEngine
from forkd.errors import Conflict, ForkdError, GuestDied, InvalidInput, NotFound, NotRunning, Unsupported, WarmupFailed
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.model.machine import NO_LIMITS, Limits
from forkd.model.names import parse_tag
from forkd.model.sandbox import OnTimeout, SandboxSpec, State
from forkd.runtime.freeze import Warmup
from forkd.runtime.registry import IdempotencyKey, SandboxQuery
from forkd.runtime.runtime import Runtime

pytestmark = pytest.mark.usefixtures("nothing_left")

TAG = parse_tag("warm")
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

    async def boot(self, spec: BootSpec, directory: Path, memory_in: Path, nic: Nic | None = None) -> Machine:
        await self._wait()
        return await super().boot(spec, directory, memory_in, nic)

    async def fork(
        self, frozen: Frozen, directory: Path, limits: Limits = NO_LIMITS, nic: Nic | None = None
    ) -> Machine:
        await self._wait()
        return await super().fork(frozen, directory, limits, nic)

    async def _wait(self) -> None:
        if not self._may.is_set():
            self._asked.release()
            await self._may.wait()


async def test_spawned_sandboxes_answer_and_are_recorded(runtime: Runtime) -> None:
    spawned = await runtime.spawn(SandboxSpec(TAG, n=3, labels={"a": "b"}))
    assert len(spawned.records) == 3 and spawned.failed == 0 and len(spawned.contract_s) == 3
    assert len({record.agent_port for record in spawned.records}) == 3
    for record in spawned.records:
        assert record.state is State.RUNNING and record.pid
        assert await evaluate(runtime, record.id, "x + 1") == 42
    page, after = runtime.sandboxes.find(SandboxQuery(limit=2))
    rest, end = runtime.sandboxes.find(SandboxQuery(limit=2, after=after or 0))
    assert [record.id for record in page + rest] == [record.id for record in spawned.records]
    assert end is None


async def test_a_killed_sandbox_is_gone_and_a_second_kill_finds_nothing(runtime: Runtime) -> None:
    (record,) = (await runtime.spawn(SPEC)).records
    outcomes = await asyncio.gather(
        runtime.sandboxes.kill(record.id), runtime.sandboxes.kill(record.id), return_exceptions=True
    )
    assert sorted(type(outcome) for outcome in outcomes if outcome) == [NotFound]
    with pytest.raises(NotFound):
        runtime.sandboxes.get(record.id)
    assert record.pid and not os.path.exists(f"/proc/{record.pid}")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", record.agent_port), timeout=5)


@pytest.mark.parametrize("name", ["", "sb-", "../../etc", "sb-00000000000", "sb-0000000000", "sb-zzzzzzzzzz", "a\0b"])
async def test_what_is_no_id_is_not_found(runtime: Runtime, name: str) -> None:
    with pytest.raises(NotFound):
        runtime.sandboxes.get(name)
    with pytest.raises(NotFound):
        await runtime.sandboxes.kill(name)
    with pytest.raises(NotFound):
        runtime.sandboxes.use(name)


async def test_a_paused_sandbox_refuses_and_goes_on_where_it_was(runtime: Runtime) -> None:
    (record,) = (await runtime.spawn(SPEC)).records
    assert (await runtime.sandboxes.pause(record.id)).state is State.PAUSED
    assert (await runtime.sandboxes.pause(record.id)).state is State.PAUSED
    with pytest.raises(NotRunning, match="paused"):
        runtime.sandboxes.use(record.id)
    assert (await runtime.sandboxes.resume(record.id)).state is State.RUNNING
    assert await evaluate(runtime, record.id, "x") == 41


async def test_a_vm_that_dies_by_itself_stays_as_dead_with_its_cause(runtime: Runtime) -> None:
    (record,) = (await runtime.spawn(SPEC)).records
    assert record.pid
    os.kill(record.pid, signal.SIGKILL)
    await until(lambda: runtime.sandboxes.get(record.id).state is State.DEAD, "its death")
    dead = runtime.sandboxes.get(record.id)
    assert dead.cause and dead.pid is None
    with pytest.raises(GuestDied) as caught:
        runtime.sandboxes.use(record.id)
    assert caught.value.status == 409
    assert [event.type for event in runtime.events.list(sandbox_id=record.id)][-1] == "sandbox.dead"
    await runtime.sandboxes.kill(record.id)
    with pytest.raises(NotFound):
        runtime.sandboxes.get(record.id)


async def test_a_vm_that_dies_during_a_call_says_so(runtime: Runtime) -> None:
    (record,) = (await runtime.spawn(SPEC)).records
    assert record.pid
    with pytest.raises(GuestDied, match="ended while"):
        async with runtime.sandboxes.use(record.id) as live:
            # Its own command does it: then the call is under way for certain.
            await live.agent.run(f"kill -KILL {record.pid}; sleep 30")


async def test_a_lost_channel_is_made_anew(runtime: Runtime) -> None:
    (record,) = (await runtime.spawn(SPEC)).records
    async with runtime.sandboxes.use(record.id) as live:
        live.agent.close()
    assert await evaluate(runtime, record.id, "x") == 41


async def test_a_deadline_kills_or_pauses(runtime: Runtime) -> None:
    (killed,) = (await runtime.spawn(SandboxSpec(TAG, timeout_s=0.3))).records
    (paused,) = (await runtime.spawn(SandboxSpec(TAG, timeout_s=0.3, on_timeout=OnTimeout.PAUSE))).records
    (kept,) = (await runtime.spawn(SandboxSpec(TAG, timeout_s=0.3))).records
    runtime.sandboxes.set_timeout(kept.id, 300)
    await until(lambda: runtime.sandboxes.get(paused.id).state is State.PAUSED, "the pause")
    assert runtime.sandboxes.get(paused.id).deadline_unix is None
    await until(lambda: killed.id not in {one.id for one in runtime.sandboxes.find(SandboxQuery())[0]}, "the kill")
    assert runtime.sandboxes.get(kept.id).state is State.RUNNING
    assert [event.type for event in runtime.events.list(type="sandbox.timeout")] == ["sandbox.timeout"] * 2


@cannot_limit_memory
async def test_a_daemon_that_is_told_so_starts_without_what_it_cannot_enforce_and_says_so(fake_home: Home) -> None:
    async with opened(fake_home, unenforced_limits="drop") as runtime:
        (record,) = (await runtime.spawn(SandboxSpec(TAG, limits=Limits(memory_mib=64)))).records
        assert runtime.sandboxes.get(record.id).limits == NO_LIMITS


@cannot_limit_memory
async def test_a_limit_that_this_host_cannot_enforce_is_refused_and_nothing_is_left(
    runtime: Runtime, fake_home: Home
) -> None:
    for allow_partial in (False, True):
        with pytest.raises(Unsupported, match="A memory limit cannot be enforced on this host"):
            await runtime.spawn(SandboxSpec(TAG, n=2, limits=Limits(memory_mib=64), allow_partial=allow_partial))
    with pytest.raises(Unsupported):
        await runtime.workspaces.create("desk", TAG, Limits(memory_mib=64))
    assert runtime.workspaces.list() == []
    assert runtime.sandboxes.find(SandboxQuery())[0] == []
    assert list(fake_home.vms.iterdir()) == []


async def test_one_key_spawns_once_however_often_it_is_sent(runtime: Runtime) -> None:
    key = IdempotencyKey("k", "", "digest")
    spec = SandboxSpec(TAG, n=2)
    first, second = await asyncio.gather(runtime.spawn(spec, key=key), runtime.spawn(spec, key=key))
    third = await runtime.spawn(spec, key=key)
    ids = [[record.id for record in spawned.records] for spawned in (first, second, third)]
    assert ids[0] == ids[1] == ids[2]
    assert runtime.sandboxes.counts()[State.RUNNING] == 2
    with pytest.raises(Conflict, match="another request"):
        await runtime.spawn(spec, key=IdempotencyKey("k", "", "other"))
    for sandbox_id in ids[0]:
        await runtime.sandboxes.kill(sandbox_id)
    with pytest.raises(Conflict, match="removed since"):
        await runtime.spawn(spec, key=key)


async def test_a_spawn_that_fails_leaves_no_row_port_or_key(runtime: Runtime) -> None:
    await make(runtime, "bad", "import forkd\nforkd.on_fork(lambda identity: 1/0)")
    key = IdempotencyKey("k", "", "digest")
    for _ in range(2):
        with pytest.raises(ForkdError):
            await runtime.spawn(SandboxSpec(parse_tag("bad"), n=2), key=key)
    assert runtime.sandboxes.find(SandboxQuery())[0] == []
    assert runtime.registry.find_spawn(key) is None


async def test_a_port_can_be_chosen_and_is_not_given_twice(runtime: Runtime) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Conflict):
            await runtime.spawn(SandboxSpec(TAG, agent_port=port))
    assert runtime.sandboxes.find(SandboxQuery())[0] == []
    (record,) = (await runtime.spawn(SandboxSpec(TAG, agent_port=port))).records
    assert record.agent_port == port
    with pytest.raises(Conflict):
        await runtime.spawn(SandboxSpec(TAG, agent_port=port))


async def test_a_caller_that_goes_away_leaves_no_half_made_sandbox(fake_home: Home) -> None:
    engine = HeldEngine()
    async with opened(fake_home, engine) as runtime:
        engine.hold()
        spawning = asyncio.create_task(runtime.spawn(SandboxSpec(TAG, n=2)))
        await engine.held(2)
        assert runtime.sandboxes.counts()[State.STARTING] == 2
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
        engine.let_go()
        await until(lambda: runtime.sandboxes.counts()[State.RUNNING] == 2, "the rest of the spawn")


async def test_a_sandbox_that_is_starting_refuses(fake_home: Home) -> None:
    engine = HeldEngine()
    async with opened(fake_home, engine) as runtime:
        engine.hold()
        spawning = asyncio.create_task(runtime.spawn(SPEC))
        await engine.held()
        (record,) = runtime.sandboxes.find(SandboxQuery())[0]
        assert record.state is State.STARTING
        for refused in (runtime.sandboxes.kill, runtime.sandboxes.pause, runtime.sandboxes.resume):
            with pytest.raises(NotRunning, match="starting"):
                await refused(record.id)
        with pytest.raises(NotRunning, match="starting"):
            runtime.sandboxes.use(record.id)
        engine.let_go()
        (spawned,) = (await spawning).records
        assert await evaluate(runtime, spawned.id, "x") == 41


async def test_a_second_daemon_for_the_same_home_is_refused(runtime: Runtime, fake_home: Home) -> None:
    with pytest.raises(Conflict, match="runs already"):
        async with Runtime.opened(fake_home, FakeEngine(outlive=True)):
            pass


async def test_a_workspace_lives_through_suspend_resume_and_the_loss_of_its_vm(runtime: Runtime) -> None:
    made = await runtime.workspaces.create("desk", "warm")
    assert made.status == "running" and made.live_sandbox_id
    with pytest.raises(Conflict):
        await runtime.workspaces.create("desk", "warm")
    async with runtime.sandboxes.use(made.live_sandbox_id) as live:
        await live.agent.eval("x = 'mine'")
    with pytest.raises(InvalidInput):
        await runtime.workspaces.resume("desk")
    assert (await runtime.workspaces.suspend("desk")).status == "suspended"
    with pytest.raises(InvalidInput):
        await runtime.workspaces.suspend("desk")
    resumed = await runtime.workspaces.resume("desk")
    assert resumed.live_sandbox_id is not None and resumed.live_sandbox_id != made.live_sandbox_id
    assert await evaluate(runtime, resumed.live_sandbox_id, "x") == "mine"
    await evaluate(runtime, resumed.live_sandbox_id, "x = 'lost'")
    await runtime.sandboxes.kill(resumed.live_sandbox_id)
    lost = runtime.workspaces.get("desk")
    assert lost.status == "suspended" and lost.live_sandbox_id is None
    again = await runtime.workspaces.resume("desk")
    assert again.status == "running" and again.live_sandbox_id is not None
    assert await evaluate(runtime, again.live_sandbox_id, "x") == "mine"
    await runtime.workspaces.remove("desk")
    assert runtime.sandboxes.find(SandboxQuery())[0] == [] and runtime.workspaces.list() == []


async def test_a_workspace_whose_spawn_fails_does_not_keep_its_name(runtime: Runtime) -> None:
    with pytest.raises(NotFound):
        await runtime.workspaces.create("desk", "nothing")
    assert runtime.workspaces.list() == []


async def test_a_snapshot_is_writing_then_ready_and_tells_its_progress(fake_home: Home) -> None:
    engine = HeldEngine()
    async with opened(fake_home, engine) as runtime:
        engine.hold()
        view = await runtime.snapshots.create(request("second"))
        assert view.status == "writing"
        with pytest.raises(Conflict, match="already"):
            await runtime.snapshots.create(request("second"))
        with pytest.raises(Conflict, match="still being made"):
            await runtime.spawn(SandboxSpec(parse_tag("second")))
        engine.let_go()
        assert (await runtime.snapshots.wait("second")).status == "ready"
        assert [view.tag for view in runtime.snapshots.list()] == ["second", "warm"]
        stages = [event.data["stage"] for event in runtime.events.list(type="snapshot.progress")]
        assert "freezing" in stages
        with pytest.raises(Conflict, match="exists already"):
            await runtime.snapshots.create(request("second"))
        await runtime.snapshots.remove("second")
        with pytest.raises(NotFound):
            runtime.snapshots.get("second")
        with pytest.raises(NotFound):
            await runtime.snapshots.remove("second")


async def test_a_snapshot_that_fails_says_why_and_a_failed_replacement_changes_nothing(runtime: Runtime) -> None:
    await runtime.snapshots.create(request("bad", Warmup("1/0")))
    with pytest.raises(WarmupFailed):
        await runtime.snapshots.wait("bad")
    view = runtime.snapshots.get("bad")
    assert view.status == "failed" and view.code == "warmup_failed"
    with pytest.raises(ForkdError):
        await runtime.spawn(SandboxSpec(parse_tag("bad")))
    await runtime.snapshots.create(request("warm", Warmup("1/0"), replace=True))
    with pytest.raises(WarmupFailed):
        await runtime.snapshots.wait("warm")
    kept = runtime.snapshots.get("warm")
    assert kept.status == "ready" and kept.code == "warmup_failed"
    (record,) = (await runtime.spawn(SPEC)).records
    assert await evaluate(runtime, record.id, "x") == 41
    await runtime.snapshots.remove("bad")


async def test_a_snapshot_in_the_making_can_be_given_up(runtime: Runtime) -> None:
    await runtime.snapshots.create(request("slow", Warmup("import time; time.sleep(60)")))
    await asyncio.sleep(0.5)
    await runtime.snapshots.remove("slow")
    with pytest.raises(NotFound):
        runtime.snapshots.get("slow")


async def test_sandboxes_outlive_their_daemon_and_the_next_one_adopts_them(fake_home: Home) -> None:
    async with Runtime.opened(fake_home, FakeEngine(outlive=True)) as runtime:
        await make(runtime, "warm")
        records = (await runtime.spawn(SandboxSpec(TAG, n=3, labels={"l": "1"}, timeout_s=600))).records
        kept, paused, killed = (record.id for record in records)
        await evaluate(runtime, kept, "x = 'kept'")
        await runtime.sandboxes.pause(paused)
    leaders = find_marked(fake_home.vms)
    assert len(leaders) == 3
    os.kill(leaders[fake_home.vms / killed].pid, signal.SIGKILL)
    async with opened(fake_home, make_warm=False) as runtime:
        states = [runtime.sandboxes.get(sandbox_id).state for sandbox_id in (kept, paused, killed)]
        assert states == [State.RUNNING, State.PAUSED, State.DEAD]
        assert runtime.sandboxes.get(kept).labels == {"l": "1"} and runtime.sandboxes.get(kept).deadline_unix
        assert await evaluate(runtime, kept, "x") == "kept"
        await runtime.sandboxes.resume(paused)
        assert await evaluate(runtime, paused, "x") == 41
        await runtime.sandboxes.kill(killed)
    for leader in leaders.values():  # the first runtime was us, and let go of children that were ours
        with contextlib.suppress(ChildProcessError):
            os.waitpid(leader.pid, 0)


async def test_a_cancelled_spawn_leaves_nothing_however_far_it_was(fake_home: Home) -> None:
    engine = HeldEngine()
    async with opened(fake_home, engine) as runtime:
        done, under_way, never = (IdempotencyKey(name, "me", "digest") for name in ("done", "under way", "never"))
        made = await runtime.spawn(SandboxSpec(TAG, n=2), key=done)
        engine.hold()
        spawning = asyncio.create_task(runtime.spawn(SandboxSpec(TAG, n=2), key=under_way))
        await engine.held(2)
        cancelling = asyncio.create_task(runtime.cancel_spawn("me", under_way.key))
        await asyncio.sleep(0)
        cancelling.cancel()  # whoever asked need not wait
        engine.let_go()
        await spawning
        assert await runtime.cancel_spawn("other", done.key) == []
        assert sorted(await runtime.cancel_spawn("me", done.key)) == sorted(record.id for record in made.records)
        for key in (under_way, never):
            await runtime.cancel_spawn("me", key.key)
        assert runtime.sandboxes.find(SandboxQuery())[0] == []
        for key in (done, under_way, never):  # their requests come late
            with pytest.raises(Conflict, match="cancelled"):
                await runtime.spawn(SandboxSpec(TAG), key=key)
        assert runtime.sandboxes.find(SandboxQuery())[0] == []


async def test_a_life_can_be_extended_and_is_not_made_shorter_by_that(runtime: Runtime) -> None:
    (record,) = (await runtime.spawn(SandboxSpec(TAG, timeout_s=500))).records
    sandboxes = runtime.sandboxes
    assert sandboxes.set_timeout(record.id, 50, extend=True).deadline_unix == record.deadline_unix
    later = sandboxes.set_timeout(record.id, 5000, extend=True).deadline_unix
    assert later is not None and record.deadline_unix is not None and later > record.deadline_unix
    assert sandboxes.set_timeout(record.id, None, extend=True).deadline_unix is None
    assert sandboxes.set_timeout(record.id, 50, extend=True).deadline_unix is None
    assert sandboxes.set_timeout(record.id, 50).deadline_unix is not None
