"""One daemon for all tests of routes, and one that wants a token."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from daemon_cases import Client, fresh_home, running
from support_images import make_image

from forkd.host.paths import Home

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def home() -> Iterator[Home]:
    with fresh_home() as made:
        make_image(made)
        yield made


@pytest.fixture(scope="session")
def places(home: Home) -> Iterator[list[str]]:
    with running(home, "--bind", "127.0.0.1:0", "--on-stop", "kill") as daemon:
        yield daemon.places(2)
        log = daemon.errors()
    assert "Traceback" not in log, log


@pytest.fixture(scope="session")
def client(places: list[str]) -> Client:
    """Over the unix socket, with a snapshot `base` to fork from."""
    made = Client(places[0])
    answer = made.post("/v1/snapshots", {"tag": "base", "image": "small", "warm": "past = 41", "wait": True})
    assert answer.status == 201, answer.content
    return made


@pytest.fixture(scope="session")
def tcp(places: list[str], client: Client) -> Client:
    return Client(places[1])


@pytest.fixture(scope="module")
def sandbox(client: Client) -> Iterator[str]:
    """The path of one that nobody ends."""
    answer = client.post("/v1/sandboxes", {"snapshot_tag": "base"})
    assert answer.status == 201, answer.content
    path = f"/v1/sandboxes/{answer.body[0]['id']}"
    yield path
    client.delete(path)


@pytest.fixture
def spawn(client: Client) -> Iterator[Callable[..., str]]:
    """Makes sandboxes that are gone afterwards; returns their paths."""
    paths = []

    def make(**more: object) -> str:
        answer = client.post("/v1/sandboxes", {"snapshot_tag": "base", **more})
        assert answer.status == 201, answer.content
        paths.append(f"/v1/sandboxes/{answer.body[0]['id']}")
        return paths[-1]

    yield make
    for path in paths:
        assert client.delete(path).status in (204, 404)


@pytest.fixture
def new_tag() -> str:
    return f"tag-{next(_numbers)}"
