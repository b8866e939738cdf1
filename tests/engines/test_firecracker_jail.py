"""Where a Firecracker lives, and what it is given there, without starting one."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from forkd.engines.firecracker.jail import Given, Slot
from forkd.host.firecracker import Binaries

BINARIES = Binaries(Path("/opt/firecracker-v1.12.1"), "1.12.1", Path("/opt/jailer"))
USER = 1_900_000_000
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Given]:
    (tmp_path / "a memory").write_text("pages")
    (tmp_path / "out").mkdir()
    return {"memory": Given(tmp_path / "a memory"), "out": Given(tmp_path / "out", writable=True)}


def seat_in(tmp_path: Path, jails: str | None) -> Slot:
    directory = tmp_path / "sb-1"
    directory.mkdir()
    return Slot(directory, jails, user=None if jails is None else USER)


def test_without_a_jail_what_is_given_is_linked(tmp_path: Path, given: dict[str, Given]) -> None:
    slot = seat_in(tmp_path, None)
    slot.furnish(given)
    assert slot.root == slot.directory
    assert (slot.root / "memory").read_text() == "pages"
    assert (slot.root / "out").resolve() == tmp_path / "out"
    assert slot.render_command(BINARIES, 1000)[0] == "/opt/firecracker-v1.12.1"
    assert Slot.found(slot.directory) == slot


@ROOT
def test_in_a_jail_what_is_given_is_bound_and_can_be_read_only_unless_it_is_to_be_written(
    tmp_path: Path, given: dict[str, Given]
) -> None:
    slot = seat_in(tmp_path, "firecracker-v1.12.1")
    slot.furnish(given)
    root = tmp_path / "sb-1/firecracker-v1.12.1/sb-1/root"
    assert slot.root == root and Slot.found(slot.directory) == replace(slot, user=None)
    lines = (slot.directory / "fstab").read_text().splitlines()
    assert lines == [
        f"{root} {root} none bind,nosuid 0 0",
        f"{tmp_path}/a\\040memory {root}/memory none bind,ro 0 0",
        f"{tmp_path}/out {root}/out none bind 0 0",
    ]
    assert (root / "memory").is_file() and (root / "out").is_dir()
    for path in (tmp_path / "out", root / "firecracker.log"):
        assert (path.stat().st_uid, path.stat().st_gid) == (USER, USER)
    assert (tmp_path / "a memory").stat().st_uid == 0


def test_the_jailer_is_told_the_user_and_the_bound_of_its_files(tmp_path: Path) -> None:
    slot = seat_in(tmp_path, "firecracker-v1.12.1")
    command = slot.render_command(BINARIES, 4096)
    assert command[0] == "unshare" and {"--mount", "--net", "--pid", "--kill-child"} <= set(command)
    assert command[command.index("--uid") + 1] == command[command.index("--gid") + 1] == str(USER)
    assert "fsize=4096" in command
    assert command.index("/opt/jailer") < command.index("--api-sock")


def test_taps_of_two_directories_differ(tmp_path: Path) -> None:
    slots = [Slot(tmp_path / name, "firecracker") for name in ("one", "two")]
    assert slots[0].tap != slots[1].tap
    assert all(len(slot.tap) <= 15 for slot in slots), "what the kernel allows as a name"
