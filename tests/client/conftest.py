"""One daemon for the tests of a module; each of them finds it in its environment, and leaves no sandbox there."""

from collections.abc import Iterator

import pytest
from sdk_daemon import serving
from support_daemon import Served, environment

from forkd.client import Controller
from forkd.client.shared import close_shared


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("daemon"), "--bind", "none") as started:
        yield started


@pytest.fixture
def daemon(served: Served, nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    for name in ("FORKD_URL", "FORKD_TOKEN", "FORKD_SOCKET", "FORKD_TAG", "FORKD_TARGET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(served.home, "fake").items():
        monkeypatch.setenv(name, value)
    with Controller() as controller:
        yield controller
        left = controller.list_sandboxes()
        for info in left:
            controller.kill_sandbox(info["id"])
    close_shared()
    assert left == []
