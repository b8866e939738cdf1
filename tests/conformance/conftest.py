"""Daemons of each kind, and the real clients talking to them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_clients import CONTROLLERS, Controller, Driver, driven
from real_daemon import IMAGE, Daemon, running_daemon
from support_images import link_snapshot, made_home, make_image

from forkd.host.paths import Home

TOKEN = "a-token-of-a-conformance-test"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("fake", None), id="fake"),
        pytest.param(("fake", TOKEN), id="fake-token"),
        pytest.param(("auto", TOKEN), id="vm", marks=pytest.mark.vm),
    ],
)
def daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    engine, token = request.param
    with made_home(tmp_path_factory.mktemp("home")) as home:
        if engine == "fake":
            make_image(home, IMAGE)
        else:
            home.images.symlink_to(request.getfixturevalue("built_home").images)
            link_snapshot(request.getfixturevalue("warm_vm"), home)
        with running_daemon(home, engine, token) as started:
            yield started


@pytest.fixture
def nothing_running(daemon: Daemon, nothing_left: None) -> Iterator[None]:
    yield
    left = daemon.live()
    for info in left:
        daemon.delete(f"/v1/sandboxes/{info['id']}")
    assert left == []


@pytest.fixture(scope="session")
def clients(built_home: Home) -> Path:
    """Where they are installed; kept between runs."""
    return built_home.root / "clients"


@pytest.fixture(scope="module")
def typescript_driver(daemon: Daemon, clients: Path) -> Iterator[Driver]:
    with driven(clients, "typescript", daemon.client_env) as driver:
        yield driver


@pytest.fixture(scope="module")
def mcp_driver(daemon: Daemon, clients: Path) -> Iterator[Driver]:
    with driven(clients, "mcp", daemon.client_env) as driver:
        driver.make(names=True)  # from here on its server is there too
        yield driver


@pytest.fixture(scope="module", params=["python", "typescript"])
def controller(request: pytest.FixtureRequest, daemon: Daemon, clients: Path) -> Iterator[Controller]:
    with driven(clients, request.param, daemon.client_env) as driver:
        yield CONTROLLERS[request.param](driver)


@pytest.fixture(scope="session")
def our_cli() -> Path:
    """The directory of our `forkd`, for PATH."""
    directory = Path(sys.executable).parent
    assert (directory / "forkd").is_file(), "forkd is not installed in the environment of the tests"
    return directory
