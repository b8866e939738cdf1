"""Branches, forks of sandboxes, checkpoints and workspaces: the same over an engine with live forks and one without."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from runtime_cases import evaluate, opened, until

from forkd.engines.base import Engine, Opening
from forkd.engines.fake import FakeEngine
from forkd.errors import Conflict, ForkdError, InvalidInput, LimitReached, NoCapacity, NotFound, WarmupFailed
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime import branches
from forkd.runtime.branch_files import BranchRequest, Mode
from forkd.runtime.derive import DeriveRequest
from forkd.runtime.doctor import open_engine
from forkd.runtime.freeze import Warmup
from forkd.runtime.lineage import LineagePolicy
from forkd.runtime.registry import SandboxRecord
from forkd.runtime.runtime import Runtime
from forkd.runtime.workspaces import RUNNING, SUSPENDED

pytestmark = pytest.mark.usefixtures("nothing_left")

TAG, NEXT = parse_tag("warm"), parse_tag("next")
SPEC = SandboxSpec(TAG)


@pytest.fixture(params=["fake", pytest.param("qemu", marks=pytest.mark.vm)])
def engine(request: pytest.FixtureRequest) -> Engine:
    return FakeEngine(outlive=True) if request.param == "fake" else open_engine("qemu", Opening(outlive=True))


@pytest.fixture
def home(engine: Engine, request: pytest.FixtureRequest) -> Home:
    found: Home = request.getfixturevalue("fake_home" if engine.name == "fake" else "vm_home")
    return found


@pytest.fixture
async def runtime(home: Home, engine: Engine) -> AsyncIterator[Runtime]:
    async with opened(home, engine, make_warm=engine.name == "fake") as runtime:
        yield runtime


async def spawn(runtime: Runtime, tag: str = "warm", **options: Any) -> SandboxRecord:
    return (await runtime.spawn(SandboxSpec(parse_tag(tag), **options))).records[0]


async def branch(runtime: Runtime, sandbox_id: str, tag: str = "next", mode: Mode = Mode.LIVE) -> None:
    made = await runtime.branches.branch(sandbox_id, BranchRequest(parse_tag(tag), mode))
    await runtime.branches.written(made)


async def restarted(home: Home, engine: Engine, check: Any) -> None:
    """`check` runs in a runtime that finds only what is on disk, and what runs."""
    async with opened(home, engine, make_warm=False) as again:
        await check(again)


async def test_a_branch_has_what_its_source_had_at_that_moment_and_no_more(runtime: Runtime) -> None:
    source = await spawn(runtime)
    await evaluate(runtime, source.id, "y = x + 1; blob = bytes(range(256)) * 40000")
    await branch(runtime, source.id)
    await evaluate(runtime, source.id, "y = 'later'")
    child = await spawn(runtime, "next")
    assert await evaluate(runtime, child.id, "[x, y, blob == bytes(range(256)) * 40000]") == [41, 42, True]
    await evaluate(runtime, child.id, "y = 'of the child'")
    assert await evaluate(runtime, source.id, "y") == "later"
    view = runtime.snapshots.get("next")
    assert view.status == "ready" and view.manifest is not None and view.manifest.origin is not None
    assert view.manifest.parent is not None and view.manifest.parent.tag == TAG and not view.manifest.settled
    assert view.manifest.origin.branched_from == source.id
    assert (child.parent_id, child.lineage, child.depth) == (source.id, source.id, 1)
    assert runtime.sandboxes.get(source.id).branch_count == 1


async def test_a_branch_can_be_forked_before_it_is_written(runtime: Runtime) -> None:
    source = await spawn(runtime)
    await evaluate(runtime, source.id, "y = 1")
    made = await runtime.branches.branch(source.id, BranchRequest(NEXT))
    assert runtime.snapshots.get("next").usable
    child = await spawn(runtime, "next")
    assert await evaluate(runtime, child.id, "y") == 1
    await runtime.branches.written(made)
    assert runtime.snapshots.get("next").status == "ready"
    assert await evaluate(runtime, (await spawn(runtime, "next")).id, "y") == 1


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_branch_starts_from_its_files_after_a_restart(home: Home, engine: Engine, mode: Mode) -> None:
    async with opened(home, engine, make_warm=engine.name == "fake") as runtime:
        source = await spawn(runtime)
        await evaluate(runtime, source.id, "y = [n * n for n in range(100000)]")
        await branch(runtime, source.id, mode=mode)
        parent = runtime.snapshots.get("next").manifest.parent  # type: ignore[union-attr]
        assert (parent is None) == (mode is Mode.FULL)

    async def check(again: Runtime) -> None:
        for _ in range(2):  # from files, then from the template that the first one asked for
            child = await spawn(again, "next")
            assert await evaluate(again, child.id, "y == [n * n for n in range(100000)]") is True
        if mode is Mode.FULL:
            await again.snapshots.remove("warm")
            assert await evaluate(again, (await spawn(again, "next")).id, "len(y)") == 100000

    await restarted(home, engine, check)


async def test_layers_over_layers_hold_what_differs(home: Home, engine: Engine) -> None:
    async with opened(home, engine, make_warm=engine.name == "fake") as runtime:
        tag = "warm"
        for depth in range(1, 5):
            sandbox = await spawn(runtime, tag)
            await evaluate(runtime, sandbox.id, f"level{depth} = 'x' * 100000 + '{depth}'")
            await branch(runtime, sandbox.id, f"layer-{depth}", Mode.DIFF)
            await runtime.sandboxes.kill(sandbox.id)
            tag = f"layer-{depth}"
        detail = runtime.snapshots.look_at(runtime.snapshots.get("layer-3"))
        assert (detail.ancestors, detail.dependents) == (("warm", "layer-1", "layer-2"), ("layer-4",))
        with pytest.raises(Conflict, match="layer-4"):
            await runtime.snapshots.remove("layer-3")

    async def check(again: Runtime) -> None:
        child = await spawn(again, "layer-4")
        code = "[level1[-1], level2[-1], level3[-1], level4[-1], x]"
        assert await evaluate(again, child.id, code) == ["1", "2", "3", "4", 41]
        await again.snapshots.compact(parse_tag("layer-4"), parse_tag("flat"))
        await again.snapshots.remove("layer-1", cascade=True)
        assert [view.tag for view in again.snapshots.list()] == ["flat", "warm"]
        assert await evaluate(again, (await spawn(again, "flat")).id, code) == ["1", "2", "3", "4", 41]

    await restarted(home, engine, check)


async def test_forks_start_where_their_source_is_each_as_itself(runtime: Runtime) -> None:
    source = await spawn(runtime, labels={"run": "1"})
    await evaluate(runtime, source.id, "import random, socket; thought = 'five ways'")
    spawned = await runtime.fork(source.id, SandboxSpec(TAG, n=5))
    seen = [
        await evaluate(runtime, one.id, "[thought, socket.gethostname(), random.random()]") for one in spawned.records
    ]
    assert {one[0] for one in seen} == {"five ways"}
    assert len({one[2] for one in seen}) == 5
    if runtime.engine.name != "fake":
        assert [one[1] for one in seen] == [record.id for record in spawned.records]
    assert {(one.parent_id, one.depth, one.lineage) for one in spawned.records} == {(source.id, 1, source.id)}
    assert await evaluate(runtime, source.id, "thought") == "five ways"
    deeper = (await runtime.fork(spawned.records[0].id, SandboxSpec(TAG))).records[0]
    assert (deeper.depth, deeper.lineage) == (2, source.id)
    await runtime.sandboxes.kill_all()
    await until(lambda: [view.tag for view in runtime.snapshots.list()] == ["warm"], "what forks left to go")


async def test_a_command_of_the_source_goes_on_while_it_is_forked(runtime: Runtime) -> None:
    source = await spawn(runtime)
    async with runtime.sandboxes.use(source.id) as live:
        command = "for n in 1 2 3 4 5 6 7 8; do echo $n; sleep 0.2; done"
        running = asyncio.create_task(live.agent.run(command))
        await asyncio.sleep(0.3)
        forked = await runtime.fork(source.id, SandboxSpec(TAG, n=2))
        await branch(runtime, source.id)
        result = await running
    assert result.stdout.split() == [b"1", b"2", b"3", b"4", b"5", b"6", b"7", b"8"] and result.exit_code == 0
    for one in forked.records:
        assert await evaluate(runtime, one.id, "x") == 41


async def test_a_rewind_moves_a_sandbox_back_in_place(runtime: Runtime) -> None:
    source = await spawn(runtime, timeout_s=3000.0)
    before = runtime.sandboxes.get(source.id)
    await evaluate(runtime, source.id, "y = 'first'")
    first = await runtime.checkpoints.create(source.id)
    await evaluate(runtime, source.id, "y = 'second'")
    await runtime.checkpoints.create(source.id, "named")
    await evaluate(runtime, source.id, "y = 'third'")
    assert [each.name for each in runtime.checkpoints.list(source.id)] == [first.name, "named"]
    after = await runtime.checkpoints.rewind(source.id)
    assert await evaluate(runtime, source.id, "y") == "second"
    assert (after.id, after.agent_port, after.limits, after.state) == (
        before.id,
        before.agent_port,
        before.limits,
        State.RUNNING,
    )
    assert after.deadline_unix == before.deadline_unix and after.pid != before.pid
    await runtime.checkpoints.rewind(source.id, first.name)
    assert await evaluate(runtime, source.id, "y") == "first"
    await runtime.checkpoints.rewind(source.id, "named")
    assert await evaluate(runtime, source.id, "y") == "second"
    await until(lambda: len(own_vms(runtime, source.id)) == 1, "the VMs it left behind to end")
    await runtime.sandboxes.kill(source.id)
    await until(lambda: [view.tag for view in runtime.snapshots.list()] == ["warm"], "its checkpoints to go")


def own_vms(runtime: Runtime, sandbox_id: str) -> list[str]:
    return [path.name for path in runtime.home.vms.iterdir() if path.name.startswith(sandbox_id)]


async def test_a_rewound_sandbox_is_adopted_and_can_go_back_again(home: Home, engine: Engine) -> None:
    async with opened(home, engine, make_warm=engine.name == "fake") as runtime:
        pass
    async with asyncio.timeout(120), Runtime.opened(home, engine) as runtime:
        source = await spawn(runtime)
        await evaluate(runtime, source.id, "y = 'kept'")
        await runtime.checkpoints.create(source.id)
        await evaluate(runtime, source.id, "y = 'lost'")
        await runtime.checkpoints.rewind(source.id)

    async def check(again: Runtime) -> None:
        assert await evaluate(again, source.id, "y") == "kept"
        await evaluate(again, source.id, "y = 'lost again'")
        await again.checkpoints.rewind(source.id)
        assert await evaluate(again, source.id, "y") == "kept"

    await restarted(home, engine, check)


async def test_a_rewind_that_cannot_be_leaves_the_sandbox_as_it_was(runtime: Runtime) -> None:
    source = await spawn(runtime)
    await evaluate(runtime, source.id, "y = 'present'")
    with pytest.raises(NotFound, match="has no checkpoint"):
        await runtime.checkpoints.rewind(source.id)
    with pytest.raises(NotFound, match="has no checkpoint never"):
        await runtime.checkpoints.rewind(source.id, "never")
    with pytest.raises(InvalidInput):
        await runtime.checkpoints.create(source.id, "../up")
    before = runtime.sandboxes.get(source.id)
    assert await evaluate(runtime, source.id, "y") == "present"
    assert runtime.sandboxes.get(source.id) == before


async def test_a_promoted_child_takes_the_place_of_its_parent(runtime: Runtime) -> None:
    source = await spawn(runtime)
    await evaluate(runtime, source.id, "score = 0")
    children = (await runtime.fork(source.id, SandboxSpec(TAG, n=3))).records
    for number, child in enumerate(children, start=1):
        await evaluate(runtime, child.id, f"score = {number}")
    with pytest.raises(InvalidInput, match="was not forked from"):
        await runtime.checkpoints.promote(children[0].id, children[1].id)
    record = await runtime.checkpoints.promote(source.id, children[1].id)
    assert (record.id, record.agent_port) == (source.id, source.agent_port)
    assert await evaluate(runtime, source.id, "score") == 2
    assert [one.id for one in runtime.registry.list_sandboxes()] == [source.id]
    if runtime.engine.name != "fake":
        assert await evaluate(runtime, source.id, "__import__('socket').gethostname()") == source.id


async def test_what_cannot_be_branched_says_why(runtime: Runtime) -> None:
    source = await spawn(runtime)
    with pytest.raises(NotFound):
        await runtime.branches.branch("sb-0000000000", BranchRequest(NEXT))
    with pytest.raises(Conflict, match="exists already"):
        await runtime.branches.branch(source.id, BranchRequest(TAG))
    with pytest.raises(InvalidInput, match="parent_tag"):
        await runtime.branches.branch(source.id, BranchRequest(NEXT, Mode.DIFF, parent_tag=parse_tag("other")))
    runtime.branches.at_once = 0
    with pytest.raises(NoCapacity, match="branch_concurrency"):
        await runtime.branches.branch(source.id, BranchRequest(NEXT))
    assert [view.tag for view in runtime.snapshots.list()] == ["warm"]
    assert await evaluate(runtime, source.id, "x") == 41


async def test_a_paused_sandbox_can_be_branched_and_stays_paused(runtime: Runtime) -> None:
    source = await spawn(runtime)
    await evaluate(runtime, source.id, "y = 'asleep'")
    await runtime.sandboxes.pause(source.id)
    await branch(runtime, source.id)
    assert runtime.sandboxes.get(source.id).state is State.PAUSED
    assert await evaluate(runtime, (await spawn(runtime, "next")).id, "y") == "asleep"
    await runtime.sandboxes.resume(source.id)
    assert await evaluate(runtime, source.id, "y") == "asleep"


async def test_a_branch_outlives_its_source_and_a_source_its_snapshot(runtime: Runtime) -> None:
    source = await spawn(runtime)
    await evaluate(runtime, source.id, "y = 7")
    await runtime.snapshots.remove("warm")
    await branch(runtime, source.id)
    await runtime.sandboxes.kill(source.id)
    child = await spawn(runtime, "next")
    assert await evaluate(runtime, child.id, "[x, y]") == [41, 7]
    assert runtime.snapshots.get("next").manifest.parent is None  # type: ignore[union-attr]


async def test_a_derived_snapshot_holds_what_a_command_changed(home: Home, engine: Engine) -> None:
    async with opened(home, engine, make_warm=engine.name == "fake") as runtime:
        request = DeriveRequest(NEXT, TAG, Warmup("installed = 'numpy-next'", "true"))
        view = await runtime.derive(request)
        assert view.status == "ready" and view.manifest is not None and view.manifest.settled
        assert runtime.registry.list_sandboxes() == []
        with pytest.raises(WarmupFailed):
            await runtime.derive(DeriveRequest(parse_tag("third"), TAG, Warmup(None, "exit 3")))
        with pytest.raises(Conflict):
            await runtime.derive(request)
        assert [each.tag for each in runtime.snapshots.list()] == ["next", "warm"]

    async def check(again: Runtime) -> None:
        assert await evaluate(again, (await spawn(again, "next")).id, "[x, installed]") == [41, "numpy-next"]

    await restarted(home, engine, check)


async def test_a_workspace_is_suspended_to_disk_and_resumed_after_a_restart(home: Home, engine: Engine) -> None:
    async with opened(home, engine, make_warm=engine.name == "fake") as runtime:
        made = await runtime.workspaces.create("desk", "warm")
        assert made.live_sandbox_id is not None
        await evaluate(runtime, made.live_sandbox_id, "notes = ['first']")
        for round in range(3):
            suspended = await runtime.workspaces.suspend("desk")
            assert (suspended.status, suspended.live_sandbox_id) == (SUSPENDED, None)
            assert find_marked(home.vms).keys() <= {home.vms / name for name in templates_in(home)}
            with pytest.raises(InvalidInput):
                await runtime.workspaces.suspend("desk")
            resumed = await runtime.workspaces.resume("desk")
            assert resumed.status == RUNNING and resumed.live_sandbox_id is not None
            assert await evaluate(runtime, resumed.live_sandbox_id, f"notes.append({round}); len(notes)") == round + 2
        await runtime.workspaces.suspend("desk")
        states = [view for view in runtime.snapshots.list() if view.tag != "warm"]
        assert len(states) == 1 and states[0].manifest is not None and states[0].manifest.parent is not None
        assert states[0].manifest.parent.tag == "warm", "its chain does not grow"

    async def check(again: Runtime) -> None:
        assert again.workspaces.get("desk").status == SUSPENDED
        resumed = await again.workspaces.resume("desk")
        assert resumed.live_sandbox_id is not None
        assert await evaluate(again, resumed.live_sandbox_id, "notes") == ["first", 0, 1, 2]
        await again.workspaces.remove("desk")
        assert [view.tag for view in again.snapshots.list()] == ["warm"]

    await restarted(home, engine, check)


def templates_in(home: Home) -> list[str]:
    return [path.name for path in home.vms.iterdir() if path.name.startswith(("template-", "branch-"))]


async def test_forks_of_forks_meet_their_limits(home: Home, engine: Engine) -> None:
    policy = LineagePolicy(fork_depth=2, fork_children=3, lineage_sandboxes=6, token_sandboxes=5)
    async with opened(home, engine, make_warm=engine.name == "fake", lineage=policy) as runtime:
        source = await spawn(runtime)
        with pytest.raises(LimitReached, match="may have 3 live forks"):
            await runtime.fork(source.id, SandboxSpec(TAG, n=4))
        children = (await runtime.fork(source.id, SandboxSpec(TAG, n=3))).records
        deep = (await runtime.fork(children[0].id, SandboxSpec(TAG))).records[0]
        with pytest.raises(LimitReached, match="forked from a fork"):
            await runtime.fork(deep.id, SandboxSpec(TAG))
        await runtime.fork(children[1].id, SandboxSpec(TAG))
        with pytest.raises(LimitReached, match="A lineage may have 6"):
            await runtime.fork(children[1].id, SandboxSpec(TAG))
        await runtime.sandboxes.kill_all()
        await runtime.spawn(SandboxSpec(TAG, n=5, owner="agent"))
        with pytest.raises(LimitReached, match="A token may have 5"):
            await runtime.spawn(SandboxSpec(TAG, owner="agent"))
        await runtime.spawn(SandboxSpec(TAG, owner="other"))


async def test_a_branch_whose_paused_fork_is_killed_fails_and_harms_nobody(runtime: Runtime) -> None:
    if runtime.engine.why_no_live_forks() is not None:
        pytest.skip("its branches are written while the source is paused")
    source = await spawn(runtime)
    made = await runtime.branches.branch(source.id, BranchRequest(NEXT))
    assert made.template is not None
    os.kill(made.template.machine.pid, signal.SIGKILL)
    try:
        await runtime.branches.written(made)
    except ForkdError:
        assert runtime.snapshots.get("next").status == "failed"
        await runtime.snapshots.remove("next")
        await branch(runtime, source.id)
    assert await evaluate(runtime, (await spawn(runtime, "next")).id, "x") == 41
    assert await evaluate(runtime, source.id, "x") == 41


async def test_a_branch_that_is_removed_when_it_is_complete_is_gone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step of its writing only reads."""
    if runtime.engine.why_no_live_forks() is not None:
        pytest.skip("its branches are written while the source is paused")
    reading, may_end = threading.Event(), threading.Event()

    def read_back(*_: object) -> None:
        reading.set()
        assert may_end.wait(60)

    monkeypatch.setattr(branches, "read_back", read_back)
    source = await spawn(runtime)
    await runtime.branches.branch(source.id, BranchRequest(NEXT))
    await until(reading.is_set, "all but the reading")
    removing = asyncio.create_task(runtime.snapshots.remove("next"))
    await asyncio.sleep(0.05)
    may_end.set()
    await removing
    with pytest.raises(NotFound):
        runtime.snapshots.get("next")
    assert not (runtime.home.snapshots / "next").exists()


async def test_many_branches_of_one_busy_sandbox(runtime: Runtime) -> None:
    """They are written one after the other; each holds its own moment."""
    source = await spawn(runtime)
    count = 6
    for number in range(count):
        await evaluate(runtime, source.id, f"y = {number}")
        await branch(runtime, source.id, f"moment-{number}")
    begun = time.monotonic()
    for number in reversed(range(count)):
        child = await spawn(runtime, f"moment-{number}")
        assert await evaluate(runtime, child.id, "y") == number
    assert time.monotonic() - begun < 600
