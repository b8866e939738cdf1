"""Someone whose token is revoked while a request of theirs is under way."""

import contextlib
import http.client
from collections.abc import Iterator

import pytest
from support_client import Client
from support_daemon import Served, served

from forkd.daemon.tokens import TokenStore
from forkd.host.paths import Home


@pytest.fixture
def daemon(home: Home) -> Iterator[Served]:
    with served(home, "--bind", "127.0.0.1:0", "--on-stop", "kill") as daemon:
        yield daemon


@contextlib.contextmanager
def following(place: str, token: str | None) -> Iterator[http.client.HTTPResponse]:
    """Events, and the first of them has come."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with contextlib.closing(Client(place).connection(timeout=30)) as connection:
        connection.request("GET", "/v1/events?follow=true&since=0", headers=headers)
        answer = connection.getresponse()
        assert answer.status == 200
        answer.readline()
        yield answer


def is_cut(answer: http.client.HTTPResponse) -> bool:
    """A timeout is not; comments come every 15 s."""
    try:
        while line := answer.readline():
            if line.startswith(b": "):
                return False
    except (ConnectionResetError, http.client.IncompleteRead):
        pass
    return True


def test_its_streams_end_and_those_of_others_go_on(home: Home, daemon: Served) -> None:
    store = TokenStore(home.tokens)
    gone, kept = store.create("gone"), store.create("kept")
    unix, tcp = daemon.places
    with following(tcp, gone) as cut, following(tcp, kept) as other, following(unix, None) as local:
        store.revoke("gone")
        assert is_cut(cut)
        assert Client(tcp, gone).get("/version").status == 401
        assert Client(tcp, kept).post("/v1/snapshots", {"tag": "base", "image": "small", "wait": True}).status == 201
        for answer in (other, local):
            assert any(b"snapshot.ready" in line for line in iter(answer.readline, b""))


def test_its_command_ends(home: Home, daemon: Served) -> None:
    token = TokenStore(home.tokens).create("gone")
    unix, tcp = daemon.places
    local = Client(unix)
    assert local.post("/v1/snapshots", {"tag": "base", "image": "small", "wait": True}).status == 201
    path = f"/v1/sandboxes/{local.post('/v1/sandboxes', {'snapshot_tag': 'base'}).body[0]['id']}"
    body = b'{"shell": "echo begun; sleep 60", "timeout_secs": 90}'
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    with contextlib.closing(Client(tcp).connection(timeout=30)) as connection:
        connection.request("POST", f"{path}/exec/stream", body, headers)
        answer = connection.getresponse()
        assert answer.readline().startswith(b"event: ")
        TokenStore(home.tokens).revoke("gone")
        assert is_cut(answer)
    assert local.get(f"{path}/processes").body == []


def test_the_first_token_ends_what_was_open_to_everybody(home: Home, daemon: Served) -> None:
    _, tcp = daemon.places
    with following(tcp, None) as answer:
        TokenStore(home.tokens).create("first")
        assert is_cut(answer)
