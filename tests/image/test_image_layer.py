"""Images with Python packages and steps on top of a root."""

import asyncio
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from image_cases import NOTHING, Heard, list_leftovers
from support_roots import make_busybox_root, make_wheel

from forkd.errors import BuildFailed, InvalidInput, NotFound, WarmupFailed
from forkd.host.files import digest_file
from forkd.host.paths import Home
from forkd.host.tools import find_tool
from forkd.image import Copy, Image, ImageSpec, ImageStore, Run, directory_spec
from forkd.image.manifest import MANIFEST_FILE
from forkd.image.spec import Silent
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime.doctor import open_engine
from forkd.runtime.freeze import Warmup, create_snapshot
from forkd.store.snapshots import SnapshotStore

ALREADY = "Nothing to do: it is already built (--fresh builds it again)"


@pytest.fixture
def busybox_root(tmp_path: Path) -> Path:
    return make_busybox_root(tmp_path / "busybox")


def read_back(image: Image, path: str) -> str:
    """A file of a packed root."""
    with tempfile.TemporaryDirectory(prefix="fkd-") as where:
        extract = [find_tool("fsck.erofs"), f"--extract={where}/root", image.root]
        subprocess.run(extract, check=True, stdout=subprocess.DEVNULL)
        return Path(where, "root", path).read_text()


@pytest.mark.usefixtures("small_kernel")
def test_steps_are_done_in_their_order(home: Home, busybox_root: Path, heard: Heard) -> None:
    steps = [Run("echo one > /etc/order"), Run("echo two >> /etc/order; echo said")]
    image = ImageStore(home).build(directory_spec(busybox_root, steps=steps), "stepped", heard)
    assert read_back(image, "etc/order") == "one\ntwo\n"
    assert "said" in heard.lines
    said = [f"Step {number} of 2: {step.render()}" for number, step in enumerate(steps, start=1)]
    assert [stage for stage in heard.stages if stage.startswith("Step")] == said
    assert image.source["steps"] == [step.describe() for step in steps]
    assert list_leftovers(home.root) == NOTHING


@pytest.mark.usefixtures("small_kernel")
def test_the_same_steps_again_are_found_and_that_is_said(home: Home, busybox_root: Path) -> None:
    store, spec = ImageStore(home), directory_spec(busybox_root, steps=[Run("echo x > /etc/made")])
    first_time, again = Heard(), Heard()
    first = store.build(spec, "mine", first_time)
    # The pieces it was made from stay for the next build, also when others are collected.
    store.prune()
    assert store.build(spec, "mine", again) == first
    assert ALREADY not in first_time.stages
    assert again.stages == [f"Reading {busybox_root}", ALREADY]
    fresh = Heard()
    store.build(spec, "mine", fresh, fresh=True)
    assert ALREADY not in fresh.stages and "Packing the image" in fresh.stages


@pytest.mark.usefixtures("small_kernel")
def test_whatever_is_asked_for_makes_another_root(home: Home, busybox_root: Path) -> None:
    store = ImageStore(home)
    base = directory_spec(busybox_root)
    changes: list[Callable[[], ImageSpec]] = [
        lambda: base,
        lambda: replace(base, steps=(Run("true"),)),
        lambda: replace(base, steps=(Run("true"), Run("true"))),
        lambda: replace(base, steps=(Run("true "),)),
    ]
    roots = {store.build(change(), "mine").root for change in changes}
    (busybox_root / "etc/changed").touch()
    roots.add(store.build(changes[1](), "mine").root)
    assert len(roots) == len(changes) + 1


@pytest.mark.usefixtures("small_kernel")
def test_a_fresh_build_of_the_same_has_the_same_bytes(home: Home, busybox_root: Path) -> None:
    store, spec = ImageStore(home), directory_spec(busybox_root, steps=[Run("mkdir /srv; echo x > /srv/file")])
    first = store.build(spec, "mine")
    assert store.build(spec, "mine", fresh=True).id == first.id


@pytest.mark.usefixtures("small_kernel")
def test_a_step_that_fails_shows_its_last_lines_and_leaves_no_image(home: Home, busybox_root: Path) -> None:
    spec = directory_spec(busybox_root, steps=[Run("echo the last words; exit 9")])
    with pytest.raises(BuildFailed, match=r"(?m)^--run echo .* exit 9 failed \(exit status 9\)$") as caught:
        ImageStore(home).build(spec, "mine")
    assert caught.value.details == "the last words"
    assert ImageStore(home).list() == []
    assert list_leftovers(home.root) == NOTHING


@pytest.mark.usefixtures("small_kernel")
def test_a_step_that_removes_the_python_is_refused(home: Home, busybox_root: Path) -> None:
    with pytest.raises(InvalidInput, match="no Python"):
        ImageStore(home).build(directory_spec(busybox_root, steps=[Run("rm -rf /usr/lib/python3.11")]), "mine")
    assert list_leftovers(home.root) == NOTHING


def test_a_source_that_is_absent_is_said_before_anything_is_done(home: Home, tmp_path: Path, heard: Heard) -> None:
    spec = directory_spec(tmp_path / "absent-root", steps=[Copy(tmp_path / "absent", "/srv")])
    with pytest.raises(NotFound, match="absent"):
        ImageStore(home).build(spec, "mine", heard)
    assert heard.stages == []


@pytest.fixture(scope="module")
def real_root(python_image: Image) -> Iterator[Path]:
    """The python image's root as a directory."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as where:
        root = Path(where, "root")
        extract = [find_tool("fsck.erofs"), f"--extract={root}", python_image.root]
        subprocess.run(extract, check=True, stdout=subprocess.DEVNULL)
        yield root


@pytest.fixture
def packages(real_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that pip can find: one package of plain Python, which needs one with a compiled module."""
    compiled = next(real_root.glob("usr/lib/python3.*/lib-dynload/_json.cpython-*.so"))
    tag = "cp311-cp311-manylinux_2_17_x86_64"
    assert "cpython-311-" in compiled.name
    binary = {"tinybin/__init__.py": b"", f"tinybin/{compiled.name}": compiled.read_bytes()}
    make_wheel(tmp_path / "index", "tinybin", "0.2", binary, tag=tag)
    make_wheel(tmp_path / "index", "tiny", "0.1", {"tiny.py": b"def twice(x): return 2 * x\n"}, requires=["tinybin"])
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))


def share_kernel(python_image: Image, home: Home) -> None:
    """So that it is not fetched again."""
    piece = python_image.kernel.parent
    shutil.copytree(piece, home.images / "pieces" / piece.name)


WARM = """
import os, tiny, tinybin._json, platform
made = open('/etc/made').read().strip()
compiled = os.path.exists(tiny.__cached__) and os.stat(tiny.__file__).st_mtime
mode = oct(os.stat('/srv/app/start').st_mode)
raise RuntimeError(f"{tiny.twice(21)} {tinybin._json.encode_basestring_ascii('x')} {made} {compiled} {mode}")
"""


@pytest.mark.vm
@pytest.mark.build
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("packages")
def test_packages_and_steps_are_there_in_a_real_vm(
    real_root: Path, python_image: Image, home: Home, tmp_path: Path, run_directory: Path
) -> None:
    share_kernel(python_image, home)
    (tmp_path / "app").mkdir()
    (tmp_path / "app/start").write_text("#!/bin/sh\n")
    (tmp_path / "app/start").chmod(0o751)
    steps = [Copy(tmp_path / "app", "/srv/app"), Run("python3 -c 'import tiny; print(tiny.twice(4))' > /etc/made")]
    spec, again = directory_spec(real_root, pip=["tiny==0.1"], steps=steps), Heard()
    image = ImageStore(home).build(spec, "layered")

    wheels = {name: digest_file(next((tmp_path / "index").glob(f"{name}-*"))) for name in ("tiny", "tinybin")}
    assert {name: wheel["version"] for name, wheel in image.pip.items()} == {"tiny": "0.1", "tinybin": "0.2"}
    assert {name: wheel["sha256"] for name, wheel in image.pip.items()} == {
        name: total.sha256 for name, total in wheels.items()
    }
    manifest = json.loads((image.dir / MANIFEST_FILE).read_text())
    assert manifest["source"]["pip"] == ["tiny==0.1"]

    # Nothing is asked of the index again.
    shutil.rmtree(tmp_path / "index")
    assert ImageStore(home).build(spec, "layered", again) == image
    assert again.stages[-1] == ALREADY
    shutil.copytree(tmp_path / "app", tmp_path / "elsewhere/app")
    moved = Copy(tmp_path / "elsewhere/app", "/srv/app")
    assert ImageStore(home).build(replace(spec, steps=(moved, steps[1])), "layered").root == image.root
    (tmp_path / "elsewhere/app/start").write_text("#!/bin/bash\n")
    assert ImageStore(home).build(replace(spec, steps=(moved, steps[1])), "changed").root != image.root
    assert ImageStore(home).build(replace(spec, steps=()), "packages").root != image.root

    snapshots = SnapshotStore(tmp_path / "snapshots")
    making = (open_engine("qemu"), snapshots, image, parse_tag("layered"), MachineSpec(256), Warmup(WARM))
    with pytest.raises(WarmupFailed) as caught:
        asyncio.run(create_snapshot(*making, run_directory, progress=Silent()))
    assert '42 "x" 8 946684800.0 0o100751' in caught.value.message


@pytest.mark.build
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("packages", "small_kernel")
def test_a_fresh_build_with_packages_has_the_same_bytes(real_root: Path, home: Home) -> None:
    spec = directory_spec(real_root, pip=["tiny"])
    first = ImageStore(home).build(spec, "mine")
    assert ImageStore(home).build(spec, "mine", fresh=True).id == first.id
