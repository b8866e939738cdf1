"""Packs over HTTP: parts of them, uploads that go on, and who may go on with one."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_client import Answer, Client
from support_daemon import served
from support_images import made_home
from support_packs import add_chain, add_root, made

from forkd.daemon.tokens import TokenStore
from forkd.host.paths import Home
from forkd.runtime.packs import MAX_PIECE_BYTES, MAX_UPLOADS_EACH
from forkd.store.keys import SigningKey

PACK = "/v1/snapshots/head/pack"


@pytest.fixture(scope="module")
def giver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Home, Client]]:
    with made(tmp_path_factory.mktemp("giver") / "home") as home:
        add_chain(home, "root", "head")
        add_root(home, "noisy", text=os.urandom(6 << 20))
        with served(home, "--bind", "none") as daemon:
            yield home, Client(daemon.places[0])
        assert "Traceback" not in daemon.read_log()


@pytest.fixture
def taker(tmp_path: Path, giver: tuple[Home, Client]) -> Iterator[tuple[Home, Client]]:
    """Empty, and trusts the giver."""
    with made_home(tmp_path / "taker") as home:
        with served(home, "--bind", "127.0.0.1:0") as daemon:
            yield home, Client(daemon.places[0])
        assert "Traceback" not in daemon.read_log()
        assert [path.name for path in home.snapshots.glob(".staging*")] == []
        assert [path.name for path in home.images.glob("pieces/.staging*")] == []


def begin(client: Client, **body: object) -> str:
    answer = client.post("/v1/packs", body)
    assert answer.status == 201, answer.content
    assert (answer.body["offset"], answer.body["done"], answer.body["total_bytes"]) == (0, False, None)
    return f"/v1/packs/{answer.body['id']}"


def append(client: Client, upload: str, offset: int, data: bytes) -> Answer:
    return client.ask("PATCH", f"{upload}?offset={offset}", data=data)


def test_a_pack_has_a_mark_and_the_same_bytes_each_time(giver: tuple[Home, Client]) -> None:
    _, client = giver
    first, second = client.get(PACK), client.get(PACK)
    assert first.status == 200
    assert first.content == second.content
    assert first.headers["ETag"] == second.headers["ETag"]
    assert int(second.headers["Content-Length"]) == len(first.content)  # once it was made, that is known
    assert client.get(f"{PACK}?image=false").headers["ETag"] != first.headers["ETag"]
    assert client.get("/v1/snapshots/nobody/pack").error == (404, "not_found")


def test_what_is_still_being_made_has_no_pack(giver: tuple[Home, Client]) -> None:
    _, client = giver
    slow = {"tag": "slow", "image": "small", "warm": "import time; time.sleep(60)"}
    assert client.post("/v1/snapshots", slow).status == 202
    assert client.get("/v1/snapshots/slow/pack").error == (409, "conflict")
    assert client.delete("/v1/snapshots/slow").status == 204


def test_parts_of_a_pack_are_parts_of_it(giver: tuple[Home, Client]) -> None:
    _, client = giver
    path = "/v1/snapshots/noisy/pack"
    tail = client.get(path, headers={"Range": "bytes=5000000-"})  # before it was ever made whole
    whole = client.get(path)
    size = len(whole.content)
    assert tail.status == 206
    assert tail.headers["Content-Range"] == f"bytes 5000000-{size - 1}/{size}"
    assert tail.content == whole.content[5000000:]
    middle = client.get(path, headers={"Range": "bytes=17-4200000", "If-Range": whole.headers["ETag"]})
    assert (middle.status, middle.content) == (206, whole.content[17:4200001])
    other = client.get(path, headers={"Range": "bytes=17-", "If-Range": '"another"'})
    assert (other.status, other.content) == (200, whole.content)
    assert client.get(path, headers={"Range": f"bytes={size}-"}).error == (416, "invalid_input")
    for strange in ("bytes=-5", "lines=1-2", "bytes=1-2,4-5", "bytes=x"):
        assert client.get(path, headers={"Range": strange}).status == 200


def test_an_upload_goes_on_where_it_is(giver: tuple[Home, Client], taker: tuple[Home, Client]) -> None:
    data = giver[1].get("/v1/snapshots/noisy/pack").content
    home, client = taker
    upload = begin(client, trust=True)
    assert append(client, upload, 0, data[:1000]).body["offset"] == 1000
    assert append(client, upload, 0, data[:1000]).body["offset"] == 1000  # the answer was lost, it is sent again
    assert append(client, upload, 999, data[999:2000]).error == (409, "conflict")
    assert append(client, upload, 1001, b"x").error == (409, "conflict")
    assert client.get(upload).body["offset"] == 1000
    for at in range(1000, len(data), 3_000_000):
        state = append(client, upload, at, data[at : at + 3_000_000]).body
    assert (state["offset"], state["unpacked_bytes"]) == (len(data), state["total_bytes"])
    assert [info["tag"] for info in client.get("/v1/snapshots").body] == []  # nothing is visible yet
    done = client.post(f"{upload}/finish")
    assert done.status == 201
    assert (done.body["tag"], done.body["made"], done.body["reused"]) == ("noisy", ["noisy"], [])
    assert client.post(f"{upload}/finish").body == done.body  # this answer may be lost too
    assert client.get(upload).body["done"] is True
    assert [(info["tag"], info["status"]) for info in client.get("/v1/snapshots").body] == [("noisy", "ready")]
    theirs = (giver[0].snapshots / "noisy/memory").read_bytes()
    assert hashlib.sha256((home.snapshots / "noisy/memory").read_bytes()).digest() == hashlib.sha256(theirs).digest()
    assert client.delete(upload).status == 204
    assert client.get(upload).error == (404, "not_found")


def test_what_is_refused_is_refused_with_its_head_and_the_upload_is_gone(
    giver: tuple[Home, Client], taker: tuple[Home, Client]
) -> None:
    data = giver[1].get("/v1/snapshots/noisy/pack").content
    home, client = taker
    upload = begin(client)
    refusal = append(client, upload, 0, data[:20_000])
    assert refusal.error == (403, "untrusted")
    assert SigningKey(giver[0].signing_key).public() in refusal.body["error"]
    assert client.get(upload).error == (404, "not_found")
    upload = begin(client, trust=True)
    broken = bytearray(data)
    broken[-2000] ^= 1
    answers = [append(client, upload, at, bytes(broken[at : at + 4_000_000])) for at in range(0, len(data), 4_000_000)]
    assert answers[-1].error == (409, "snapshot_damaged")
    upload = begin(client, trust=True)
    append(client, upload, 0, data[:-10][:4_000_000])
    assert client.post(f"{upload}/finish").error == (409, "snapshot_damaged")
    assert not home.trust.exists()


def test_uploads_are_few_and_pieces_small(taker: tuple[Home, Client]) -> None:
    _, client = taker
    uploads = [begin(client) for _ in range(MAX_UPLOADS_EACH)]
    uploads = [*uploads[1:], begin(client)]  # the first one, in which there was nothing, gave way
    for upload in uploads:
        assert append(client, upload, 0, b"^").status == 200
    assert client.post("/v1/packs", {}).error == (503, "no_capacity")
    assert append(client, uploads[0], 0, bytes(MAX_PIECE_BYTES + 1)).status == 413
    assert client.delete(uploads[0]).status == 204
    uploads[0] = begin(client)
    for upload in uploads:
        assert client.delete(upload).status == 204
    for strange in ({"tag": "../x"}, {"origin": "a b"}, {"origin": "x" * 301}):
        assert client.post("/v1/packs", strange).status == 400
    assert client.post("/v1/packs", {"trust": 1}).status == 422


def test_an_upload_belongs_to_its_token(taker: tuple[Home, Client], giver: tuple[Home, Client]) -> None:
    home, unix = taker
    tokens = TokenStore(home.tokens)
    tcp = "http://127.0.0.1:" + (home.root / "served.log").read_text().partition("http://127.0.0.1:")[2].split()[0]
    one, other = Client(tcp, tokens.create("one")), Client(tcp, tokens.create("other"))
    upload = begin(one, trust=True)
    for client in (other, unix):
        assert client.get(upload).error == (404, "not_found")
        assert append(client, upload, 0, b"x").error == (404, "not_found")
        assert client.post(f"{upload}/finish").error == (404, "not_found")
        assert client.delete(upload).error == (404, "not_found")
    data = giver[1].get(PACK).content
    assert append(one, upload, 0, data).status == 200
    assert one.post(f"{upload}/finish").status == 201
    assert "push:one" in home.trust.read_text()


def test_a_daemon_that_stops_leaves_nothing_of_an_upload(giver: tuple[Home, Client], tmp_path: Path) -> None:
    data = giver[1].get("/v1/snapshots/noisy/pack").content
    with made_home(tmp_path / "taker") as home:
        for ending in ("stop", "kill"):
            with served(home, "--bind", "none") as daemon:
                client = Client(daemon.places[0])
                upload = begin(client, trust=True)
                append(client, upload, 0, data[:5_000_000])
                assert len(list(home.snapshots.glob(".staging*"))) == 1
                getattr(daemon, ending)()
        with served(home, "--bind", "none") as daemon:
            assert Client(daemon.places[0]).get(upload).error == (404, "not_found")
        assert list(home.snapshots.iterdir()) == []
        assert list(home.images.glob("pieces/*")) == []
