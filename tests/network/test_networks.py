"""Networks as a whole: real namespaces, rules, names and servers, and a stand-in for the guest."""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support_world import (
    HOST,
    OTHER,
    PRIVATE,
    RANGE_PORTS,
    RESOLVER,
    THIRD,
    WEB,
    Guest,
    World,
    made_world,
    needs_world,
)

from forkd.errors import NetworkFailed, NotFound
from forkd.host import netlink, netns, nftables
from forkd.model.network import GATEWAY_ADDRESS, GUEST_ADDRESS, parse_network
from forkd.network.networks import NetworkOptions, Networks, Refused

pytestmark = [needs_world, pytest.mark.usefixtures("nothing_left")]

T = TypeVar("T")
NAMES = {"allow": ["allowed.test", "*.allowed.test"], "deny": ["denied.test"]}
_TOLD_S = 5.0


@pytest.fixture
def world() -> Iterator[World]:
    with made_world() as world:
        yield world


@pytest.fixture
def refused() -> list[Refused]:
    return []


@pytest.fixture(params=["veth", "pasta"])
async def networks(
    request: pytest.FixtureRequest, world: World, run_directory: Path, refused: list[Refused]
) -> AsyncIterator[Networks]:
    options = NetworkOptions(uplink=request.param, pool=2, resolvers=(RESOLVER,))
    async with Networks.opened(run_directory, options, refused.append) as networks:
        yield networks
    for name in ("hub.log", "hub"):
        path = run_directory / name
        if path.is_dir():
            path.rmdir()
        elif path.exists():
            print(path.read_text())
            path.unlink()


@contextlib.asynccontextmanager
async def guest_of(
    networks: Networks, network: Any, name: str = "a", names: tuple[str, ...] = ()
) -> AsyncIterator[Guest]:
    lease = await networks.lease(name, parse_network(network), names)
    guest = Guest(lease.tap)
    os.close(lease.tap)
    try:
        yield guest
    finally:
        await asyncio.to_thread(guest.close)
        await networks.release(name)


async def do(work: Callable[..., T], *args: Any, **options: Any) -> T:
    return await asyncio.to_thread(lambda: work(*args, **options))


async def is_refused(work: Callable[..., object], *args: Any, **options: Any) -> None:
    with pytest.raises(OSError) as caught:
        await do(work, *args, **options)
    # Told at once: a reset, or a message that it is prohibited; no silence.
    assert caught.value.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.EACCES)


async def told(refused: list[Refused], **wanted: object) -> Refused:
    deadline = time.monotonic() + _TOLD_S
    while time.monotonic() < deadline:
        for each in refused:
            if all(getattr(each, name) == value for name, value in wanted.items()):
                return each
        await asyncio.sleep(0.02)
    raise AssertionError(f"Nothing like {wanted} in {refused}")


async def test_an_address_is_reached_once_an_allowed_name_stands_for_it(networks: Networks) -> None:
    async with guest_of(networks, NAMES) as guest:
        await is_refused(guest.fetch, WEB)
        assert await do(guest.ask, "allowed.test") == ("NOERROR", [WEB])
        assert await do(guest.fetch, WEB, size=300_000) == 300_000
        await is_refused(guest.fetch, WEB, RANGE_PORTS[0])
        await is_refused(guest.fetch, OTHER)


async def test_names_are_answered_as_the_rules_say(networks: Networks, refused: list[Refused]) -> None:
    async with guest_of(networks, NAMES) as guest:
        assert await do(guest.ask, "WWW.Allowed.Test.") == ("NOERROR", [WEB])
        assert await do(guest.ask, "allowed.test", tcp=True) == ("NOERROR", [WEB])
        assert await do(guest.ask, "allowed.test", "AAAA") == ("NOERROR", [])
        assert await do(guest.ask, "allowed.test", "TXT") == ("REFUSED", [])
        assert await do(guest.ask, "nothing.allowed.test") == ("NXDOMAIN", [])
        assert await do(guest.ask, "other.test") == ("REFUSED", [])
        assert await do(guest.ask, "allowed.test.evil.test") == ("REFUSED", [])
        assert await do(guest.ask, "through.allowed.test") == ("NOERROR", [])
    assert (await told(refused, reason="name", asked="other.test")).name == "a"


async def test_answers_that_lead_to_private_addresses_are_emptied(networks: Networks, refused: list[Refused]) -> None:
    async with guest_of(networks, NAMES) as guest:
        assert await do(guest.ask, "rebind.allowed.test") == ("NOERROR", [])
        await is_refused(guest.fetch, PRIVATE)
        await told(refused, reason="private", asked="rebind.allowed.test", address=PRIVATE)
        await told(refused, reason="private", asked="rebind.allowed.test", address=HOST)


async def test_a_name_that_moves_is_followed_but_not_to_a_private_address(networks: Networks, world: World) -> None:
    world.ttl_s = 0
    async with guest_of(networks, NAMES) as guest:
        for address, found in ((WEB, [WEB]), (PRIVATE, []), (HOST, []), ("127.0.0.1", []), (OTHER, [OTHER])):
            world.records["allowed.test"] = [("A", address)]
            assert await do(guest.ask, "www.allowed.test") == ("NOERROR", found)
            if found:
                assert await do(guest.fetch, address) == 5
            else:
                await is_refused(guest.fetch, address if address != "127.0.0.1" else PRIVATE)


async def test_an_answer_too_long_for_a_datagram_is_asked_for_by_tcp(networks: Networks) -> None:
    async with guest_of(networks, NAMES) as guest:
        code, addresses = await do(guest.ask, "many.allowed.test", tcp=True)
        assert code == "NOERROR" and len(addresses) == 32


async def test_tls_passes_with_the_name_that_stood_for_the_address(networks: Networks, refused: list[Refused]) -> None:
    async with guest_of(networks, {"allow": ["allowed.test", "other.test"]}) as guest:
        await do(guest.ask, "allowed.test")
        await do(guest.ask, "other.test")
        assert await do(guest.fetch_tls, WEB, "allowed.test", size=200_000) == 200_000
        for address, name in ((WEB, "shared.test"), (WEB, "other.test"), (WEB, None)):
            with pytest.raises(OSError):
                await do(guest.fetch_tls, address, name)
        with pytest.raises(OSError):
            await do(guest.fetch, WEB, 443)  # not TLS
    assert (await told(refused, reason="sni", asked="shared.test")).address == WEB


async def test_address_rules_have_ports_and_need_no_name(networks: Networks) -> None:
    rules = {"allow": [f"{WEB}:8000-8001", THIRD], "deny": [f"{THIRD}:8001"]}
    async with guest_of(networks, rules) as guest:
        assert await do(guest.fetch, WEB, 8000) == await do(guest.fetch, WEB, 8001) == 5
        await is_refused(guest.fetch, WEB, 80)
        assert await do(guest.fetch, THIRD) == await do(guest.fetch_tls, THIRD, "any.test") == 5
        assert await do(guest.echo, THIRD) == b"hello"
        await is_refused(guest.fetch, THIRD, 8001)
        await is_refused(guest.echo, WEB)
        assert await do(guest.ask, "allowed.test") == ("REFUSED", [])


async def test_open_reaches_all_but_private_addresses_this_host_and_what_is_denied(networks: Networks) -> None:
    async with guest_of(networks, {"mode": "open", "deny": [f"{OTHER}:80"]}) as guest:
        assert await do(guest.ask, "other.test") == ("NOERROR", [OTHER])
        assert await do(guest.ask, "rebind.allowed.test") == ("NOERROR", [])
        assert await do(guest.fetch, WEB) == await do(guest.fetch_tls, WEB, None) == 5
        assert await do(guest.echo, OTHER) == b"hello"
        for address in (OTHER, HOST, PRIVATE, GATEWAY_ADDRESS, "127.0.0.1"):
            if address != "127.0.0.1":
                await is_refused(guest.fetch, address)


async def test_private_addresses_and_this_host_are_reached_by_a_rule_for_them(networks: Networks) -> None:
    server = socket.create_server((HOST, 8077))
    with server:
        async with guest_of(networks, {"allow": [f"{HOST}:8077", f"{PRIVATE}:80"]}) as guest:
            assert await do(guest.fetch, PRIVATE) == 5
            with await do(guest.connect, HOST, 8077):
                pass
            await is_refused(guest.connect, HOST, 8078)
        async with guest_of(networks, {"mode": "open"}, "b") as other:
            await is_refused(other.connect, HOST, 8077)


@pytest.mark.parametrize("wide", ["0.0.0.0/0", "192.0.2.0/24", "8.0.0.0/5"])
async def test_a_wide_range_is_not_for_this_host_nor_for_private_addresses(networks: Networks, wide: str) -> None:
    with socket.create_server((HOST, 8079)):
        async with guest_of(networks, {"allow": [wide]}) as guest:
            for address, port in ((HOST, 8079), (PRIVATE, 80)):
                await is_refused(guest.connect, address, port)
            if wide == "0.0.0.0/0":
                assert await do(guest.fetch, WEB) == 5


async def test_an_address_that_the_host_gets_later_is_denied_too(networks: Networks) -> None:
    async with guest_of(networks, {"mode": "open"}) as guest:
        with socket.create_server(("0.0.0.0", 8078)):
            with netlink.Netlink() as links:
                link = links.find_link("eth0")
                assert link is not None
                links.do(netlink.render_add_address(link.index, "203.0.113.77", 32))
            await asyncio.sleep(0.5)
            await is_refused(guest.connect, "203.0.113.77", 8078)


async def test_sandboxes_reach_each_other_only_in_a_group(networks: Networks, world: World) -> None:
    group = {"group": "team"}
    async with (
        guest_of(networks, group, "one", ("one",)) as one,
        guest_of(networks, group, "two", ("two", "Second")) as two,
        guest_of(networks, {"group": "rest"}, "three", ("three",)) as three,
        guest_of(networks, {"mode": "open"}, "four") as four,
    ):
        code, found = await do(one.ask, "second.forkd")
        assert code == "NOERROR" and len(found) == 1
        assert await do(one.ask, "three.forkd") == ("NXDOMAIN", [])
        assert (await do(four.ask, "two.forkd"))[0] == "REFUSED"
        with netns.inside(two.namespace):
            server = socket.create_server(("0.0.0.0", 9000))
        with server:
            with await do(one.connect, found[0], 9000) as sock:
                inside, _ = server.accept()
                with inside:
                    sock.sendall(b"from one")
                    assert inside.recv(100) == b"from one"
            for outsider in (three, four):
                with pytest.raises(OSError):
                    await do(outsider.connect, found[0], 9000)
        await is_refused(one.fetch, WEB)


async def test_a_change_is_in_force_at_once_and_cuts_what_it_no_longer_allows(networks: Networks) -> None:
    async with guest_of(networks, {"allow": ["allowed.test", THIRD]}) as guest:
        await do(guest.ask, "allowed.test")
        with await do(guest.connect, THIRD, 80) as sock:
            sock.sendall(b"wait\n")
            assert sock.recv(100) == b"waiting\n"
            await networks.change("a", parse_network({"allow": ["allowed.test:443"]}))
            sock.sendall(b"wait\n")
            with pytest.raises(ConnectionResetError):
                await do(sock.recv, 100)
        await is_refused(guest.fetch, THIRD)
        await is_refused(guest.fetch, WEB)
        assert await do(guest.fetch_tls, WEB, "allowed.test") == 5


async def test_another_name_cuts_no_connection(networks: Networks) -> None:
    rules = {"allow": ["allowed.test", THIRD], "group": "team"}
    async with guest_of(networks, rules, names=("a",)) as guest:
        await do(guest.ask, "allowed.test")
        with await do(guest.connect, THIRD, 80) as sock:
            sock.sendall(b"wait\n")
            assert sock.recv(100) == b"waiting\n"
            await networks.change("a", parse_network(rules), ("a", "db"))
            sock.sendall(b"wait\n")
            assert await do(sock.recv, 100) == b"waiting\n"
        assert (await do(guest.ask, "db.forkd"))[0] == "NOERROR"
        assert await do(guest.fetch_tls, WEB, "allowed.test") == 5


async def test_a_connection_of_before_a_fork_is_reset(networks: Networks) -> None:
    """The guest has it, the namespace does not: as after a fork, which gets a namespace of its own."""
    lease = await networks.lease("a", parse_network({"allow": [THIRD]}))
    other = await networks.lease("b", parse_network({"allow": [THIRD]}))
    with Guest(lease.tap) as guest:
        with await do(guest.connect, THIRD, 80) as sock:
            sock.sendall(b"wait\n")
            assert sock.recv(100) == b"waiting\n"
            guest.plug(other.tap)
            sock.sendall(b"wait\n")
            with pytest.raises(ConnectionResetError):
                await do(sock.recv, 100)
        assert await do(guest.fetch, THIRD) == 5
    for each in (lease, other):
        os.close(each.tap)
        await networks.release(each.name)


async def test_a_quota_of_bytes_cuts_off(networks: Networks, refused: list[Refused]) -> None:
    async with guest_of(networks, {"allow": [THIRD], "max_bytes": 200_000}) as guest:
        assert await do(guest.fetch, THIRD, size=50_000) == 50_000
        with pytest.raises(OSError):
            await do(guest.fetch, THIRD, size=400_000)
        await is_refused(guest.fetch, THIRD)
        usage = await networks.usage("a")
        assert usage.bytes_in + usage.bytes_out > 200_000 and usage.refused > 0
    await told(refused, reason="quota", address=THIRD)


async def test_a_quota_of_connections_counts_those_that_are_open(networks: Networks, refused: list[Refused]) -> None:
    async with guest_of(networks, {"allow": [THIRD], "max_connections": 3}) as guest:
        held = [await do(guest.connect, THIRD, 80) for _ in range(3)]
        await is_refused(guest.connect, THIRD, 80)
        for sock in held:
            sock.close()
    await told(refused, reason="connections", address=THIRD)


async def test_a_port_of_the_guest_is_reached_from_outside(networks: Networks) -> None:
    async with guest_of(networks, {"allow": [THIRD]}) as guest:
        with netns.inside(guest.namespace):
            server = socket.create_server((GUEST_ADDRESS, 8080))
        with server, await networks.connect("a", 8080) as sock:
            inside, _ = await do(server.accept)
            with inside:
                inside.sendall(b"from the guest")
                assert await asyncio.get_running_loop().sock_recv(sock, 100) == b"from the guest"
        with pytest.raises(NetworkFailed, match="Port 8081"):
            await networks.connect("a", 8081)


async def test_without_dns_names_fail_and_addresses_work(networks: Networks, world: World) -> None:
    world.dns_down = True
    async with guest_of(networks, {"allow": ["allowed.test", THIRD]}) as guest:
        assert await do(guest.ask, "allowed.test") == ("SERVFAIL", [])
        assert await do(guest.fetch, THIRD) == 5


async def test_a_network_of_mode_none_lets_nothing_out_and_has_a_way_in(networks: Networks) -> None:
    async with guest_of(networks, "none") as guest:
        with pytest.raises(OSError):
            await do(guest.fetch, THIRD)
        assert (await do(guest.ask, "allowed.test"))[0] == "REFUSED"
        listener = netns.socket_inside(guest.namespace, socket.SOCK_STREAM)
        with listener:
            listener.bind((GUEST_ADDRESS, 8080))
            listener.listen()
            (await networks.connect("a", 8080)).close()


async def test_what_a_sandbox_never_had_is_an_error_and_its_release_is_not(networks: Networks) -> None:
    await networks.release("nobody")
    with pytest.raises(NotFound):
        await networks.usage("nobody")
    lease = await networks.lease("a", parse_network(NAMES))
    os.close(lease.tap)
    with pytest.raises(NetworkFailed, match="already"):
        await networks.lease("a", parse_network(NAMES))
    await networks.release("a")
    await networks.release("a")


async def test_leases_that_nobody_waits_for_any_more_are_released(networks: Networks) -> None:
    os.close((await networks.lease("first", parse_network(NAMES))).tap)
    names = [f"s{number}" for number in range(20)]
    waiting = [asyncio.ensure_future(networks.lease(name, parse_network(NAMES))) for name in names]
    await asyncio.sleep(0.02)
    for each in waiting:
        each.cancel()
    for done in await asyncio.gather(*waiting, return_exceptions=True):
        if not isinstance(done, BaseException):
            os.close(done.tap)
    await asyncio.gather(*map(networks.release, names))
    os.close((await networks.lease("last", parse_network(NAMES))).tap)  # made after all of them
    for name in names:
        with pytest.raises(NotFound):
            await networks.usage(name)


async def test_changes_and_releases_at_once_leave_nothing(networks: Networks) -> None:
    """Each change ends before the release begins, or finds nothing."""
    group = parse_network({"group": "team"})
    lease = await networks.lease("stays", group, ("stays",))
    with Guest(lease.tap) as guest:
        for _ in range(10):
            os.close((await networks.lease("goes", parse_network(NAMES))).tap)
            changing = asyncio.ensure_future(networks.change("goes", group, ("goes",)))
            await asyncio.gather(changing, networks.release("goes"), return_exceptions=True)
            assert (await do(guest.ask, "stays.forkd"))[0] == "NOERROR"
            assert (await do(guest.ask, "goes.forkd"))[0] == "NXDOMAIN"
    os.close(lease.tap)


async def test_a_released_network_is_cut_off_though_somebody_holds_its_tap(networks: Networks) -> None:
    async with guest_of(networks, {"allow": [THIRD]}) as guest:
        assert await do(guest.fetch, THIRD) == 5
        await networks.release("a")
        with pytest.raises(OSError):
            await do(guest.fetch, THIRD)


async def test_the_hub_has_no_rights_over_the_host(networks: Networks) -> None:
    lease = await networks.lease("a", parse_network(NAMES))
    os.close(lease.tap)
    status = dict(line.split(":", 1) for line in Path(f"/proc/{networks.hub_pid}/status").read_text().splitlines())
    assert set(status["Uid"].split()) == {str(0x3FFF0000)}
    assert status["NoNewPrivs"].strip() == "1"
    assert os.readlink(f"/proc/{networks.hub_pid}/ns/user") != os.readlink("/proc/self/ns/user")
    assert {line for line in Path(f"/proc/{networks.hub_pid}/environ").read_bytes().split(b"\0") if line} <= {
        b"LANG=C.UTF-8",
        b"PATH=" + os.environb.get(b"PATH", b""),
        b"PWD=" + os.getcwdb(),
    }


async def test_nothing_is_left_in_the_hosts_network(world: World, run_directory: Path) -> None:
    before = _state()
    options = NetworkOptions(pool=1, resolvers=(RESOLVER,))
    async with Networks.opened(run_directory / "n", options, lambda _: None) as networks:
        os.close((await networks.lease("a", parse_network({"mode": "open"}))).tap)
        assert _state() != before
    assert _state() == before
    for name in ("hub.log",):
        (run_directory / "n" / name).unlink()
    (run_directory / "n" / "hub").rmdir()
    (run_directory / "n").rmdir()


def _state() -> object:
    with netlink.Netlink() as links:
        return (
            nftables.run("list ruleset"),
            [link.name for link in links.links()],
            links.routes(),
            Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        )
