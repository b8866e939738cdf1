"""Networks as the daemon has them, with a pool that is full: what one costs to make, to lease and to give back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.figures import Family, Figure, Row, Values
from bench.forks import exact_cpu_seconds, unique_mib
from bench.wires import NAME, SERVER, Wires
from forkd.errors import NetworkFailed
from forkd.host.system import parse_kib_table
from forkd.model.network import Network, parse_network
from forkd.network.lease import Lease, NetworkOptions
from forkd.network.networks import Networks
from forkd.runtime.events import EventLog
from forkd.runtime.leases import Leases
from forkd.runtime.registry import Registry

# A rule for an address and one for a name, which is what most have.
RULES = parse_network({"allow": [SERVER, NAME]})
OTHER_RULES = parse_network({"allow": ["example.org", f"{SERVER}:443"], "max_bytes": 1 << 30})

# The hub has nothing to do once it has used no more than this of a core for as long as that.
_REST_S, _REST_CPU_S = 0.6, 0.005
_REST_DEADLINE_S = 60.0
_KERNEL = ("Slab", "Percpu", "KernelStack")
_MIB = 2**20

_HUB = "the hub runs, with no other networks"
_POOL = "the pool is full, its networks with rules that are expected; the hub at rest"
_IN_FORCE = "its rules are in force and its tap is here; starts with the call"
LEASES = Family(
    "network.lease",
    "network: ",
    _POOL,
    {
        "first": Row("leased first of all, the hub started for it", "ms", _IN_FORCE, prepared="no hub"),
        "made": Row("made and leased, the pool being empty", "ms", _IN_FORCE, prepared=_HUB),
        "same": Row("leased from the pool, with the rules it has", "ms", _IN_FORCE),
        "other": Row("leased from the pool, with other rules", "ms", _IN_FORCE),
        "changed": Row("changed to other rules", "ms", "they are in force; starts with the call", prepared="a lease"),
        "released": Row("released", "ms", "nothing passes and its number is free", prepared="a lease nobody uses"),
        "hub_memory": Row("memory of the hub without any", "MiB", "the hub is at rest", prepared=_HUB),
        "memory": Row("memory of the hub for each", "MiB", "all are leased; more than before, mean", prepared=_HUB),
        "kernel": Row(
            "memory of the kernel for each",
            "MiB",
            "all are leased; slabs, per-CPU areas and stacks of the machine that are more than before, mean",
            prepared=_HUB,
        ),
    },
)


@dataclass(frozen=True)
class Site:
    """`networks` keeps `pool` ready with `RULES`; `leases` is what the daemon takes them by."""

    wires: Wires
    networks: Networks
    leases: Leases
    pool: int

    async def ready(self) -> None:
        """Until the pool is full and the hub has nothing to do."""
        self.networks.expect(RULES, self.pool)
        await settle_hub(self.networks)

    def hub_cpu_s(self) -> float:
        return exact_cpu_seconds(self.networks.hub_pid) if self.networks.hub_pid else 0.0


@contextlib.asynccontextmanager
async def opened_site(wires: Wires, directory: Path, pool: int) -> AsyncIterator[Site]:
    """On the host of `wires`, where the calling thread has to be. `directory` is to be removed by the caller."""
    options = NetworkOptions(uplink="veth", pool=pool, resolvers=(SERVER,))
    with contextlib.closing(Registry(directory / "registry.db")) as registry:
        leases = Leases(EventLog(registry))
        async with Networks.opened(directory / "networks", options, leases.take_refusal) as networks:
            if (why := networks.why_none()) is not None:
                raise NetworkFailed(f"No network can be had in a namespace made for it: {why}")
            leases.networks = networks
            # The first one starts the hub, which fills the pool.
            await _release(networks, [lease for lease, _ in await _take(networks, RULES, 1)])
            try:
                yield Site(wires, networks, leases, pool)
            finally:
                leases.close()


async def settle_hub(networks: Networks) -> None:
    pid = networks.hub_pid
    deadline = time.monotonic() + _REST_DEADLINE_S
    while pid is not None:
        before = exact_cpu_seconds(pid)
        await asyncio.sleep(_REST_S)
        if exact_cpu_seconds(pid) - before <= _REST_CPU_S:
            return
        if time.monotonic() > deadline:
            raise NetworkFailed(f"The hub was busy for {_REST_DEADLINE_S:g} s")


async def measure_leases(site: Site, directory: Path, count: int) -> dict[Figure, float]:
    """`count` of each kind; those that are made have a hub of their own, without a pool."""
    values: Values = {}
    released: list[float] = []
    for kind, network in (("same", RULES), ("other", OTHER_RULES)):
        await site.ready()
        taken = await _take(site.networks, network, min(count, site.pool))
        values[kind] = [took_ms for _, took_ms in taken]
        if kind == "same":
            values["changed"] = await _change(site.networks, taken, OTHER_RULES)
        released += await _release(site.networks, [lease for lease, _ in taken])
    options = NetworkOptions(uplink="veth", pool=0, resolvers=(SERVER,))
    async with Networks.opened(directory / "made", options, lambda _: None) as networks:
        values |= await _measure_made(networks, count, released)
    values["released"] = released
    await site.ready()
    return LEASES.read(values)


async def _measure_made(networks: Networks, count: int, released: list[float]) -> Values:
    first = await _take(networks, RULES, 1)
    released += await _release(networks, [lease for lease, _ in first])
    await settle_hub(networks)
    pid = networks.hub_pid
    assert pid is not None
    memory, kernel = unique_mib(pid), kernel_mib()
    taken = await _take(networks, RULES, count)
    values: Values = {
        "first": first[0][1],
        "made": [took_ms for _, took_ms in taken],
        "hub_memory": memory,
        "memory": (unique_mib(pid) - memory) / count,
        "kernel": (kernel_mib() - kernel) / count,
    }
    released += await _release(networks, [lease for lease, _ in taken])
    return values


async def _take(networks: Networks, network: Network, count: int) -> list[tuple[Lease, float]]:
    """One after the other, each with its milliseconds. What holds its tap is not measured."""
    taken = []
    for number in range(count):
        begun = time.monotonic()
        lease = await networks.lease(f"lease-{number}", network)
        taken.append((lease, (time.monotonic() - begun) * 1000))
        os.close(lease.tap)
    return taken


async def _change(networks: Networks, taken: Sequence[tuple[Lease, float]], network: Network) -> list[float]:
    times = []
    for lease, _ in taken:
        begun = time.monotonic()
        await networks.change(lease.name, network)
        times.append((time.monotonic() - begun) * 1000)
    return times


async def _release(networks: Networks, leases: Sequence[Lease]) -> list[float]:
    times = []
    for lease in leases:
        begun = time.monotonic()
        await networks.release(lease.name)
        times.append((time.monotonic() - begun) * 1000)
    return times


def kernel_mib() -> float:
    """Of the whole machine: that of namespaces, links and rules belongs to no process."""
    table = parse_kib_table(Path("/proc/meminfo").read_text())
    return sum(table.get(name, 0) for name in _KERNEL) / _MIB
