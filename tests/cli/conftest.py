"""One daemon with one snapshot for the tests that only use it; homes of their own for those that start and stop one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import Cli, ended, serving
from support_images import make_image

from forkd.host.paths import Home


def _make_cli(home: Path) -> Cli:
    """With one image, called small. The runtime directory's path is short: sockets are in it."""
    runtime = Path(tempfile.mkdtemp(prefix="fkd-", dir="/tmp"))
    make_image(Home(home, runtime))
    return Cli(home, runtime)


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    """No daemon runs, and none may: nothing is left in the runtime directory."""
    made = _make_cli(tmp_path / "home")
    yield made
    made.stop()
    left = [path.name for path in made.runtime.iterdir()]
    shutil.rmtree(made.runtime)
    assert left == []


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Cli]:
    """Daemons may be started; they are ended afterwards."""
    made = _make_cli(tmp_path / "home")
    try:
        with ended(made):
            yield made
            made.stop()
    finally:
        shutil.rmtree(made.runtime)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A daemon runs, with the snapshot warm, in which x is 41."""
    made = _make_cli(tmp_path_factory.mktemp("served"))
    try:
        with serving(made):
            done = made.ask("snapshot", "create", "--image", "small", "--tag", "warm", "--warm", "x = 41")
            assert done.returncode == 0, done.stderr
            yield made
        assert list(made.runtime.glob("vms/*")) == []
    finally:
        shutil.rmtree(made.runtime)


@pytest.fixture
def warm(served: Cli) -> Iterator[Cli]:
    """The same; sandboxes, workspaces and other snapshots are removed after each test."""
    yield served
    served.stop()
    for info in served.json("workspace", "ls"):
        served.ask("workspace", "rm", info["name"])
    assert served.ask("rm", "--all").returncode == 0
    for tag in served.tags():
        if tag != "warm":
            assert served.ask("snapshot", "rm", tag).returncode == 0
    assert served.ids() == []
