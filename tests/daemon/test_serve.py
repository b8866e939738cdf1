"""A daemon's life: what it refuses to start with, how it stops, what outlives it."""

from __future__ import annotations

import argparse
import json
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_cases import Client, fresh_home, is_alive, running, wait_until
from support_images import make_image

from forkd.cli.serve import add_parser
from forkd.daemon.listeners import load_tls, opened_unix
from forkd.daemon.tokens import TokenStore
from forkd.errors import Conflict, InvalidInput
from forkd.host.paths import Home


@pytest.fixture
def empty() -> Iterator[Home]:
    with fresh_home() as home:
        yield home


def refused(home: Home, *flags: str) -> str:
    with running(home, *flags) as daemon:
        assert daemon.wait() != 0
        return daemon.errors()


def with_sandbox(home: Home, place: str) -> tuple[Client, str]:
    client = Client(place)
    if client.get("/v1/snapshots/base").status == 404:
        assert client.post("/v1/snapshots", {"tag": "base", "image": "small", "wait": True}).status == 201
    return client, f"/v1/sandboxes/{client.post('/v1/sandboxes', {'snapshot_tag': 'base'}).body[0]['id']}"


def test_it_stops_when_told_and_sandboxes_go_on(empty: Home) -> None:
    make_image(empty)
    with running(empty, "--bind", "none") as daemon:
        (place,) = daemon.places(1)
        client, path = with_sandbox(empty, place)
        client.post(f"{path}/eval", {"code": "kept = 'yes'"})
        pid = client.get(path).body["pid"]
        daemon.signal(signal.SIGTERM)
        assert daemon.wait() == 0
    assert not Path(place.removeprefix("unix://")).exists()
    assert is_alive(pid)
    with running(empty, "--bind", "none", "--on-stop", "kill") as daemon:
        client = Client(daemon.places(1)[0])
        assert client.post(f"{path}/eval", {"code": "kept"}).body["value"] == "yes"
        daemon.signal(signal.SIGINT)
        assert daemon.wait() == 0
    assert not is_alive(pid)


def test_a_request_under_way_is_finished_and_a_second_signal_hurries(empty: Home) -> None:
    make_image(empty)
    with running(empty, "--bind", "none", "--on-stop", "kill") as daemon:
        client, path = with_sandbox(empty, daemon.places(1)[0])
        statuses: list[int] = []
        begun, go = empty.root / "begun", empty.root / "go"

        def ask(shell: str) -> threading.Thread:
            thread = threading.Thread(
                target=lambda: statuses.append(client.post(f"{path}/exec", {"shell": shell, "timeout_secs": 60}).status)
            )
            thread.start()
            return thread

        short = ask(f"echo >> {begun}; while [ ! -e {go} ]; do sleep 0.02; done")
        long = ask(f"echo >> {begun}; sleep 60")
        wait_until(lambda: begun.exists() and begun.stat().st_size == 2, "both are under way")
        follower = client.stream("GET", "/v1/events?follow=true&since=0")
        next(follower)
        daemon.signal(signal.SIGTERM)
        assert [event.kind for event in follower if event.kind == "error"] == []
        go.touch()
        short.join()
        assert statuses == [200]
        daemon.signal(signal.SIGTERM)
        long.join()
        assert statuses == [200, 503]
        assert daemon.wait() == 0


def test_it_goes_away_by_itself_when_nobody_wants_anything(empty: Home) -> None:
    make_image(empty)
    with running(empty, "--bind", "none", "--idle-exit-secs", "1") as daemon:
        client, path = with_sandbox(empty, daemon.places(1)[0])
        time.sleep(1.6)
        assert client.get("/healthz").status == 200, "a sandbox keeps it"
        client.delete(path)
        assert daemon.wait() == 0


def test_beyond_loopback_there_has_to_be_a_token(empty: Home) -> None:
    assert "without a token" in refused(empty, "--bind", "0.0.0.0:0")
    value = TokenStore(empty.tokens).create("b")
    with running(empty, "--bind", "0.0.0.0:0", "--socket", "none") as daemon:
        place = daemon.places(1)[0].replace("0.0.0.0", "127.0.0.1")
        assert Client(place, value).get("/version").status == 200
        assert Client(place).get("/version").status == 401
        empty.tokens.unlink()
        assert Client(place).get("/version").status == 401, "open only where loopback is all there is"


def test_what_it_refuses_to_start_with(empty: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_HOME", str(empty.root))
    monkeypatch.setenv("FORKD_RUNTIME_DIR", str(empty.runtime))

    def said(*flags: str) -> str:
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        args = parser.parse_args(["serve", *flags])
        with pytest.raises(InvalidInput) as caught:
            args.func(args)
        return caught.value.message

    (tmp_path / "short").write_text("short")
    assert "fewer than 16 bytes" in said("--token-file", str(tmp_path / "short"))
    assert "tls_key" in said("--tls-cert", str(tmp_path / "short"))
    assert "cannot be" in said("--bind", "localhost:80")
    assert "nothing to listen on" in said("--bind", "none", "--socket", "none")
    (tmp_path / "bad.toml").write_text("bind = 3\n")
    assert "bad.toml" in said("--config", str(tmp_path / "bad.toml"))
    assert "without a token" in said("--bind", "0.0.0.0:0")
    TokenStore(empty.tokens).create("a")
    TokenStore(empty.tokens).revoke("a")
    assert "without a token" in said("--bind", "[::]:0")


def test_one_daemon_for_a_home_and_one_for_an_address(empty: Home) -> None:
    with running(empty, "--bind", "127.0.0.1:0") as daemon:
        _, tcp = daemon.places(2)
        assert "runs already" in refused(empty, "--bind", "none")
        with fresh_home() as other:
            assert "already" in refused(other, "--bind", tcp.removeprefix("http://"))
        assert Client(tcp).get("/healthz").status == 200


def test_a_socket_left_by_a_crash_is_replaced(empty: Home) -> None:
    with running(empty, "--bind", "none") as daemon:
        place = daemon.places(1)[0]
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    assert Path(place.removeprefix("unix://")).exists()
    with running(empty, "--bind", "none") as daemon:
        assert Client(daemon.places(1)[0]).get("/readyz").status == 200


def test_a_socket_is_not_taken_from_who_listens_nor_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened_unix(path) as sock:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(Conflict), opened_unix(path):
            pass
        assert path.exists()
        assert sock.fileno() > 0
    assert not path.exists()
    path.write_text("mine")
    with pytest.raises(InvalidInput), opened_unix(path):
        pass
    assert path.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [path]


def make_certificate(directory: Path) -> tuple[Path, Path]:
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def test_tls_is_spoken_where_there_is_a_certificate(empty: Home, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with running(empty, "--bind", "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key)) as daemon:
        unix, tcp = daemon.places(2)
        assert tcp.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(cert))
        assert Client(tcp, tls=trusting).get("/version").status == 200
        assert Client(unix).get("/version").status == 200
        with pytest.raises(ssl.SSLError):
            Client(tcp, tls=ssl.create_default_context()).get("/version")
        plain = Client(tcp.replace("https", "http"))
        with pytest.raises((ConnectionError, OSError)):
            plain.get("/version")
        assert Client(tcp, tls=trusting).post("/v1/sandboxes", data=b"x").status == 415
    with pytest.raises(InvalidInput, match="no certificate"):
        load_tls(key, cert)


def test_a_hang_up_reopens_the_audit_log(empty: Home) -> None:
    with running(empty, "--bind", "none", "--log-format", "json") as daemon:
        client = Client(daemon.places(1)[0])
        client.get("/version")
        log = empty.root / "audit.log"
        wait_until(log.exists, "it is audited")
        log.rename(empty.root / "old.log")
        daemon.signal(signal.SIGHUP)
        # What is asked before it has seen the signal still goes to the old one.
        wait_until(lambda: client.get("/version") and log.exists() and log.read_text(), "it goes on under its name")
        assert json.loads(daemon.errors().splitlines()[0])["message"].startswith("Ready")


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(empty: Home, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(20)
        with running(empty, "--bind", "none", env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as daemon:
            assert sock.recv(100) == b"READY=1"
            daemon.signal(signal.SIGTERM)
            assert sock.recv(100) == b"STOPPING=1"
            assert daemon.wait() == 0


def test_the_settings_file_of_the_home_counts(empty: Home) -> None:
    empty.root.mkdir(parents=True)
    empty.config.write_text('bind = "none"\naudit_log = "none"\n')
    with running(empty) as daemon:
        client = Client(daemon.places(1)[0])
        assert client.get("/version").status == 200
    assert not (empty.root / "audit.log").exists()
