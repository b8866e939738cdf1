"""The network of a sandbox while it runs: shown, changed, and ports of its guest exposed.

The row says first what is to be, so that the next daemon knows; what fails leaves the sandbox as it was, and never with
more than it may have.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass

from forkd.engines.base import Machine
from forkd.errors import ForkdError, Unsupported
from forkd.host.faults import fault_point
from forkd.model.network import NO_NETWORK, Network
from forkd.model.sandbox import State
from forkd.network.lease import Usage
from forkd.runtime.child import LiveSandbox
from forkd.runtime.exposed import Exposed
from forkd.runtime.leases import Leases, is_leased, names_of
from forkd.runtime.registry import SandboxRecord
from forkd.runtime.sandboxes import Sandboxes, not_running

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NetworkView:
    usage: Usage
    address: str | None  # among the sandboxes


class SandboxNetworks:
    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._leases: Leases = sandboxes.leases

    async def look_at(self, record: SandboxRecord) -> NetworkView | None:
        """None: it has none."""
        if not self._leases.has(record.vm):
            return None
        return NetworkView(await self._leases.usage(record.vm), self._leases.address(record.vm))

    # Changing

    async def change(self, sandbox_id: str, network: Network) -> SandboxRecord:
        """All or nothing. A paused sandbox has to be resumed first: its guest could not be told."""
        self._leases.check(network)
        return await self._sandboxes.finished(self._change(sandbox_id, network))

    async def _change(self, sandbox_id: str, network: Network) -> SandboxRecord:
        live = self._sandboxes.held(sandbox_id)
        async with live.lock:
            record = self._check_running(live)
            if network != record.network:
                self._record(record, network)
                fault_point("network.recorded")
                try:
                    await self._apply(live, record, network)
                except BaseException:
                    await self._go_back(live, record)
                    raise
                self._sandboxes.events.emit("network.changed", sandbox_id=record.id, data=network.as_json())
        return self._sandboxes.get(live.id)

    async def _go_back(self, live: LiveSandbox, record: SandboxRecord) -> None:
        """To what it had; where that fails too, to none."""
        if self._leases.has(record.vm) and record.vm not in self._leases.lost:
            try:
                await self._leases.change(record.vm, record.network, names_of(record))
            except (ForkdError, OSError) as error:
                await self.lose(record, live.machine, error)
                return
        self._record(record, record.network)

    async def lose(self, record: SandboxRecord, machine: Machine, error: Exception) -> None:
        """Close what cannot be as it should: the sandbox lives on without a network, and without ways in."""
        _log.warning("Sandbox %s has no network any more: %s", record.id, error)
        await self._leases.release(record.vm)
        await _unplug(machine)
        self._sandboxes.exposed.close_of(record.id)
        with self._sandboxes.registry.transaction(durable=True):
            self._sandboxes.registry.change(record.id, network=NO_NETWORK, ports={})
            self._sandboxes.events.emit("network.lost", sandbox_id=record.id, data={"reason": str(error)})

    def _check_running(self, live: LiveSandbox) -> SandboxRecord:
        record = self._sandboxes.get(live.id)
        if live.state is not State.RUNNING:
            raise not_running(record)
        return record

    def _record(self, record: SandboxRecord, network: Network) -> None:
        with self._sandboxes.registry.transaction(durable=True):
            self._sandboxes.registry.change(record.id, network=network)

    async def _apply(self, live: LiveSandbox, record: SandboxRecord, network: Network) -> None:
        if not self._leases.has(record.vm):
            await self._plug(live, record, network)
        elif network.off:
            await self._close(live, record)
        else:
            await self._leases.change(record.vm, network, names_of(record))
            if record.network.off:
                async with live.answering():
                    await live.agent.set_network(True)

    async def _plug(self, live: LiveSandbox, record: SandboxRecord, network: Network) -> None:
        """An interface for a VM that has none: the rules are in force before it can send anything."""
        lease = self._leases.take(record.vm, network, names_of(record), sandbox_id=record.id)
        async with self._leases.given(lease) as nic:
            try:
                await live.machine.plug(nic)
                fault_point("network.plugged")
                if not network.off:
                    async with live.answering():
                        await live.agent.set_network(True)
            except BaseException:
                await _unplug(live.machine)
                raise

    async def _close(self, live: LiveSandbox, record: SandboxRecord) -> None:
        """Nothing leaves it once the rules are gone; what the guest and its VMM make of that is only tidiness."""
        await self._leases.change(record.vm, NO_NETWORK, names_of(record))
        try:
            async with live.answering():
                await live.agent.set_network(False)
        except ForkdError as error:
            _log.warning("The guest of %s was not told that it has no network: %s", record.id, error.message)
        if not record.ports:
            await self._unlease(live, record)

    async def _unlease(self, live: LiveSandbox, record: SandboxRecord) -> None:
        """One that cannot be unplugged keeps its place, where nothing passes, and may be given rules again."""
        if await _unplug(live.machine):
            await self._leases.release(record.vm)

    # Ways in

    def ports(self, sandbox_id: str) -> list[Exposed]:
        return self._sandboxes.exposed.list(self._sandboxes.get(sandbox_id).id)

    async def expose(
        self, sandbox_id: str, port: int, host_port: int | None = None, *, anyone: bool = False
    ) -> Exposed:
        """Of a sandbox without a network, too: nothing but this way in is there then."""
        self._leases.check_any()
        return await self._sandboxes.finished(self._expose(sandbox_id, port, host_port, anyone))

    async def _expose(self, sandbox_id: str, port: int, host_port: int | None, anyone: bool) -> Exposed:
        live, exposed = self._sandboxes.held(sandbox_id), self._sandboxes.exposed
        async with live.lock:
            record = self._check_running(live)
            made = exposed.open(record.id, port, host_port, anyone=anyone)
            try:
                self._record_ports(record.id, [*self.ports(record.id)])
                fault_point("port.recorded")
                if not self._leases.has(record.vm):
                    await self._plug(live, record, record.network)
                exposed.serve(record.id, port)
            except BaseException:
                exposed.close(record.id, port)
                self._record_ports(record.id, self.ports(record.id))
                raise
            data = {"port": port, "host_port": made.host_port, "anyone": anyone}
            self._sandboxes.events.emit("port.exposed", sandbox_id=record.id, data=data)
        return made

    async def close_port(self, sandbox_id: str, port: int) -> None:
        await self._sandboxes.finished(self._close_port(sandbox_id, port))

    async def _close_port(self, sandbox_id: str, port: int) -> None:
        live = self._sandboxes.held(sandbox_id)
        async with live.lock:
            self._sandboxes.exposed.close(live.id, port)
            self._record_ports(live.id, self.ports(live.id))
            self._sandboxes.events.emit("port.closed", sandbox_id=live.id, data={"port": port})
            record = self._sandboxes.get(live.id)
            if not is_leased(record) and self._leases.has(record.vm):
                await self._unlease(live, record)

    def _record_ports(self, sandbox_id: str, ports: list[Exposed]) -> None:
        rows = {str(each.port): asdict(each) for each in ports}
        with self._sandboxes.registry.transaction(durable=True):
            self._sandboxes.registry.change(sandbox_id, ports=rows)

    # After a restart

    async def adopt(self, record: SandboxRecord, machine: Machine) -> None:
        """Take over what an earlier daemon gave. Where that fails the sandbox lives on without a network."""
        # A daemon may have died before it could record, or undo, what it did.
        if not is_leased(record) and await _unplug(machine):
            return
        try:
            await self._leases.adopt(record, machine)
        except (ForkdError, OSError) as error:
            await self.lose(record, machine, error)
            return
        self._reopen(record)

    def _reopen(self, record: SandboxRecord) -> None:
        for exposed in parse_ports(record):
            try:
                self._sandboxes.exposed.open(record.id, exposed.port, exposed.host_port, anyone=exposed.anyone)
                self._sandboxes.exposed.serve(record.id, exposed.port)
            except ForkdError as error:
                _log.warning("Port %d of %s is not exposed any more: %s", exposed.port, record.id, error.message)
                data = {"port": exposed.port, "reason": error.message}
                self._sandboxes.events.emit("port.closed", sandbox_id=record.id, data=data)
        self._record_ports(record.id, self.ports(record.id))


def parse_ports(record: SandboxRecord) -> list[Exposed]:
    """As the registry has them."""
    return [Exposed(each["port"], each["host_port"], each["anyone"]) for each in record.ports.values()]


async def _unplug(machine: Machine) -> bool:
    """Whether its engine could. Else its tap leads nowhere once it is given back, so that it can do no harm."""
    try:
        await machine.plug(None)
    except Unsupported:
        return False
    except (ForkdError, OSError) as error:
        _log.warning("The VM in %s keeps an interface that leads nowhere: %s", machine.directory.name, error)
    return True
