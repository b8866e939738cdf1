"""Forking children, over the fake engine: all of them or none, each with an identity of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support_freeze import NO_IMAGE, freeze

from forkd.engines.base import Frozen
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
from forkd.host.marked import find_marked
from forkd.runtime import fork as forking
from forkd.runtime.admission import Capacity
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_children, fork_one, kill_all, new_identities
from forkd.wire.agent import EVAL, encode_message, pack_eval

pytestmark = pytest.mark.usefixtures("nothing_left")

ENGINE = FakeEngine()
PAST = "import random, os\npast = {'answer': 42}\n"


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    return asyncio.run(freeze(ENGINE, NO_IMAGE, tmp_path_factory.mktemp("frozen"), PAST))


async def cancel_half_way(frozen: Frozen, run: Path, *, n: int, started: int, allow_partial: bool = False) -> None:
    """When so many have been started; nothing is left."""
    identities = new_identities(n)

    async def wait(sandbox: Child) -> None:
        # The last is never ready, so that a fork of all of them cannot be over before it is cancelled.
        if sandbox.identity == identities[-1]:
            await asyncio.Event().wait()

    fork = fork_children(ENGINE, frozen, identities, run, after=wait, allow_partial=allow_partial)
    forking = asyncio.create_task(fork)
    while len(find_marked(run)) < started:
        await asyncio.sleep(0.002)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert list(run.iterdir()) == []


@asynccontextmanager
async def forked(frozen: Frozen, run: Path, n: int, **more: Any) -> AsyncIterator[list[Child]]:
    """Killed at the end."""
    children = (
        await fork_children(ENGINE, frozen, new_identities(n, env=more.pop("env", None)), run, **more)
    ).sandboxes
    try:
        yield children
    finally:
        await kill_all(children)


class Turns:
    """How many children were under way at once, each for a while."""

    def __init__(self, meet: int = 1) -> None:
        self.under_way = self.most = 0
        self._meet, self._met = meet, asyncio.Event()

    async def take(self, _: Child) -> None:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        if self.under_way == self._meet:
            self._met.set()
        await self._met.wait()  # the first, however long the next takes to come
        await asyncio.sleep(0.05)
        self.under_way -= 1


async def test_children_answer_are_distinct_and_know_what_their_parent_knew(
    frozen: Frozen, run_directory: Path
) -> None:
    async with forked(frozen, run_directory, 5, env={"ROLE": "child"}) as children:
        assert len(children) == len({child.id for child in children}) == 5
        assert len({child.machine.pid for child in children}) == 5
        assert len({child.proof.hostname for child in children}) == 5
        assert len({child.proof.machine_id for child in children}) == 5
        assert all(child.proof.hostname == child.identity.hostname for child in children)
        answers = [(await child.agent.eval("[past, os.environ['ROLE'], random.random()]")).value for child in children]
        assert [answer[:2] for answer in answers] == [[{"answer": 42}, "child"]] * 5
        assert len({answer[2] for answer in answers}) == 5
        assert all("contract" in child.machine.phases.steps for child in children)


async def test_what_a_child_changes_its_sibling_and_the_parent_do_not_see(frozen: Frozen, run_directory: Path) -> None:
    async with forked(frozen, run_directory, 2) as (one, other):
        await one.agent.eval("past.clear()")
        assert (await other.agent.eval("past")).value == {"answer": 42}
    async with forked(frozen, run_directory, 1) as (later,):
        assert (await later.agent.eval("past")).value == {"answer": 42}


@pytest.mark.parametrize("n", [0, -1, 1001])
async def test_a_count_that_cannot_be_is_refused_before_anything_starts(
    frozen: Frozen, run_directory: Path, n: int
) -> None:
    with pytest.raises(InvalidInput, match=f"Cannot fork {n}"):
        await fork_children(ENGINE, frozen, new_identities(n), run_directory)


async def test_more_children_than_fit_are_refused_before_anything_starts(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "look", lambda: Capacity(600, 2))
    with pytest.raises(NoCapacity):
        await fork_children(ENGINE, frozen, new_identities(3), run_directory)


async def test_memory_that_runs_out_between_two_starts_ends_them_all(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([Capacity(100_000, 1)] * 3)
    monkeypatch.setattr(forking, "look", lambda: next(looks, Capacity(520, 1)))
    with pytest.raises(NoCapacity):
        await fork_children(ENGINE, frozen, new_identities(6), run_directory)
    assert list(run_directory.iterdir()) == []


async def test_a_foreign_snapshot_is_refused_before_anything_starts(frozen: Frozen, run_directory: Path) -> None:
    foreign = Frozen(frozen.directory, frozen.boot, {"python": "2.7"})
    with pytest.raises(SnapshotIncompatible):
        await fork_children(ENGINE, foreign, new_identities(3), run_directory)


async def test_no_more_than_admitted_start_at_once(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "look", lambda: Capacity(100_000, 1))
    turns = Turns(meet=2)
    async with asyncio.timeout(60), forked(frozen, run_directory, 6, after=turns.take):
        assert turns.most == 2


async def test_a_gate_of_the_caller_is_shared_by_several_forks(frozen: Frozen, run_directory: Path) -> None:
    gate, turns = asyncio.Semaphore(1), Turns()
    forks = [fork_children(ENGINE, frozen, new_identities(2), run_directory, gate=gate, after=turns.take) for _ in "ab"]
    for each in await asyncio.gather(*forks):
        await kill_all(each.sandboxes)
    assert turns.most == 1


async def test_children_come_in_the_order_and_under_the_ids_asked_for(frozen: Frozen, run_directory: Path) -> None:
    identities = new_identities(4)

    async def delay(sandbox: Child) -> None:
        await asyncio.sleep(0.2 if sandbox.id == identities[0].sandbox_id else 0)

    forked = await fork_children(ENGINE, frozen, identities, run_directory, after=delay)
    try:
        assert [sandbox.identity for sandbox in forked.sandboxes] == identities
        assert sorted(path.name for path in run_directory.iterdir()) == sorted(i.sandbox_id for i in identities)
        assert forked.errors == {}
    finally:
        await kill_all(forked.sandboxes)


async def test_partial_success_is_what_came_up_and_why_the_rest_did_not(frozen: Frozen, run_directory: Path) -> None:
    identities = new_identities(4)
    # One fails before its VM exists, one after.
    (run_directory / identities[1].sandbox_id).mkdir()

    async def spoil(sandbox: Child) -> None:
        if sandbox.id == identities[2].sandbox_id:
            raise ContractBroken("made up")

    forked = await fork_children(ENGINE, frozen, identities, run_directory, after=spoil, allow_partial=True)
    try:
        assert [sandbox.identity for sandbox in forked.sandboxes] == [identities[0], identities[3]]
        assert {key: type(error) for key, error in forked.errors.items()} == {
            identities[1].sandbox_id: EngineFailed,
            identities[2].sandbox_id: ContractBroken,
        }
        assert len(find_marked(run_directory)) == 2
    finally:
        await kill_all(forked.sandboxes)
    (run_directory / identities[1].sandbox_id).rmdir()


async def test_partial_success_of_none_is_an_error(frozen: Frozen, run_directory: Path) -> None:
    async def spoil(_: Child) -> None:
        raise ContractBroken("made up")

    with pytest.raises(ContractBroken, match="made up"):
        await fork_children(ENGINE, frozen, new_identities(3), run_directory, after=spoil, allow_partial=True)
    assert find_marked(run_directory) == {}


async def test_partial_success_is_no_excuse_for_a_mistake_or_a_cancellation(
    frozen: Frozen, run_directory: Path
) -> None:
    async def blunder(_: Child) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fork_children(ENGINE, frozen, new_identities(3), run_directory, after=blunder, allow_partial=True)
    await cancel_half_way(frozen, run_directory, n=6, started=2, allow_partial=True)


async def test_memory_for_some_is_enough_for_partial_success(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([Capacity(600, 1), Capacity(600, 1), Capacity(600, 1)])
    monkeypatch.setattr(forking, "look", lambda: next(looks, Capacity(520, 1)))
    forked = await fork_children(ENGINE, frozen, new_identities(5), run_directory, allow_partial=True)
    await kill_all(forked.sandboxes)
    assert len(forked.sandboxes) == 2
    assert {type(error) for error in forked.errors.values()} == {NoCapacity}


async def test_one_failure_afterwards_takes_all_children_with_it(frozen: Frozen, run_directory: Path) -> None:
    seen: list[Child] = []

    async def spoil(sandbox: Child) -> None:
        seen.append(sandbox)
        if len(seen) == 3:
            raise ZeroDivisionError("the third")

    with pytest.raises(ZeroDivisionError, match="the third") as caught:
        await fork_children(ENGINE, frozen, new_identities(5), run_directory, after=spoil)
    assert not isinstance(caught.value, BaseExceptionGroup)
    assert all(sandbox.machine.death.done() for sandbox in seen)
    assert list(run_directory.iterdir()) == []
    assert len(seen) >= 3


@pytest.mark.parametrize("started", [1, 3])
async def test_a_cancellation_half_way_kills_all(frozen: Frozen, run_directory: Path, started: int) -> None:
    await cancel_half_way(frozen, run_directory, n=8, started=started)


async def test_a_hook_that_raises_fails_the_fork_with_its_reason(run_directory: Path, tmp_path: Path) -> None:
    spoilt = await freeze(
        ENGINE, NO_IMAGE, tmp_path, "import forkd\n@forkd.on_fork\ndef hook(): raise KeyError('no database')\n"
    )
    with pytest.raises(ContractBroken, match="interpreter") as caught:
        await fork_children(ENGINE, spoilt, new_identities(3), run_directory)
    assert "no database" in (caught.value.details or "")
    assert list(run_directory.iterdir()) == []
    with pytest.raises(ContractBroken) as alone:
        await fork_one(ENGINE, spoilt, new_identities(1)[0], run_directory)
    assert alone.value.__cause__ is None


async def test_a_hook_runs_in_every_child_and_never_in_the_parent(run_directory: Path, tmp_path: Path) -> None:
    hooked = await freeze(
        ENGINE,
        NO_IMAGE,
        tmp_path,
        "import forkd\nnames = []\nforkd.on_fork(lambda: names.append(forkd.identity()['hostname']))\n",
    )
    async with forked(hooked, run_directory, 2) as children:
        assert [child.proof.hooks for child in children] == [1, 1]
        for child in children:
            assert (await child.agent.eval("names")).value == [child.identity.hostname]


async def test_a_child_that_dies_while_it_becomes_someone_is_explained(run_directory: Path, tmp_path: Path) -> None:
    # The agent is the parent of the interpreter the hook runs in.
    deadly = await freeze(
        ENGINE, NO_IMAGE, tmp_path, "import forkd, os\nforkd.on_fork(lambda: os.kill(os.getppid(), 9))\n"
    )
    with pytest.raises(GuestDied, match=r"ended while it was forked: crashed \(killed by SIGKILL") as caught:
        await fork_children(ENGINE, deadly, new_identities(2), run_directory)
    assert isinstance(caught.value.__cause__, ChannelClosed)


async def test_a_child_that_dies_before_it_runs_is_not_waited_for(
    frozen: Frozen, tmp_path: Path, run_directory: Path
) -> None:
    deadly = pack_eval(b"import os; os.kill(os.getppid(), 9)", 10_000)
    (tmp_path / "journal").write_bytes(encode_message(EVAL, 1, deadly))
    machine = await ENGINE.fork(Frozen(tmp_path, frozen.boot, frozen.platform), run_directory / "child")
    try:
        async with asyncio.timeout(20):
            with pytest.raises(EngineFailed):
                await machine.running()
    finally:
        await machine.kill()
    with pytest.raises(GuestDied, match="while it was forked"):
        await fork_one(ENGINE, Frozen(tmp_path, frozen.boot, frozen.platform), new_identities(1)[0], run_directory)


async def test_all_are_killed_even_when_one_resists(
    frozen: Frozen, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = (await fork_children(ENGINE, frozen, new_identities(3), run_directory)).sandboxes
    first = children[0].machine
    real = first.kill

    async def resist() -> None:
        await real()
        raise TimeoutError("it resists")

    monkeypatch.setattr(first, "kill", resist)
    with pytest.raises(TimeoutError, match="it resists"):
        await kill_all(children)
    assert all(child.machine.death.done() for child in children)
