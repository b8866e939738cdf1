import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from image_cases import make_module

from forkd.errors import HostLacks
from forkd.host.tools import find_tool
from forkd.image.initramfs import (
    character_device,
    check_static,
    digest_sources,
    directory,
    file,
    read_agent_sources,
    render_cpio,
    render_init,
    render_initramfs,
    symlink,
)

ENTRIES = [
    directory("bin"),
    file("bin/tool", b"#!/bin/sh\n", 0o755),
    symlink("bin/other", "tool"),
    file("empty", b""),
    file("odd", b"abc"),
    file("ünïcode name", b"x" * 5000),
]


def run_cpio(archive: bytes, *argv: str, cwd: Path) -> str:
    done = subprocess.run([str(find_tool("busybox")), "cpio", *argv], input=archive, cwd=cwd, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


@pytest.mark.parametrize("python", ["/usr/bin/python3", "/usr/bin/a b'c$(id)"])
def test_init_is_a_script_busybox_can_parse(python: str, tmp_path: Path) -> None:
    script = tmp_path / "init"
    script.write_text(render_init(["virtio", "erofs"], python))
    subprocess.run([str(find_tool("busybox")), "sh", "-n", str(script)], check=True)
    assert re.search("@[A-Z]+@", script.read_text()) is None


def test_init_loads_the_modules_in_order_and_starts_the_agent_alone() -> None:
    script = render_init(["virtio", "virtio_ring", "erofs"], "/usr/bin/python3")
    assert "for module in virtio virtio_ring erofs; do" in script
    last = script.splitlines()[-1]
    assert last.startswith("exec ")
    assert last.endswith("switch_root /newroot /usr/bin/python3 -I -B -u /run/forkd/lib/start.py")
    assert "env -i PATH=" in last


def test_every_command_of_init_is_there(tmp_path: Path) -> None:
    run_cpio(render_initramfs(b"\x7fELF", [], {"start.py": b""}, "/usr/bin/python3"), "-i", "-d", cwd=tmp_path)
    applets = {path.name for path in (tmp_path / "bin").iterdir()}
    assert {"busybox", "sh", "mount", "insmod", "mkdir", "rm", "cp", "ln", "sleep", "reboot"} <= applets
    for path in (tmp_path / "bin").iterdir():
        assert path.name == "busybox" or path.readlink() == Path("busybox")


def test_the_agent_lies_there_as_a_package_that_can_be_imported(tmp_path: Path) -> None:
    module = make_module("depends=")
    archive = render_initramfs(b"\x7fELF", [("erofs", module)], read_agent_sources(), "/usr/bin/python3")
    run_cpio(archive, "-i", "-d", cwd=tmp_path)
    assert (tmp_path / "modules/erofs.ko").read_bytes() == module
    home = tmp_path / "forkd-agent"
    assert "from forkd.agent.main import main" in (home / "start.py").read_text()
    script = f"import sys; sys.path.insert(0, {str(home)!r}); import forkd, forkd.agent.main; print(forkd.__file__)"
    done = subprocess.run([sys.executable, "-I", "-B", "-S", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(home / "forkd/__init__.py")


def test_a_change_of_the_agent_changes_its_digest() -> None:
    assert digest_sources({"a": b"1"}) != digest_sources({"a": b"2"})
    assert digest_sources({"a": b"1", "b": b""}) != digest_sources({"a": b"", "b": b"1"})


def test_a_busybox_that_needs_libraries_is_refused() -> None:
    check_static(find_tool("busybox").read_bytes())
    with pytest.raises(HostLacks, match="static"):
        check_static(Path(sys.executable).resolve().read_bytes())


def test_busybox_lists_every_entry_in_order(tmp_path: Path) -> None:
    listed = run_cpio(render_cpio(ENTRIES), "-t", cwd=tmp_path)
    assert listed.splitlines() == [entry.name for entry in ENTRIES]


def test_what_comes_out_is_what_went_in(tmp_path: Path) -> None:
    run_cpio(render_cpio(ENTRIES), "-i", cwd=tmp_path)
    assert (tmp_path / "bin/tool").read_bytes() == b"#!/bin/sh\n"
    assert stat.S_IMODE((tmp_path / "bin/tool").stat().st_mode) == 0o755
    assert (tmp_path / "bin/other").readlink() == Path("tool")
    assert (tmp_path / "empty").read_bytes() == b""
    assert (tmp_path / "odd").read_bytes() == b"abc"
    assert (tmp_path / "ünïcode name").read_bytes() == b"x" * 5000


def test_a_device_is_listed_with_its_numbers(tmp_path: Path) -> None:
    listed = run_cpio(render_cpio([character_device("console", 5, 1)]), "-tv", cwd=tmp_path)
    assert listed.startswith("crw-------")
    assert "console" in listed


def test_the_same_entries_give_the_same_bytes_in_whole_blocks() -> None:
    assert render_cpio(ENTRIES) == render_cpio(ENTRIES)
    assert len(render_cpio(ENTRIES)) % 512 == 0


@pytest.mark.parametrize("size", range(8))
def test_content_of_any_length_is_aligned_to_four_bytes(size: int, tmp_path: Path) -> None:
    run_cpio(render_cpio([file("a", b"y" * size), file("b", b"after")]), "-i", cwd=tmp_path)
    assert (tmp_path / "a").read_bytes() == b"y" * size
    assert (tmp_path / "b").read_bytes() == b"after"
