"""Clients that hold connections, or send without end, before anyone knows who they are."""

import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_client import Client
from support_daemon import Served, make_certificate, served
from support_processes import wait_until

from forkd.daemon.tokens import TokenStore
from forkd.host.paths import Home

FILES = 240  # that the daemon may open, so that few connections are many
CAP = FILES // 4
ROOM_MIB = 24
CHUNKED = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def few_files(home: Home) -> Iterator[Served]:
    """A daemon that wants a token and may not open many files."""
    TokenStore(home.tokens).create("somebody")
    prefix = ("prlimit", f"--nofile={FILES}:{FILES}")
    with served(home, "--bind", "127.0.0.1:0", prefix=prefix) as daemon:
        yield daemon


@contextlib.contextmanager
def held(place: str, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    """So many connections that ask for nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(Client(place).raw(timeout=30)))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                made[-1].sendall(sent)
        yield made


def open_sockets(daemon: Served) -> int:
    links = Path(f"/proc/{daemon.process.pid}/fd").iterdir()
    found = 0
    for link in links:
        with contextlib.suppress(FileNotFoundError):
            found += link.readlink().name.startswith("socket:")
    return found


def check_quiet(daemon: Served) -> None:
    log = daemon.read_log()
    assert "Traceback" not in log
    assert len(log) < 8_000, log


@pytest.mark.parametrize("sent", [b"", b"GET /version HTTP/1.1\r\nHost: ", b"GET /version HTTP/1.1\r\n\r\n"])
def test_idle_connections_lock_nobody_out(few_files: Served, sent: bytes) -> None:
    unix, tcp = few_files.places
    with held(tcp, 2 * FILES, sent):
        assert Client(unix).get("/version").status == 200
        assert Client(tcp).get("/version").status == 401
        assert Client(tcp).get("/healthz").status == 200
        wait_until(lambda: open_sockets(few_files) < CAP + 20, "the oldest gave way")
    check_quiet(few_files)


def test_connections_that_never_begin_their_tls_handshake_lock_nobody_out(home: Home, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    TokenStore(home.tokens).create("somebody")
    flags = ("--bind", "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key))
    with served(home, *flags, prefix=("prlimit", f"--nofile={FILES}:{FILES}")) as daemon:
        unix, tcp = daemon.places
        with held(tcp.replace("https:", "http:"), 2 * FILES):
            assert Client(unix).get("/version").status == 200
            trusting = Client(tcp, tls=ssl.create_default_context(cafile=str(cert)))
            assert trusting.get("/healthz").status == 200
            wait_until(lambda: open_sockets(daemon) < CAP + 20, "the oldest gave way")
        check_quiet(daemon)


def test_what_is_in_use_is_not_closed_for_others_who_are_told_to_wait(home: Home) -> None:
    token = TokenStore(home.tokens).create("somebody")
    with served(home, "--bind", "127.0.0.1:0", "--max-connections", "3") as daemon:
        unix, tcp = daemon.places
        known = {"Authorization": f"Bearer {token}"}
        with contextlib.ExitStack() as stack:
            streams = []
            for _ in range(3):
                connection = stack.enter_context(contextlib.closing(Client(tcp).connection()))
                connection.request("GET", "/v1/events?follow=true&since=0", headers=known)
                streams.append(connection.getresponse())
                assert b"daemon.started" in b"".join(streams[-1].readline() for _ in range(3))
            refused = Client(tcp, token).exchange(b"")
            assert refused.error == (503, "no_capacity")
            with held(unix, 10):
                assert Client(unix).get("/version").status == 200
            assert all(not stream.closed for stream in streams)
        wait_until(lambda: Client(tcp, token).exchange(b"GET /healthz HTTP/1.0\r\n\r\n").status == 200, "there is room")
        check_quiet(daemon)


def endless(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece))


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(CHUNKED + b"0\r\n" + endless(b"a:b\r\n", 2 << 20), id="trailers"),
        pytest.param(CHUNKED + b"0\r\na:" + endless(b"b", 2 << 20), id="one trailer"),
        pytest.param(CHUNKED + b"1;" + endless(b"b", 2 << 20), id="a chunk extension"),
        pytest.param(b"GET / HTTP/1.1\r\n" + endless(b"a:b\r\n", 2 << 20), id="headers"),
        pytest.param(b"GET / HTTP/1.1\r\na:" + endless(b"b", 2 << 20), id="one header"),
        pytest.param(b"GET /" + endless(b"b", 2 << 20), id="the path"),
        pytest.param(endless(b"GET / HTTP/1.1\r\n\r\n", 2 << 20), id="requests"),
        pytest.param(CHUNKED + endless(b"1\r\nb\r\n", 2 << 20), id="small chunks"),
    ],
)
def test_what_is_sent_before_authentication_costs_no_memory(few_files: Served, sent: bytes) -> None:
    unix, tcp = few_files.places
    assert Client(tcp).get("/version").status == 401
    before = few_files.memory_mib("VmHWM")
    with held(tcp, 20, sent):
        assert Client(unix).get("/version").status == 200
    assert few_files.memory_mib("VmHWM") - before < ROOM_MIB
    check_quiet(few_files)
