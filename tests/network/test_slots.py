"""Slots and the pool that makes them: real namespaces, in a thread of our own instead of the hub's."""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Network
from typing import TypeVar

import pytest
from support_world import HOST, needs_world

from forkd.host import netns, nftables
from forkd.model.network import NO_NETWORK, parse_network
from forkd.network.layout import Layout
from forkd.network.pool import Pool
from forkd.network.slot import Slot, SlotGone, SlotMaker, TapKind

pytestmark = [needs_world, pytest.mark.usefixtures("nothing_left")]

T = TypeVar("T")
LATER = "203.0.113.77"
OPEN = parse_network("open")
BY_NAME = TapKind(vnet_hdr=True)


class Namespaces:
    """The thread that owns them, and the addresses that the host has."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self.addresses = frozenset({HOST})
        self.after: Callable[[], None] = lambda: None  # whatever is done there
        self.maker = self.do(self._begin)
        self.pool = Pool(self.maker, self.in_thread, lambda: self.addresses)

    def _begin(self) -> SlotMaker:
        netns.enter_new()
        return SlotMaker(Layout(IPv4Network("100.127.240.0/20")))

    def do(self, work: Callable[[], T]) -> T:
        return self._thread.submit(work).result()

    async def in_thread(self, work: Callable[[], T]) -> T:
        done = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        self.after()
        return done

    def get_later(self) -> None:
        self.addresses = frozenset({HOST, LATER})

    def denies(self, slot: Slot, address: str) -> bool:
        def look() -> bool:
            with self.maker.inside(slot):
                return address in nftables.run("list set ip forkd host")

        return self.do(look)

    def close(self) -> None:
        self._thread.shutdown()
        # The hub ends with both.
        self.maker._hub.close()
        os.close(self.maker._home)


@pytest.fixture
def there() -> Iterator[Namespaces]:
    namespaces = Namespaces()
    yield namespaces
    namespaces.close()


def test_a_removed_slot_is_never_entered_again_whoever_has_its_descriptor_now(there: Namespaces) -> None:
    removed = there.do(lambda: there.maker.make(0, TapKind(), []))
    other = there.do(lambda: there.maker.make(1, TapKind(), []))
    there.do(lambda: there.maker.remove(removed))
    os.dup2(other.namespace, removed.namespace)
    with pytest.raises(SlotGone):
        there.do(lambda: there.maker.run(removed, "add table ip stray"))
    os.close(removed.namespace)
    there.do(lambda: there.maker.remove(other))


async def test_a_slot_that_goes_meanwhile_leaves_no_other_without_the_hosts_new_address(there: Namespaces) -> None:
    slots = [await there.pool.take(TapKind(), OPEN) for _ in range(8)]
    there.get_later()
    telling = asyncio.ensure_future(there.pool.refresh_all())
    await asyncio.sleep(0)
    for slot in slots[::2]:
        await there.pool.give_back(slot)
    await telling
    assert all(there.denies(slot, LATER) for slot in slots[1::2])
    for slot in slots[1::2]:
        await there.pool.give_back(slot)


async def test_an_address_that_the_host_gets_while_a_slot_is_made_is_denied(there: Namespaces) -> None:
    there.after = there.get_later
    slot = await there.pool.take(TapKind(), OPEN)
    assert there.denies(slot, LATER)
    await there.pool.give_back(slot)


async def test_an_address_that_the_host_gets_while_a_slot_is_taken_over_is_denied(there: Namespaces) -> None:
    before = await there.pool.take(TapKind(), NO_NETWORK)
    tap, before.tap = before.tap, None
    namespace = os.dup(before.namespace)
    await there.pool.give_back(before)
    there.after = there.get_later
    slot = await there.pool.adopt(namespace, OPEN)
    assert there.denies(slot, LATER)
    await there.pool.give_back(slot)
    assert tap is not None
    os.close(tap)


@pytest.mark.parametrize("kind", [TapKind(), BY_NAME])
async def test_those_made_ahead_are_of_the_kind_that_is_asked_for(there: Namespaces, kind: TapKind) -> None:
    there.pool.want(3)
    await until(lambda: len(there.pool.ready) == 3)
    slot = await there.pool.take(kind, OPEN)
    await until(lambda: [each.kind for each in there.pool.ready] == [kind] * 3)
    there.pool.want(0)
    for each in (slot, *there.pool.ready):
        await there.pool.give_back(each)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)
