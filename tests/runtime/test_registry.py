"""The registry: guarded states, all-or-nothing transactions, queries."""

import itertools
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from forkd.errors import Conflict, HostLacks, NotFound
from forkd.model.machine import NO_LIMITS, Limits
from forkd.model.names import parse_tag
from forkd.model.sandbox import TRANSITIONS, State, Way, new_sandbox_id
from forkd.runtime import registry as stored
from forkd.runtime.registry import IdempotencyKey, Registry, SandboxQuery, SandboxRecord, SnapshotJob, WorkspaceRow

TAG = parse_tag("warm")


def record(state: State = State.STARTING, **fields: object) -> SandboxRecord:
    base = SandboxRecord(0, new_sandbox_id(), TAG, state, 100.0, "fake", "none", 4000)
    return SandboxRecord(**{**base.__dict__, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_a_state_is_left_only_for_one_that_may_follow(registry: Registry, before: State, after: State) -> None:
    one = record(before)
    registry.insert_sandboxes([one])
    if after in TRANSITIONS[before]:
        registry.move([one.id], after)
        assert registry.get_sandbox(one.id).state is after
    else:
        with pytest.raises(Conflict, match=before.value):
            registry.move([one.id], after)
        assert registry.get_sandbox(one.id).state is before


def test_a_sandbox_is_found_by_its_name_which_no_other_can_have(registry: Registry) -> None:
    one, other = record(), record()
    registry.insert_sandboxes([one, other])
    assert one.name is None
    registry.rename(one.id, "web")
    assert registry.get_sandbox("web") == registry.get_sandbox(one.id)
    registry.rename(one.id, "web")
    with pytest.raises(Conflict, match="Another sandbox is named web"):
        registry.rename(other.id, "web")
    registry.rename(one.id, None)
    with pytest.raises(NotFound):
        registry.get_sandbox("web")
    registry.rename(other.id, "web")
    assert registry.get_sandbox("web").id == other.id


def test_moving_many_is_all_or_nothing(registry: Registry) -> None:
    fine, wrong = record(State.STARTING), record(State.DEAD)
    registry.insert_sandboxes([fine, wrong])
    with pytest.raises(Conflict):
        registry.move([fine.id, wrong.id], State.RUNNING, {fine.id: {"pid": 7}})
    assert registry.get_sandbox(fine.id).state is State.STARTING
    assert registry.get_sandbox(fine.id).pid is None


def test_a_failed_transaction_leaves_nothing(registry: Registry) -> None:
    one = record()
    with pytest.raises(RuntimeError), registry.transaction():
        registry.insert_sandboxes([one])
        raise RuntimeError("crash")
    with pytest.raises(NotFound):
        registry.get_sandbox(one.id)


def test_what_is_written_is_there_for_the_next_daemon(tmp_path: Path) -> None:
    one = record(labels={"team": "a"}, metadata={"k": "ü\n"}, limits=Limits(256, 0.5, 9, 8), workspace="w")
    first = Registry(tmp_path / "registry.db")
    first.insert_sandboxes([one])
    # Not closed: a killed daemon closes nothing.
    second = Registry(tmp_path / "registry.db")
    seen = second.get_sandbox(one.id)
    assert (seen.labels, seen.metadata, seen.workspace) == ({"team": "a"}, {"k": "ü\n"}, "w")
    assert seen.limits == Limits(memory_mib=256, cpus=0.5, pids=9, io_mib_s=8)
    first.close()
    second.close()


def test_how_a_sandbox_came_to_be_is_known_once_it_runs(registry: Registry) -> None:
    one = record()
    registry.insert_sandboxes([one])
    assert registry.get_sandbox(one.id).way is None
    registry.move([one.id], State.RUNNING, {one.id: {"way": Way.FORK.value}})
    assert registry.get_sandbox(one.id).way is Way.FORK
    registry.move([one.id], State.PAUSED)
    assert registry.get_sandbox(one.id).way is Way.FORK


def make_old(path: Path, version: int, script: str, *states: str) -> None:
    """A registry as an earlier version left it, with a sandbox in each of the states."""
    with closing(sqlite3.connect(path)) as db, db:
        db.executescript(script)
        for number, state in enumerate(states):
            db.execute(
                "INSERT INTO sandboxes (id, snapshot_tag, state, created_at_unix, engine, isolation, agent_port,"
                " memory_limit_mib, on_timeout, labels, metadata)"
                " VALUES (?, 'warm', ?, 1, 'fake', 'none', 4000, 256, 'kill', '{}', '{}')",
                (f"sb-000000000{number}", state),
            )
        db.execute(f"PRAGMA user_version = {version}")


def test_a_registry_between_then_and_now_is_taken_over(tmp_path: Path) -> None:
    make_old(tmp_path / "registry.db", 2, stored._FIRST + stored._MORE_LIMITS, "running", "starting")
    with closing(Registry(tmp_path / "registry.db")) as registry:
        found = [(one.way, one.limits.memory_mib) for one in registry.list_sandboxes()]
    assert found == [(Way.START, 256), (None, 256)]


def test_a_file_that_is_no_registry_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(HostLacks, match="cannot be used"):
        Registry(path)


def test_a_registry_of_another_version_is_refused_and_not_changed(tmp_path: Path) -> None:
    make_old(tmp_path / "registry.db", 99, "")
    with pytest.raises(HostLacks, match="version 99"):
        Registry(tmp_path / "registry.db")


def test_a_registry_of_the_version_before_is_taken_over_with_what_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    make_old(path, 1, stored._FIRST + "INSERT INTO workspaces VALUES ('w', 'ws-1', 'warm', 128, 1, 2)", "running")
    with closing(Registry(path)) as registry:
        taken_over = registry.get_sandbox("sb-0000000000")
        assert taken_over.limits == NO_LIMITS  # the one it had was never enforced
        assert taken_over.way is Way.START  # there was no other
        workspace = registry.find_workspace("w")
        assert workspace == WorkspaceRow("w", "ws-1", TAG, Limits(memory_mib=128), 1.0, 2.0)
    Registry(path).close()


def test_sandboxes_are_found_by_label_metadata_state_and_snapshot(registry: Registry) -> None:
    red = record(State.RUNNING, labels={"colour": "red", "size": "1"})
    blue = record(State.PAUSED, labels={"colour": "blue"}, metadata={"user": "x'; --"})
    other = record(State.RUNNING, snapshot_tag=parse_tag("cold"))
    registry.insert_sandboxes([red, blue, other])

    def ids(**query: object) -> list[str]:
        return [found.id for found in registry.list_sandboxes(SandboxQuery(**query))]  # type: ignore[arg-type]

    assert ids() == [red.id, blue.id, other.id]
    assert ids(labels={"colour": "red"}) == [red.id]
    assert ids(labels={"colour": "red", "size": "2"}) == []
    assert ids(metadata={"user": "x'; --"}) == [blue.id]
    assert ids(states=frozenset({State.PAUSED})) == [blue.id]
    assert ids(snapshot_tag="cold") == [other.id]


def test_pages_follow_each_other_without_gap_or_repeat(registry: Registry) -> None:
    registry.insert_sandboxes(record() for _ in range(7))
    seen: list[str] = []
    after = 0
    while page := registry.list_sandboxes(SandboxQuery(after=after, limit=3)):
        seen += [one.id for one in page]
        after = page[-1].number
    assert seen == [one.id for one in registry.list_sandboxes()]


def test_numbers_are_not_given_twice(registry: Registry) -> None:
    first = record()
    registry.insert_sandboxes([first])
    number = registry.get_sandbox(first.id).number
    registry.remove_sandboxes([first.id])
    second = record()
    registry.insert_sandboxes([second])
    assert registry.get_sandbox(second.id).number > number


def test_a_key_belongs_to_one_request_of_one_owner(registry: Registry) -> None:
    key = IdempotencyKey("k", "alice", "d1")
    registry.record_spawn(key, ["a", "b"], 10.0)
    assert registry.find_spawn(key) == ("a", "b")
    assert registry.find_spawn(IdempotencyKey("k", "bob", "d1")) is None
    with pytest.raises(Conflict, match="another request"):
        registry.find_spawn(IdempotencyKey("k", "alice", "d2"))


def test_only_the_keys_of_spawns_that_were_never_answered_are_forgotten(registry: Registry) -> None:
    """Not those of sandboxes that are gone: the same request would make them again."""
    starting, running, gone = record(), record(State.RUNNING), new_sandbox_id()
    registry.insert_sandboxes([starting, running])
    keys = {name: IdempotencyKey(name, "", "d") for name in (starting.id, running.id, gone)}
    for name, key in keys.items():
        registry.record_spawn(key, [name], 1.0)
    registry.forget_unfinished_spawns()
    assert registry.find_spawn(keys[starting.id]) is None
    assert registry.find_spawn(keys[running.id]) == (running.id,)
    assert registry.find_spawn(keys[gone]) == (gone,)


def test_a_workspace_name_is_taken_once(registry: Registry) -> None:
    row = WorkspaceRow("w", "ws-1", TAG, Limits(cpus=0.5), 1.0, 1.0)
    registry.insert_workspace(row)
    with pytest.raises(Conflict, match="exists already"):
        registry.insert_workspace(row)
    assert registry.find_workspace("w") == row


def test_a_job_is_replaced_by_the_next_one_for_its_tag(registry: Registry) -> None:
    registry.record_job(SnapshotJob(TAG, "failed", 1.0, "why", "warmup_failed"))
    registry.record_job(SnapshotJob(TAG, "writing", 2.0))
    assert registry.list_jobs() == [SnapshotJob(TAG, "writing", 2.0)]
