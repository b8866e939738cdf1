"""Hostile commands and files in the build of an image: they reach nothing of the host, and leave nothing there."""

import os
import re
import socket
import stat
import subprocess
from pathlib import Path

import pytest
from support_depth import make_deep
from support_processes import find_processes, wait_until
from support_roots import layer_on, make_busybox_root

from forkd.errors import BuildFailed, Conflict, InvalidInput
from forkd.host.tools import check_namespaces
from forkd.image import Copy, Run
from forkd.image import layer as image_layer
from forkd.image.directory import scan_copied

pytestmark = pytest.mark.usefixtures("nothing_left")


class Heard:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def stage(self, text: str) -> None: ...

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    check_namespaces()
    return make_busybox_root(tmp_path / "root")


def run(root: Path, where: Path, *commands: str) -> list[str]:
    """What the commands print."""
    heard = Heard()
    layer_on(root, [Run(command) for command in commands], where / "build", heard)
    return heard.lines


def test_a_command_sees_nothing_of_the_host(root: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret of the host")
    lines = run(
        root,
        tmp_path,
        f"cat {secret} /proc/1/root{secret} /proc/1/cwd{secret} || :; ls /proc /; ls -l /proc/self/fd",
        f"cd /; for i in 1 2 3 4 5 6 7 8; do cd ..; done; cat .{secret} || :; chroot / cat {secret} || :",
        "cat /proc/sys/kernel/core_pattern /proc/sysrq-trigger /proc/kcore || :; ls /sys || :",
    )
    assert not [line for line in lines if line.startswith("secret of")]
    # The shell and what it runs; nobody else's processes.
    assert {int(line) for line in lines if line.isdigit()} <= set(range(1, 10))
    assert "core_pattern" in " ".join(lines)


def test_a_command_has_no_network(root: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        lines = run(root, tmp_path, f"nc -w 2 127.0.0.1 {port} < /dev/null && echo connected; ip link; ip route; :")
    assert "connected" not in lines
    assert [line for line in lines if re.match(r"\d+: ", line)] == [
        line for line in lines if line.startswith("1: lo: <LOOPBACK>")
    ]


def test_a_command_has_no_rights_over_the_machine(root: Path, tmp_path: Path) -> None:
    before = os.stat("/dev/null")
    lines = run(
        root,
        tmp_path,
        "mknod /disk b 254 0 && echo did mknod; :",
        "mount -t tmpfs none /etc && echo did mount; mount -t proc none /proc && echo did proc; :",
        "chmod 600 /dev/null && echo did chmod; rm -f /dev/null && echo did rm; :",
        "echo x > /dev/null && echo null is written",
        "cat /proc/self/status",
    )
    assert [line for line in lines if line.startswith("did")] == []
    assert "null is written" in lines
    assert "NoNewPrivs:\t1".expandtabs(1) in [" ".join(line.split()) for line in lines]
    # chown, dac_override, fowner, fsetid, kill, setgid, setuid.
    assert {line.split()[1] for line in lines if line.startswith(("CapEff", "CapPrm", "CapBnd"))} == {f"{0xFB:016x}"}
    after = os.stat("/dev/null")
    assert stat.S_ISCHR(after.st_mode) and after.st_mode == before.st_mode


def test_a_command_that_stays_in_the_background_ends_with_its_step(root: Path, tmp_path: Path) -> None:
    length = 1_000_000 + os.getpid()
    run(root, tmp_path, f"setsid sleep {length} > /dev/null 2>&1 & :", "ls /proc")
    wait_until(lambda: not find_processes(command=f"sleep {length}"))


def test_a_command_that_does_not_end_is_ended(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 2_000_000 + os.getpid()
    monkeypatch.setattr(image_layer, "_STEP_DEADLINE_S", 3.0)
    with pytest.raises(BuildFailed, match="did not end within"):
        run(root, tmp_path, f"sleep {length}")
    wait_until(lambda: not find_processes(command=f"sleep {length}"))
    assert not (tmp_path / "build/out/work/root").exists()


def test_a_flood_of_output_ends_at_the_deadline_and_is_not_kept(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_layer, "_STEP_DEADLINE_S", 3.0)
    with pytest.raises(BuildFailed, match="did not end within") as caught:
        layer_on(root, [Run("yes flood")], tmp_path / "build")
    assert len(caught.value.details or "") < 10_000


@pytest.mark.parametrize("place", ["run", "dev", "proc", "tmp"])
def test_a_link_in_place_of_a_mount_point_leads_nowhere(root: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "victim").mkdir()
    (root / place).symlink_to(tmp_path / "victim")
    with pytest.raises(BuildFailed) as caught:
        run(root, tmp_path, "true")
    assert f"/{place} of the image is not a directory" in (caught.value.details or "")
    assert os.listdir(tmp_path / "victim") == []


def test_a_step_that_puts_a_link_in_place_of_tmp_changes_nothing_of_the_host(root: Path, tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir(mode=0o700)
    swap = f"rm -rf /tmp && ln -s {tmp_path}/victim /tmp"
    with pytest.raises(BuildFailed) as caught:
        run(root, tmp_path, swap, "true")
    assert "/tmp of the image is not a directory" in (caught.value.details or "")
    run(root, tmp_path / "last", swap)
    assert (tmp_path / "victim").stat().st_mode & 0o7777 == 0o700
    assert os.listdir(tmp_path / "victim") == []


def test_a_tree_too_deep_for_paths_fails_and_goes(root: Path, tmp_path: Path) -> None:
    deep = f"d={'d' * 50}; i=0; while [ $i -lt 200 ]; do mkdir $d; cd $d; i=$((i+1)); done"
    with pytest.raises(BuildFailed):
        run(root, tmp_path, f"cd /etc; {deep}")
    assert not (tmp_path / "build/out/work/root").exists()


def test_files_copied_in_are_read_without_following_links_out(root: Path, tmp_path: Path) -> None:
    source, outside = tmp_path / "source", tmp_path / "outside"
    source.mkdir()
    outside.mkdir()
    (source / "out").symlink_to(outside)
    before = scan_copied(source)
    (outside / "secret").write_text("x")
    assert scan_copied(source) == before


def test_a_source_that_changes_between_reading_and_copying_is_refused(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "file").write_text("one")
    extract = image_layer._Root.extract

    def swapped(self: image_layer._Root, tree: Path) -> None:
        extract(self, tree)
        (source / "file").unlink()
        (source / "file").symlink_to("/etc/shadow")

    monkeypatch.setattr(image_layer._Root, "extract", swapped)
    with pytest.raises(Conflict, match="changed while it was read"):
        layer_on(root, [Copy(source, "/srv")], tmp_path / "build")


def test_a_source_too_deep_for_paths_is_refused(tmp_path: Path) -> None:
    make_deep(tmp_path / "deep", 600)
    with pytest.raises(InvalidInput, match="more than 4095 bytes"):
        scan_copied(tmp_path / "deep")
    subprocess.run(["rm", "-rf", str(tmp_path / "deep")], check=True)


def test_an_image_without_a_shell_says_so(root: Path, tmp_path: Path) -> None:
    (root / "bin/sh").unlink()
    with pytest.raises(BuildFailed) as caught:
        run(root, tmp_path, "true")
    assert "/bin/sh of the image cannot be run" in (caught.value.details or "")
