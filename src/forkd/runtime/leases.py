"""Which VMs have a network: taken before the VM exists, given back when it is gone."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from forkd.engines.base import Machine, Nic
from forkd.errors import ForkdError, NetworkFailed
from forkd.host.faults import fault_point
from forkd.model.network import Network
from forkd.network.lease import Lease, Networks, NoNetworks, Refused, Usage, no_network
from forkd.runtime.events import EventLog
from forkd.runtime.refusals import Refusals
from forkd.runtime.registry import SandboxRecord

_log = logging.getLogger(__name__)

_USAGE_S = 5.0
_RELEASE_S = 30.0
# The pool is told to have as many as were wanted at once lately, and no more than this.
_MOST_EXPECTED = 256


class Leases:
    """`networks` is set once they are open; until then there are none."""

    def __init__(self, events: EventLog, *, opened_by_name: bool = False) -> None:
        """`opened_by_name`: whether the engine opens taps itself."""
        self.networks: Networks = NoNetworks("the daemon is starting")
        self.refusals = Refusals(self._tell)
        self.ended = Usage()  # of VMs that are gone
        self._events = events
        self._opened_by_name = opened_by_name
        self._owners: dict[str, Mapping[str, str]] = {}  # by VM: whose it is, as fields of an event
        self._addresses: dict[str, str] = {}
        self._lost: set[str] = set()

    @property
    def count(self) -> int:
        return len(self._owners)

    def check(self, network: Network) -> None:
        """Raise HostLacks where it cannot be had, before anything is started."""
        if not network.off:
            self.check_any()

    def check_any(self) -> None:
        if (why := self.networks.why_none()) is not None:
            raise no_network(why)

    def has(self, vm: str) -> bool:
        return vm in self._owners

    def address(self, vm: str) -> str | None:
        """Among the sandboxes, where it is known."""
        return self._addresses.get(vm)

    @property
    def lost(self) -> frozenset[str]:
        """VMs whose network went with the process that served it."""
        return frozenset(self._lost)

    def lose_all(self) -> None:
        self._lost = set(self._owners)

    async def take(self, vm: str, network: Network, names: Sequence[str], **owner: str) -> Lease:
        """`owner`: a sandbox_id or snapshot_tag, whose events its refusals are."""
        self._owners[vm] = owner
        try:
            lease = await self.networks.lease(vm, network, names, vnet_hdr=self._opened_by_name)
        except BaseException as error:
            await self.release(vm)
            if isinstance(error, ForkdError | asyncio.CancelledError):
                raise
            raise NetworkFailed(f"The network of {vm} could not be made") from error
        self._addresses[vm] = lease.address
        self._lost.discard(vm)
        fault_point("network.leased")
        return lease

    def begin(self, ids: Sequence[str], network: Network) -> Batch | None:
        """Those of new sandboxes, all asked for at once; None where they have none."""
        if network.off:
            return None
        self.expect(network, len(ids))
        return Batch(self, {each: self.take(each, network, (each,), sandbox_id=each) for each in ids})

    async def give_up(self, batch: Batch | None, ids: Sequence[str]) -> None:
        """Of sandboxes that did not come to be."""
        if batch is not None:
            await batch.give_up(ids)
            await asyncio.gather(*map(self.release, ids))

    @asynccontextmanager
    async def given(self, lease: Coroutine[Any, Any, Lease] | asyncio.Task[Lease] | None) -> AsyncIterator[Nic | None]:
        """For the start of a VM: our descriptor is closed behind it, and all is given back when it fails."""
        if lease is None:
            yield None
            return
        taken = await lease
        try:
            yield Nic(taken.tap, taken.tap_name, taken.namespace)
        except BaseException:
            await self.release(taken.name)
            raise
        finally:
            _close(taken)

    async def adopt(self, record: SandboxRecord, machine: Machine) -> None:
        """Of a VM that an earlier daemon left. Raises what makes it impossible; nothing is open then."""
        self._owners[record.vm] = {"sandbox_id": record.id}
        try:
            await self._adopt(record, machine)
        except BaseException:
            await self.release(record.vm)
            raise

    async def restore(self, record: SandboxRecord, machine: Machine) -> None:
        """One that was lost. Raises what makes it impossible; it is lost still."""
        self._lost.discard(record.vm)
        try:
            await self._adopt(record, machine)
        except BaseException:
            self._lost.add(record.vm)
            raise

    async def _adopt(self, record: SandboxRecord, machine: Machine) -> None:
        tap = machine.find_tap()
        if tap is None:
            raise NetworkFailed(f"The VM of {record.id} has no network interface")
        try:
            address = await self.networks.adopt(record.vm, tap, record.network, names_of(record))
            self._addresses[record.vm] = address
        finally:
            os.close(tap)

    async def change(self, vm: str, network: Network, names: Sequence[str]) -> None:
        await self.networks.change(vm, network, names)

    async def release(self, vm: str) -> None:
        """Safe to repeat. What fails is told in the log: the VM is gone, or about to be, and nothing of it is open."""
        if self._owners.get(vm) is None:
            return
        usage = await self.usage(vm)
        if self._owners.pop(vm, None) is None:
            return  # somebody else was first
        self.ended += usage
        self.refusals.forget(vm)
        self._addresses.pop(vm, None)
        self._lost.discard(vm)
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self.networks.release(vm)
        except (ForkdError, OSError, TimeoutError) as error:
            _log.warning("The network of %s could not be given back: %s", vm, error)

    async def usage(self, vm: str) -> Usage:
        """Zero where it cannot be told."""
        if not self.has(vm):
            return Usage()
        try:
            async with asyncio.timeout(_USAGE_S):
                return await self.networks.usage(vm)
        except (ForkdError, OSError, TimeoutError) as error:
            _log.debug("What %s used of its network is not known: %s", vm, error)
            return Usage()

    async def total(self) -> Usage:
        """Of all VMs since the daemon started."""
        counted = await asyncio.gather(*(self.usage(vm) for vm in list(self._owners)))
        return sum(counted, self.ended)

    def expect(self, network: Network, count: int) -> None:
        if not network.off:
            self.networks.expect(network, min(count, _MOST_EXPECTED))

    def take_refusal(self, refused: Refused) -> None:
        self.refusals.take(refused)

    def close(self) -> None:
        self.refusals.close()

    def _tell(self, vm: str, data: dict[str, Any]) -> None:
        owner = self._owners.get(vm, {})
        self._events.emit("network.refused", **owner, data=data)


class Batch:
    """The networks of one spawn, on their way. Each is given once, or given up."""

    def __init__(self, leases: Leases, asked: Mapping[str, Coroutine[Any, Any, Lease]]) -> None:
        self._leases = leases
        self._tasks = {each: asyncio.ensure_future(work) for each, work in asked.items()}

    def give(self, sandbox_id: str) -> AbstractAsyncContextManager[Nic | None]:
        return self._leases.given(self._tasks.pop(sandbox_id))

    async def give_up(self, ids: Sequence[str]) -> None:
        """Those that nobody took."""
        tasks = [self._tasks.pop(each) for each in ids if each in self._tasks]
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Lease):
                _close(outcome)


def _close(lease: Lease) -> None:
    if lease.tap >= 0:
        os.close(lease.tap)


def names_of(record: SandboxRecord) -> tuple[str, ...]:
    """By which others of its group find it."""
    return (record.id,) if record.name is None else (record.id, record.name)


def is_leased(record: SandboxRecord) -> bool:
    """Whether its VM needs a network, be it only for ways in."""
    return not record.network.off or bool(record.ports)
