"""pip, git, apt, curl and a websocket in a real VM, through the rules. The sites are in a namespace of the test."""

import contextlib
import functools
import http.server
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support_daemon import served
from support_images import made_home
from support_processes import wait_until
from support_sites import GREETING, PACKAGE, make_apt, make_git, make_index
from support_world import RESOLVER, THIRD, World, made_world, needs_world
from websockets.sync.server import ServerConnection, serve

from forkd import Network, Sandbox
from forkd.client.controller import Controller
from forkd.host import netns
from forkd.host.paths import Home
from forkd.image import ImageStore, debian_spec

pytestmark = [pytest.mark.vm, pytest.mark.build, needs_world, pytest.mark.timeout(900)]

_IMAGE = "clients"
_PACKAGES = ("python3", "python3-pip", "git", "curl", "ca-certificates")
_WEB, _WEBSOCKET = 8080, 8765
_SITES = ("index.test", "git.test", "apt.test")
_COMMAND_S = 240.0


@dataclass(frozen=True)
class Clients:
    sandbox: Sandbox
    controller: Controller
    world: World
    commit: str

    def run(self, command: str) -> str:
        result = self.sandbox.commands.run(command, timeout=_COMMAND_S)
        assert result.exit_code == 0, f"{command}: {result.stdout}{result.stderr}"
        return result.stdout

    def fails(self, command: str) -> int:
        result = self.sandbox.commands.run(command, timeout=_COMMAND_S)
        assert result.exit_code != 0, result.stdout
        return result.exit_code


@pytest.fixture(scope="module")
def clients_home(built_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    ImageStore(built_home).build(debian_spec(_PACKAGES), _IMAGE)
    with made_home(tmp_path_factory.mktemp("clients") / "home", built_home.images) as home:
        yield home


@pytest.fixture(scope="module")
def clients(clients_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    sites = tmp_path_factory.mktemp("sites")
    for name in _SITES:
        (sites / name).mkdir()
    make_index(sites / "index.test", "websockets")
    commit = make_git(sites / "git.test")
    make_apt(sites / "apt.test")
    allow = [*(f"{name}:{_WEB}" for name in _SITES), f"ws.test:{_WEBSOCKET}", "allowed.test"]
    flags = ("--network-resolvers", RESOLVER, "--bind", "none", "--on-stop", "kill")
    with made_world() as world, contextlib.ExitStack() as stack:
        stack.enter_context(_sites_served(world, sites))
        daemon = stack.enter_context(served(clients_home, *flags, engine="qemu"))
        controller = stack.enter_context(daemon.controller(timeout=300.0))
        controller.create_snapshot("clients", image=_IMAGE, memory_mib=512, wait=True)
        made = Sandbox.create("clients", controller=controller, network=Network(allow=allow))
        yield Clients(stack.enter_context(made), controller, world, commit)


@contextlib.contextmanager
def _sites_served(world: World, sites: Path) -> Iterator[None]:
    world.records |= {name: [("A", THIRD)] for name in (*_SITES, "ws.test")}
    with netns.inside(world.beyond):
        web = http.server.ThreadingHTTPServer((THIRD, _WEB), functools.partial(_Site, directory=str(sites)))
        websocket = serve(_echo, THIRD, _WEBSOCKET)
    threads = [threading.Thread(target=each.serve_forever) for each in (web, websocket)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        web.shutdown()
        web.server_close()
        websocket.shutdown()
        for thread in threads:
            thread.join(10.0)


class _Site(http.server.SimpleHTTPRequestHandler):
    """A directory for each name."""

    def translate_path(self, path: str) -> str:
        name = self.headers.get("Host", "").partition(":")[0]
        base = Path(self.directory)
        return super().translate_path(path).replace(str(base), str(base / Path(name).name), 1)

    def log_message(self, *_: object) -> None: ...


def _echo(connection: ServerConnection) -> None:
    for message in connection:
        connection.send(f"heard {message!r}")


def test_pip_installs_a_package_that_then_speaks_over_a_websocket(clients: Clients) -> None:
    index = f"http://index.test:{_WEB}/simple"
    clients.run(
        f"python3 -m pip install --break-system-packages --index-url {index} --trusted-host index.test websockets"
    )
    code = (
        "from websockets.sync.client import connect\n"
        f"with connect('ws://ws.test:{_WEBSOCKET}') as ws:\n"
        "    ws.send(str(6 * 7)); print(ws.recv())\n"
    )
    assert clients.run(f"python3 -c {shlex.quote(code)}") == "heard '42'\n"


def test_git_clones_over_http(clients: Clients) -> None:
    clients.run(f"git clone http://git.test:{_WEB}/project.git /tmp/project")
    assert clients.run("git -C /tmp/project rev-parse HEAD").strip() == clients.commit


def test_apt_installs_a_package(clients: Clients) -> None:
    clients.run(f"echo 'deb [trusted=yes] http://apt.test:{_WEB}/ ./' > /tmp/sources.list")
    options = "-o Dir::Etc::sourcelist=/tmp/sources.list -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root"
    clients.run(f"apt-get {options} update && apt-get {options} install -y {PACKAGE}")
    assert clients.run(PACKAGE).strip() == GREETING


def test_curl_fetches_with_and_without_tls(clients: Clients) -> None:
    assert clients.run("curl -sS --max-time 60 http://allowed.test/") == "hello\n"
    assert clients.run("curl -sS --max-time 60 --insecure https://allowed.test/") == "hello\n"


def test_names_are_answered_over_udp_and_tcp_and_never_with_ipv6(clients: Clients) -> None:
    assert "203.0.113.10" in clients.run("getent ahostsv4 www.allowed.test || getent ahostsv4 allowed.test")
    assert "203.0.113.10" in clients.run("RES_OPTIONS=use-vc getent ahostsv4 allowed.test")
    assert clients.fails("getent ahostsv6 allowed.test | grep -v ::ffff:") != 0
    refused = "import socket; socket.create_connection(('2001:db8::1', 80), timeout=30)"
    assert "Network is unreachable" in clients.run(f'python3 -c "{refused}" 2>&1 || true')


def test_what_is_not_allowed_fails_at_once_and_is_told_by_its_name(clients: Clients) -> None:
    assert clients.fails("curl -sS --max-time 60 http://other.test/") == 6  # its name is not answered
    assert clients.fails("curl -sS --max-time 60 http://203.0.113.20/") == 7  # it does not connect
    assert clients.fails(
        "curl -sS --insecure --max-time 60 --resolve shared.test:443:203.0.113.10 https://shared.test/"
    )

    def told(**wanted: object) -> bool:
        data = [event["data"] for event in clients.controller.list_events(type="network.refused")]
        return any(wanted.items() <= each.items() for each in data)

    wait_until(lambda: told(reason="name", asked="other.test"), "the name was not told", every_s=0.2)
    wait_until(lambda: told(address="203.0.113.20", port=80), "the address was not told", every_s=0.2)
    wait_until(lambda: told(reason="sni", asked="shared.test"), "the name in TLS was not told", every_s=0.2)
    assert ("203.0.113.20", 80, "http") not in clients.world.seen
