"""Snapshots on disk: complete or absent, held or removable, and one that is damaged spoils no other."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forkd.errors import Conflict, HostLacks, NotFound, SnapshotDamaged, SnapshotIncompatible
from forkd.host.files import STAGING_PREFIX
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.store.manifest import Manifest
from forkd.store.snapshots import Snapshot, SnapshotStore

A, B = parse_tag("a"), parse_tag("b")
IMAGE = "0123456789abcdef" * 2

_CREATE_AND_WAIT = """
import sys, time
from pathlib import Path
from forkd.store.snapshots import SnapshotStore
with SnapshotStore(Path(sys.argv[1])).created("a", replace_existing=True) as (staging, seal):
    (staging / "memory").write_text("half")
    print("there", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "deep/snapshots")


def manifest(tag: SnapshotTag, image_id: str = IMAGE) -> Manifest:
    return Manifest(tag, 1_700_000_000, "fake", image_id, MachineSpec(256), "import this", {"python": "3"}, {})


def create(store: SnapshotStore, tag: SnapshotTag, text: str = "memory", *, replace: bool = False) -> Snapshot:
    with store.created(tag, replace_existing=replace) as (staging, seal):
        (staging / "memory").write_text(text)
        (staging / "state").write_text("state")
        seal(manifest(tag))
    return store.get(tag)


def tags(store: SnapshotStore) -> list[str]:
    return [snapshot.manifest.tag for snapshot in store.list().snapshots]


def entries(store: SnapshotStore) -> list[str]:
    return sorted(path.name for path in store.root.iterdir())


def edit(store: SnapshotStore, tag: SnapshotTag, **fields: object) -> None:
    path = store.root / tag / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_an_empty_store_has_nothing(store: SnapshotStore) -> None:
    assert (store.list().snapshots, store.list().unusable, store.images_in_use()) == ((), (), {})
    assert not store.has(A)
    with pytest.raises(NotFound, match="no snapshot a") as caught:
        store.get(A)
    assert caught.value.hint is not None and "snapshot ls" in caught.value.hint
    with pytest.raises(NotFound), store.held(A):
        pass
    with pytest.raises(NotFound):
        store.remove(A)


def test_a_snapshot_is_there_when_its_block_is_over(store: SnapshotStore) -> None:
    with store.created(A, replace_existing=False) as (staging, seal):
        (staging / "memory").write_bytes(bytes(9000))
        seal(manifest(A))
        assert tags(store) == []
        assert not store.has(A)
    assert tags(store) == ["a"]
    with store.held(A) as snapshot:
        assert snapshot.manifest.files["memory"].size == 9000
        assert snapshot.disk_bytes() >= 8192
        # A jailed VMM, which is another user, reads the file it is handed; by its path nobody else gets there.
        assert (snapshot.directory / "memory").stat().st_mode & 0o777 == 0o644
        assert snapshot.directory.stat().st_mode & 0o777 == 0o700
    assert entries(store) == ["a"]


def test_a_block_that_fails_or_seals_nothing_leaves_nothing(store: SnapshotStore) -> None:
    with pytest.raises(ZeroDivisionError), store.created(A, replace_existing=False) as (staging, seal):
        (staging / "memory").touch()
        seal(manifest(A))
        raise ZeroDivisionError
    assert entries(store) == []
    with pytest.raises(AssertionError), store.created(A, replace_existing=False) as (staging, _):
        (staging / "memory").touch()
    assert entries(store) == []


def test_a_tag_is_not_taken_twice(store: SnapshotStore) -> None:
    create(store, A, "old")
    with pytest.raises(Conflict, match="exists already") as caught:
        create(store, A, "new")
    assert caught.value.hint is not None and "--replace" in caught.value.hint
    assert (store.root / "a/memory").read_text() == "old"
    assert entries(store) == ["a"]


@pytest.mark.parametrize(
    "take",
    [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")],
    ids=["no manifest", "a file", "a dangling link"],
)
def test_a_tag_that_is_taken_by_wreckage_is_a_conflict_before_any_work(
    store: SnapshotStore, take: Callable[[Path], None]
) -> None:
    create(store, B)
    take(store.root / "a")
    with pytest.raises(Conflict, match="exists already"):
        with store.created(A, replace_existing=False):
            pytest.fail("work was begun")


def test_a_replacement_takes_the_place_of_the_old_one(store: SnapshotStore) -> None:
    create(store, A, "old")
    create(store, A, "new", replace=True)
    with store.held(A) as snapshot:
        assert (snapshot.directory / "memory").read_text() == "new"
    assert entries(store) == ["a"]


def test_wreckage_can_be_replaced(store: SnapshotStore) -> None:
    (store.root / "a/inner").mkdir(parents=True)
    create(store, A, replace=True)
    assert tags(store) == ["a"]
    assert entries(store) == ["a"]


def test_a_failed_replacement_keeps_the_old_one(store: SnapshotStore) -> None:
    create(store, A, "old")
    with pytest.raises(ZeroDivisionError):
        with store.created(A, replace_existing=True) as (_, seal):
            seal(manifest(A))
            raise ZeroDivisionError
    assert (store.root / "a/memory").read_text() == "old"
    assert entries(store) == ["a"]
    store.remove(A)  # the lock on it was given back


def test_what_is_held_cannot_be_removed_or_replaced(store: SnapshotStore) -> None:
    create(store, A, "old")
    with store.held(A), store.held(A):
        with pytest.raises(Conflict, match="in use") as caught:
            store.remove(A)
        assert caught.value.hint
        with pytest.raises(Conflict, match="in use"):
            create(store, A, "new", replace=True)
        assert (store.root / "a/memory").read_text() == "old"
    create(store, A, "new", replace=True)
    store.remove(A)
    assert entries(store) == []


def test_nobody_can_take_hold_of_the_old_one_while_it_is_being_replaced(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, A, "old")
    real = os.fsync
    seen: list[str] = []

    def fsync(fd: int) -> None:
        # Called when the block is over and the new one is about to take its place.
        if not seen:
            with pytest.raises(Conflict), store.held(A):
                pass
            seen.append("refused")
        real(fd)

    with store.created(A, replace_existing=True) as (staging, seal):
        (staging / "memory").write_text("new")
        seal(manifest(A))
        monkeypatch.setattr(os, "fsync", fsync)
    assert seen == ["refused"]


def test_the_lock_taken_is_that_of_the_snapshot_there_now(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, A, "old")
    real = os.open
    raced: list[str] = []

    def open_and_lose(path: Path, flags: int, *args: int) -> int:
        fd = real(path, flags, *args)
        if path == store.root / "a" and not raced:
            raced.append("replaced between opening and locking")
            create(store, A, "new", replace=True)
        return fd

    monkeypatch.setattr(os, "open", open_and_lose)
    with store.held(A) as snapshot:
        assert (snapshot.directory / "memory").read_text() == "new"
        with pytest.raises(Conflict):
            store.remove(A)
    assert raced


def test_several_are_removed_together_or_not_at_all(store: SnapshotStore) -> None:
    create(store, A)
    create(store, B)
    with pytest.raises(NotFound, match="no snapshot c"):
        store.remove(A, parse_tag("c"), B)
    assert tags(store) == ["a", "b"]
    with store.held(B), pytest.raises(Conflict, match="b is in use"):
        store.remove(A, B)
    assert tags(store) == ["a", "b"]
    store.remove(A, B, A)
    assert entries(store) == []


def test_a_creator_that_is_killed_leaves_nothing_listed_and_the_next_one_cleans_up(store: SnapshotStore) -> None:
    create(store, A, "old")
    maker = subprocess.Popen(
        [sys.executable, "-c", _CREATE_AND_WAIT, str(store.root)], stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    assert maker.stdout.readline() == "there\n"
    create(store, B)  # sweeps, and leaves alone what is in progress
    assert len(entries(store)) == 3
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    assert tags(store) == ["a", "b"]
    assert store.list().unusable == ()
    assert (store.root / "a/memory").read_text() == "old"
    create(store, B, replace=True)
    assert entries(store) == ["a", "b"]


def test_one_that_is_damaged_hides_no_other_and_says_why(store: SnapshotStore) -> None:
    for name in ("a", "b", "cut", "foreign", "gone", "json", "none", "renamed", "short"):
        create(store, parse_tag(name))
    (store.root / "gone/state").unlink()
    os.truncate(store.root / "short/memory", 2)
    (store.root / "json/manifest.json").write_text("{")
    (store.root / "cut/manifest.json").write_bytes((store.root / "a/manifest.json").read_bytes()[:60])
    (store.root / "none/manifest.json").unlink()
    edit(store, parse_tag("foreign"), format=7)
    (store.root / "renamed").rename(store.root / "other")
    listing = store.list()
    assert tags(store) == ["a", "b"]
    reasons = {entry.tag: entry.error for entry in listing.unusable}
    assert list(reasons) == ["cut", "foreign", "gone", "json", "none", "other", "short"]
    assert "file state of snapshot gone is missing" in reasons[parse_tag("gone")].message
    assert "file memory of snapshot short has 2 bytes instead of 6" in reasons[parse_tag("short")].message
    assert "manifest of snapshot none cannot be read" in reasons[parse_tag("none")].message
    assert isinstance(reasons[parse_tag("foreign")], SnapshotIncompatible)
    assert all(entry.tag in entry.error.message and entry.error.hint for entry in listing.unusable)
    store.remove(*reasons)
    assert entries(store) == ["a", "b"]


def test_entries_that_are_no_snapshots_are_left_alone(store: SnapshotStore) -> None:
    create(store, A)
    (store.root / "a.b").mkdir()
    (store.root / f"{STAGING_PREFIX}x").mkdir()
    (store.root / "file").write_text("mine")
    (store.root / "link").symlink_to("a")
    before = entries(store)
    assert tags(store) == ["a"]
    assert store.list().unusable == ()
    assert set(store.images_in_use()) == {IMAGE}
    for name in ("file", "link"):
        with pytest.raises(NotFound):
            store.remove(SnapshotTag(name))
    assert entries(store) == before


@pytest.mark.parametrize("name", ["memory", "state"])
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (Path.unlink, "is missing"),
        (lambda path: os.truncate(path, 1), "bytes instead of"),
        (lambda path: path.write_bytes(path.read_bytes()[::-1]), "was altered"),
    ],
    ids=["removed", "truncated", "altered"],
)
def test_a_damaged_file_is_named_when_the_snapshot_is_to_be_used(
    store: SnapshotStore, name: str, harm: Callable[[Path], object], said: str
) -> None:
    create(store, A)
    with store.held(A):
        pass  # verified and remembered: that must not hide what comes
    path = store.root / "a" / name
    path.chmod(0o600)
    harm(path)
    with pytest.raises(SnapshotDamaged, match=f"The file {name} of snapshot a .*{said}") as caught:
        with store.held(A):
            pytest.fail("damaged, and handed out")
    assert caught.value.hint is not None and "forkd snapshot rm a" in caught.value.hint
    store.remove(A)


def test_images_are_in_use_by_damaged_snapshots_too(store: SnapshotStore) -> None:
    for tag, image_id in ((A, "1" * 32), (B, "2" * 32)):
        create(store, tag)
        edit(store, tag, image_id=image_id)
    (store.root / "a/memory").unlink()
    edit(store, B, format=7)
    assert store.images_in_use() == {"1" * 32: (A,), "2" * 32: (B,)}


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")], ids=["no manifest", "half a one"])
def test_where_an_image_may_be_in_use_unseen_nobody_is_told_that_it_is_not(
    store: SnapshotStore, damage: Callable[[Path], object]
) -> None:
    create(store, A)
    create(store, B)
    damage(store.root / "b/manifest.json")
    with pytest.raises(SnapshotDamaged, match="snapshot b") as caught:
        store.images_in_use()
    assert caught.value.hint is not None and "forkd snapshot rm b" in caught.value.hint
    store.remove(B)
    assert set(store.images_in_use()) == {IMAGE}


def test_a_store_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HostLacks, match="cannot be changed") as caught:
        create(SnapshotStore(tmp_path / "file/snapshots"), A)
    assert caught.value.hint is not None and "FORKD_HOME" in caught.value.hint
