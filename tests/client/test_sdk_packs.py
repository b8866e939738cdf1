"""Packs between daemons, files and web servers that cut connections, redirect, lie and change their mind."""

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import pytest
from support_daemon import Served, served
from support_images import made_home
from support_packs import add_chain, add_root, files_of, key_of, made, store_of

from forkd.client import AsyncController, Controller
from forkd.client.resume import Patience, Position, find_origin, follow
from forkd.errors import Conflict, InvalidInput, NotFound, SnapshotDamaged, Unauthorized, Unreachable, Untrusted
from forkd.image import ImageStore

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclass
class Site:
    """A web server with one file at /pack. `cuts`: after how many bytes each of the first answers breaks off."""

    data: bytes = b""
    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    mark: str | None = '"one"'
    moved: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    seen: list[str] = field(default_factory=list)
    put: bytes = b""
    refuse_put: int = 0
    url: str = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        site = self.site
        site.seen.append(f"{self.path} {self.headers.get('Range', '')}".strip())
        if self.path in site.moved:
            self._answer(302, b"", Location=site.moved[self.path])
        elif site.token is not None and self.headers.get("Authorization") != f"Bearer {site.token}":
            self._answer(401, b"no")
        elif self.path != "/pack":
            self._answer(404, b"not here")
        else:
            self._send_file()

    def do_PUT(self) -> None:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
            if self.site.cuts and len(body) > self.site.cuts[0]:
                self.site.cuts.pop(0)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
        self.rfile.readline()
        self.site.put = body
        self._answer(self.site.refuse_put or 201, b"")

    def _send_file(self) -> None:
        site, start, status, more = self.site, 0, 200, {}
        asked = self.headers.get("Range")
        if asked and site.ranges and self.headers.get("If-Range") in (None, site.mark):
            start, status = int(asked.removeprefix("bytes=").rstrip("-")), 206
            more["Content-Range"] = f"bytes {start}-{len(site.data) - 1}/{len(site.data)}"
        if site.mark:
            more["ETag"] = site.mark
        self._answer(status, site.data[start:], **more)

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = self.site.cuts.pop(0) if self.site.cuts and len(body) > 100 else None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def published(site: Site) -> Iterator[Site]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"site": site}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def giver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with made(tmp_path_factory.mktemp("giver") / "home") as home:
        add_chain(home, "root", "head")
        add_root(home, "noisy", text=os.urandom(6 << 20))
        with served(home, "--bind", "none") as daemon:
            yield daemon


@pytest.fixture(scope="module")
def noisy(giver: Served) -> bytes:
    with giver.controller() as controller:
        return b"".join(controller.pack_snapshot("noisy"))


@pytest.fixture(scope="module")
def taking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with made_home(tmp_path_factory.mktemp("taking") / "home") as home, served(home, "--bind", "none") as daemon:
        yield daemon


@pytest.fixture
def taker(taking: Served) -> Iterator[Served]:
    """Empty, and trusts nobody."""
    yield taking
    home = taking.home
    assert [path.name for path in home.snapshots.glob(".staging*")] == []
    home.trust.unlink(missing_ok=True)
    store = store_of(home)
    for snapshot in store.list().snapshots:
        with contextlib.suppress(NotFound):  # gone with the one it lies over
            store.remove(snapshot.manifest.tag, cascade=True)
    ImageStore(home).drop_unused_imports(())


def tags(daemon: Served) -> list[str]:
    with daemon.controller() as controller:
        return [info["tag"] for info in controller.list_snapshots()]


def test_what_is_packed_is_unpacked_elsewhere(giver: Served, taker: Served) -> None:
    told: list[tuple[int, float | None]] = []
    with giver.controller() as here, taker.controller() as there:
        done = there.unpack_snapshot(
            here.pack_snapshot("head"), trust=True, on_progress=lambda done, part: told.append((done, part))
        )
    assert (done["tag"], done["made"], done["key"]) == ("head", ["root", "head"], key_of(giver.home))
    assert told[-1][1] == 1.0
    kept = {name: data for name, data in files_of(giver.home).items() if not name.startswith("noisy/")}
    assert files_of(taker.home) == kept


async def test_the_same_with_await(giver: Served, taker: Served) -> None:
    async with AsyncController(giver.url) as here, AsyncController(taker.url) as there:
        done = await there.unpack_snapshot(here.pack_snapshot("head"), trust=True, tag="mine")
        assert done["made"] == ["root", "mine"]
        pushed = await here.push_snapshot("noisy", taker.url, trust=True)
        assert pushed["imported"] is not None and pushed["imported"]["image_reused"]
    assert await asyncio.to_thread(tags, taker) == ["mine", "noisy", "root"]


def test_a_pull_goes_on_after_every_cut(noisy: bytes, taker: Served) -> None:
    cuts = [1, 5000, 300_000, 2_000_000, 100, 1_000_000]
    with published(Site(noisy, list(cuts))) as site, taker.controller() as controller:
        done = controller.pull_snapshot(f"{site.url}/pack", trust=True)
        assert done["made"] == ["noisy"]
        assert site.cuts == []
        assert len(site.seen) == len(cuts) + 1
        assert site.seen[2] == "/pack bytes=4999-"  # one byte that it has already
        origins = [each["origin"] for each in _trusted(taker)]
    assert origins == [site.url]


def _trusted(daemon: Served) -> list[dict[str, str]]:
    import json

    return list(json.loads(daemon.home.trust.read_text()))


def test_a_server_that_cannot_go_on_or_has_something_else_by_then_is_given_up(noisy: bytes, taker: Served) -> None:
    for site in (Site(noisy, [400_000], ranges=False), Site(noisy, [400_000], mark=None, ranges=False)):
        with published(site), taker.controller() as controller, pytest.raises(Conflict, match="cannot go on"):
            controller.pull_snapshot(f"{site.url}/pack", trust=True)
    assert tags(taker) == []


def test_a_server_that_only_cuts_is_given_up(noisy: bytes, taker: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkd.client.resume._MAX_FAILURES", 3)
    with published(Site(noisy, [1000] + [0] * 50)) as site, taker.controller() as controller:
        with pytest.raises(Unreachable):
            controller.pull_snapshot(f"{site.url}/pack", trust=True)
        assert len(site.seen) == 3


def test_redirects_stay_on_the_host(noisy: bytes, taker: Served) -> None:
    with published(Site(noisy)) as other, published(Site(noisy)) as site, taker.controller() as controller:
        site.moved = {"/a": "/b", "/b": f"{site.url}/pack", "/away": f"{other.url}/pack", "/round": "/round"}
        for path in ("away", "round"):
            with pytest.raises(Unreachable, match="lead"):
                controller.pull_snapshot(f"{site.url}/{path}", trust=True)
        assert other.seen == []
        assert controller.pull_snapshot(f"{site.url}/a", trust=True)["tag"] == "noisy"


def test_errors_of_a_server_are_told(noisy: bytes, taker: Served) -> None:
    with published(Site(noisy, token="secret")) as site, taker.controller() as controller:
        with pytest.raises(Unauthorized):
            controller.pull_snapshot(f"{site.url}/pack")
        with pytest.raises(NotFound):
            controller.pull_snapshot(f"{site.url}/nothing", remote_token="secret")
        for wrong in ("ftp://x/y", "file:///etc/passwd", "http://", "http://user:word@host/x", "nothing"):
            with pytest.raises(InvalidInput):
                controller.pull_snapshot(wrong)
        assert controller.pull_snapshot(f"{site.url}/pack", remote_token="secret", trust=True)["made"] == ["noisy"]


def test_what_is_not_trusted_is_refused_before_it_is_downloaded(noisy: bytes, taker: Served) -> None:
    big = noisy[: 1 << 20] + bytes(64 << 20)
    with published(Site(big)) as site, taker.controller() as controller:
        with pytest.raises(Untrusted, match="ed25519:"):
            controller.pull_snapshot(f"{site.url}/pack")
        with pytest.raises(SnapshotDamaged):
            controller.pull_snapshot(f"{site.url}/pack", trust=True)
    assert tags(taker) == []


def test_a_push_sends_the_image_only_where_it_is_not(giver: Served, taker: Served) -> None:
    with giver.controller() as here:
        first = here.push_snapshot("root", taker.url, trust=True)
        assert first["imported"] is not None and not first["imported"]["image_reused"]
        second = here.push_snapshot("head", taker.url, tag="other")
        assert second["imported"] is not None
        assert (second["imported"]["made"], second["imported"]["reused"]) == (["other"], ["root"])
        with pytest.raises(NotFound):
            here.push_snapshot("nobody", taker.url)
    assert "push:local" in taker.home.trust.read_text()


def test_a_push_to_a_web_server_begins_again_after_a_cut(giver: Served, noisy: bytes) -> None:
    with published(Site(cuts=[100_000, 3_000_000])) as site, giver.controller() as here:
        done = here.push_snapshot("noisy", f"{site.url}/put/here")
        assert (done["imported"], done["bytes"]) == (None, len(noisy))
        assert site.put == noisy
        site.refuse_put = 405
        with pytest.raises(Exception, match="405"):
            here.push_snapshot("noisy", f"{site.url}/put/here")


class _Cutter:
    """Between a client and a daemon: passes bytes on, and breaks connections off after so many."""

    def __init__(self, target: str, cuts: list[int]) -> None:
        self._target, self.cuts = target, cuts
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(client,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        cut = self.cuts.pop(0) if self.cuts else None
        with client, socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(self._target)
            back = threading.Thread(target=self._pass_on, args=(daemon, client, cut))
            back.start()
            self._pass_on(client, daemon, cut)
            back.join()

    def _pass_on(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536 if left is None else min(65536, left or 1)):
                if left is not None:
                    left -= len(data)
                target.sendall(data)
                if left is not None and left <= 0:
                    break
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join()


def test_packs_from_and_to_a_daemon_go_on_after_cuts(giver: Served, taker: Served, noisy: bytes) -> None:
    cuts = [700, 300_000, 3_000_000, 2_000_000, 100]
    here, there = (_Cutter(urlsplit(each.url).path, list(cuts)) for each in (giver, taker))
    try:
        with Controller(here.url) as source:
            assert b"".join(source.pack_snapshot("noisy")) == noisy
            done = source.push_snapshot("noisy", there.url, trust=True)
        assert done["imported"] is not None and done["imported"]["made"] == ["noisy"]
        assert here.cuts == there.cuts == []
    finally:
        here.close()
        there.close()
    assert tags(taker) == ["noisy"]


# By value


def test_a_redirect_is_followed_to_the_same_host_and_up_to_tls_only() -> None:
    assert follow("http://a/x/y", "z") == "http://a/x/z"
    assert follow("http://a/x", "https://a/y") == "https://a/y"
    assert follow("http://a:8/x", "http://a:8/y") == "http://a:8/y"
    for url, location in [
        ("http://a/x", "http://b/x"),
        ("http://a/x", "http://a:81/x"),
        ("http://a:8/x", "https://a:9/x"),
        ("https://a/x", "http://a/x"),
        ("http://a/x", "//b/x"),
        ("http://a/x", "ftp://a/x"),
        ("http://a/x", "http://user@a/x"),
        ("http://a/x", ""),
    ]:
        with pytest.raises(Unreachable):
            follow(url, location)


def test_a_position_asks_for_one_byte_it_has_and_takes_no_other_content() -> None:
    position = Position("it")
    assert position.render_headers() == {}
    position.begin(200, {"etag": '"x"', "content-length": "10"})
    assert position.take(b"abc") == b"abc"
    assert position.render_headers() == {"Range": "bytes=2-", "If-Range": '"x"'}
    position.begin(206, {"content-range": "bytes 2-9/10"})
    assert position.take(b"c") == b""
    assert position.take(b"defg") == b"defg"
    assert (position.at, position.total) == (7, 10)
    for status, headers in [(200, {}), (206, {}), (206, {"content-range": "bytes 7-9/10"})]:
        with pytest.raises(Conflict):
            position.begin(status, headers)
    weak = Position("it")
    weak.begin(200, {"etag": 'W/"x"', "last-modified": "then"})
    weak.take(b"a")
    assert weak.render_headers()["If-Range"] == "then"


def test_patience_is_as_long_as_there_is_progress() -> None:
    patience = Patience()
    assert [patience.next_wait() for _ in range(3)] == [0.2, 0.4, None]
    patience.progress()
    waits = [patience.next_wait() for _ in range(8)]
    assert waits[0] == 0.2 and None not in waits[:7] and waits[7] is None
    patience.progress()
    assert patience.next_wait() == 0.2


def test_an_origin_is_a_scheme_a_host_and_a_port() -> None:
    assert find_origin("https://Host:8/a/b?c=d") == "https://host:8"
    assert find_origin("http://u:p@host/a") == "http://host"
