"""Who may ask: tokens over TCP, nothing over the unix socket, no pages of browsers."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_client import Client
from support_daemon import served
from support_images import made_home
from support_processes import wait_until

from forkd.daemon.app import ROUTES
from forkd.daemon.tokens import TokenStore
from forkd.host.paths import Home

FILE_TOKEN = "0123456789abcdef-file"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, str, str]]:
    """A daemon that wants a token: home, unix socket, TCP."""
    root = tmp_path_factory.mktemp("guarded")
    (root / "file").write_text(FILE_TOKEN + "\n")
    flags = ["--bind", "127.0.0.1:0", "--token-file", str(root / "file")]
    with made_home(root / "home") as home, served(home, *flags) as daemon:
        unix, tcp = daemon.places
        yield home, unix, tcp


def test_every_path_wants_the_token_known_or_not(guarded: tuple[Home, str, str]) -> None:
    client = Client(guarded[2])
    seen = set()
    every = [(route.method, route.path) for route in ROUTES]
    for method, path in [*every, ("GET", "/nope"), ("PATCH", "/v1/sandboxes"), ("GET", "/openapi.json")]:
        answer = client.ask(method, path.replace("{id}", "sb-0123456789").replace("{pid}", "1"))
        if path in ("/healthz", "/readyz"):
            assert answer.status == 200
            continue
        assert answer.status == 401, (method, path)
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        seen.add(answer.content)
    assert len(seen) == 1, "nothing is revealed: all refusals are the same"
    assert json.loads(seen.pop())["code"] == "unauthorized"


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"bearer {FILE_TOKEN}", FILE_TOKEN, f"Basic {FILE_TOKEN}", "Bearer wrong", "é"]
)
def test_a_wrong_token_is_like_none(guarded: tuple[Home, str, str], header: str) -> None:
    client = Client(guarded[2])
    sent = header.encode("utf-8").decode("latin-1")
    assert client.get("/version", headers={"Authorization": sent}).content == client.get("/version").content
    assert client.get("/version", headers={"Authorization": sent}).status == 401
    assert client.get("/healthz/").status == 401


def test_named_tokens_work_at_once_and_are_gone_at_once(guarded: tuple[Home, str, str]) -> None:
    home, unix, tcp = guarded
    assert Client(tcp, FILE_TOKEN).get("/version").status == 200
    value = TokenStore(home.tokens).create("ci")
    assert Client(tcp, value).get("/version", headers={"X-Request-Id": "by-ci"}).status == 200
    TokenStore(home.tokens).revoke("ci")
    assert Client(tcp, value).get("/version").status == 401
    assert Client(tcp, FILE_TOKEN).get("/version").status == 200
    assert Client(unix).get("/version").status == 200

    def audited() -> list[dict[str, object]]:
        lines = (home.root / "audit.log").read_text().splitlines()
        return [entry for line in lines if (entry := json.loads(line))["request_id"] == "by-ci"]

    wait_until(audited, "it is audited")
    assert audited()[0]["token"] == "ci"
    assert str(audited()[0]["peer"]).startswith("127.0.0.1:")
    text = (home.root / "audit.log").read_text()
    assert value not in text
    assert FILE_TOKEN not in text


def test_a_refused_upload_is_not_taken_and_gets_its_answer(guarded: tuple[Home, str, str]) -> None:
    client = Client(guarded[2])
    answer = client.ask("PUT", "/v1/sandboxes/sb-0123456789/files?path=/x", data=b"x" * 2_000_000)
    assert answer.status == 401
    assert answer.headers["Connection"] == "close"


def test_without_tokens_pages_of_browsers_are_refused(tcp: Client) -> None:
    assert tcp.get("/version").status == 200
    assert tcp.get("/version", headers={"Host": "localhost:8889"}).status == 200
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "localhost.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ):
        answer = tcp.get("/version", headers=headers)
        assert answer.error == (403, "forbidden"), headers


def test_the_unix_socket_is_its_owners(guarded: tuple[Home, str, str]) -> None:
    assert Path(guarded[1].removeprefix("unix://")).stat().st_mode & 0o777 == 0o600
