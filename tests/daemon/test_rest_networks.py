"""Networks and exposed ports through the API, with the fake engine's networks."""

import socket
from collections.abc import Callable

import pytest
from support_client import Client

RULES = {"allow": ["pypi", "api.example.org:8443"], "deny": ["192.0.2.0/24"], "max_bytes": 10**9, "group": "team"}
SERVE = (
    "import socket, threading\n"
    "s = socket.create_server(('127.0.0.1', 0))\n"
    "threading.Thread(target=lambda: s.accept()[0].sendall(b'from the guest'), daemon=True).start()\n"
    "s.getsockname()[1]"
)
NONE = {"mode": "none", "allow": [], "deny": [], "max_bytes": None, "max_connections": None, "group": None}


def test_a_sandbox_shows_no_network(client: Client, sandbox: str):
    info = client.get(sandbox).body
    assert info["network"] == NONE and info["ports"] == [] and info["netns"] is None


def test_rules_are_kept_and_shown(client: Client, spawn: Callable[..., str]):
    path = spawn(network=RULES)
    network = client.get(path).body["network"]
    assert network["mode"] == "egress" and network["allow"] == RULES["allow"] and network["group"] == "team"
    assert network["usage"] == {"bytes_in": 0, "bytes_out": 0, "connections": 0, "refused": 0} and network["address"]
    listed = next(info for info in client.get("/v1/sandboxes").body if path.endswith(info["id"]))
    assert "usage" not in listed["network"]


def test_open_is_a_word(client: Client, spawn: Callable[..., str]):
    assert client.get(spawn(network="open")).body["network"]["mode"] == "open"


@pytest.mark.parametrize(
    "network",
    [
        7,
        True,
        [],
        "egress",
        "closed",
        {"allow": "pypi"},
        {"allow": ["-"]},
        {"mode": "open", "nope": 1},
        {"max_bytes": 1},
    ],
)
def test_a_network_that_cannot_be_is_a_400_with_a_hint(client: Client, sandbox: str, network: object):
    for answer in (
        client.post("/v1/sandboxes", {"snapshot_tag": "base", "network": network}),
        client.post(f"{sandbox}/fork", {"network": network}),
        client.post("/v1/snapshots", {"tag": "x", "image": "small", "network": network}),
        client.post("/v1/workspaces", {"name": "x", "snapshot_tag": "base", "network": network}),
        client.post("/v1/snapshots/base/derive", {"tag": "x", "code": "1", "network": network}),
        client.ask("PUT", f"{sandbox}/network", {"network": network}),
    ):
        assert (answer.status, answer.body["code"]) == (400, "invalid_input"), answer.content


def test_a_change_is_answered_with_what_is(client: Client, spawn: Callable[..., str]):
    path = spawn()
    changed = client.ask("PUT", f"{path}/network", {"network": RULES})
    assert changed.status == 200 and changed.body["network"]["max_bytes"] == 10**9
    assert client.ask("PUT", f"{path}/network", {"network": "none"}).body["network"] == NONE
    assert client.ask("PUT", f"{path}/network", {}).status == 422
    client.post(f"{path}/pause")
    assert client.ask("PUT", f"{path}/network", {"network": "open"}).status == 409
    assert client.ask("PUT", "/v1/sandboxes/nobody/network", {"network": "open"}).status == 404


def test_a_fork_keeps_the_network_of_its_source(client: Client, spawn: Callable[..., str]):
    path = spawn(network=RULES)
    forks = client.post(f"{path}/fork", {"count": 1}).body
    try:
        assert forks[0]["network"]["allow"] == RULES["allow"]
    finally:
        client.delete(f"/v1/sandboxes/{forks[0]['id']}")


def test_a_snapshot_has_a_network_for_its_sandboxes(client: Client, new_tag: str, spawn: Callable[..., str]):
    made = client.post("/v1/snapshots", {"tag": new_tag, "image": "small", "network": RULES, "wait": True})
    assert made.status == 201 and made.body["network"]["allow"] == RULES["allow"]
    assert client.get(f"/v1/snapshots/{new_tag}").body["network"]["group"] == "team"
    assert client.get("/v1/snapshots/base").body["network"] == NONE
    assert client.get(spawn(snapshot_tag=new_tag)).body["network"]["allow"] == RULES["allow"]
    assert client.get(spawn(snapshot_tag=new_tag, network="none")).body["network"] == NONE
    assert client.delete(f"/v1/snapshots/{new_tag}").status == 204


def test_a_port_of_the_guest_is_at_a_local_address(client: Client, spawn: Callable[..., str]):
    path = spawn()
    port = client.post(f"{path}/eval", {"code": SERVE}).body["value"]
    made = client.post(f"{path}/ports", {"port": port})
    assert made.status == 201 and made.body["address"] == "127.0.0.1" and made.body["anyone"] is False
    with socket.create_connection(("127.0.0.1", made.body["host_port"]), timeout=30) as connection:
        assert connection.recv(100) == b"from the guest"
    assert client.get(f"{path}/ports").body == [made.body] == client.get(path).body["ports"]
    assert client.post(f"{path}/ports", {"port": port}).status == 409
    taken = client.post(f"{path}/ports", {"port": 1, "host_port": made.body["host_port"]})
    assert taken.status == 409, taken.content
    assert client.delete(f"{path}/ports/{port}").status == 204
    assert client.delete(f"{path}/ports/{port}").status == 404
    assert client.get(f"{path}/ports").body == []


@pytest.mark.parametrize(
    ("body", "status"), [({"port": 0}, 400), ({"port": 65536}, 400), ({"port": "80"}, 422), ({}, 422)]
)
def test_what_is_no_port_is_refused(client: Client, sandbox: str, body: object, status: int):
    assert client.post(f"{sandbox}/ports", body).status == status
    assert client.delete(f"{sandbox}/ports/x").status == 404


def test_metrics_count_networks(client: Client, spawn: Callable[..., str]):
    before = _gauge(client)
    spawn(network=RULES)
    assert _gauge(client) == before + 1
    assert 'forkd_network_bytes_total{direction="out"}' in client.get("/metrics").content.decode()


def _gauge(client: Client) -> float:
    lines = client.get("/metrics").content.decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("forkd_networks "))


def test_the_document_says_what_a_network_is(client: Client):
    schemas = client.get("/openapi.json").body["components"]["schemas"]
    assert "allow" in str(schemas["SpawnBody"]["properties"]["network"])
    assert "network" in schemas["ChangeNetworkBody"]["required"]
