"""One daemon with one snapshot for the tests that only use it; homes of their own for those that start and stop one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import Cli, ended
from support_daemon import served as serving
from support_images import made_home, make_image

from forkd.host.paths import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """With one image, called small."""
    with made_home(tmp_path / "home") as made:
        make_image(made)
        yield made


@pytest.fixture
def cli(home: Home) -> Iterator[Cli]:
    """No daemon runs, and none may: nothing is left in the runtime directory."""
    made = Cli(home)
    yield made
    made.stop()
    assert [path.name for path in home.runtime.iterdir()] == []


@pytest.fixture
def alone(home: Home) -> Iterator[Cli]:
    """Daemons may be started; they are ended afterwards."""
    with ended(Cli(home)) as made:
        yield made


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A daemon runs, with the snapshot warm, in which x is 41."""
    with made_home(tmp_path_factory.mktemp("served")) as home:
        make_image(home)
        with serving(home, "--on-stop", "kill", "--bind", "none"):
            made = Cli(home)
            done = made.create("warm", "--warm", "x = 41")
            assert done.returncode == 0, done.stderr
            yield made


@pytest.fixture
def warm(served: Cli) -> Iterator[Cli]:
    """The same; sandboxes, workspaces and other snapshots are removed after each test."""
    yield served
    served.stop()
    for info in served.json("workspace", "ls"):
        served.ask("workspace", "rm", info["name"])
    assert served.ask("rm", "--all").returncode == 0
    if others := [tag for tag in served.tags() if tag != "warm"]:
        assert served.ask("snapshot", "rm", *others).returncode == 0
    assert served.ids() == []


@pytest.fixture
def sandbox(warm: Cli) -> str:
    """The id of a fork of it."""
    return warm.fork()
