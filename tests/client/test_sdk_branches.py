"""Branches and what is made of them, through a real daemon."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
from sdk_daemon import TAG

from forkd import AsyncSandbox, Controller, InvalidInput, NotFound, Sandbox


@pytest.fixture
def sandbox(daemon: Controller) -> Iterator[Sandbox]:
    """With x = 1. Snapshots that are made with it are removed."""
    with Sandbox.create(TAG) as made:
        made.run_code("x = 1")
        yield made
    for tag in tags(daemon) - {TAG}:
        with suppress(NotFound):  # with another one, or with the sandbox it was a checkpoint of
            daemon.delete_snapshot(tag, cascade=True)


def tags(daemon: Controller) -> set[str]:
    return {info["tag"] for info in daemon.list_snapshots()}


def test_forks_go_on_from_where_their_source_is_and_leave_no_tag(sandbox: Sandbox, daemon: Controller) -> None:
    with sandbox.fork(3, labels={"try": "7"}) as forks:
        assert [fork.eval_value("[x, warmed]") for fork in forks] == [[1, 41]] * 3
        forks[0].run_code("x = 2")
        assert (sandbox.eval("x"), forks[1].eval("x")) == ("1", "1")
        infos = daemon.list_sandboxes(labels={"try": "7"})
        assert {(info["parent_id"], info["depth"]) for info in infos} == {(sandbox.id, 1)}
        assert {info["lineage"] for info in infos} == {sandbox.info()["lineage"]}
        assert all(info["deadline_unix"] is not None for info in infos)
    assert [info["id"] for info in daemon.list_sandboxes()] == [sandbox.id]
    assert tags(daemon) == {TAG}


def test_a_fork_of_a_fork_is_deeper(sandbox: Sandbox) -> None:
    with sandbox.fork() as [child], child.fork(timeout=None) as [grandchild]:
        assert grandchild.info()["depth"] == 2 and grandchild.eval("x") == "1"
        assert grandchild.info()["deadline_unix"] is None


def test_the_state_that_forks_start_from_can_be_kept(sandbox: Sandbox, daemon: Controller) -> None:
    with sandbox.fork(2, tag="kept") as forks:
        assert forks[0].tag == "kept"
    with Sandbox.create("kept") as other:
        assert other.eval("x") == "1"


def test_a_branch_is_a_snapshot_like_others(sandbox: Sandbox, daemon: Controller) -> None:
    made = sandbox.branch("there")
    assert (made["tag"], made["status"], made["branched_from"]) == ("there", "ready", sandbox.id)
    sandbox.run_code("x = 5")
    with Sandbox.create("there") as other:
        assert other.eval("x") == "1"
    early = sandbox.branch(wait=False)
    assert early["usable"]
    with Sandbox.create(early["tag"]) as other:
        assert other.eval("x") == "5"
    assert sandbox.info()["branch_count"] == 2


def test_a_sandbox_goes_back_and_stays_itself(sandbox: Sandbox) -> None:
    before = sandbox.info()
    sandbox.checkpoint("safe")
    sandbox.run_code("x = 2")
    sandbox.checkpoint()
    sandbox.run_code("x = 3")
    assert [each["name"] for each in sandbox.checkpoints()] == ["safe", "c1"]
    sandbox.rewind()
    assert sandbox.eval("x") == "2"
    after = sandbox.rewind("safe")
    assert sandbox.eval("x") == "1"
    assert all(after[key] == before[key] for key in ("id", "guest_addr", "on_timeout", "created_at_unix"))
    sandbox.delete_checkpoint("c1")
    assert [each["name"] for each in sandbox.checkpoints()] == ["safe"]
    with pytest.raises(NotFound, match="no checkpoint c1"):
        sandbox.rewind("c1")
    assert sandbox.eval("x") == "1"


def test_an_attempt_is_kept_or_undone(sandbox: Sandbox) -> None:
    with sandbox.attempt():
        sandbox.run_code("x = 2")
    with pytest.raises(ZeroDivisionError):
        with sandbox.attempt():
            sandbox.run_code("x = 3")
            raise ZeroDivisionError
    assert sandbox.eval("x") == "2"
    with sandbox.attempt() as trial:
        for wrong in (7, 8):
            sandbox.run_code(f"x = x + {wrong}")
            trial.rewind()
        sandbox.run_code("x = x + 1")
    assert sandbox.eval("x") == "3" and sandbox.checkpoints() == []


def test_attempts_may_be_inside_others(sandbox: Sandbox) -> None:
    with sandbox.attempt():
        sandbox.run_code("x = 2")
        with pytest.raises(KeyError), sandbox.attempt():
            sandbox.run_code("x = 3")
            raise KeyError
        with pytest.raises(KeyError), sandbox.attempt(), sandbox.attempt():
            sandbox.run_code("x = 4")
            raise KeyError
    assert sandbox.eval("x") == "2" and sandbox.checkpoints() == []


def test_a_promoted_fork_takes_the_place_of_its_source(sandbox: Sandbox, daemon: Controller) -> None:
    with sandbox.fork(3) as forks:
        for number, fork in enumerate(forks):
            fork.run_code(f"x = {number + 10}")
        assert sandbox.promote(forks[1])["id"] == sandbox.id
    assert sandbox.eval("x") == "11"
    assert [info["id"] for info in daemon.list_sandboxes()] == [sandbox.id]
    with Sandbox.create(TAG) as other, pytest.raises(InvalidInput, match="not forked from"):
        sandbox.promote(other)


async def test_all_of_it_with_asyncio(daemon: Controller) -> None:
    async with await AsyncSandbox.create(TAG) as sandbox:
        await sandbox.run_code("x = 1")
        async with await sandbox.fork(2) as forks:
            await forks[1].run_code("x = 2")
            await sandbox.promote(forks[1])
        with pytest.raises(KeyError):
            async with sandbox.attempt():
                await sandbox.run_code("x = 3")
                raise KeyError
        assert await sandbox.eval("x") == "2"
    assert daemon.list_sandboxes() == []


def test_chains_are_derived_checked_made_flat_and_pruned(daemon: Controller) -> None:
    made = daemon.derive_snapshot(TAG, "more", code="more = warmed + 1")
    assert (made["tag"], made["parent_tag"], made["status"]) == ("more", TAG, "ready")
    daemon.derive_snapshot("more", "most", shell="true", code="most = more + 1")
    detail = daemon.snapshot_info("most")
    assert (detail["ancestors"], detail["chain_depth"]) == ([TAG, "more"], 2)
    assert daemon.snapshot_info("more")["dependents"] == ["most"]
    assert daemon.verify_snapshot("most")["chain"] == [TAG, "more", "most"]
    daemon.compact_snapshot("most", "flat")
    assert daemon.snapshot_info("flat")["ancestors"] == []
    with Sandbox.create("most") as one, Sandbox.create("flat") as other:
        assert one.eval("most") == other.eval("most") == "43"
    daemon.delete_snapshot("more", cascade=True)
    daemon.delete_snapshot("flat")
    assert tags(daemon) == {TAG}
    would = daemon.prune_snapshots(max_age_secs=0, dry_run=True)
    assert would["dry_run"] and would["removed"] == []


def test_the_key_of_a_fork_finds_what_it_made_and_removes_it(sandbox: Sandbox, daemon: Controller) -> None:
    first = daemon.fork_sandbox(sandbox.id, 2, idempotency_key="fork-key")
    again = daemon.fork_sandbox(sandbox.id, 2, idempotency_key="fork-key")
    assert {info["id"] for info in first} == {info["id"] for info in again}
    assert set(daemon.cancel_spawn("fork-key")["removed"]) == {info["id"] for info in first}
    kept = daemon.fork_sandbox(sandbox.id, 1, tag="kept", idempotency_key="kept-key")
    assert daemon.fork_sandbox(sandbox.id, 1, tag="kept", idempotency_key="kept-key")[0]["id"] == kept[0]["id"]
    assert len(daemon.cancel_spawn("kept-key")["removed"]) == 1


def test_a_checkpoint_of_a_sandbox_that_runs_is_not_pruned(sandbox: Sandbox, daemon: Controller) -> None:
    sandbox.checkpoint("safe")
    daemon.prune_snapshots(keep_last=0)
    assert [each["name"] for each in sandbox.checkpoints()] == ["safe"]
