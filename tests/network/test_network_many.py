"""Many networks: at once, and one after the other."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_world import RESOLVER, THIRD, Guest, World, made_world, needs_world

from forkd.host import netlink, nftables
from forkd.model.network import parse_network
from forkd.network.networks import NetworkOptions, Networks

pytestmark = [needs_world, pytest.mark.usefixtures("nothing_left")]

AT_ONCE = 500
CYCLES = 1000
_SETTLE_S = 20.0


@pytest.fixture
def world() -> Iterator[World]:
    with made_world() as world:
        yield world


async def links_in_hub(networks: Networks) -> int:
    """Of the hub, seen from a process beside it: its threads' own network."""
    tasks = Path(f"/proc/{networks.hub_pid}/task").iterdir()
    ours = os.stat("/proc/self/ns/net").st_ino
    for task in tasks:
        if os.stat(task / "ns/net").st_ino != ours:
            return len((task / "net/dev").read_text().splitlines()) - 2
    raise AssertionError("The hub has no network of its own")


async def test_five_hundred_at_once_each_with_a_way_out(world: World, tmp_path: Path) -> None:
    options = NetworkOptions(pool=4, resolvers=(RESOLVER,))
    rules = parse_network({"allow": ["allowed.test", THIRD]})
    async with Networks.opened(tmp_path, options, lambda _: None) as networks:
        leases = [await networks.lease(f"s{number}", rules) for number in range(AT_ONCE)]
        assert len({lease.address for lease in leases}) == AT_ONCE
        for lease in (leases[0], leases[AT_ONCE // 2], leases[-1]):
            with Guest(lease.tap) as guest:
                assert await asyncio.to_thread(guest.fetch, THIRD) == 5
                assert (await asyncio.to_thread(guest.ask, "allowed.test"))[0] == "NOERROR"
        for lease in leases:
            os.close(lease.tap)
        await asyncio.gather(*(networks.release(lease.name) for lease in leases))


async def test_a_thousand_leases_and_releases_leave_nothing(world: World, tmp_path: Path) -> None:
    options = NetworkOptions(pool=4, resolvers=(RESOLVER,))
    rules = parse_network({"allow": ["allowed.test", THIRD]})
    grouped = parse_network({"allow": ["allowed.test", THIRD], "group": "team"})
    async with Networks.opened(tmp_path, options, lambda _: None) as networks:
        os.close((await networks.lease("first", rules)).tap)
        await networks.release("first")
        await asyncio.sleep(1)
        before = await held(networks)
        for number in range(CYCLES):
            lease = await networks.lease(f"s{number}", rules if number % 10 else grouped, (f"s{number}",))
            os.close(lease.tap)
            await networks.release(lease.name)
        after = await held(networks)
        for _ in range(int(_SETTLE_S / 0.2)):
            if after == before:
                break
            await asyncio.sleep(0.2)
            after = await held(networks)
        assert after == before


async def held(networks: Networks) -> tuple[int, int, int, str]:
    """Descriptors of the hub, links in it, links and rules of the host."""
    descriptors = len(os.listdir(f"/proc/{networks.hub_pid}/fd"))
    with netlink.Netlink() as links:
        here = len(links.links())
    return descriptors, await links_in_hub(networks), here, nftables.run("list ruleset")
