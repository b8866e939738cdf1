"""Real builds: mmdebstrap, the package archive, mkfs.erofs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from image_cases import NOTHING, Heard, list_leftovers, make_python
from support_mounts import as_root, mounted, small_disk
from support_processes import wait_until

from forkd.errors import BuildFailed, HostLacks, InvalidInput, NoCapacity
from forkd.host import tools
from forkd.host.paths import Home
from forkd.image import Image, ImageStore, Run, debian_spec, directory_spec, get_recipe
from forkd.image.kernel import BOOT_MODULES, load_order, read_index

build = pytest.mark.build

_CHILD = """
import sys
from pathlib import Path
from forkd.host.paths import Home
from forkd.image import ImageStore, debian_spec
class Printed:
    def stage(self, text): print(text, flush=True)
    def line(self, text): print(text, flush=True)
home = Path(sys.argv[1])
ImageStore(Home(home, home)).build(debian_spec([]), "interrupted", Printed())
"""


@build
@pytest.mark.timeout(900)
def test_the_python_recipe_builds(python_image: Image, built_home: Home) -> None:
    assert python_image.python == "/usr/bin/python3"
    assert python_image.kernel_version.endswith("-cloud-amd64")
    assert {"python3", "python3-numpy", "libc6", "apt"} <= set(python_image.packages)
    assert ImageStore(built_home).open("python") == python_image


@build
def test_a_second_build_is_found_in_milliseconds_without_tools(
    python_image: Image, built_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a tool was run")

    store = ImageStore(built_home)
    # Once more by this agent's sources: whoever works on them may have changed them since the session began.
    first = store.build(debian_spec(get_recipe("python")), "python")
    monkeypatch.setattr(tools.subprocess, "Popen", refuse)
    started = time.monotonic()
    again = store.build(debian_spec(reversed(get_recipe("python"))), "python")
    assert again == first
    assert again.root == python_image.root
    assert time.monotonic() - started < 0.5


@build
def test_the_real_kernel_has_all_modules_the_guest_boots_with(python_image: Image) -> None:
    order = load_order(BOOT_MODULES, read_index(python_image.kernel.parent))
    assert {"virtio_pci", "virtio_blk", "virtio_console", "erofs", "overlay", "virtio_ring"} <= set(order)
    assert order.index("virtio_ring") < order.index("virtio_blk")


@build
def test_modules_for_later_are_there_too(python_image: Image) -> None:
    assert load_order(["kvm_amd", "tun"], read_index(python_image.kernel.parent)) == [
        "irqbypass",
        "kvm",
        "kvm_amd",
        "tun",
    ]


@build
@as_root
def test_the_root_carries_nothing_of_this_host_and_nothing_of_the_build(python_image: Image, tmp_path: Path) -> None:
    with mounted(tmp_path / "view", python_image.root, "-o", "loop,ro") as root:
        assert (root / "etc/hostname").read_text() == "localhost\n"
        assert (root / "etc/machine-id").read_text() == ""
        assert (root / "etc/resolv.conf").read_text() == ""
        for name in ("dev", "proc", "run", "sys", "tmp", "var/lib/apt/lists", "var/cache/apt"):
            assert list((root / name).iterdir()) == []
        assert not (root / "usr/sbin/policy-rc.d").exists()
        assert not (root / "usr/sbin/start-stop-daemon.REAL").exists()
        assert list((root / "usr/share/man").glob("man*/*")) == []
        assert (root / "usr/bin/su").stat().st_mode & 0o7777 == 0o4755
        assert (root / "usr/bin/su").stat().st_uid == 0
        assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777


@build
@as_root
def test_compiled_python_is_kept_and_fits_its_source(python_image: Image, tmp_path: Path) -> None:
    with mounted(tmp_path / "view", python_image.root, "-o", "loop,ro") as root:
        source = next(root.glob("usr/lib/python3.*/os.py"))
        compiled = next((source.parent / "__pycache__").glob("os.cpython-*.pyc")).read_bytes()
        assert int.from_bytes(compiled[4:8], "little") == 0, "checked by hash, which is slow"
        assert int.from_bytes(compiled[8:12], "little") == int(source.stat().st_mtime)


@build
def test_an_unknown_package_is_one_line_with_a_hint(home: Home, heard: Heard) -> None:
    with pytest.raises(BuildFailed) as caught:
        ImageStore(home).build(debian_spec(["python3", "no-such-package-anywhere"]), "x", heard)
    assert caught.value.message == "Debian bookworm has no package no-such-package-anywhere"
    assert caught.value.hint is not None and caught.value.details is None
    assert list_leftovers(home.root) == NOTHING
    assert ImageStore(home).list() == []


@build
@as_root
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("small_kernel")
def test_a_debian_root_with_a_step_on_top_keeps_what_the_packages_brought(home: Home, tmp_path: Path) -> None:
    image = ImageStore(home).build(debian_spec(["python3"], steps=[Run("id -u > /etc/made")]), "stepped")
    assert {"python3", "libc6"} <= set(image.packages)
    with mounted(tmp_path / "view", image.root, "-o", "loop,ro") as root:
        assert (root / "etc/made").read_text() == "0\n"
        assert (root / "usr/bin/su").stat().st_mode & 0o7777 == 0o4755
        assert (root / "usr/bin/perl").stat().st_ino == next(root.glob("usr/bin/perl5.*")).stat().st_ino
        assert (root / "etc/shadow").stat().st_gid == 42
        assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
        for name in ("dev", "proc", "run", "sys", "tmp"):
            assert list((root / name).iterdir()) == []


def test_an_archive_that_cannot_be_reached_fails_with_the_tools_words(home: Home) -> None:
    with pytest.raises(BuildFailed) as caught:
        ImageStore(home).build(debian_spec(["python3"], mirror="http://127.0.0.1:9/debian"), "x")
    assert "127.0.0.1" in (caught.value.details or "")
    assert list_leftovers(home.root) == NOTHING


@build
def test_an_image_without_python_is_refused(home: Home) -> None:
    with pytest.raises(InvalidInput, match="no Python") as caught:
        ImageStore(home).build(debian_spec([]), "x")
    assert caught.value.hint is not None and "python3" in caught.value.hint
    assert list_leftovers(home.root) == NOTHING


@pytest.mark.parametrize("tool", ["mmdebstrap", "mkfs.erofs"])
def test_a_missing_tool_is_said_before_anything_is_fetched(
    home: Home, tool: str, monkeypatch: pytest.MonkeyPatch, heard: Heard
) -> None:
    found = tools.shutil.which
    monkeypatch.setattr(tools.shutil, "which", lambda name, path=None: None if name == tool else found(name, path=path))
    with pytest.raises(HostLacks, match=tool):
        ImageStore(home).build(debian_spec(["python3"]), "x", heard)
    assert heard.lines == []


@as_root
@pytest.mark.usefixtures("small_kernel")
def test_a_full_disk_while_packing_is_no_capacity(tmp_path: Path) -> None:
    make_python(tmp_path / "root")
    (tmp_path / "root/large").write_bytes(os.urandom(8 << 20))
    with small_disk(tmp_path / "disk", "4m") as disk:
        home = Home(disk / "home", disk / "run")
        with pytest.raises(NoCapacity):
            ImageStore(home).build(directory_spec(tmp_path / "root"), "x")
        assert list_leftovers(home.root) == NOTHING


@build
@as_root
@pytest.mark.parametrize("size", ["30m", "150m", "260m"])
def test_a_full_disk_while_installing_is_no_capacity(tmp_path: Path, size: str) -> None:
    with small_disk(tmp_path / "disk", size) as disk:
        home = Home(disk / "home", disk / "run")
        with pytest.raises(NoCapacity):
            ImageStore(home).build(debian_spec(["python3"]), "x")
        assert list_leftovers(home.root) == NOTHING
        assert ImageStore(home).list() == []


@build
@pytest.mark.parametrize("moment", ["downloading packages", "installing essential", "--customize-hook"])
@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_build_leaves_nothing(home: Home, moment: str, with_signal: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(home.root)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if moment in line:
                break
        time.sleep(0.3)
        process.send_signal(with_signal)
        process.wait(timeout=30)
    wait_until(lambda: not list_leftovers(home.root)["processes"])
    left = list_leftovers(home.root)
    assert (left["processes"], left["mounts"]) == ([], [])
    if with_signal == signal.SIGINT:
        assert left["staging"] == []
    store = ImageStore(home)
    assert store.list() == []
    store.prune()
    assert list_leftovers(home.root) == NOTHING
