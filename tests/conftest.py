"""What all tests share: one real image, kept between runs, and the proof that nothing is left behind."""

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_images import link_snapshot, made_home
from support_leftovers import left_clean, temporary_directories

from forkd.host.dead_end import find_dead_tap
from forkd.host.files import locked
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.image import Image, ImageStore, debian_spec, get_recipe
from forkd.image.spec import Silent
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime.doctor import open_engine
from forkd.runtime.freeze import Warmup, create_snapshot
from forkd.store.snapshots import SnapshotStore

WARM = parse_tag("warm")


def pytest_configure() -> None:
    # A script's background jobs ignore two of these, what nohup starts the third; many tests send them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    find_dead_tap()  # made once for each process, and kept: no test leaves it behind


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files with VMs and builds first: the short ones then fill the time until the last worker is done.
    slow = {item.path for item in items if item.get_closest_marker("vm") or item.get_closest_marker("build")}
    items.sort(key=lambda item: item.path not in slow)
    if os.environ.get("FORKD_LAB") != "1":
        skip = pytest.mark.skip(reason="needs KVM, root and cgroup v2: make lab runs it")
        for item in items:
            if item.get_closest_marker("lab") is not None:
                item.add_marker(skip)


@pytest.fixture
def anyio_backend() -> str:
    """What runs coroutines: tests and fixtures that are asynchronous need no mark."""
    return "asyncio"


@pytest.fixture(scope="session")
def built_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home with the real python image; kept between runs where FORKD_TEST_HOME says so."""
    kept = os.environ.get("FORKD_TEST_HOME")
    root = Path(kept) if kept else tmp_path_factory.mktemp("built")
    return Home(root, root / "run")


@pytest.fixture(scope="session")
def python_image(built_home: Home) -> Image:
    return ImageStore(built_home).build(debian_spec(get_recipe("python")), "python")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of all workers of this run. What is made there is made under a lock."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def warm_vm(python_image: Image, shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshot `warm` of a real VM, booted once; link_snapshot gives it to the homes of tests."""
    store = SnapshotStore(shared / "warm")
    warmup = Warmup("import numpy, random, time\nx = 41\npast = {'answer': 42}")
    with locked(shared / "warm.lock"):
        if not store.has(WARM):
            making = (open_engine("qemu"), store, python_image, WARM, MachineSpec(256), warmup)
            asyncio.run(create_snapshot(*making, tmp_path_factory.mktemp("run"), progress=Silent()))
    return store.get(WARM).directory


@pytest.fixture
def vm_home(fake_home: Home, warm_vm: Path) -> Home:
    """For daemons with real VMs: the same as fake_home, with the snapshot `warm`."""
    link_snapshot(warm_vm, fake_home)
    return fake_home


@pytest.fixture
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, mount or open descriptor of ours more than before."""
    # The built home is none of these: other runs use it at the same time.
    with left_clean(lambda: {tmp_path_factory.getbasetemp(), *temporary_directories()}):
        yield


@pytest.fixture
def run_directory() -> Iterator[Path]:
    """Short, as sockets live in it; empty at the end, or the engine left something."""
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        yield Path(path)
        assert list(Path(path).iterdir()) == []
        assert find_marked(Path(path)) == {}


@pytest.fixture
def fake_home(python_image: Image, built_home: Home, tmp_path: Path) -> Iterator[Home]:
    """An empty home that has the real images.

    For daemons with the fake engine, which asks for an image and looks at none of it.
    """
    with made_home(tmp_path / "home", built_home.images) as home:
        yield home
