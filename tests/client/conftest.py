"""One daemon for the tests of a module; each of them finds it in its environment, and leaves no sandbox there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sdk_daemon import serving

from forkd.client.controller import Controller
from forkd.client.shared import close_shared


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with serving(tmp_path_factory.mktemp("daemon"), "--bind", "none") as environ:
        yield environ


@pytest.fixture
def daemon(served: dict[str, str], nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Controller]:
    for name in ("FORKD_URL", "FORKD_TOKEN", "FORKD_SOCKET", "FORKD_TAG", "FORKD_TARGET"):
        monkeypatch.delenv(name, raising=False)
    for name, value in served.items():
        monkeypatch.setenv(name, value)
    with Controller() as controller:
        yield controller
        left = controller.list_sandboxes()
        for info in left:
            controller.kill_sandbox(info["id"])
    close_shared()
    assert left == []
