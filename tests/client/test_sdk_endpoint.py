"""Where the SDK looks for the daemon."""

import os
import socket
import subprocess
import sys

import pytest
from support_recording import Reply, recording

from forkd.client.endpoint import Endpoint, find_endpoint
from forkd.errors import HostLacks, InvalidInput

DEFAULT = "http://127.0.0.1:8889"


def test_argument_then_environment_then_the_socket() -> None:
    environ = {"FORKD_RUNTIME_DIR": "/run/somewhere"}
    path = "/run/somewhere/forkd.sock"
    assert find_endpoint(environ=environ) == Endpoint("http://localhost", path, startable=True)
    assert find_endpoint(environ=environ).name == f"unix://{path}"
    environ |= {"FORKD_URL": "http://h:1/", "FORKD_TOKEN": " t\n"}
    assert find_endpoint(environ=environ) == Endpoint("http://h:1", None, "t")
    assert find_endpoint("https://k:2", "u", environ) == Endpoint("https://k:2", None, "u")
    assert find_endpoint(f"unix://{path}", "", environ) == Endpoint("http://localhost", path)


def test_no_socket_is_looked_for_where_it_is_said_to_be_none() -> None:
    assert find_endpoint(environ={"FORKD_SOCKET": "none"}) == Endpoint(DEFAULT, startable=True)


@pytest.mark.parametrize(
    "url",
    [
        "h:1",
        "ftp://h",
        "http://",
        "unix://x",
        "http://h/?a=b",
        "http://u:p@h",
        "http://h:99999",
        "http://h:0",
        "http://[::1",
        "http://h\x00",
        "//h",
    ],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        find_endpoint(url, environ={})


@pytest.mark.parametrize("token", ["a b", "a\nb", "ä", "a\x00"])
def test_a_token_that_would_break_the_header_is_refused(token: str) -> None:
    with pytest.raises(InvalidInput, match="token") as caught:
        find_endpoint(token=token, environ={})
    assert token not in str(caught.value)


def test_a_token_is_not_shown() -> None:
    assert "secret" not in repr(find_endpoint("http://h", "secret", {}))


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("http://127.0.0.1:1", True),
        ("http://[::1]:1", True),
        ("http://localhost", True),
        ("http://10.0.0.1", False),
        ("https://h", False),
    ],
)
def test_loopback_is_this_machine(url: str, local: bool) -> None:
    assert find_endpoint(url, environ={}).is_local is local


def test_without_unix_sockets_a_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(HostLacks, match="unix sockets"):
        find_endpoint("unix:///x", environ={})
    assert find_endpoint(environ={"FORKD_RUNTIME_DIR": "/tmp"}) == Endpoint(DEFAULT, startable=True)


# What Python on Windows lacks and a client might reach for. The loop is made before: here its own parts need it.
_ELSEWHERE = """
import sys
for name in ("fcntl", "pwd", "grp", "resource", "termios"):
    sys.modules[name] = None
import asyncio, os, socket
loop = asyncio.new_event_loop()
for name in ("geteuid", "getuid", "fork"):
    delattr(os, name)
del socket.AF_UNIX
from forkd import AsyncController, Controller, Sandbox
with Controller() as controller:
    assert controller.url == "http://127.0.0.1:8889", controller.url
with Controller(sys.argv[1]) as controller:
    print(controller.version()["version"], Sandbox.list(controller=controller))
async def main():
    async with AsyncController(sys.argv[1]) as controller:
        print((await controller.version())["version"])
loop.run_until_complete(main())
loop.close()
"""


def test_a_client_needs_nothing_that_only_unix_has() -> None:
    with recording(Reply(200, {"version": "7"}), Reply(200, []), Reply(200, {"version": "8"})) as server:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("FORKD_")}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", _ELSEWHERE, server.url],
            capture_output=True,
            text=True,
            env=environ,
            timeout=60,
            check=False,
        )
    assert (done.stdout.split(), done.stderr) == (["7", "[]", "8"], "")
