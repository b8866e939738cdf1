"""A layer written by a process of its own: the same files, errors that say the same, and no writer left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chain_cases import SIZE, make_layer, make_root, noise, started
from support_processes import wait_until

from forkd.errors import EngineFailed, GuestDied, SnapshotDamaged
from forkd.host.pages import opened_handles
from forkd.model.memory import PAGE
from forkd.model.names import parse_tag
from forkd.store import apart
from forkd.store.apart import write_layer_apart
from forkd.store.layers import write_layer
from forkd.store.snapshots import SnapshotStore

A = parse_tag("a")


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path / "snapshots")
    make_root(store)
    make_layer(store, "a", "root", lambda guest: guest.write(50 * PAGE, noise(3, 1)))
    return store


def test_it_writes_what_would_be_written_here(store: SnapshotStore, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    told: list[tuple[int, int]] = []
    with store.held(A) as parent, started(parent) as guest:
        guest.write(51 * PAGE, noise(7, 2))
        guest.write(200 * PAGE, bytes(PAGE) + noise(1, 3))
        memory = guest.memory()
        stats = write_layer_apart(memory, parent, there, on_progress=lambda *at: told.append(at))
        assert stats == write_layer(memory, parent, here)
    assert stats.bytes_dirty == 8 * PAGE
    assert told[-1] == (stats.bytes_looked_at, stats.bytes_looked_at)
    for name in ("pages", "extents"):
        assert (here / name).read_bytes() == (there / name).read_bytes()


def test_its_errors_are_those_of_writing_here(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.held(A) as parent, started(parent) as guest:
        memory = guest.memory()
        with opened_handles(memory) as handles:
            guest.process.kill()
            guest.process.wait()
            monkeypatch.setattr(apart, "opened_handles", lambda memory: Opened(handles))
            with pytest.raises(GuestDied, match=f"Process {memory.pid} ended while its memory was read"):
                write_layer_apart(memory, parent, tmp_path)
            (store.root / "a/extents").write_bytes(b"")
            with pytest.raises(SnapshotDamaged, match="extents of snapshot a is damaged") as caught:
                write_layer_apart(memory, parent, tmp_path)
            assert caught.value.hint is not None and "snapshot rm a" in caught.value.hint


class Opened:
    def __init__(self, handles: object) -> None:
        self.handles = handles

    def __enter__(self) -> object:
        return self.handles

    def __exit__(self, *_: object) -> None:
        pass


def test_a_writer_that_is_killed_is_an_error(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = subprocess.Popen

    def start_and_kill(*args: object, **kwargs: object) -> object:
        writer = real(*args, **kwargs)  # type: ignore[call-overload]
        os.kill(writer.pid, signal.SIGKILL)
        return writer

    with store.held(A) as parent, started(parent) as guest:
        memory = guest.memory()
        monkeypatch.setattr(subprocess, "Popen", start_and_kill)
        with pytest.raises(EngineFailed, match="ended with status -9"):
            write_layer_apart(memory, parent, tmp_path)
        monkeypatch.undo()
        assert write_layer_apart(memory, parent, tmp_path).bytes_dirty == 0


def test_what_progress_raises_ends_the_writer(store: SnapshotStore, tmp_path: Path) -> None:
    def give_up(done: int, total: int) -> None:
        raise ZeroDivisionError

    with store.held(A) as parent, started(parent) as guest:
        guest.write(0, noise(1, 9))
        with pytest.raises(ZeroDivisionError):
            write_layer_apart(guest.memory(), parent, tmp_path, on_progress=give_up)


def test_a_writer_ends_with_whoever_asked_it(tmp_path: Path) -> None:
    (tmp_path / "stuck").mkdir()
    os.mkfifo(tmp_path / "stuck/manifest.json")  # which nobody writes to
    writer = subprocess.Popen([sys.executable, "-m", "forkd.store.apart"], stdin=subprocess.PIPE)
    try:
        assert writer.stdin is not None
        writer.stdin.write(json.dumps({"parent": str(tmp_path / "stuck")}).encode() + b"\n")
        writer.stdin.flush()
        wait_until(lambda: len(os.listdir(f"/proc/{writer.pid}/task")) == 2)
        assert writer.poll() is None
        writer.stdin.close()
        assert writer.wait(30) == 1
    finally:
        writer.kill()
        writer.wait()


def test_the_guest_is_as_it_was(store: SnapshotStore, tmp_path: Path) -> None:
    with store.held(A) as parent, started(parent) as guest:
        guest.write(9 * PAGE, b"x")
        before = os.listdir(f"/proc/{guest.process.pid}/fd")
        write_layer_apart(guest.memory(), parent, tmp_path)
        assert os.listdir(f"/proc/{guest.process.pid}/fd") == before
        assert guest.memory().size == SIZE
