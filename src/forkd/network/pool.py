"""Slots made ahead, some with rules that are expected, so that a sandbox need not wait for one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from forkd.errors import NetworkFailed
from forkd.model.network import NO_NETWORK, Network
from forkd.network import rules
from forkd.network.named import NamedAddresses
from forkd.network.slot import Slot, SlotGone, SlotMaker, TapKind

T = TypeVar("T")

# Before one is made ahead: others want the thread that makes them.
_PAUSE_S = 0.002
# After it, so many times as long as it took: VMs are being started with those that were taken, and need the processor.
_PAUSES, _MOST_PAUSE_S = 10, 0.5
_RETRY_S = 5.0
_MAX_READY = 1024

_log = logging.getLogger(__name__)


class InThread(Protocol):
    def __call__(self, work: Callable[[], T]) -> Coroutine[Any, Any, T]: ...


class Pool:
    def __init__(self, maker: SlotMaker, in_thread: InThread, host_addresses: Callable[[], frozenset[str]]) -> None:
        self._maker, self._in_thread, self._host_addresses = maker, in_thread, host_addresses
        self.ready: deque[Slot] = deque()
        self._slots: set[Slot] = set()  # all that there are, also those that sandboxes have
        self._kind = TapKind()  # as was asked for last: one daemon asks for one
        # Those longest unused first: what is left of the last one may still be going.
        self._free = deque(range(maker.layout.slots))
        self._wanted = 0
        self._expected = NO_NETWORK
        self._refilling: asyncio.Task[None] | None = None
        self._asking = 0

    def want(self, count: int) -> None:
        self._wanted = min(count, _MAX_READY)
        self._refill()

    def expect(self, network: Network, count: int) -> None:
        """Those that are ready get these rules, as long as they have others."""
        self._expected = network
        self.want(max(count, self._wanted))

    async def take(self, kind: TapKind, network: Network) -> Slot:
        """With its rules in force."""
        self._asking, self._kind = self._asking + 1, kind
        try:
            return await self._furnish(self._find(kind, network) or await self._make(kind), network)
        finally:
            self._asking -= 1
            self._refill()

    async def adopt(self, namespace: int, network: Network) -> Slot:
        slot = await self._new(lambda index, addresses: self._maker.adopt(index, namespace, addresses))
        return await self._furnish(slot, network)

    async def give_back(self, slot: Slot) -> None:
        """It is never used again; its number is."""
        self._slots.discard(slot)
        await self._in_thread(lambda: self._maker.remove(slot))
        self._free.append(slot.index)

    async def refresh_all(self) -> None:
        """The host's addresses have changed. What goes wrong in one slot does not leave others with the old ones."""
        for slot in list(self._slots):
            try:
                await self._refresh(slot)
            except SlotGone:
                pass
            except OSError as error:
                _log.error("The host's addresses could not be denied to %s: %s", slot.address, error)

    async def _furnish(self, slot: Slot, network: Network) -> Slot:
        """From the first look on `refresh_all` finds it, so that it misses no address."""
        try:
            await self._refresh(slot)
            await self._load(slot, network)
        except BaseException:
            await self.give_back(slot)
            raise
        return slot

    async def _refresh(self, slot: Slot) -> None:
        """The host's addresses may have changed since it was made."""
        addresses = self._host_addresses()
        if slot.host_addresses != addresses:
            text = rules.render_host_addresses(sorted(addresses))
            await self._in_thread(lambda: self._maker.run(slot, text))
            slot.host_addresses = addresses

    def render_change(self, slot: Slot, network: Network, used_bytes: int, named: NamedAddresses) -> str:
        left = named.left(network, time.monotonic())
        block = self._maker.layout.block
        return rules.render_change(slot.network, network, slot.address, block, used_bytes=used_bytes, named=left)

    async def _load(self, slot: Slot, network: Network) -> None:
        if slot.network == network:
            return
        block = self._maker.layout.block
        if slot.network == NO_NETWORK:
            text = rules.render_policy(network, slot.address, block, used_bytes=slot.used_bytes)
        else:
            text = rules.render_change(slot.network, network, slot.address, block, used_bytes=0, named={})
        await self._in_thread(lambda: self._maker.run(slot, text))
        slot.network = network

    def _find(self, kind: TapKind, network: Network) -> Slot | None:
        fitting = [slot for slot in self.ready if slot.kind == kind]
        best = min(fitting, key=lambda slot: (slot.network != network, slot.network != NO_NETWORK), default=None)
        if best is not None:
            self.ready.remove(best)
        return best

    async def _make(self, kind: TapKind) -> Slot:
        return await self._new(lambda index, addresses: self._maker.make(index, kind, addresses))

    async def _new(self, make: Callable[[int, Sequence[str]], Slot]) -> Slot:
        index, addresses = self._index(), sorted(self._host_addresses())
        try:
            slot = await self._in_thread(lambda: make(index, addresses))
        except BaseException:
            self._free.append(index)
            raise
        self._slots.add(slot)
        return slot

    def _index(self) -> int:
        if not self._free:
            raise NetworkFailed("The sandboxes have all addresses that there are for them", hint="End some")
        return self._free.popleft()

    def _refill(self) -> None:
        if self._refilling is None or self._refilling.done():
            self._refilling = asyncio.ensure_future(self._keep_full())

    async def _keep_full(self) -> None:
        pause_s = _PAUSE_S
        while self._free:
            await asyncio.sleep(pause_s)
            if self._asking:
                continue
            begun = time.monotonic()
            unfit = next((slot for slot in self.ready if slot.kind != self._kind), None)
            slot = next((slot for slot in self.ready if slot.network != self._expected), None)
            try:
                if unfit is not None:
                    self.ready.remove(unfit)
                    await self.give_back(unfit)
                    continue
                if len(self.ready) < self._wanted:
                    slot = await self._make(self._kind)
                    self.ready.append(slot)
                elif slot is None:
                    return
                self.ready.remove(slot)
                with contextlib.ExitStack() as back:
                    back.callback(self.ready.append, slot)
                    await self._load(slot, self._expected)
                pause_s = choose_pause_s(time.monotonic() - begun)
            except OSError as error:
                _log.error("A network could not be made ahead: %s", error)
                await asyncio.sleep(_RETRY_S)


def choose_pause_s(took_s: float) -> float:
    """After one that was made ahead. Pure."""
    return min(max(_PAUSE_S, took_s * _PAUSES), _MOST_PAUSE_S)
