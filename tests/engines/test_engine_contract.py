"""What every engine keeps: the same tests run over the fake and over real VMs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case

from forkd.engines.base import ExitReason
from forkd.errors import ContractBroken, GuestDied, GuestTimeout, SnapshotIncompatible
from forkd.host.marked import find_marked
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.spawn import fork_children, fork_one, kill_all, new_identities

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_child_goes_on_where_its_parent_was_frozen(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        child = await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
        try:
            assert (await child.agent.eval("past + 1")).value == 42
        finally:
            await child.kill()

    asyncio.run(body())


def test_children_share_nothing_they_write(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        children = (await fork_children(case.engine, case.frozen, new_identities(4), run_directory)).sandboxes
        try:
            for number, child in enumerate(children):
                await child.agent.eval(f"past = {number}")
            assert [(await child.agent.eval("past")).value for child in children] == [0, 1, 2, 3]
        finally:
            await kill_all(children)

    asyncio.run(body())


def test_children_repeat_no_randomness(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        children = (await fork_children(case.engine, case.frozen, new_identities(4), run_directory)).sandboxes
        try:
            drawn = [(await child.agent.eval("random.getrandbits(64)")).value for child in children]
            assert len(set(drawn)) == 4
            assert len({child.proof.urandom for child in children}) == 4
            assert len({child.proof.machine_id for child in children}) == 4
        finally:
            await kill_all(children)

    asyncio.run(body())


def test_no_time_passes_for_a_child_while_it_is_frozen(case: Case, run_directory: Path) -> None:
    """Its timers would all expire at once, and its kernel take that for a stall."""
    if case.engine.name == "fake":
        pytest.skip("the fake is a process, whose monotonic clock is the host's")

    async def uptime_s() -> float:
        child = await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
        try:
            return float((await child.agent.eval("__import__('time').monotonic()")).value)
        finally:
            await child.kill()

    async def body() -> None:
        first = await uptime_s()
        await asyncio.sleep(3)
        begun = time.monotonic()
        second = await uptime_s()
        assert second - first < time.monotonic() - begun + 1

    asyncio.run(body())


def test_a_paused_machine_is_silent_until_it_is_resumed(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        child = await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
        try:
            await child.machine.pause()
            with pytest.raises(GuestTimeout):
                await child.agent.ping(deadline_s=0.5)
            await child.machine.resume()
            await child.agent.ping()
        finally:
            await child.kill()

    asyncio.run(body())


def test_killing_ends_the_process_and_can_be_repeated(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        child = await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
        pid = child.machine.pid
        await child.kill()
        await child.kill()
        assert (await child.machine.death).reason is ExitReason.KILLED
        assert not Path(f"/proc/{pid}").exists()
        assert list(run_directory.iterdir()) == []

    asyncio.run(body())


def test_a_kill_that_is_cancelled_ends_it_all_the_same(case: Case, run_directory: Path) -> None:
    async def body() -> None:
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

    asyncio.run(body())


def test_a_vmm_killed_from_outside_has_crashed(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        child = await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
        try:
            os.kill(child.machine.pid, signal.SIGKILL)
            death = await asyncio.wait_for(asyncio.shield(child.machine.death), 10)
            assert death.reason is ExitReason.CRASHED
            assert "SIGKILL" in death.status
        finally:
            await child.kill()

    asyncio.run(body())


def test_a_child_whose_vmm_dies_at_its_start_is_an_error_with_the_reason(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        async def kill_it() -> None:
            while not (found := find_marked(run_directory)):
                await asyncio.sleep(0.001)
            os.kill(next(iter(found.values())).pid, signal.SIGKILL)

        killer = asyncio.create_task(kill_it())
        with pytest.raises(GuestDied, match="crashed"):
            await fork_one(case.engine, case.frozen, new_identities(1)[0], run_directory)
        await killer

    asyncio.run(body())


def test_one_failing_child_takes_its_siblings_with_it(case: Case, run_directory: Path) -> None:
    seen: list[Sandbox] = []

    async def spoil(sandbox: Sandbox) -> None:
        seen.append(sandbox)
        if len(seen) == 3:
            raise ContractBroken("made up")

    async def body() -> None:
        with pytest.raises(ContractBroken, match="made up"):
            await fork_children(case.engine, case.frozen, new_identities(4), run_directory, after=spoil)
        assert all(sandbox.machine.death.done() for sandbox in seen)

    asyncio.run(body())


def test_a_cancelled_fork_leaves_no_child(case: Case, run_directory: Path) -> None:
    async def body() -> None:
        forking = asyncio.create_task(fork_children(case.engine, case.frozen, new_identities(6), run_directory))
        while len(list(run_directory.iterdir())) < 3:
            await asyncio.sleep(0.005)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking

    asyncio.run(body())


def test_what_was_frozen_on_another_platform_is_refused_and_named(case: Case) -> None:
    key = next(iter(case.frozen.platform))
    foreign = replace(case.frozen, platform={**case.frozen.platform, key: "something else"})
    with pytest.raises(SnapshotIncompatible, match=f"(?i){key} something else"):
        case.engine.check(foreign)
    case.engine.check(case.frozen)
