"""One daemon for all tests of routes, and one that wants a token."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support_client import Client
from support_daemon import served
from support_images import made_home, make_image

from forkd.host.paths import Home

_numbers = itertools.count(1)


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Home]:
    """For daemons of their own: there is an image, and no more."""
    with made_home(tmp_path / "home") as made:
        make_image(made)
        yield made


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with made_home(tmp_path_factory.mktemp("home")) as made:
        make_image(made)
        yield made


@pytest.fixture(scope="session")
def places(home: Home) -> Iterator[list[str]]:
    with served(home, "--bind", "127.0.0.1:0", "--on-stop", "kill") as daemon:
        yield daemon.places
        log = daemon.read_log()
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
