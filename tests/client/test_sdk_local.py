"""No daemon, or none that can be asked: one is started where none was named, else the error says what to do."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_daemon import environment
from support_images import made_home

from bench.served import find_free_port
from forkd import AsyncController, Controller, InvalidInput, Unreachable
from forkd.cli.background import stop_daemon
from forkd.client import endpoint, local
from forkd.host.paths import Home

CREATE = "from forkd import Sandbox\nSandbox.create('python')"


@pytest.fixture
def alone(tmp_path: Path, nothing_left: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    """A home without a daemon, which our environment points to."""
    for name in [name for name in os.environ if name.startswith("FORKD_")]:
        monkeypatch.delenv(name)
    with made_home(tmp_path / "home") as home:
        for name, value in environment(home, "fake").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("FORKD_BIND", "none")
        # Where a daemon of this machine could listen, which is not ours to ask.
        monkeypatch.setattr(endpoint, "DEFAULT_URL", f"http://127.0.0.1:{find_free_port()}")
        yield home


def test_a_daemon_is_started_where_none_runs_and_none_was_named(alone: Home) -> None:
    with Controller() as controller:
        assert controller.healthy() is False  # to look starts nothing
        assert not list(alone.runtime.glob("*.sock"))
        pid = controller.version()["pid"]
        try:
            assert controller.list_sandboxes() == [] and controller.url.startswith("unix://")
            with Controller() as other:
                assert other.version()["pid"] == pid
        finally:
            stop_daemon(pid)


async def test_the_asynchronous_client_starts_one_too_and_again_when_it_has_ended(alone: Home) -> None:
    async with AsyncController() as controller:
        for _ in range(2):
            pid = (await controller.version())["pid"]
            await asyncio.to_thread(stop_daemon, pid)


def test_a_daemon_that_was_named_is_not_started(alone: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_URL", f"http://127.0.0.1:{find_free_port()}")
    with Controller() as controller, pytest.raises(Unreachable, match="nothing was sent"):
        controller.version()


def test_without_the_server_installed_the_error_says_how_to_install_it(
    alone: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_SERVER", ("no_such_module",))
    with Controller() as controller, pytest.raises(Unreachable, match="has the SDK, but not the daemon") as caught:
        controller.version()
    assert "pip install '.[server]'" in (caught.value.hint or "") and caught.value.sent is False


def test_a_daemon_that_cannot_start_says_why(alone: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_ENGINE", "nonsense")
    with Controller() as controller, pytest.raises(Unreachable, match="none could be started: The daemon") as caught:
        controller.version()
    assert "nonsense" in (caught.value.details or "")


@pytest.mark.parametrize("said", ["", "no JSON", "[]", '{"error": "E"}'])
def test_whatever_a_failed_start_prints_becomes_an_error(said: str) -> None:
    assert "none could be started: " in local.parse_failure(said).message


def test_a_traceback_shows_message_and_hint_in_few_lines() -> None:
    unreachable = os.environ | {"FORKD_URL": f"http://127.0.0.1:{find_free_port()}"}
    done = subprocess.run(
        [sys.executable, "-c", CREATE], env=unreachable, capture_output=True, text=True, timeout=60, check=False
    )
    *_, message, hint = done.stderr.strip().splitlines()
    assert message.startswith("forkd.errors.Unreachable: No forkd daemon answers at http://127.0.0.1:")
    assert hint == "Hint: Start one with: forkd up. Or set FORKD_URL"
    assert "httpx" not in done.stderr and "httpcore" not in done.stderr
    assert len(done.stderr.splitlines()) < 40


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "https://daemon.invalid"])
@pytest.mark.parametrize("content", [None, "no certificate"])
def test_certificates_that_cannot_be_read_are_an_error_that_names_them(
    url: str, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "authority.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    with pytest.raises(InvalidInput, match=r"SSL_CERT_FILE .*authority\.pem") as caught:
        Controller(url)
    assert "PEM" in (caught.value.hint or "")
