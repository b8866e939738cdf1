"""What is taken of a Firecracker that was asked to save its VM, and may have been broken into."""

import os
from pathlib import Path

import pytest

from forkd.engines.firecracker import machine
from forkd.engines.firecracker.machine import read_saved, remove_saved
from forkd.engines.firecracker.plan import is_saved, render_load, render_save
from forkd.errors import EngineFailed


def test_it_is_asked_for_state_and_has_no_place_for_memory() -> None:
    call = render_save("saved")
    assert (call.method, call.path) == ("PUT", "/snapshot/create")
    assert call.body == {"snapshot_type": "Full", "snapshot_path": "saved", "mem_file_path": "nowhere/memory"}
    assert is_saved("refused: Cannot perform open on the memory backing file: No such file or directory (os error 2)")
    assert not is_saved("refused: Cannot perform open on the snapshot backing file: No such file or directory")
    assert not is_saved("refused: Cannot save the microVM state")


def test_a_vm_with_a_layer_does_not_run_before_that_is_written() -> None:
    assert (render_load("state", "memory").body or {})["resume_vm"] is True
    assert (render_load("state", "memory", resume=False).body or {})["resume_vm"] is False


def test_only_a_file_of_some_size_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_MAX_STATE_BYTES", 1000)
    place = tmp_path / "saved"
    with pytest.raises(EngineFailed, match="cannot be read"):
        read_saved(place)
    place.write_bytes(b"x" * 1000)
    assert read_saved(place) == b"x" * 1000
    place.write_bytes(b"x" * 1001)
    with pytest.raises(EngineFailed, match="up to 1000 bytes"):
        read_saved(place)
    place.write_bytes(b"")
    with pytest.raises(EngineFailed, match="up to 1000 bytes"):
        read_saved(place)


def test_no_link_pipe_or_directory_is_followed_and_all_are_removed(tmp_path: Path) -> None:
    place, secret = tmp_path / "saved", tmp_path / "secret"
    secret.write_text("not for a guest")
    for make in (
        lambda: place.symlink_to(secret),
        lambda: os.mkfifo(place),
        lambda: (place / "deep/er").mkdir(parents=True),
    ):
        make()
        with pytest.raises(EngineFailed):
            read_saved(place)
        remove_saved(place)
        assert not os.path.lexists(place)
    remove_saved(place)
    assert secret.exists()
