"""VMs that outlive their owner, and who takes them over: the same tests over the fake and over real VMs."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from engine_cases import Case, adopted, fork_live, left_behind, live_forks, started, value_of

from forkd.engines.base import Engine, ExitReason
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import ChannelClosed, EngineFailed, GuestDied, GuestTimeout, NotForkable
from forkd.guest.agent import Agent
from forkd.host.marked import find_marked
from forkd.host.system import start_time_ticks
from forkd.model.names import new_identity
from forkd.runtime.fork import fork_one

pytestmark = pytest.mark.usefixtures("nothing_left")

KEPT = "kept = past + 1"


async def test_a_vm_is_found_by_its_mark_as_soon_as_it_was_started(case: Case, run_directory: Path) -> None:
    machine = await case.engine.fork(case.frozen, run_directory / "sb-1")
    try:
        found = find_marked(run_directory)
        assert {directory: process.pid for directory, process in found.items()} == {run_directory / "sb-1": machine.pid}
    finally:
        await machine.kill()
    assert find_marked(run_directory) == {}


async def test_a_vm_process_sees_nothing_of_our_environment(
    case: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORKD_TOKEN", "secret")
    async with started(case, run_directory, "sb-1") as child:
        environ = _environ(find_marked(run_directory)[run_directory / "sb-1"].pid)
        names = {entry.partition("=")[0] for entry in (*environ, *_environ(child.machine.pid)) if entry}
    # Slashes behind it are room for the marks of forks.
    assert f"FORKD_VM={run_directory}/sb-1" in [entry.rstrip("/") for entry in environ]
    assert names <= {"FORKD_VM", "PATH", "HOME", "LANG", "TMPDIR", "MALLOC_ARENA_MAX", "PWD", "SHLVL", "_", "OLDPWD"}


async def test_a_vm_whose_owner_was_killed_is_adopted_and_goes_on(case: Case, run_directory: Path) -> None:
    with left_behind(case, run_directory, code=KEPT) as directory:
        async with adopted(case.engine, directory) as (machine, agent):
            assert not machine.paused
            assert (await agent.eval("kept")).value == 42
            await machine.pause()
            assert machine.paused
            with pytest.raises(GuestTimeout):
                await agent.ping(deadline_s=0.5)
            await machine.resume()
            assert not machine.paused
            assert (await agent.eval("kept + 1")).value == 43
        await machine.kill()
        assert (await machine.death).reason is ExitReason.KILLED
        assert start_time_ticks(machine.pid) is None
        assert find_marked(run_directory) == {} and not directory.exists()


async def test_a_paused_vm_is_adopted_as_paused(case: Case, run_directory: Path) -> None:
    with left_behind(case, run_directory, code=KEPT, pause=True) as directory:
        machine = await case.engine.adopt(directory, find_marked(run_directory)[directory])
        try:
            assert machine.paused
            await machine.resume()
            assert not machine.paused
            with closing(await Agent.connect(await machine.connect())) as agent:
                assert (await agent.eval("kept")).value == 42
        finally:
            await machine.kill()


async def test_what_an_adopted_vm_has_running_goes_with_it(case: Case, run_directory: Path) -> None:
    code = "import subprocess\nlasting = subprocess.Popen(['sleep', '600'])"
    with left_behind(case, run_directory, code=code) as directory:
        async with adopted(case.engine, directory) as (_, agent):
            assert (await agent.eval("lasting.poll()")).value is None
        assert find_marked(run_directory) == {}


async def test_a_vm_that_ended_cannot_be_adopted(case: Case, run_directory: Path) -> None:
    with left_behind(case, run_directory) as directory:
        leader = find_marked(run_directory)[directory]
        os.kill(leader.pid, signal.SIGKILL)
        _wait_until(lambda: start_time_ticks(leader.pid) is None)
        for known in (None, leader):
            with pytest.raises(GuestDied):
                await case.engine.adopt(directory, known)
        assert directory.is_dir()
        with pytest.raises(GuestDied):
            await case.engine.adopt(run_directory / "sb-never")


async def test_a_vm_that_cannot_be_reached_is_left_as_it_is(case: Case, run_directory: Path) -> None:
    with left_behind(case, run_directory) as directory:
        leader = find_marked(run_directory)[directory]
        (agent_socket,) = directory.rglob("agent.sock")
        away = agent_socket.rename(agent_socket.with_name("agent.away"))
        with pytest.raises(EngineFailed, match=r"agent\.sock"):
            await case.engine.adopt(directory)
        assert find_marked(run_directory)[directory] == leader
        away.rename(agent_socket)
        async with adopted(case.engine, directory) as (_, agent):
            assert (await agent.eval("past")).value == 41


async def test_an_adopted_vm_that_is_killed_from_outside_has_ended(case: Case, run_directory: Path) -> None:
    with left_behind(case, run_directory) as directory:
        async with adopted(case.engine, directory) as (machine, _):
            os.kill(machine.pid, signal.SIGKILL)
            death = await asyncio.wait_for(asyncio.shield(machine.death), 10)
            assert (death.reason, death.status) == (ExitReason.UNKNOWN, "exit status unknown")
            with pytest.raises(GuestDied):
                await machine.connect()


async def test_a_lost_channel_is_replaced_by_another(case: Case, run_directory: Path) -> None:
    async with started(case, run_directory, "sb-1") as child:
        await child.agent.eval(KEPT)
        for _ in range(3):
            asking = asyncio.create_task(child.agent.run("sleep 600"))
            await asyncio.sleep(0.1)
            child.agent.close()
            with pytest.raises(ChannelClosed):
                await asking
            agent = await Agent.connect(await child.machine.connect())
            assert (await agent.eval("kept")).value == 42
            assert (await agent.ping()).streams == 0  # what the one before had running has ended
            agent.close()


async def test_a_channel_is_served_when_the_one_before_it_is_closed(case: Case, run_directory: Path) -> None:
    async with started(case, run_directory, "sb-1") as child:
        following = Agent.attach(await child.machine.connect())
        try:
            with pytest.raises(GuestTimeout):
                await following.hello(deadline_s=0.5)
            assert (await child.agent.eval("past")).value == 41
            child.agent.close()
            await following.hello()
            assert (await following.eval("past")).value == 41
        finally:
            following.close()


async def test_a_released_vm_runs_on_and_can_be_adopted(case: Case, run_directory: Path) -> None:
    directory = run_directory / "sb-1"
    child = await fork_one(case.engine, case.frozen, new_identity("sb-1"), run_directory)
    await child.agent.eval(KEPT)
    await child.release()
    await asyncio.sleep(0.2)
    assert not child.machine.death.done()
    machine = await case.engine.adopt(directory)
    assert machine.pid == child.machine.pid
    with closing(await Agent.connect(await machine.connect())) as agent:
        assert (await agent.eval("kept")).value == 42
    await machine.release()
    assert start_time_ticks(find_marked(run_directory)[directory].pid) is not None
    await (await case.engine.adopt(directory)).kill()


@pytest.mark.parametrize(("outlive", "boot"), [(False, False), (True, True)], ids=["a fork", "a parent"])
def test_a_fork_that_was_not_told_to_outlive_its_owner_and_every_parent_die_with_it(
    case: Case, run_directory: Path, outlive: bool, boot: bool
) -> None:
    with left_behind(case, run_directory, outlive=outlive, boot=boot):
        _wait_until(lambda: find_marked(run_directory) == {})


# Forks of live machines


def test_a_live_fork_that_was_not_told_to_outlive_its_owner_dies_with_it(live: Case, run_directory: Path) -> None:
    with left_behind(live, run_directory, outlive=False, live=True):
        _wait_until(lambda: find_marked(run_directory) == {})


async def test_a_live_fork_whose_owner_was_killed_is_adopted_and_goes_on_as_does_its_source(
    live: Case, run_directory: Path
) -> None:
    with left_behind(live, run_directory, code=KEPT, live=True) as directory:
        left = find_marked(run_directory)
        assert len(left) == 2 and directory in left
        for each, leader in left.items():
            async with adopted(live.engine, each, leader) as (machine, agent):
                assert (await agent.eval("kept")).value == 42
                await machine.pause()
                await machine.resume()
                assert (await agent.eval("__import__('socket').gethostname()")).value == each.name
        assert find_marked(run_directory) == {}


@pytest.mark.parametrize("live_fork", [False, True], ids=["a fork", "a live fork"])
async def test_an_adopted_vm_can_be_forked(live: Case, run_directory: Path, live_fork: bool) -> None:
    firecracker = live.engine.name == "firecracker"
    lasting: Engine = FirecrackerEngine(outlive=True) if firecracker else QemuEngine("tcg", outlive=True)
    with left_behind(live, run_directory, code=KEPT, live=live_fork) as directory:
        async with adopted(lasting, directory) as (machine, agent):
            async with live_forks(lasting, machine, run_directory, 1) as (fork,):
                await agent.eval("kept = 0")
                assert await value_of(fork, "kept") == 42
                again = await fork_live(lasting, fork.machine, run_directory)
                assert await value_of(again, "kept") == 42
                await again.kill()
                assert (await again.machine.death).reason is ExitReason.KILLED
            assert (await agent.eval("kept")).value == 0


async def test_a_fork_that_is_to_die_with_us_cannot_be_made_of_what_is_not_our_child(
    live: Case, run_directory: Path
) -> None:
    """It would be the child of the process that adopted its source, and outlive us."""
    with left_behind(live, run_directory, code=KEPT) as directory:
        async with adopted(live.engine, directory) as (machine, agent):
            with pytest.raises(NotForkable, match="look for its parent"):
                await live.engine.fork_live(machine, run_directory / "sb-mortal")
            assert find_marked(run_directory).keys() == {directory}
            assert (await agent.eval("kept")).value == 42


def _environ(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
