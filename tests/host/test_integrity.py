"""Checksums of files: what was damaged is found and named, what was not is not read again."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import pytest

from forkd.errors import NoCapacity, SnapshotDamaged
from forkd.host import integrity
from forkd.host.integrity import FileSum, digest_file, dump_sums, parse_sums, verify_files, verify_sizes

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

    monkeypatch.setattr(integrity, "digest_file", reading)
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
    monkeypatch.setattr(integrity.time, "time_ns", lambda: moment)
    verify(tmp_path, sums)
    read.clear()
    verify(tmp_path, sums)
    assert read == ["memory"]
    moment += integrity._CLOCK_STEP_NS
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

    monkeypatch.setattr(integrity, "write_atomic", refuse)
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
