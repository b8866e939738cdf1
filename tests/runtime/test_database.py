"""What the disk does not take is kept in memory, as if it were there, until it does."""

import contextlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_mounts import as_root, small_disk

from forkd.errors import Conflict, HostLacks, NoCapacity
from forkd.model.names import parse_tag
from forkd.model.sandbox import State
from forkd.runtime.registry import EventRecord, IdempotencyKey, Registry, SandboxRecord, WorkspaceRow

TAG = parse_tag("warm")
ONE, TWO, THREE = (f"sb-{number:010x}" for number in range(3))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkd.runtime.database._BUSY_MS", 20)


def emit(registry: Registry, kind: str) -> int:
    return registry.insert_event(EventRecord(0, 1.0, kind, None, None, {"n": 1}))


def fill(registry: Registry) -> None:
    registry.insert_sandboxes(
        SandboxRecord(0, sandbox_id, TAG, State.RUNNING, 1.0, "fake", "none", 1) for sandbox_id in (ONE, TWO, THREE)
    )
    registry.rename(ONE, "one")
    registry.rename(TWO, "two")
    registry.record_spawn(IdempotencyKey("k", "", "d"), [ONE], 1.0)
    emit(registry, "before")
    emit(registry, "forgotten")
    registry.forget_events_through(2)


@contextlib.contextmanager
def locked_by_another(path: Path) -> Iterator[None]:
    """The disk takes nothing: another program is writing."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def change(registry: Registry) -> None:
    with registry.transaction():
        registry.move([ONE], State.PAUSED)
        emit(registry, "in a transaction")
    registry.remove_sandboxes([TWO])
    registry.rename(THREE, "two")
    registry.rename(ONE, None)


def check_changed(registry: Registry) -> None:
    rows = {row.id: (row.state, row.name) for row in registry.list_sandboxes()}
    assert rows == {ONE: (State.PAUSED, None), THREE: (State.RUNNING, "two")}
    # A number that was given is not given again.
    assert [(event.id, event.type) for event in registry.list_events(0, None, None, 10)] == [(3, "in a transaction")]
    assert registry.find_spawn(IdempotencyKey("k", "", "d")) == (ONE,)


def test_what_another_program_keeps_us_from_writing_is_written_later(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    with contextlib.closing(Registry(path)) as registry:
        fill(registry)
        with locked_by_another(path):
            change(registry)
            assert registry.adrift and not registry.land()
            check_changed(registry)
        with contextlib.closing(Registry(path)) as on_disk:
            assert len(on_disk.list_sandboxes()) == 3
        assert registry.land() and not registry.adrift
        check_changed(registry)
        with contextlib.closing(Registry(path)) as on_disk:
            check_changed(on_disk)


def test_rules_hold_in_memory_too(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    with contextlib.closing(Registry(path)) as registry:
        fill(registry)
        with locked_by_another(path):
            registry.move([ONE], State.DEAD)
            with pytest.raises(Conflict, match="is dead"), registry.transaction():
                registry.move([TWO], State.PAUSED)
                registry.move([ONE], State.RUNNING)
            assert registry.get_sandbox(TWO).state is State.RUNNING
            with pytest.raises(Conflict, match="Another sandbox is named two"):
                registry.rename(THREE, "two")


def test_what_must_be_durable_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    path, row = tmp_path / "registry.db", WorkspaceRow("w", "ws-1", TAG, SandboxRecord.limits, 1.0, 1.0)
    with contextlib.closing(Registry(path)) as registry:
        fill(registry)
        with locked_by_another(path):
            for _ in range(2):
                with pytest.raises(NoCapacity, match="cannot be written") as caught:
                    registry.insert_workspace(row)
                assert caught.value.hint
                emit(registry, "from here on in memory")
            assert registry.list_workspaces() == []
        registry.insert_workspace(row)
        assert not registry.adrift and registry.list_workspaces() == [row]


@as_root
def test_a_full_disk_loses_nothing_however_many_changes_there_are(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        with contextlib.closing(Registry(disk / "registry.db")) as registry:
            fill(registry)
            with (disk / "filling").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free)
            change(registry)
            for _ in range(500):
                registry.move([ONE], State.RUNNING)
                registry.move([ONE], State.PAUSED)
            assert registry.adrift
            check_changed(registry)
            (disk / "filling").unlink()
        with contextlib.closing(Registry(disk / "registry.db")) as registry:
            check_changed(registry)


def test_the_log_does_not_grow_without_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkd.runtime.database._LOG_BYTES", 100_000)
    path = tmp_path / "registry.db"
    with contextlib.closing(Registry(path)) as registry:
        for _ in range(500):
            emit(registry, "again")
            registry.checkpoint()
        assert path.with_name("registry.db-wal").stat().st_size < 150_000


def test_others_cannot_read_it_at_any_time(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with contextlib.closing(Registry(tmp_path / "registry.db")) as registry:
            fill(registry)
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("registry.db", "registry.db-wal", "registry.db-shm"), 0o600)


def test_what_cannot_be_made_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(HostLacks, match=r"registry\.db cannot be used"):
        Registry(tmp_path / "nowhere" / "registry.db")
