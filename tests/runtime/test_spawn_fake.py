"""Forking children, over the fake engine: all of them or none, each someone of its own."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from forkd.engines.base import BootSpec, Frozen
from forkd.engines.fake import FakeEngine
from forkd.errors import (
    ChannelClosed,
    ContractBroken,
    EngineFailed,
    GuestDied,
    InvalidInput,
    NoCapacity,
    SnapshotIncompatible,
)
from forkd.model.machine import MachineSpec
from forkd.runtime import spawn as spawning
from forkd.runtime.admission import Capacity
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.spawn import fork_children, fork_one, kill_all
from forkd.runtime.warmup import Warmup, booted, warm_up
from forkd.wire.agent import pack_eval

pytestmark = pytest.mark.usefixtures("nothing_left")

ENGINE = FakeEngine()
PAST = "import random, os\npast = {'answer': 42}\n"

Freeze = Callable[[str], Frozen]


async def _freeze(into: Path, code: str) -> Frozen:
    nowhere = Path("/nonexistent")
    spec = BootSpec(MachineSpec(256), nowhere, nowhere, nowhere)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as run:
        async with booted(ENGINE, spec, Path(run) / "parent", into) as (machine, agent):
            await warm_up(agent, Warmup(code))
            await agent.prepare_freeze()
            platform = await ENGINE.freeze(machine, into)
    return Frozen(into, spec, platform)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    return asyncio.run(_freeze(tmp_path_factory.mktemp("frozen"), PAST))


@pytest.fixture
def freeze(tmp_path: Path) -> Freeze:
    return lambda code: asyncio.run(_freeze(tmp_path, code))


def test_children_answer_are_distinct_and_know_what_their_parent_knew(frozen: Frozen, run_directory: Path) -> None:
    async def body() -> None:
        children = await fork_children(ENGINE, frozen, 5, run_directory, env={"ROLE": "child"})
        try:
            assert len(children) == len({child.id for child in children}) == 5
            assert len({child.machine.pid for child in children}) == 5
            assert len({child.proof.hostname for child in children}) == 5
            assert len({child.proof.machine_id for child in children}) == 5
            assert all(child.proof.hostname == child.identity.hostname for child in children)
            answers = [
                (await child.agent.eval("[past, os.environ['ROLE'], random.random()]")).value for child in children
            ]
            assert [answer[:2] for answer in answers] == [[{"answer": 42}, "child"]] * 5
            assert len({answer[2] for answer in answers}) == 5
            assert all("contract" in child.machine.phases.steps for child in children)
        finally:
            await kill_all(children)

    asyncio.run(body())


def test_what_a_child_changes_its_sibling_and_the_parent_do_not_see(frozen: Frozen, run_directory: Path) -> None:
    async def body() -> None:
        one, other = await fork_children(ENGINE, frozen, 2, run_directory)
        try:
            await one.agent.eval("past.clear()")
            assert (await other.agent.eval("past")).value == {"answer": 42}
        finally:
            await kill_all([one, other])
        later = await fork_one(ENGINE, frozen, run_directory)
        assert (await later.agent.eval("past")).value == {"answer": 42}
        await later.kill()

    asyncio.run(body())


@pytest.mark.parametrize("n", [0, -1, 1001])
def test_a_count_that_cannot_be_is_refused_before_anything_starts(frozen: Frozen, run_directory: Path, n: int) -> None:
    with pytest.raises(InvalidInput, match=f"Cannot fork {n}"):
        asyncio.run(fork_children(ENGINE, frozen, n, run_directory))


def test_more_children_than_fit_are_refused_before_anything_starts(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawning, "look", lambda: Capacity(600, 2))
    with pytest.raises(NoCapacity):
        asyncio.run(fork_children(ENGINE, frozen, 3, run_directory))


def test_memory_that_runs_out_between_two_starts_ends_them_all(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([Capacity(100_000, 1)] * 3)
    monkeypatch.setattr(spawning, "look", lambda: next(looks, Capacity(520, 1)))
    with pytest.raises(NoCapacity):
        asyncio.run(fork_children(ENGINE, frozen, 6, run_directory))
    assert list(run_directory.iterdir()) == []


def test_a_foreign_snapshot_is_refused_before_anything_starts(frozen: Frozen, run_directory: Path) -> None:
    foreign = Frozen(frozen.directory, frozen.boot, {"python": "2.7"})
    with pytest.raises(SnapshotIncompatible):
        asyncio.run(fork_children(ENGINE, foreign, 3, run_directory))


def test_no_more_than_admitted_start_at_once(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawning, "look", lambda: Capacity(100_000, 1))
    under_way, most = 0, 0

    async def watch(_: Sandbox) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.05)
        under_way -= 1

    async def body() -> None:
        await kill_all(await fork_children(ENGINE, frozen, 6, run_directory, after=watch))

    asyncio.run(body())
    assert most == 2


def test_one_failure_afterwards_takes_all_children_with_it(frozen: Frozen, run_directory: Path) -> None:
    seen: list[Sandbox] = []

    async def spoil(sandbox: Sandbox) -> None:
        seen.append(sandbox)
        if len(seen) == 3:
            raise ZeroDivisionError("the third")

    async def body() -> None:
        with pytest.raises(ZeroDivisionError, match="the third") as caught:
            await fork_children(ENGINE, frozen, 5, run_directory, after=spoil)
        assert not isinstance(caught.value, BaseExceptionGroup)
        assert all(sandbox.machine.death.done() for sandbox in seen)
        assert list(run_directory.iterdir()) == []

    asyncio.run(body())
    assert len(seen) >= 3


@pytest.mark.parametrize("started", [1, 3])
def test_a_cancellation_half_way_kills_all(frozen: Frozen, run_directory: Path, started: int) -> None:
    async def body() -> None:
        forking = asyncio.create_task(fork_children(ENGINE, frozen, 8, run_directory))
        while len(list(run_directory.glob("*/pid"))) < started:
            await asyncio.sleep(0.002)
        forking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await forking
        assert list(run_directory.iterdir()) == []

    asyncio.run(body())


def test_a_hook_that_raises_fails_the_fork_with_its_reason(freeze: Freeze, run_directory: Path) -> None:
    spoilt = freeze("import forkd\n@forkd.on_fork\ndef hook(): raise KeyError('no database')\n")

    async def body() -> None:
        with pytest.raises(ContractBroken, match="interpreter") as caught:
            await fork_children(ENGINE, spoilt, 3, run_directory)
        assert "no database" in (caught.value.details or "")
        assert list(run_directory.iterdir()) == []
        with pytest.raises(ContractBroken) as alone:
            await fork_one(ENGINE, spoilt, run_directory)
        assert alone.value.__cause__ is None

    asyncio.run(body())


def test_a_hook_runs_in_every_child_and_never_in_the_parent(freeze: Freeze, run_directory: Path) -> None:
    hooked = freeze("import forkd\nnames = []\nforkd.on_fork(lambda: names.append(forkd.identity()['hostname']))\n")

    async def body() -> None:
        children = await fork_children(ENGINE, hooked, 2, run_directory)
        try:
            assert [child.proof.hooks for child in children] == [1, 1]
            for child in children:
                assert (await child.agent.eval("names")).value == [child.identity.hostname]
        finally:
            await kill_all(children)

    asyncio.run(body())


def test_a_child_that_dies_while_it_becomes_someone_is_explained(freeze: Freeze, run_directory: Path) -> None:
    # The agent is the parent of the interpreter the hook runs in.
    deadly = freeze("import forkd, os\nforkd.on_fork(lambda: os.kill(os.getppid(), 9))\n")

    async def body() -> None:
        with pytest.raises(GuestDied, match=r"ended while it was forked: crashed \(killed by SIGKILL") as caught:
            await fork_children(ENGINE, deadly, 2, run_directory)
        assert isinstance(caught.value.__cause__, ChannelClosed)

    asyncio.run(body())


def test_a_child_that_dies_before_it_runs_is_not_waited_for(
    frozen: Frozen, tmp_path: Path, run_directory: Path
) -> None:
    deadly = pack_eval(b"import os; os.kill(os.getppid(), 9)", 10_000)
    (tmp_path / "journal").write_text(json.dumps([deadly.hex()]))

    async def body() -> None:
        machine = await ENGINE.fork(Frozen(tmp_path, frozen.boot, frozen.platform), run_directory / "child")
        try:
            async with asyncio.timeout(20):
                with pytest.raises(EngineFailed):
                    await machine.running()
        finally:
            await machine.kill()
        with pytest.raises(GuestDied, match="while it was forked"):
            await fork_one(ENGINE, Frozen(tmp_path, frozen.boot, frozen.platform), run_directory)

    asyncio.run(body())


def test_all_are_killed_even_when_one_resists(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        children = await fork_children(ENGINE, frozen, 3, run_directory)
        first = children[0].machine
        real = first.kill

        async def resist() -> None:
            await real()
            raise TimeoutError("it resists")

        monkeypatch.setattr(first, "kill", resist)
        with pytest.raises(TimeoutError, match="it resists"):
            await kill_all(children)
        assert all(child.machine.death.done() for child in children)

    asyncio.run(body())
