"""What all tests share: one real image, kept between runs, and the proof that nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_leftovers import left_clean, temporary_directories

from forkd.host.marked import find_marked, kill_marked
from forkd.host.paths import Home
from forkd.image import Image, ImageStore, debian_spec, get_recipe


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("FORKD_LAB") != "1":
        skip = pytest.mark.skip(reason="needs KVM, root and cgroup v2: make lab runs it")
        for item in items:
            if item.get_closest_marker("lab") is not None:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def built_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home with the real python image; kept between runs where FORKD_TEST_HOME says so."""
    kept = os.environ.get("FORKD_TEST_HOME")
    root = Path(kept) if kept else tmp_path_factory.mktemp("built")
    return Home(root, root / "run")


@pytest.fixture(scope="session")
def python_image(built_home: Home) -> Image:
    return ImageStore(built_home).build(debian_spec(get_recipe("python")), "python")


@pytest.fixture
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No process, mount or open descriptor of ours more than before."""
    # The built home is none of these: other runs use it at the same time.
    with left_clean(lambda: {tmp_path_factory.getbasetemp(), *temporary_directories()}):
        yield


@pytest.fixture
def fake_home(python_image: Image, built_home: Home, tmp_path: Path) -> Iterator[Home]:
    """An empty home that has the real images, with a runtime directory short enough for sockets.

    For daemons with the fake engine, which asks for an image and looks at none of it.
    """
    root = tmp_path / "home"
    root.mkdir()
    (root / "images").symlink_to(built_home.images, target_is_directory=True)
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as runtime:
        home = Home(root, Path(runtime))
        yield home
        left = find_marked(home.runtime)
        kill_marked(home.runtime)
        assert left == {}, "VMs were left running"
