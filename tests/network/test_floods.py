"""A guest that asks for too much: it is bounded, nothing is opened for it, and another one is served meanwhile."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import dns.message
import pytest
from support_world import OTHER, RESOLVER, THIRD, WEB, Guest, World, made_world, needs_world

from forkd.host import netns
from forkd.model.network import GATEWAY_ADDRESS, parse_network
from forkd.network import rules
from forkd.network.lease import Refused
from forkd.network.networks import NetworkOptions, Networks

pytestmark = [needs_world, pytest.mark.usefixtures("nothing_left")]

RULES = {"allow": ["allowed.test", "*.allowed.test", THIRD]}
OF_ONE_NAME = 128
TIMES = 3000


@pytest.fixture
def world() -> Iterator[World]:
    with made_world() as world:
        yield world


@contextlib.asynccontextmanager
async def guests(networks: Networks, *names: str) -> AsyncIterator[list[Guest]]:
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for name in names:
            lease = await networks.lease(name, parse_network(RULES))
            made.append(stack.enter_context(Guest(lease.tap)))
            os.close(lease.tap)
        yield made


async def test_a_full_set_of_names_is_servfail_and_lets_nothing_more_through(world: World, tmp_path: Path) -> None:
    names = rules.MAX_NAMED // 8  # an answer has more addresses than that needs
    for number in range(names):
        found = [("A", f"8.8.{number}.{each}") for each in range(OF_ONE_NAME)]
        world.records[f"n{number}.allowed.test"] = found
    options = NetworkOptions("veth", pool=1, resolvers=(RESOLVER,))
    async with Networks.opened(tmp_path, options, lambda _: None) as networks, guests(networks, "a") as [guest]:
        for number in range(names):
            code, _ = await asyncio.to_thread(guest.ask, f"n{number}.allowed.test", tcp=True)
            if code != "NOERROR":
                break
        assert code == "SERVFAIL" and number
        for last in (0, OF_ONE_NAME - 1):
            with pytest.raises(ConnectionRefusedError):
                await asyncio.to_thread(guest.connect, f"8.8.{number}.{last}", 80)
        assert await asyncio.to_thread(guest.fetch, THIRD) == 5


def ask_often(guest: Guest) -> None:
    with netns.socket_inside(guest.namespace, socket.SOCK_DGRAM) as sock:
        sock.connect((GATEWAY_ADDRESS, 53))
        sock.setblocking(False)
        for number in range(TIMES):
            with contextlib.suppress(OSError):
                sock.send(dns.message.make_query(f"x{number}.evil.test", "A").to_wire())


def send_often(guest: Guest) -> None:
    with netns.socket_inside(guest.namespace, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        for number in range(TIMES):
            with contextlib.suppress(OSError):
                sock.sendto(b"x", (OTHER, 1 + number))


def connect_often(guest: Guest) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(TIMES // 10):
            sock = stack.enter_context(netns.socket_inside(guest.namespace, socket.SOCK_STREAM))
            sock.setblocking(False)
            sock.connect_ex((WEB, 443))


@pytest.mark.parametrize("flood", [ask_often, send_often, connect_often])
async def test_another_sandbox_is_served_while_one_floods(
    world: World, tmp_path: Path, flood: Callable[[Guest], None]
) -> None:
    refused: list[Refused] = []
    options = NetworkOptions("veth", pool=2, resolvers=(RESOLVER,))
    async with (
        Networks.opened(tmp_path, options, refused.append) as networks,
        guests(networks, "loud", "quiet") as [loud, quiet],
    ):
        assert (await asyncio.to_thread(loud.ask, "allowed.test"))[0] == "NOERROR"
        flooding = asyncio.ensure_future(asyncio.to_thread(flood, loud))
        while not flooding.done():
            assert await asyncio.to_thread(quiet.ask, "allowed.test") == ("NOERROR", [WEB])
            assert await asyncio.to_thread(quiet.fetch_tls, WEB, "allowed.test") == 5
            await networks.usage("quiet")
        await flooding
        assert await asyncio.to_thread(quiet.fetch, THIRD) == 5
        assert all(each.name == "loud" for each in refused) and len(refused) < TIMES
