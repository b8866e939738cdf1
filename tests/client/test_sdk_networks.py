import urllib.request

import pytest

from forkd import AsyncSandbox, Controller, InvalidInput, Network, Sandbox

SERVE = (
    "import http.server, threading\n"
    "class H(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers(); self.wfile.write(b'hello')\n"
    "    def log_message(self, *_): pass\n"
    "s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), H)\n"
    "threading.Thread(target=s.serve_forever, daemon=True).start()\n"
    "s.server_port"
)


def test_a_sandbox_has_the_network_it_asks_for(daemon: Controller):
    with Sandbox.create("python", network=Network(allow=["pypi"])) as sandbox:
        assert sandbox.network()["allow"] == ["pypi"]
        assert sandbox.set_network("open")["mode"] == "open"
        with sandbox.fork(1) as [fork]:
            assert fork.network()["mode"] == "open"
        with sandbox.fork(1, network="none") as [fork]:
            assert fork.network()["mode"] == "none"


def test_rules_that_cannot_be_are_refused_before_anything_is_sent(daemon: Controller):
    with pytest.raises(InvalidInput):
        Sandbox.create("python", network={"allow": ["nope"]})
    with pytest.raises(InvalidInput):
        Network(allow=["pypi"], deny=["pypi"])
    assert daemon.list_sandboxes() == []


def test_an_exposed_port_is_an_object(daemon: Controller):
    with Sandbox.create("python") as sandbox:
        port = sandbox.eval_value(SERVE)
        with sandbox.expose(port) as exposed:
            assert (exposed.host, exposed.guest_port) == ("127.0.0.1", port)
            with urllib.request.urlopen(exposed.url, timeout=60) as answer:
                assert answer.read() == b"hello"
            assert [each["host_port"] for each in sandbox.ports()] == [exposed.port]
        assert sandbox.ports() == []
        exposed.close()


async def test_the_same_with_await(daemon: Controller):
    async with await AsyncSandbox.create("python", network="open") as sandbox:
        assert (await sandbox.network())["mode"] == "open"
        async with await sandbox.expose(80) as exposed:
            assert [each["host_port"] for each in await sandbox.ports()] == [exposed.port]
        assert (await sandbox.set_network(Network.none()))["mode"] == "none"
