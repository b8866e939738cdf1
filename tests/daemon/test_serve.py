"""A daemon's life: what it refuses to start with, how it stops, what outlives it."""

import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support_client import Client
from support_daemon import STOP_S, Served, environment, make_certificate, served
from support_images import made_home
from support_processes import has_ended, wait_until

from forkd.cli.parser import build_parser
from forkd.daemon.listeners import load_tls, opened_unix
from forkd.daemon.tokens import TokenStore
from forkd.errors import Conflict, InvalidInput
from forkd.host.paths import Home


def refused(home: Home, *flags: str) -> str:
    command = [sys.executable, "-m", "forkd.cli.main", "serve", *flags]
    ended = subprocess.run(command, env=environment(home, "fake"), capture_output=True, text=True, timeout=STOP_S)
    assert ended.returncode != 0
    return ended.stderr


def told(daemon: Served, number: signal.Signals) -> int:
    """To stop; its exit status."""
    daemon.process.send_signal(number)
    return daemon.process.wait(STOP_S)


def with_sandbox(daemon: Served) -> tuple[Client, str]:
    client = Client(daemon.places[0])
    if client.get("/v1/snapshots/base").status == 404:
        assert client.post("/v1/snapshots", {"tag": "base", "image": "small", "wait": True}).status == 201
    return client, f"/v1/sandboxes/{client.post('/v1/sandboxes', {'snapshot_tag': 'base'}).body[0]['id']}"


def test_it_stops_when_told_and_sandboxes_go_on(empty: Home) -> None:
    with served(empty, "--bind", "none") as daemon:
        (place,) = daemon.places
        client, path = with_sandbox(daemon)
        client.post(f"{path}/eval", {"code": "kept = 'yes'"})
        pid = client.get(path).body["pid"]
        assert told(daemon, signal.SIGTERM) == 0
    assert not Path(place.removeprefix("unix://")).exists()
    assert not has_ended(pid)
    with served(empty, "--bind", "none", "--on-stop", "kill") as daemon:
        client = Client(daemon.places[0])
        assert client.post(f"{path}/eval", {"code": "kept"}).body["value"] == "yes"
        assert told(daemon, signal.SIGINT) == 0
    assert has_ended(pid)


def test_a_request_under_way_is_finished_and_a_second_signal_hurries(empty: Home) -> None:
    with served(empty, "--bind", "none", "--on-stop", "kill") as daemon:
        client, path = with_sandbox(daemon)
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
        daemon.process.send_signal(signal.SIGTERM)
        assert [event.kind for event in follower if event.kind == "error"] == []
        go.touch()
        short.join()
        assert statuses == [200]
        daemon.process.send_signal(signal.SIGTERM)
        long.join()
        assert statuses == [200, 503]
        assert daemon.process.wait(STOP_S) == 0


def test_it_goes_away_by_itself_when_nobody_wants_anything(empty: Home) -> None:
    with served(empty, "--bind", "none", "--idle-exit-secs", "1") as daemon:
        client, path = with_sandbox(daemon)
        time.sleep(1.6)
        assert client.get("/healthz").status == 200, "a sandbox keeps it"
        client.delete(path)
        assert daemon.process.wait(STOP_S) == 0


def test_one_that_is_told_to_stay_does_not_go_away(empty: Home) -> None:
    with served(empty, "--bind", "none", "--idle-exit-secs", "1") as daemon:
        client = Client(daemon.places[0])
        assert client.get("/version").body["idle_exit_secs"] == 1
        assert client.post("/v1/stay").status == 204
        time.sleep(1.6)
        assert client.get("/version").body["idle_exit_secs"] == 0


def test_that_tcp_asks_for_no_token_is_said_loudly(empty: Home) -> None:
    with served(empty, "--bind", "127.0.0.1:0") as daemon:
        wait_until(lambda: "warning forkd.daemon: TCP asks for no token" in daemon.read_log())
        assert Client(daemon.places[0]).get("/version").body["tcp_access"] == "open"
    TokenStore(empty.tokens).create("a")
    with served(empty, "--bind", "127.0.0.1:0") as daemon:
        assert Client(daemon.places[0]).get("/version").body["tcp_access"] == "token"
        assert "warning" not in daemon.read_log()
    TokenStore(empty.tokens).revoke("a")
    with served(empty, "--bind", "127.0.0.1:0") as daemon:
        wait_until(lambda: "No token is left" in daemon.read_log())


def test_beyond_loopback_there_has_to_be_a_token(empty: Home) -> None:
    assert "without a token" in refused(empty, "--bind", "0.0.0.0:0")
    value = TokenStore(empty.tokens).create("b")
    with served(empty, "--bind", "0.0.0.0:0", "--socket", "none") as daemon:
        place = daemon.places[0].replace("0.0.0.0", "127.0.0.1")
        assert Client(place, value).get("/version").status == 200
        assert Client(place).get("/version").status == 401
        empty.tokens.unlink()
        assert Client(place).get("/version").status == 401, "open only where loopback is all there is"


def test_what_it_refuses_to_start_with(empty: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORKD_HOME", str(empty.root))
    monkeypatch.setenv("FORKD_RUNTIME_DIR", str(empty.runtime))

    def said(*flags: str) -> str:
        args = build_parser("serve").parse_args(["serve", *flags])
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


def test_one_daemon_for_a_home_and_one_for_an_address(empty: Home, tmp_path: Path) -> None:
    with served(empty, "--bind", "127.0.0.1:0") as daemon:
        _, tcp = daemon.places
        assert "runs already" in refused(empty, "--bind", "none")
        with made_home(tmp_path / "other") as other:
            assert "already" in refused(other, "--bind", tcp.removeprefix("http://"))
        assert Client(tcp).get("/healthz").status == 200


def test_a_socket_left_by_a_crash_is_replaced(empty: Home) -> None:
    with served(empty, "--bind", "none") as daemon:
        place = daemon.places[0]
        told(daemon, signal.SIGKILL)
    assert Path(place.removeprefix("unix://")).exists()
    with served(empty, "--bind", "none") as daemon:
        assert Client(daemon.places[0]).get("/readyz").status == 200


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


def test_tls_is_spoken_where_there_is_a_certificate(empty: Home, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with served(empty, "--bind", "127.0.0.1:0", "--tls-cert", str(cert), "--tls-key", str(key)) as daemon:
        unix, tcp = daemon.places
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
    with pytest.raises(InvalidInput, match="Expected a certificate"):
        load_tls(key, cert)


def test_a_hang_up_reopens_the_audit_log(empty: Home) -> None:
    with served(empty, "--bind", "none", "--log-format", "json") as daemon:
        client = Client(daemon.places[0])
        client.get("/version")
        log = empty.root / "audit.log"
        wait_until(log.exists, "it is audited")
        log.rename(empty.root / "old.log")
        daemon.process.send_signal(signal.SIGHUP)
        # What is asked before it has seen the signal still goes to the old one.
        wait_until(lambda: client.get("/version") and log.exists() and log.read_text(), "it goes on under its name")
        assert json.loads(re.findall(r"^\{.*", daemon.read_log(), re.MULTILINE)[0])["message"].startswith("Ready")


def test_systemd_is_told_when_it_is_ready_and_when_it_stops(empty: Home, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(20)
        with served(empty, "--bind", "none", env={"NOTIFY_SOCKET": str(tmp_path / "notify")}) as daemon:
            assert sock.recv(100) == b"READY=1"
            daemon.process.send_signal(signal.SIGTERM)
            assert sock.recv(100) == b"STOPPING=1"
            assert daemon.process.wait(STOP_S) == 0


def test_the_settings_file_of_the_home_counts(empty: Home) -> None:
    empty.config.write_text('bind = "none"\naudit_log = "none"\n')
    with served(empty) as daemon:
        client = Client(daemon.places[0])
        assert client.get("/version").status == 200
    assert not (empty.root / "audit.log").exists()
