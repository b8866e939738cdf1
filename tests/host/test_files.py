"""Directories and files that are there whole or not at all; damaged ones are found and named."""

import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support_mounts import as_root, small_disk

from forkd.errors import Conflict, NoCapacity, SnapshotDamaged
from forkd.host import files
from forkd.host.files import (
    STAGING_PREFIX,
    FileSum,
    digest_file,
    dump_sums,
    locked,
    parse_sums,
    scratch_directory,
    staged_directory,
    sweep_staging,
    verify_files,
    verify_sizes,
    write_atomic,
)

_TINY_BYTES = 256 * 1024

_STAGE_AND_WAIT = """
import sys, time
from pathlib import Path
from forkd.host.files import staged_directory
with staged_directory(Path(sys.argv[1])) as staging:
    (staging / "half").write_text("half")
    print(staging, flush=True)
    time.sleep(60)
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """A directory that is there already, with something in it."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final/old").touch()
    return tmp_path / "final"


def test_a_directory_appears_only_when_its_block_is_over(tmp_path: Path) -> None:
    final = tmp_path / "deep/final"
    with staged_directory(final) as staging:
        (staging / "inner").mkdir()
        (staging / "inner/file").write_text("whole")
        assert not final.exists()
        assert staging.parent == final.parent
        assert staging.stat().st_mode & 0o777 == 0o700
    assert (final / "inner/file").read_text() == "whole"
    assert names(final.parent) == ["final"]


def test_everything_in_a_directory_is_synced_before_it_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final, real = tmp_path / "final", os.fsync
    synced: list[tuple[str, bool]] = []

    def fsync(fd: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{fd}")).name, final.exists()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with staged_directory(final) as staging:
        (staging / "inner").mkdir()
        (staging / "inner/file").write_text("whole")
        (staging / "link").symlink_to("nowhere")
    assert sorted(synced[:-1]) == sorted((name, False) for name in (staging.name, "inner", "file"))
    assert synced[-1] == (tmp_path.name, True)


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with staged_directory(tmp_path / "final") as staging:
            (staging / "file").write_text("x")
            raise ZeroDivisionError
    assert names(tmp_path) == []


def test_what_exists_is_not_replaced_by_accident(final: Path) -> None:
    with pytest.raises(Conflict, match="final"):
        with staged_directory(final) as staging:
            (staging / "new").touch()
    assert names(final.parent) == ["final"]
    assert names(final) == ["old"]


def test_a_file_in_the_place_of_the_directory_is_a_conflict(tmp_path: Path) -> None:
    (tmp_path / "final").write_text("mine")
    with pytest.raises(Conflict):
        with staged_directory(tmp_path / "final"):
            pass
    assert names(tmp_path) == ["final"]
    assert (tmp_path / "final").read_text() == "mine"


def test_what_exists_is_replaced_as_a_whole_when_asked(final: Path) -> None:
    with staged_directory(final, replace=True) as staging:
        (staging / "new").touch()
        assert names(final) == ["old"]
    assert names(final.parent) == ["final"]
    assert names(final) == ["new"]


def test_a_failed_replacement_keeps_the_old(final: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        with staged_directory(final, replace=True):
            raise ZeroDivisionError
    assert names(final.parent) == ["final"]
    assert names(final) == ["old"]


def test_a_killed_maker_leaves_only_staging_which_a_sweep_removes(tmp_path: Path) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", _STAGE_AND_WAIT, str(tmp_path / "final")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert maker.stdout is not None
        staging = Path(maker.stdout.readline().strip())
        assert sweep_staging(tmp_path) == []  # its maker lives
        assert names(staging) == ["half"]
    finally:
        maker.send_signal(signal.SIGKILL)
        maker.communicate()
    assert names(tmp_path) == [staging.name]
    with scratch_directory(tmp_path) as ours:
        assert sweep_staging(tmp_path) == [staging]
        assert names(tmp_path) == [ours.name]
    assert names(tmp_path) == []


def test_a_sweep_touches_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / ".other").mkdir()
    (tmp_path / f"{STAGING_PREFIX}file").touch()
    assert sweep_staging(tmp_path) == []
    assert sweep_staging(tmp_path / "absent") == []
    assert names(tmp_path) == sorted(["final", ".other", f"{STAGING_PREFIX}file"])


@pytest.mark.parametrize("call", ["open", "flock"])
def test_a_maker_overtaken_by_a_sweep_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    module = os if call == "open" else fcntl
    real = getattr(module, call)
    swept: list[Path] = []

    def overtaken(*args: object) -> object:
        monkeypatch.setattr(module, call, real)
        swept.extend(sweep_staging(tmp_path))
        return real(*args)

    monkeypatch.setattr(module, call, overtaken)
    with staged_directory(tmp_path / "final") as staging:
        assert len(swept) == 1 and swept[0] != staging
        (staging / "file").touch()
        assert sweep_staging(tmp_path) == []
    assert names(tmp_path) == ["final"]
    assert names(tmp_path / "final") == ["file"]


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    with path.open("rb") as reader:
        write_atomic(path, b"new", mode=0o600)
        assert reader.read() == b"old"  # another inode: who had it open sees no mixture
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["file"]


def test_a_file_that_cannot_be_put_in_place_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "taken", b"x")
    assert names(tmp_path) == ["taken"]


@as_root
def test_a_full_disk_is_a_typed_error_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "tiny", str(_TINY_BYTES)) as tiny:
        with pytest.raises(NoCapacity, match="No space left") as caught:
            with staged_directory(tiny / "final") as staging:
                (staging / "file").write_bytes(bytes(2 * _TINY_BYTES))
        assert caught.value.hint is not None and "FORKD_HOME" in caught.value.hint
        assert names(tiny) == []
        write_atomic(tiny / "file", b"old")
        with pytest.raises(NoCapacity):
            write_atomic(tiny / "file", bytes(2 * _TINY_BYTES))
        assert names(tiny) == ["file"]
        assert (tiny / "file").read_bytes() == b"old"


def test_an_exclusive_lock_waits_for_a_shared_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    order = []

    def wait() -> None:
        with locked(path):
            order.append("exclusive")

    with locked(path, shared=True), locked(path, shared=True):
        waiter = threading.Thread(target=wait)
        waiter.start()
        waiter.join(0.2)
        order.append("shared")
    waiter.join(10)
    assert order == ["shared", "exclusive"]


_STEP_S = 0.05  # more than file times and the guard against their coarseness take


@pytest.fixture
def sums(tmp_path: Path) -> dict[str, FileSum]:
    for name in ("memory", "state"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    time.sleep(_STEP_S)
    return {name: digest_file(tmp_path / name) for name in ("memory", "state")}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which files were read."""
    names: list[str] = []

    def reading(path: Path) -> FileSum:
        names.append(path.name)
        return digest_file(path)

    monkeypatch.setattr(files, "digest_file", reading)
    return names


def verify(directory: Path, sums: dict[str, FileSum]) -> None:
    verify_files(directory, sums, what="snapshot x", hint="make it again")


def alter(path: Path, at: int = 10) -> None:
    """Same size, same modification time: as an attacker or a bad disk would."""
    info = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def test_a_digest_is_size_and_sha256(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"hello")
    assert digest_file(tmp_path / "f") == FileSum(5, hashlib.sha256(b"hello").hexdigest())


def test_whole_files_pass(tmp_path: Path, sums: dict[str, FileSum]) -> None:
    verify(tmp_path, sums)
    assert set(verify_sizes(tmp_path, sums, what="x", hint="y")) == {"memory", "state"}


def test_a_missing_file_is_named(tmp_path: Path, sums: dict[str, FileSum]) -> None:
    (tmp_path / "state").unlink()
    with pytest.raises(SnapshotDamaged, match="The file state of snapshot x is missing") as caught:
        verify(tmp_path, sums)
    assert caught.value.hint == "make it again"


@pytest.mark.parametrize("size", [0, 10, 10_000])
def test_a_file_of_another_size_is_named(tmp_path: Path, sums: dict[str, FileSum], size: int) -> None:
    os.truncate(tmp_path / "memory", size)
    for check in (verify_files, verify_sizes):
        with pytest.raises(SnapshotDamaged, match=f"memory of snapshot x has {size} bytes instead of 6000"):
            check(tmp_path, sums, what="snapshot x", hint="")


def test_an_altered_file_of_the_same_size_is_named(tmp_path: Path, sums: dict[str, FileSum]) -> None:
    alter(tmp_path / "state")
    with pytest.raises(SnapshotDamaged, match="The file state of snapshot x was altered"):
        verify(tmp_path, sums)


def test_what_is_no_file_is_named(tmp_path: Path, sums: dict[str, FileSum]) -> None:
    (tmp_path / "state").unlink()
    (tmp_path / "state").mkdir()
    here = {"state": FileSum((tmp_path / "state").stat().st_size, sums["state"].sha256)}
    with pytest.raises(SnapshotDamaged, match="The file state of snapshot x cannot be read: Is a directory"):
        verify(tmp_path, here)
    (tmp_path / "memory").unlink()
    (tmp_path / "memory").symlink_to("memory")
    with pytest.raises(SnapshotDamaged, match="The file memory of snapshot x cannot be read"):
        verify(tmp_path, sums)


def test_what_passed_is_not_read_again(tmp_path: Path, sums: dict[str, FileSum], read: list[str]) -> None:
    verify(tmp_path, sums)
    assert read == ["memory", "state"]
    verify(tmp_path, sums)
    assert read == ["memory", "state"]


def test_what_was_touched_is_read_again(tmp_path: Path, sums: dict[str, FileSum], read: list[str]) -> None:
    verify(tmp_path, sums)
    read.clear()
    (tmp_path / "memory").touch()
    verify(tmp_path, sums)
    assert read == ["memory"]


def test_what_passed_once_and_was_altered_since_is_found(tmp_path: Path, sums: dict[str, FileSum]) -> None:
    verify(tmp_path, sums)
    alter(tmp_path / "memory")
    with pytest.raises(SnapshotDamaged, match="memory of snapshot x was altered"):
        verify(tmp_path, sums)
    with pytest.raises(SnapshotDamaged, match="memory of snapshot x was altered"):
        verify(tmp_path, sums)


def test_what_changed_a_moment_ago_is_read_again_as_its_times_prove_nothing_yet(
    tmp_path: Path, sums: dict[str, FileSum], read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").touch()
    # However long this process waits for a CPU.
    moment = (tmp_path / "memory").stat().st_ctime_ns + 1
    monkeypatch.setattr(files.time, "time_ns", lambda: moment)
    verify(tmp_path, sums)
    read.clear()
    verify(tmp_path, sums)
    assert read == ["memory"]
    moment += files._CLOCK_STEP_NS
    verify(tmp_path, sums)
    read.clear()
    verify(tmp_path, sums)
    assert read == []


def test_what_passed_for_another_checksum_is_read_again(tmp_path: Path, sums: dict[str, FileSum]) -> None:
    verify(tmp_path, sums)
    with pytest.raises(SnapshotDamaged, match="was altered"):
        verify(tmp_path, {"memory": FileSum(6000, "0" * 64)})


@pytest.mark.parametrize("stamps", [b"", b"[]", b'{"memory": 1}', b"\xff", b'{"memory": "0:0:6000:0:0:x"}'])
def test_damaged_notes_cost_a_reading_and_nothing_else(
    tmp_path: Path, sums: dict[str, FileSum], read: list[str], stamps: bytes
) -> None:
    (tmp_path / ".verified").write_bytes(stamps)
    verify(tmp_path, sums)
    assert read == ["memory", "state"]


@pytest.mark.parametrize("error", [NoCapacity("full"), OSError(30, "Read-only file system")])
def test_a_store_that_takes_no_notes_is_verified_all_the_same(
    tmp_path: Path, sums: dict[str, FileSum], read: list[str], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise error

    monkeypatch.setattr(files, "write_atomic", refuse)
    verify(tmp_path, sums)
    verify(tmp_path, sums)
    assert read == ["memory", "state", "memory", "state"]


def test_sums_survive_their_way_through_json(sums: dict[str, FileSum]) -> None:
    assert parse_sums(dump_sums(sums)) == sums


GOOD = {"size": 1, "sha256": "x"}


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {"": GOOD},
        {".": GOOD},
        {"..": GOOD},
        {"../x": GOOD},
        {"/etc/passwd": GOOD},
        {"a/b": GOOD},
        {"a\0b": GOOD},
        {"a": None},
        {"a": {}},
        {"a": {"size": "1", "sha256": "x"}},
        {"a": {"size": 1.0, "sha256": "x"}},
        {"a": {"size": True, "sha256": "x"}},
        {"a": {"size": 1, "sha256": 1}},
    ],
)
def test_anything_but_a_table_of_plain_names_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):
        parse_sums(raw)
