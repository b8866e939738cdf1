"""Directories and files that are there whole or not at all."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkd.errors import Conflict, NoCapacity
from forkd.host.files import (
    STAGING_PREFIX,
    locked,
    scratch_directory,
    staged_directory,
    sweep_staging,
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
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system that is full soon."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "tiny"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_TINY_BYTES}", "none", str(place)], check=False)
    if made.returncode != 0:
        pytest.skip("this root may not mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


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


def test_what_exists_is_not_replaced_by_accident(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final/old").touch()
    with pytest.raises(Conflict, match="final"):
        with staged_directory(tmp_path / "final") as staging:
            (staging / "new").touch()
    assert names(tmp_path) == ["final"]
    assert names(tmp_path / "final") == ["old"]


def test_a_file_in_the_place_of_the_directory_is_a_conflict(tmp_path: Path) -> None:
    (tmp_path / "final").write_text("mine")
    with pytest.raises(Conflict):
        with staged_directory(tmp_path / "final"):
            pass
    assert names(tmp_path) == ["final"]
    assert (tmp_path / "final").read_text() == "mine"


def test_what_exists_is_replaced_as_a_whole_when_asked(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final/old").touch()
    with staged_directory(tmp_path / "final", replace=True) as staging:
        (staging / "new").touch()
        assert names(tmp_path / "final") == ["old"]
    assert names(tmp_path) == ["final"]
    assert names(tmp_path / "final") == ["new"]


def test_a_failed_replacement_keeps_the_old(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    (tmp_path / "final/old").touch()
    with pytest.raises(ZeroDivisionError):
        with staged_directory(tmp_path / "final", replace=True):
            raise ZeroDivisionError
    assert names(tmp_path) == ["final"]
    assert names(tmp_path / "final") == ["old"]


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


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(tiny: Path) -> None:
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
