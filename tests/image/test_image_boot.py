"""The initramfs in a real, emulated machine."""

import shutil
import subprocess
import time
from pathlib import Path

import pytest
from support_roots import make_busybox_root

from forkd.host.tools import find_tool
from forkd.image import Image
from forkd.model.network import GATEWAY_ADDRESS

pytestmark = [pytest.mark.vm, pytest.mark.build, pytest.mark.timeout(300)]


def boot(image: Image, disk: Path | None, until: str | None = None, timeout_s: float = 120.0) -> str:
    """The console of a machine, to its end or until it said something."""
    argv = [
        *(str(find_tool("qemu-system-x86_64")), "-M", "pc", "-accel", "tcg", "-cpu", "max", "-m", "512"),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-kernel", str(image.kernel), "-initrd", str(image.initrd)),
        *("-append", "console=ttyS0 quiet panic=-1"),
    ]
    if disk is not None:
        argv += ["-drive", f"file={disk},if=virtio,format=raw,readonly=on"]
    said = ""
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    deadline = time.monotonic() + timeout_s
    try:
        for line in process.stdout:
            said += line
            if (until is not None and until in line) or time.monotonic() > deadline:
                break
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return said


def test_the_machine_boots_to_the_agent(python_image: Image) -> None:
    # Without the port it looks for, the agent says so: a line that only our code in the guest can print.
    console = boot(python_image, python_image.root, until="forkd agent:")
    assert "forkd agent: no virtio port" in console
    assert "forkd-init" not in console


def test_a_disk_that_is_no_image_is_said_and_ends_the_machine(python_image: Image, tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"\xa5" * (1 << 20))
    assert "forkd-init: mounting the image /dev/vda failed" in boot(python_image, tmp_path / "disk")


def test_no_disk_at_all_is_said_and_ends_the_machine(python_image: Image) -> None:
    assert "forkd-init: no disk appeared as /dev/vda" in boot(python_image, None)


def test_a_root_without_the_interpreter_is_said_and_ends_the_machine(python_image: Image, tmp_path: Path) -> None:
    (tmp_path / "root/etc").mkdir(parents=True)
    disk = tmp_path / "root.erofs"
    subprocess.run([str(find_tool("mkfs.erofs")), "--quiet", str(disk), str(tmp_path / "root")], check=True)
    assert "forkd-init: the image has no /usr/bin/python3" in boot(python_image, disk)


def test_links_in_place_of_mount_points_do_not_lead_out_of_the_root(python_image: Image, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "usr/bin").mkdir(parents=True)
    for name in ("dev", "proc", "run", "sys", "tmp"):
        (root / name).symlink_to("/bin")
    (root / "usr/bin/python3").write_bytes(b"not a program")
    (root / "usr/bin/python3").chmod(0o755)
    disk = tmp_path / "root.erofs"
    subprocess.run([str(find_tool("mkfs.erofs")), "--quiet", str(disk), str(root)], check=True)
    console = boot(python_image, disk)
    assert "forkd-init" not in console
    assert "switch_root" in console and "Kernel panic" in console


@pytest.mark.parametrize("before", ["none", "a link to nowhere", "a link to a file"])
def test_the_resolver_is_the_gateway_whatever_the_image_has_there(
    before: str, python_image: Image, tmp_path: Path
) -> None:
    root = make_busybox_root(tmp_path / "root")
    resolver, other = root / "etc/resolv.conf", root / "etc/other"
    other.write_text("of the image\n")
    if before == "none":
        shutil.rmtree(root / "etc")
    else:
        resolver.symlink_to("/run/resolver/stub.conf" if before == "a link to nowhere" else "other")
    python = root / "usr/bin/python3.11"
    python.write_text("#!/bin/sh\nls -l /etc/resolv.conf\ncat /etc/resolv.conf /etc/other\necho all told\nsleep 1000\n")
    disk = tmp_path / "root.erofs"
    subprocess.run([str(find_tool("mkfs.erofs")), "--quiet", str(disk), str(root)], check=True)
    console = boot(python_image, disk, until="all told").replace("\r", "")
    assert "all told" in console and "forkd-init" not in console
    assert f"nameserver {GATEWAY_ADDRESS}\n" in console
    assert "->" not in console, "it is a file"
    assert ("of the image\n" in console) is (before != "none")
