"""What every engine keeps: the same tests run over the fake and over real VMs."""

import asyncio
import os
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case, fork_live, greet, live_forks, started, started_many, value_of, values_of

from forkd.engines.base import ExitReason, Way
from forkd.errors import ContractBroken, GuestDied, GuestTimeout, SnapshotIncompatible, Unsupported
from forkd.guest.agent import Agent
from forkd.host.marked import find_marked
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_children, fork_one, kill_all, new_identities

pytestmark = pytest.mark.usefixtures("nothing_left")


async def test_a_child_goes_on_where_its_parent_was_frozen(case: Case, run_directory: Path) -> None:
    async with started(case, run_directory) as child:
        assert (await child.agent.eval("past + 1")).value == 42


async def test_children_share_nothing_they_write(case: Case, run_directory: Path) -> None:
    async with started_many(case, run_directory, 4) as children:
        for number, child in enumerate(children):
            await child.agent.eval(f"past = {number}")
        assert [(await child.agent.eval("past")).value for child in children] == [0, 1, 2, 3]


async def test_children_repeat_no_randomness(case: Case, run_directory: Path) -> None:
    async with started_many(case, run_directory, 4) as children:
        drawn = [(await child.agent.eval("random.getrandbits(64)")).value for child in children]
        assert len(set(drawn)) == 4
        assert len({child.proof.urandom for child in children}) == 4
        assert len({child.proof.machine_id for child in children}) == 4


async def test_no_time_passes_for_a_child_while_it_is_frozen(case: Case, run_directory: Path) -> None:
    """Its timers would all expire at once, and its kernel take that for a stall."""
    if case.engine.name == "fake":
        pytest.skip("the fake is a process, whose monotonic clock is the host's")

    async def uptime_s() -> float:
        async with started(case, run_directory) as child:
            return float(await value_of(child, "__import__('time').monotonic()"))

    first = await uptime_s()
    await asyncio.sleep(3)
    begun = time.monotonic()
    second = await uptime_s()
    assert second - first < time.monotonic() - begun + 1


async def test_a_paused_machine_is_silent_until_it_is_resumed(case: Case, run_directory: Path) -> None:
    async with started(case, run_directory) as child:
        await child.machine.pause()
        with pytest.raises(GuestTimeout):
            await child.agent.ping(deadline_s=0.5)
        await child.machine.resume()
        await child.agent.ping()


async def test_killing_ends_the_process_and_can_be_repeated(case: Case, run_directory: Path) -> None:
    child = await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
    pid = child.machine.pid
    await child.kill()
    await child.kill()
    assert (await child.machine.death).reason is ExitReason.KILLED
    assert not Path(f"/proc/{pid}").exists()
    assert list(run_directory.iterdir()) == []


async def test_a_kill_that_is_cancelled_ends_it_all_the_same(case: Case, run_directory: Path) -> None:
    child = await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
    child.agent.close()
    killing = asyncio.create_task(child.machine.kill())
    await asyncio.sleep(0)
    killing.cancel()
    await asyncio.sleep(0)
    killing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killing
    assert child.machine.death.done()
    assert list(run_directory.iterdir()) == []


async def test_a_vmm_killed_from_outside_has_crashed(case: Case, run_directory: Path) -> None:
    async with started(case, run_directory) as child:
        os.kill(child.machine.pid, signal.SIGKILL)
        death = await asyncio.wait_for(asyncio.shield(child.machine.death), 10)
        assert death.reason is ExitReason.CRASHED
        assert "SIGKILL" in death.status


async def test_a_child_whose_vmm_dies_at_its_start_is_an_error_with_the_reason(case: Case, run_directory: Path) -> None:
    async def kill_it() -> None:
        while not (found := find_marked(run_directory)):
            await asyncio.sleep(0.001)
        os.kill(next(iter(found.values())).pid, signal.SIGKILL)

    killer = asyncio.create_task(kill_it())
    with pytest.raises(GuestDied, match="crashed"):
        await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
    await killer


async def test_one_failing_child_takes_its_siblings_with_it(case: Case, run_directory: Path) -> None:
    seen: list[Child] = []

    async def spoil(sandbox: Child) -> None:
        seen.append(sandbox)
        if len(seen) == 3:
            raise ContractBroken("made up")

    with pytest.raises(ContractBroken, match="made up"):
        await fork_children(case.engine, case.frozen, new_identities(4), run_directory, after=spoil)
    assert all(sandbox.machine.death.done() for sandbox in seen)


async def test_a_cancelled_fork_leaves_no_child(case: Case, run_directory: Path) -> None:
    identities = new_identities(6)

    async def never_ready(sandbox: Child) -> None:
        if sandbox.identity == identities[-1]:  # so that the fork of all cannot be over before it is cancelled
            await asyncio.Event().wait()

    fork = fork_children(case.engine, case.frozen, identities, run_directory, after=never_ready)
    forking = asyncio.create_task(fork)
    while len(list(run_directory.iterdir())) < 3:
        await asyncio.sleep(0.005)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking


def test_what_was_frozen_on_another_platform_is_refused_and_named(case: Case) -> None:
    key = next(iter(case.frozen.platform))
    foreign = replace(case.frozen, platform={**case.frozen.platform, key: "something else"})
    with pytest.raises(SnapshotIncompatible, match=f"(?i){key} something else"):
        case.engine.check(foreign)
    case.engine.check(case.frozen)


# Forks of live machines


async def test_an_engine_forks_live_machines_or_says_why_it_cannot(case: Case, run_directory: Path) -> None:
    engine, why = case.engine, case.engine.why_no_live_forks()
    async with started(case, run_directory) as child:
        if why is None:
            await (await engine.template(case.frozen, run_directory / "template")).kill()
            await (await engine.fork_live(child.machine, run_directory / "fork")).kill()
            return
        assert isinstance(why, str) and why
        with pytest.raises(Unsupported) as refused:
            await engine.template(case.frozen, run_directory / "template")
        assert refused.value.hint
        with pytest.raises(Unsupported):
            await engine.fork_live(child.machine, run_directory / "fork")
        assert find_marked(run_directory).keys() == {run_directory / child.id}
        assert await value_of(child, "past + 1") == 42


async def test_a_live_fork_has_what_its_source_had_and_neither_sees_what_the_other_does_next(
    live: Case, run_directory: Path
) -> None:
    async with started(live, run_directory) as source:
        await source.agent.eval("import secrets\nsecret = secrets.token_hex(16)")
        secret = await value_of(source, "secret")
        await source.agent.write_file("/root/before", b"of both")
        async with live_forks(live.engine, source.machine, run_directory, 1) as (fork,):
            assert await value_of(fork, "secret") == secret
            assert await fork.agent.read_file("/root/before") == b"of both"
            for number, each in enumerate((source, fork)):
                await each.agent.eval(f"secret += '-{number}'")
                await each.agent.write_file(f"/root/after-{number}", b"mine")
                await each.agent.write_file("/root/before", f"of {number}".encode())
            assert await values_of((source, fork), "secret") == [f"{secret}-0", f"{secret}-1"]
            for number, each in enumerate((source, fork)):
                assert await each.agent.read_file("/root/before") == f"of {number}".encode()
                names = {entry.name for entry in (await each.agent.list_dir("/root")).entries}
                assert names & {"after-0", "after-1"} == {f"after-{number}"}


async def test_a_live_fork_becomes_someone_of_its_own(live: Case, run_directory: Path) -> None:
    async with started(live, run_directory) as source:
        async with live_forks(live.engine, source.machine, run_directory, 3) as forks:
            everyone = [source, *forks]
            names = await values_of(everyone, "__import__('socket').gethostname()")
            assert names == [each.identity.hostname for each in everyone]
            for drawn in ("random.getrandbits(64)", "__import__('os').urandom(8).hex()"):
                assert len(set(await values_of(everyone, drawn))) == 4
            assert len({each.proof.urandom for each in everyone}) == 4


async def test_the_source_of_a_live_fork_goes_on_in_the_stream_it_had(live: Case, run_directory: Path) -> None:
    waiting = "import os, time\nwhile not os.path.exists('/tmp/go'): time.sleep(0.01)\npast + 1"
    async with started(live, run_directory) as source:
        session = source.agent.session
        slow = asyncio.create_task(source.agent.eval(waiting))
        command = await source.agent.start("read line; echo got $line")
        for number in range(3):
            await (await live.engine.fork_live(source.machine, run_directory / f"fork-{number}")).kill()
        assert not slow.done()
        await command.write_stdin(b"it\n")
        assert (await command.wait(max_output_bytes=100)).stdout == b"got it\n"
        await source.agent.write_file("/tmp/go", b"")
        assert (await slow).value == 42
        assert (source.agent.session, source.agent.channel.closed) == (session, False)
        assert not source.machine.death.done()


async def test_what_the_source_has_running_runs_on_in_both(live: Case, run_directory: Path) -> None:
    async with started(live, run_directory) as source:
        loop = "while :; do sleep 0.05; echo -n x >> /tmp/marks; done"
        await source.agent.eval(f"loop = __import__('subprocess').Popen({loop!r}, shell=True, start_new_session=True)")
        slow = asyncio.create_task(source.agent.eval("__import__('time').sleep(1)\nwoken = past + 1"))
        await asyncio.sleep(0.2)
        async with live_forks(live.engine, source.machine, run_directory, 1) as (fork,):
            await slow
            # What is asked in a stream ends with that.
            both = (source, fork) if live.engine.streams_go_on else (source,)
            assert await values_of(both, "woken") == [42] * len(both)
            for each in (source, fork):
                before = (await each.agent.stat("/tmp/marks")).size
                while (await each.agent.stat("/tmp/marks")).size < before + 3:
                    await asyncio.sleep(0.05)
            for each in (source, fork):
                await each.agent.eval("loop.kill(); loop.wait()")


async def test_a_live_fork_has_a_process_a_directory_sockets_and_a_console_of_its_own(
    live: Case, run_directory: Path
) -> None:
    async with started(live, run_directory) as source:
        async with live_forks(live.engine, source.machine, run_directory, 1) as (fork,):
            assert fork.machine.phases.way is Way.FORK and source.machine.phases.way is Way.START
            assert (fork.machine.phases.pause_s or 0) > 0
            assert {directory: found.pid for directory, found in find_marked(run_directory).items()} == {
                run_directory / source.id: source.machine.pid,
                run_directory / fork.id: fork.machine.pid,
            }
            for each in (source, fork):
                said = f"I am {each.id}"
                await each.agent.eval(f"open('/dev/console', 'w').write('{said}\\n')")
                while said not in each.machine.console_tail():
                    await asyncio.sleep(0.02)
            assert fork.id not in source.machine.console_tail()
            assert source.id not in fork.machine.console_tail()
            # By a connection of its own, once the first one is closed.
            fork.agent.close()
            with closing(await Agent.connect(await fork.machine.connect())) as again:
                assert (await again.eval("__import__('socket').gethostname()")).value == fork.identity.hostname


async def test_a_machine_that_nobody_is_connected_to_is_forked_like_any_other(live: Case, run_directory: Path) -> None:
    async with started(live, run_directory) as source:
        await source.agent.eval("kept = 5")
        source.agent.close()
        await asyncio.sleep(0.1)
        async with live_forks(live.engine, source.machine, run_directory, 2) as forks:
            assert await values_of(forks, "kept") == [5, 5]
            with closing(await Agent.connect(await source.machine.connect())) as again:
                assert (await again.eval("kept")).value == 5


async def test_a_fork_made_while_the_client_of_its_source_leaves_hears_its_own(live: Case, run_directory: Path) -> None:
    async with started(live, run_directory) as source:
        agent = source.agent
        for delay_s in (0, 0.001, 0.002, 0.004, 0.008, 0.012, 0.016, 0.02, 0.03, 0.04):
            agent.close()
            await asyncio.sleep(delay_s)
            async with live_forks(live.engine, source.machine, run_directory, 1) as (fork,):
                assert await value_of(fork, "past + 1") == 42
            agent = await Agent.connect(await source.machine.connect())
        agent.close()


@pytest.mark.parametrize("first", ["source", "fork"])
async def test_source_and_live_fork_live_and_die_on_their_own(live: Case, run_directory: Path, first: str) -> None:
    async with started(live, run_directory) as source:
        async with live_forks(live.engine, source.machine, run_directory, 1) as (fork,):
            dying, living = (source, fork) if first == "source" else (fork, source)
            await dying.kill()
            assert (await dying.machine.death).reason is ExitReason.KILLED
            assert await value_of(living, "past + 1") == 42
            assert (await living.agent.run("echo $((6 * 7))")).stdout == b"42\n"
            assert {path.name for path in run_directory.iterdir()} == {living.id}
            await living.machine.pause()
            await living.machine.resume()
            await living.agent.ping()


_TICK = """
import threading, time
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.05)
threading.Thread(target=tick, daemon=True).start()
"""


async def test_a_live_fork_that_is_to_wait_does_nothing_until_it_is_resumed(live: Case, run_directory: Path) -> None:
    async with started(live, run_directory) as source:
        await source.agent.eval(_TICK)
        identity = new_identities(1)[0]
        machine = await live.engine.fork_live(source.machine, run_directory / identity.sandbox_id, paused=True)
        try:
            await machine.running()
            assert machine.paused and not source.machine.paused
            begun = await value_of(source, "ticks")
            if live.engine.streams_go_on:
                agent = Agent.attach(await machine.connect())
                with pytest.raises(GuestTimeout):
                    await agent.hello(deadline_s=0.7)
                agent.close()
            else:
                await asyncio.sleep(0.7)
            waited = await value_of(source, "ticks") - begun
            await machine.resume()
            assert not machine.paused
            fork = await greet(machine, identity)
            try:
                # All that was done by the source only.
                of_fork, of_source = await value_of(fork, "ticks"), await value_of(source, "ticks")
                assert 5 <= waited <= of_source - of_fork
            finally:
                fork.agent.close()
        finally:
            await machine.kill()


async def test_a_paused_machine_is_forked_and_stays_paused(live: Case, run_directory: Path) -> None:
    async with started(live, run_directory) as source:
        await source.agent.eval("kept = 5")
        await source.machine.pause()
        async with live_forks(live.engine, source.machine, run_directory, 2) as forks:
            assert [fork.machine.phases.pause_s for fork in forks] == [None, None]
            assert [fork.machine.paused for fork in forks] == [False, False]
            assert await values_of(forks, "kept") == [5, 5]
            assert source.machine.paused
            with pytest.raises(GuestTimeout):
                await source.agent.ping(deadline_s=0.5)
            await source.machine.resume()
            assert await value_of(source, "kept") == 5


async def test_a_live_fork_can_be_forked_itself_and_so_can_its_forks(live: Case, run_directory: Path) -> None:
    line: list[Child] = []
    async with started(live, run_directory) as source:
        try:
            line.append(source)
            for generation in range(1, 5):
                await line[-1].agent.eval(f"past += {generation}")
                line.append(await fork_live(live.engine, line[-1].machine, run_directory))
            assert await values_of(line, "past") == [42, 44, 47, 51, 51]
            # One ends first, the others stay.
            await line[1].kill()
            await line[0].agent.eval("past = 0")
            assert await values_of(line[2:], "past") == [47, 51, 51]
        finally:
            await kill_all(line[1:])


async def test_a_machine_that_is_paused_and_resumed_while_it_is_forked_ends_as_it_was_told(
    live: Case, run_directory: Path
) -> None:
    async with started(live, run_directory) as source:
        for _ in range(4):
            forking = asyncio.create_task(fork_live(live.engine, source.machine, run_directory))
            await asyncio.sleep(0.002)
            await source.machine.pause()
            fork = await forking
            try:
                assert source.machine.paused
                with pytest.raises(GuestTimeout):
                    await source.agent.ping(deadline_s=0.3)
                forking = asyncio.create_task(fork_live(live.engine, source.machine, run_directory))
                await asyncio.sleep(0.002)
                await source.machine.resume()
                other = await forking
                assert await values_of((source, fork, other), "past + 1") == [42] * 3
                await other.kill()
            finally:
                await fork.kill()


async def test_many_live_forks_of_one_machine_at_once_are_made_one_after_the_other(
    live: Case, run_directory: Path
) -> None:
    async with started(live, run_directory) as source:
        asked = [asyncio.create_task(fork_live(live.engine, source.machine, run_directory)) for _ in range(6)]
        await asyncio.wait(asked)
        forks = [task.result() for task in asked]
        try:
            assert await values_of([source, *forks], "past") == [41] * 7
            assert len({fork.machine.pid for fork in forks}) == 6
        finally:
            await kill_all(forks)
