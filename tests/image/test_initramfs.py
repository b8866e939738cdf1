from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from image_cases import make_module

from forkd.errors import HostLacks
from forkd.host.tools import find_tool
from forkd.image.boot import render_init
from forkd.image.initramfs import check_static, digest_sources, read_agent_sources, render_initramfs


def unpack(archive: bytes, where: Path) -> None:
    subprocess.run([str(find_tool("busybox")), "cpio", "-i", "-d"], input=archive, cwd=where, check=True)


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
    unpack(render_initramfs(b"\x7fELF", [], {"start.py": b""}, "/usr/bin/python3"), tmp_path)
    applets = {path.name for path in (tmp_path / "bin").iterdir()}
    assert {"busybox", "sh", "mount", "insmod", "mkdir", "rm", "cp", "ln", "sleep", "reboot"} <= applets
    for path in (tmp_path / "bin").iterdir():
        assert path.name == "busybox" or path.readlink() == Path("busybox")


def test_the_agent_lies_there_as_a_package_that_can_be_imported(tmp_path: Path) -> None:
    module = make_module("depends=")
    archive = render_initramfs(b"\x7fELF", [("erofs", module)], read_agent_sources(), "/usr/bin/python3")
    unpack(archive, tmp_path)
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
