"""Many networks: at once, and one after the other."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_world import RESOLVER, THIRD, Guest, World, host_network, hub_holds, made_world, needs_world

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
        before = held(networks)
        for number in range(CYCLES):
            lease = await networks.lease(f"s{number}", rules if number % 10 else grouped, (f"s{number}",))
            os.close(lease.tap)
            await networks.release(lease.name)
        deadline = time.monotonic() + _SETTLE_S
        while held(networks) != before and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        assert held(networks) == before


def held(networks: Networks) -> object:
    assert networks.hub_pid is not None
    return hub_holds(networks.hub_pid), host_network()
