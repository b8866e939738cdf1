import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_cases import Heard, make_module, make_python, write_modules

from forkd.host.paths import Home
from forkd.image import build as image_build
from forkd.image.kernel import BOOT_MODULES, index_kernel

_BUILD_BYTES = 2 << 30


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def home() -> Iterator[Home]:
    """In memory where there is room: dpkg syncs every file that it writes."""
    room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/dev/shm" if room > _BUILD_BYTES else None) as path:
        yield Home(Path(path) / "home", Path(path) / "run")


@pytest.fixture
def small_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Stands in for the download of a kernel, so that a store can be tried without the network."""
    calls: list[str] = []

    def build_small(suite: str, mirror: str | None, out: Path, work: Path, progress: Any) -> dict[str, Any]:
        calls.append(suite)
        (out / "vmlinuz").write_bytes(b"a kernel")
        modules = {f"kernel/{name}.ko": make_module("depends=") for name in BOOT_MODULES}
        write_modules(out / "modules.tar", {**modules, "modules.builtin": b""})
        index_kernel(out)
        return {"kernel_version": "6.1.0-test"}

    monkeypatch.setattr(image_build, "build_kernel", build_small)
    yield calls


@pytest.fixture
def root_directory(tmp_path: Path) -> Path:
    """The least that looks like a root file system with a Python."""
    root = tmp_path / "root"
    make_python(root)
    (root / "etc").mkdir()
    (root / "etc/issue").write_text("hello\n")
    return root
