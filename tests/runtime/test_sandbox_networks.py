"""Networks of sandboxes over the fake engine and fake networks."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from runtime_cases import WARM, evaluate, make, opened, request, until

from forkd.engines.fake import FakeEngine
from forkd.errors import EngineFailed, HostLacks, NetworkFailed, NotFound, NotRunning, Unsupported
from forkd.guest.agent import Agent
from forkd.host.paths import Home
from forkd.model.names import parse_tag
from forkd.model.network import NO_NETWORK, Network
from forkd.model.sandbox import SandboxSpec
from forkd.network.fake import FakeNetworks
from forkd.network.lease import Refused, Usage
from forkd.runtime.derive import DeriveRequest
from forkd.runtime.freeze import Warmup
from forkd.runtime.restore import ATTEMPTS
from forkd.runtime.runtime import Runtime, RuntimeOptions

WEB = Network(allow=["pypi"])
OTHER = Network(allow=["api.example.org"], max_bytes=1000)
SERVE = """
import socket, threading
s = socket.create_server(("127.0.0.1", 0))
def answer():
    while True:
        c, _ = s.accept()
        data = b""
        while (piece := c.recv(65536)):
            data += piece
        c.sendall(b"%d " % len(data) + data[-5:]); c.close()
threading.Thread(target=answer, daemon=True).start()
s.getsockname()[1]
"""


class Kept:
    """What opens networks, and remembers the last that were opened."""

    networks: FakeNetworks

    @asynccontextmanager
    async def open(self, directory: Path, on_refused: Callable[[Refused], None]) -> AsyncIterator[FakeNetworks]:
        async with FakeNetworks.opened(directory, on_refused) as self.networks:
            yield self.networks


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
async def runtime(fake_home: Home, kept: Kept) -> AsyncIterator[Runtime]:
    async with opened(fake_home, networks=kept.open) as runtime:
        yield runtime
    assert kept.networks.leased == {}


def spec(network: Network | None = None, **fields: object) -> SandboxSpec:
    return SandboxSpec(parse_tag("warm"), network=network, **fields)  # type: ignore[arg-type]


def kinds(runtime: Runtime, kind: str) -> list[dict[str, object]]:
    return [event.data for event in runtime.events.list(type=kind)]


async def test_a_sandbox_has_no_network_unless_asked(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec())).records
    assert record.network == NO_NETWORK and kept.networks.leased == {}
    assert await runtime.networks.look_at(record) is None


async def test_each_of_a_batch_has_its_own_and_gives_it_back(runtime: Runtime, kept: Kept):
    records = (await runtime.spawn(spec(WEB, n=3))).records
    assert kept.networks.leased == {record.id: WEB for record in records}
    assert kept.networks.names[records[0].id] == (records[0].id,)
    assert kept.networks.expected == [(WEB, 3)]
    await runtime.sandboxes.kill(records[0].id)
    assert kept.networks.leased == {record.id: WEB for record in records[1:]}


@pytest.mark.parametrize("partial", [False, True])
async def test_a_network_that_cannot_be_made_fails_its_sandbox(runtime: Runtime, kept: Kept, partial: bool):
    kept.networks.errors = [NetworkFailed("full")]
    if partial:
        spawned = await runtime.spawn(spec(WEB, n=2, allow_partial=True))
        assert spawned.failed == 1 and list(kept.networks.leased) == [spawned.records[0].id]
    else:
        with pytest.raises(NetworkFailed):
            await runtime.spawn(spec(WEB, n=2))
        assert kept.networks.leased == {} and runtime.registry.list_sandboxes() == []


async def test_a_fork_that_fails_gives_its_network_back(runtime: Runtime, kept: Kept, monkeypatch: pytest.MonkeyPatch):
    async def fail(*_: object, **__: object) -> None:
        raise EngineFailed("no")

    monkeypatch.setattr(runtime.engine, "fork", fail)
    with pytest.raises(EngineFailed):
        await runtime.spawn(spec(WEB, n=3))
    assert kept.networks.leased == {}


async def test_where_there_is_none_only_a_network_is_refused(runtime: Runtime, kept: Kept):
    kept.networks.why = "there is no /dev/net/tun"
    with pytest.raises(HostLacks, match="tun"):
        await runtime.spawn(spec(WEB))
    with pytest.raises(HostLacks):
        await runtime.snapshots.create(replace(request("more"), network=WEB))
    [record] = (await runtime.spawn(spec())).records
    with pytest.raises(HostLacks):
        await runtime.networks.expose(record.id, 80)


async def test_a_snapshot_gives_its_network_to_its_sandboxes(runtime: Runtime, kept: Kept):
    await runtime.snapshots.create(replace(request("webbed", WARM), network=WEB))
    view = await runtime.snapshots.wait("webbed")
    assert view.manifest is not None and view.manifest.network == WEB and kept.networks.leased == {}
    [kept_it] = (await runtime.spawn(SandboxSpec(parse_tag("webbed")))).records
    [other] = (await runtime.spawn(SandboxSpec(parse_tag("webbed"), network=OTHER))).records
    [none] = (await runtime.spawn(SandboxSpec(parse_tag("webbed"), network=NO_NETWORK))).records
    assert [each.network for each in (kept_it, other, none)] == [WEB, OTHER, NO_NETWORK]
    assert kept.networks.leased == {kept_it.id: WEB, other.id: OTHER}


async def test_forks_branches_and_derived_snapshots_keep_the_network(runtime: Runtime):
    [source] = (await runtime.spawn(spec(WEB))).records
    [child] = (await runtime.fork(source.id, spec())).records
    [closed] = (await runtime.fork(source.id, spec(NO_NETWORK))).records
    assert (child.network, closed.network) == (WEB, NO_NETWORK)
    derived = await runtime.derive(DeriveRequest(parse_tag("made"), parse_tag("warm"), Warmup("y = 1"), OTHER))
    assert derived.manifest is not None and derived.manifest.network == OTHER


async def test_a_rewound_sandbox_keeps_its_network_and_its_ports(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(WEB))).records
    await runtime.checkpoints.create(record.id, "here")
    await runtime.networks.change(record.id, OTHER)
    port = int(await evaluate(runtime, record.id, SERVE))
    exposed = await runtime.networks.expose(record.id, port)
    moved = await runtime.checkpoints.rewind(record.id, "here")
    assert moved.network == OTHER and moved.vm != record.vm
    await until(lambda: list(kept.networks.leased) == [moved.vm], "the end of the VM before")
    assert runtime.networks.ports(record.id) == [exposed]


async def test_a_rewind_that_fails_leaves_the_network_as_it_was(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(WEB))).records
    await runtime.checkpoints.create(record.id, "here")
    kept.networks.errors = [NetworkFailed("full")]
    with pytest.raises(NetworkFailed):
        await runtime.checkpoints.rewind(record.id, "here")
    assert kept.networks.leased == {record.id: WEB}
    assert await evaluate(runtime, record.id, "x") == 41


async def test_a_sandbox_that_dies_gives_its_network_back(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(WEB))).records
    await runtime.sandboxes.held(record.id).machine.kill()
    await until(lambda: kept.networks.leased == {}, "its network")


async def test_the_network_of_a_running_sandbox_changes(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec())).records
    assert (await runtime.networks.change(record.id, WEB)).network == WEB
    assert kept.networks.leased == {record.id: WEB}
    tap = runtime.sandboxes.held(record.id).machine.find_tap()
    assert tap is not None
    socket.close(tap)
    assert (await runtime.networks.change(record.id, OTHER)).network == OTHER
    assert kept.networks.leased == {record.id: OTHER}
    assert (await runtime.networks.change(record.id, NO_NETWORK)).network == NO_NETWORK
    assert kept.networks.leased == {} and runtime.sandboxes.held(record.id).machine.find_tap() is None
    assert [data["mode"] for data in kinds(runtime, "network.changed")] == ["egress", "egress", "none"]


@pytest.mark.parametrize("step", ["lease", "plug", "guest", "change"])
async def test_a_change_that_fails_changes_nothing(
    runtime: Runtime, kept: Kept, monkeypatch: pytest.MonkeyPatch, step: str
):
    before = WEB if step == "change" else NO_NETWORK
    [record] = (await runtime.spawn(spec(before))).records
    live = runtime.sandboxes.held(record.id)

    async def fail(*args: object, **_: object) -> None:
        if args != (None,):
            raise NetworkFailed("no")

    if step in ("lease", "change"):
        kept.networks.errors = [NetworkFailed("no")]
    else:
        monkeypatch.setattr(*((live.machine, "plug") if step == "plug" else (live.agent, "set_network")), fail)
    with pytest.raises(NetworkFailed):
        await runtime.networks.change(record.id, OTHER)
    assert runtime.sandboxes.get(record.id).network == before
    assert kept.networks.leased == ({record.id: WEB} if step == "change" else {})
    assert live.machine.find_tap() is None or step == "change"


async def test_a_paused_sandbox_keeps_its_network_until_it_runs(runtime: Runtime):
    [record] = (await runtime.spawn(spec(WEB))).records
    await runtime.sandboxes.pause(record.id)
    with pytest.raises(NotRunning):
        await runtime.networks.change(record.id, NO_NETWORK)
    assert (await runtime.sandboxes.resume(record.id)).network == WEB


async def test_bytes_go_both_ways_through_an_exposed_port(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec())).records
    port = int(await evaluate(runtime, record.id, SERVE))
    exposed = await runtime.networks.expose(record.id, port)
    assert kept.networks.leased == {record.id: NO_NETWORK}
    assert runtime.sandboxes.get(record.id).ports == {
        str(port): {"port": port, "host_port": exposed.host_port, "anyone": False}
    }
    reader, writer = await asyncio.open_connection(exposed.address, exposed.host_port)
    writer.write(b"x" * 1_000_000 + b"12345")
    writer.write_eof()
    assert await reader.read() == b"1000005 12345"
    writer.close()
    await runtime.networks.close_port(record.id, port)
    assert kept.networks.leased == {} and runtime.networks.ports(record.id) == []
    with pytest.raises(NotFound):
        await runtime.networks.close_port(record.id, port)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(exposed.address, exposed.host_port)


async def test_an_exposed_port_serves_nobody_else(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runtime.sandboxes.exposed, "_find_uid", lambda _: 4711)
    [record] = (await runtime.spawn(spec())).records
    port = int(await evaluate(runtime, record.id, SERVE))
    for anyone, answer in ((False, b""), (True, b"2 hi")):
        exposed = await runtime.networks.expose(record.id, port, anyone=anyone)
        reader, writer = await asyncio.open_connection(exposed.address, exposed.host_port)
        try:
            writer.write(b"hi")
            writer.write_eof()
            assert await reader.read() == answer
        except OSError:
            assert answer == b""
        writer.close()
        await runtime.networks.close_port(record.id, port)


async def test_the_next_daemon_takes_networks_and_ports_over(fake_home: Home, kept: Kept):
    keep = RuntimeOptions(networks=kept.open)
    async with Runtime.opened(fake_home, FakeEngine(outlive=True), keep) as first:
        await make(first, "warm")
        [web] = (await first.spawn(spec(WEB))).records
        [lost] = (await first.spawn(spec(WEB))).records
        [plain] = (await first.spawn(spec())).records
        port = int(await evaluate(first, web.id, SERVE))
        exposed = await first.networks.expose(web.id, port)
    (fake_home.vms / lost.vm / "tap").unlink()
    (fake_home.vms / plain.vm / "tap").write_text("left by a daemon that died")
    async with opened(fake_home, networks=kept.open, make_warm=False) as runtime:
        assert kept.networks.leased == {web.id: WEB}
        assert runtime.networks.ports(web.id) == [exposed]
        reader, writer = await asyncio.open_connection(exposed.address, exposed.host_port)
        writer.write(b"still")
        writer.write_eof()
        assert await reader.read() == b"5 still"
        writer.close()
        assert runtime.sandboxes.get(lost.id).network == NO_NETWORK
        assert "no network interface" in str(kinds(runtime, "network.lost"))
        seen = await runtime.networks.look_at(runtime.sandboxes.get(web.id))
        assert seen is not None and seen.address is not None
        assert runtime.sandboxes.held(plain.id).machine.find_tap() is None
        assert await evaluate(runtime, lost.id, "x") == 41


async def test_refusals_become_few_events(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(WEB))).records
    refused = Refused(record.id, "name", "evil.example", None, None, "dns")
    for _ in range(5):
        kept.networks.refuse(refused)
    kept.networks.refuse(replace(refused, reason="address", asked=None, address="192.0.2.1", port=22, protocol="tcp"))
    await until(lambda: len(kinds(runtime, "network.refused")) == 2, "the events")
    first, second = kinds(runtime, "network.refused")
    assert (first["asked"], first["count"]) == ("evil.example", 5)
    assert (second["address"], second["port"], second["reason"]) == ("192.0.2.1", 22, "address")
    assert runtime.sandboxes.leases.refusals.totals == {"name": 5, "address": 1}
    for number in range(500):
        kept.networks.refuse(replace(refused, asked=f"n{number}.example"))
    await runtime.sandboxes.kill(record.id)
    events = kinds(runtime, "network.refused")
    assert len(events) <= 31 and events[-1]["reason"] == "more"
    assert sum(int(str(event["count"])) for event in events) == 506


async def test_what_was_used_stays_counted(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(WEB))).records
    kept.networks.used[record.id] = Usage(10, 20, 1, 0)
    seen = await runtime.networks.look_at(record)
    assert seen is not None and seen.usage.bytes_out == 20 and seen.address
    await runtime.sandboxes.kill(record.id)
    assert (await runtime.sandboxes.leases.total()).bytes_in == 10


async def test_a_workspace_keeps_the_network_it_had(runtime: Runtime):
    made = await runtime.workspaces.create("ws", "warm", network=WEB)
    assert made.live_sandbox_id is not None
    await runtime.networks.change(made.live_sandbox_id, OTHER)
    await runtime.workspaces.suspend("ws")
    resumed = await runtime.workspaces.resume("ws")
    assert resumed.live_sandbox_id is not None
    assert runtime.sandboxes.get(resumed.live_sandbox_id).network == OTHER


async def test_the_group_learns_a_new_name(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(Network(group="team")))).records
    runtime.sandboxes.rename(record.id, "db")
    await until(lambda: kept.networks.names[record.id] == (record.id, "db"), "the name")


def test_a_manifest_from_before_has_no_network(runtime_manifest: bytes):
    assert "network" not in json.loads(runtime_manifest)


@pytest.fixture
def runtime_manifest() -> bytes:
    from forkd.model.machine import MachineSpec
    from forkd.store.manifest import Manifest, parse_manifest, render_manifest

    plain = Manifest(parse_tag("t"), 1, "fake", "i", MachineSpec(256), "", {}, {})
    assert parse_manifest(render_manifest(plain), "t").network == NO_NETWORK
    webbed = replace(plain, network=WEB)
    assert parse_manifest(render_manifest(webbed), "t") == webbed
    return render_manifest(plain)


async def test_networks_that_are_lost_are_taken_over_by_themselves(runtime: Runtime, kept: Kept):
    records = (await runtime.spawn(spec(WEB, n=2))).records
    [plain] = (await runtime.spawn(spec())).records
    await runtime.sandboxes.pause(records[1].id)
    kept.networks.lose()
    await until(lambda: len(kinds(runtime, "network.restored")) == 2, "the networks")
    assert kept.networks.leased == {record.id: WEB for record in records}
    assert runtime.sandboxes.leases.lost == frozenset() and not runtime.sandboxes.leases.has(plain.vm)
    assert (await runtime.networks.change(records[0].id, OTHER)).network == OTHER


async def test_a_network_that_cannot_be_had_again_is_none(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(WEB))).records
    port = int(await evaluate(runtime, record.id, SERVE))
    await runtime.networks.expose(record.id, port)
    kept.networks.errors = [NetworkFailed(f"no {number}") for number in range(ATTEMPTS)]
    kept.networks.lose()
    await until(lambda: kinds(runtime, "network.lost") != [], "the end of it")
    assert kinds(runtime, "network.lost") == [{"reason": f"no {ATTEMPTS - 1}"}]
    found = runtime.sandboxes.get(record.id)
    assert (found.network, found.ports, kept.networks.leased) == (NO_NETWORK, {}, {})
    assert runtime.networks.ports(record.id) == []
    assert runtime.sandboxes.held(record.id).machine.find_tap() is None


async def test_a_change_whose_way_back_fails_ends_closed(runtime: Runtime, kept: Kept):
    [record] = (await runtime.spawn(spec(WEB))).records
    kept.networks.errors = [NetworkFailed("not there"), NetworkFailed("nor back")]
    with pytest.raises(NetworkFailed, match="not there"):
        await runtime.networks.change(record.id, OTHER)
    assert runtime.sandboxes.get(record.id).network == NO_NETWORK and kept.networks.leased == {}
    assert kinds(runtime, "network.lost") == [{"reason": "nor back"}]
    assert (await runtime.networks.change(record.id, OTHER)).network == OTHER


@pytest.mark.parametrize("wanted", [WEB, NO_NETWORK])
async def test_the_guest_of_an_adopted_sandbox_is_told_what_it_has(
    fake_home: Home, kept: Kept, monkeypatch: pytest.MonkeyPatch, wanted: Network
):
    async with Runtime.opened(fake_home, FakeEngine(outlive=True), RuntimeOptions(networks=kept.open)) as first:
        await make(first, "warm")
        [record] = (await first.spawn(spec(wanted))).records
    told: list[bool] = []

    async def tell(_: Agent, up: bool) -> int:
        told.append(up)
        return 0

    monkeypatch.setattr(Agent, "set_network", tell)
    async with opened(fake_home, networks=kept.open, make_warm=False) as runtime:
        assert await evaluate(runtime, record.id, "x") == 41
        assert await evaluate(runtime, record.id, "x") == 41
        assert told == [not wanted.off]


async def test_a_snapshot_without_an_interface_is_refused_before_anything_is_taken(
    runtime: Runtime, kept: Kept, monkeypatch: pytest.MonkeyPatch
):
    def refuse(_: object) -> None:
        raise Unsupported("The snapshot was made without a network interface")

    monkeypatch.setattr(runtime.engine, "check_nic", refuse)
    with pytest.raises(Unsupported):
        await runtime.spawn(spec(WEB))
    assert kept.networks.expected == [] and kinds(runtime, "sandbox.created") == []
    assert (await runtime.spawn(spec())).records
