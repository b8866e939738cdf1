"""Daemons of each kind, and the real clients talking to them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_clients import (
    DRIVERS,
    MCP_SERVER,
    PYTHON_SDK,
    Controller,
    Driver,
    PythonController,
    TypeScriptController,
    driven,
    install_python,
    install_typescript,
    render_node,
)
from real_daemon import Daemon, running_daemon
from support_images import make_image

from forkd.host.paths import Home
from forkd.image import Image

TOKEN = "a-token-of-a-conformance-test"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("fake", None), id="fake"),
        pytest.param(("fake", TOKEN), id="fake-token"),
        pytest.param(("auto", TOKEN), id="vm", marks=pytest.mark.vm),
    ],
)
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    engine, token = request.param
    home = request.getfixturevalue("fake_home" if engine == "fake" else "vm_home")
    with running_daemon(home, engine, "python", token) as started:
        yield started


@pytest.fixture(scope="session")
def fake_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("fake")
    make_image(Home(home, home), "python")
    return home


@pytest.fixture(scope="session")
def vm_home(tmp_path_factory: pytest.TempPathFactory, built_home: Home, python_image: Image) -> Path:
    home = tmp_path_factory.mktemp("vm")
    (home / "images").symlink_to(built_home.images)
    return home


@pytest.fixture
def nothing_running(daemon: Daemon, nothing_left: None) -> Iterator[None]:
    yield
    left = daemon.live()
    for info in left:
        daemon.ask("DELETE", f"/v1/sandboxes/{info['id']}")
    assert left == []


@pytest.fixture(scope="session")
def clients(built_home: Home) -> Path:
    return built_home.root / "clients"


@pytest.fixture(scope="session")
def python_sdk(clients: Path) -> Path:
    return install_python(clients / "python", [PYTHON_SDK])


@pytest.fixture(scope="session")
def typescript_sdk(clients: Path) -> Path:
    return install_typescript(clients / "typescript")


@pytest.fixture(scope="session")
def mcp_server(clients: Path) -> Path:
    return install_python(clients / "mcp", MCP_SERVER)


@pytest.fixture(scope="module")
def python_driver(daemon: Daemon, python_sdk: Path) -> Iterator[Driver]:
    with driven([str(python_sdk), str(DRIVERS / "python_driver.py")], daemon.client_env) as driver:
        yield driver


@pytest.fixture(scope="module")
def typescript_driver(daemon: Daemon, typescript_sdk: Path) -> Iterator[Driver]:
    with driven(render_node(), daemon.client_env, typescript_sdk) as driver:
        yield driver


@pytest.fixture(scope="module")
def mcp_driver(daemon: Daemon, mcp_server: Path) -> Iterator[Driver]:
    with driven([str(mcp_server), str(DRIVERS / "mcp_driver.py")], daemon.client_env) as driver:
        driver.make(names=True)  # from here on its server is there too
        yield driver


@pytest.fixture(scope="module", params=["python", "typescript"])
def controller(request: pytest.FixtureRequest, daemon: Daemon) -> Controller:
    driver = request.getfixturevalue(f"{request.param}_driver")
    return PythonController(driver) if request.param == "python" else TypeScriptController(driver)


@pytest.fixture(scope="session")
def our_cli() -> Path:
    """The directory of our `forkd`, for PATH."""
    directory = Path(sys.executable).parent
    assert (directory / "forkd").is_file(), "forkd is not installed in the environment of the tests"
    return directory
