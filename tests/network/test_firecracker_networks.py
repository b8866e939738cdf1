"""Networks of jailed Firecrackers, by a daemon in a small internet of its own: what they reach, and what is left."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support_daemon import Served
from support_images import made_home
from support_world import OTHER, RESOLVER, World, made_world, needs_world

from forkd import EvalFailed, Network, Sandbox
from forkd.client.controller import Controller
from forkd.errors import Unsupported
from forkd.host.paths import Home
from forkd.image import Image

pytestmark = [pytest.mark.lab, needs_world]

ALLOWED = Network(allow=["allowed.test"])
PORT = 4000
_FLAGS = ("--network-resolvers", RESOLVER, "--bind", "none")
_CALL_S = 300.0
_GUEST_S = 60
_PATIENCE_S = 30.0
# What all forks have: ways to ask and to answer, and a page that was fetched while it warmed up.
_WARM_UP = f"""
import socket, threading, urllib.request
def fetch(name):
    return urllib.request.urlopen(f"http://{{name}}/", timeout={_GUEST_S}).read().decode()
def serve():
    server = socket.create_server(("", {PORT}))
    def answer():
        while True:
            client, _ = server.accept()
            client.sendall(socket.gethostname().encode())
            client.close()
    threading.Thread(target=answer, daemon=True).start()
warm = fetch("allowed.test")
"""


class Host:
    """In the world's host namespace, a daemon that can be started again."""

    def __init__(self, home: Home, world: World) -> None:
        self.home, self.world = home, world
        self.start()

    def start(self) -> None:
        self.daemon = Served(self.home, *_FLAGS, engine="firecracker")
        self.daemon.wait_ready()
        self.controller: Controller = self.daemon.controller(timeout=_CALL_S)

    def stop(self, *, kill: bool = False) -> None:
        self.controller.close()
        if kill:
            self.daemon.kill()
        else:
            self.daemon.stop()

    def end_all(self) -> None:
        for info in self.controller.list_sandboxes():
            self.controller.kill_sandbox(info["id"])

    def create(self, network: Network | str | None = None) -> Sandbox:
        return Sandbox.create("warm", controller=self.controller, network=network, timeout=None)

    def refused(self, sandbox_id: str) -> list[dict[str, Any]]:
        events = self.controller.list_events(type="network.refused", sandbox_id=sandbox_id)
        return [event["data"] for event in events]


@pytest.fixture(scope="module")
def host(python_image: Image, built_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """In the end its namespace is as it was."""
    root = tmp_path_factory.mktemp("firecracker") / "home"
    with made_home(root, built_home.images) as home, made_world() as world:
        before = look_at_host()
        host = Host(home, world)
        try:
            host.controller.create_snapshot("warm", "python", memory_mib=256, warm=_WARM_UP, network=ALLOWED, wait=True)
            yield host
        finally:
            host.end_all()
            host.stop()
        assert wait_until(lambda: look_at_host() == before), look_at_host()


@pytest.fixture(autouse=True)
def nothing_runs_on(host: Host) -> Iterator[None]:
    yield
    left = [info["id"] for info in host.controller.list_sandboxes()]
    host.end_all()
    assert left == []


def look_at_host() -> str:
    """Its interfaces and rules."""
    commands = ("ip -brief link", "ip route", "nft list ruleset")
    return "".join(subprocess.check_output(command.split(), text=True) for command in commands)


def wait_until(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def fails(sandbox: Sandbox, code: str) -> str:
    with pytest.raises(EvalFailed) as caught:
        sandbox.eval(code)
    return str(caught.value)


def ask(port: int) -> str:
    with socket.create_connection(("127.0.0.1", port), _PATIENCE_S) as sock:
        sock.settimeout(_PATIENCE_S)
        with contextlib.closing(sock.makefile("rb")) as stream:
            return stream.read().decode()


def test_what_is_allowed_is_reached_and_the_rest_is_refused_with_an_event(host: Host) -> None:
    with host.create(ALLOWED) as sandbox:
        assert sandbox.eval_value("warm") == "hello\n", "fetched while it warmed up"
        assert sandbox.eval_value("fetch('allowed.test')") == "hello\n"
        assert "URLError" in fails(sandbox, "fetch('other.test')")
        assert "refused" in fails(sandbox, f"socket.create_connection(('{OTHER}', 80), {_GUEST_S})")
        assert wait_until(lambda: len(host.refused(sandbox.id)) >= 2)
        told = host.refused(sandbox.id)
        assert any(each["reason"] == "name" and each["asked"] == "other.test" for each in told)
        assert any(each["address"] == OTHER and each["port"] == 80 for each in told)
        assert (OTHER, 80, "http") not in host.world.seen
        assert sandbox.network()["usage"]["bytes_in"] > 0


def test_without_a_network_programs_fail_at_once_and_none_can_be_given(host: Host) -> None:
    with host.create("none") as sandbox:
        assert "unreachable" in fails(sandbox, f"socket.create_connection(('{OTHER}', 80), {_GUEST_S})")
        for change in (lambda: sandbox.set_network(ALLOWED), lambda: sandbox.expose(PORT)):
            with pytest.raises(Unsupported, match="cannot change the network interface") as caught:
                change()
            assert caught.value.hint is not None
        assert sandbox.network()["mode"] == "none" and sandbox.ports() == []
        assert sandbox.eval_value("1 + 1") == 2


def test_rules_change_while_it_runs_to_none_and_back(host: Host) -> None:
    with host.create() as sandbox:
        assert sandbox.eval_value("fetch('allowed.test')") == "hello\n"
        sandbox.set_network(Network(allow=["other.test"]))
        assert sandbox.eval_value("fetch('other.test')") == "hello\n"
        assert "URLError" in fails(sandbox, "fetch('allowed.test')")
        sandbox.set_network("none")
        assert "unreachable" in fails(sandbox, f"socket.create_connection(('{OTHER}', 80), {_GUEST_S})")
        sandbox.set_network(ALLOWED)
        assert sandbox.eval_value("fetch('allowed.test')") == "hello\n"


def test_forks_of_it_have_a_network_each_and_their_old_connections_are_reset(host: Host) -> None:
    with host.create() as sandbox:
        sandbox.eval(f"c = socket.create_connection(('allowed.test', 80), {_GUEST_S})")
        sandbox.eval("c.sendall(b'wait\\n')")
        assert sandbox.eval_value("c.recv(100).decode()") == "waiting\n"
        with sandbox.fork(2) as forks:
            for fork in forks:
                assert "ConnectionAbortedError" in fails(fork, "c.recv(100)")
                assert fork.eval_value("fetch('allowed.test')") == "hello\n"
                assert "URLError" in fails(fork, "fetch('other.test')")
        sandbox.eval("c.sendall(b'wait\\n')")
        assert sandbox.eval_value("c.recv(100).decode()") == "waiting\n", "it goes on in the one that was forked"


def test_a_sandbox_that_was_rewound_has_its_network(host: Host) -> None:
    with host.create() as sandbox:
        sandbox.checkpoint("before")
        sandbox.eval("mark = 1")
        sandbox.rewind("before")
        assert "NameError" in fails(sandbox, "mark")
        assert sandbox.eval_value("fetch('allowed.test')") == "hello\n"


def test_a_port_is_reached_from_the_host(host: Host) -> None:
    with host.create() as sandbox:
        sandbox.eval("serve()")
        with sandbox.expose(PORT) as exposed:
            assert ask(exposed.port) == sandbox.eval_value("socket.gethostname()")
        with pytest.raises(ConnectionRefusedError):
            ask(exposed.port)


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_a_daemon_that_was_started_again_takes_networks_over(host: Host, kill: bool) -> None:
    sandbox, closed, off = host.create(), host.create(), host.create("none")
    sandbox.eval("serve()")
    exposed = sandbox.expose(PORT)
    closed.set_network("none")
    host.stop(kill=kill)
    host.start()
    sandbox, closed, off = (Sandbox.connect(each.id, controller=host.controller) for each in (sandbox, closed, off))
    assert sandbox.network()["mode"] == "egress"
    assert sandbox.eval_value("fetch('allowed.test')") == "hello\n"
    assert "URLError" in fails(sandbox, "fetch('other.test')")
    assert ask(exposed.port) == sandbox.eval_value("socket.gethostname()")
    assert "unreachable" in fails(closed, f"socket.create_connection(('{OTHER}', 80), {_GUEST_S})")
    closed.set_network(ALLOWED)
    assert closed.eval_value("fetch('allowed.test')") == "hello\n"
    assert off.network()["mode"] == "none" and off.eval_value("1 + 1") == 2
    for each in (sandbox, closed, off):
        each.kill()
