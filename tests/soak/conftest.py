"""A daemon of its own for each test, that has to leave nothing behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.served import Served, make_snapshot, served
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.image import Image

WARM = "import sys"


@contextmanager
def running(engine: str, images: Path, root: Path) -> Iterator[Served]:
    root.mkdir()
    with served(engine, images, root) as daemon:
        make_snapshot(daemon, WARM)
        yield daemon
    assert find_marked(daemon.home.runtime) == {}


@pytest.fixture
def fake_daemon(python_image: Image, built_home: Home, tmp_path: Path, nothing_left: None) -> Iterator[Served]:
    with running("fake", built_home.images, tmp_path / "home") as daemon:
        yield daemon


@pytest.fixture
def vm_daemon(python_image: Image, built_home: Home, tmp_path: Path, nothing_left: None) -> Iterator[Served]:
    with running("qemu", built_home.images, tmp_path / "home") as daemon:
        yield daemon
