"""What a VM sends: how soon its first packet is at a server behind the uplink, and how much a second."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import astuple, dataclass, field

from bench.figures import Bound, Family, Figure, Round, Row, Values, ratio, render_failure
from bench.forks import exact_cpu_seconds
from bench.ground import Ground, expect
from bench.leasing import RULES, Site
from bench.wires import (
    NAME,
    NAMED,
    PACKET_PORT,
    SERVER,
    SINK_PORT,
    TLS_PORT,
    PacketClock,
    Sink,
    answering_names,
    made_lan,
    render_hello,
)
from forkd.engines.base import Nic
from forkd.errors import ContractBroken, ForkdError
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_one, new_identities
from forkd.runtime.origin import Template

WAY_MS = 5.0
LEAST_SHARE = 0.6

_CHILD = "a child forked from a template, with a network of the pool; it has sent nothing before"
PACKETS = Family(
    "network.packet",
    "first packet of a child: ",
    _CHILD,
    {
        "frame": Row(
            "sent, by an evaluation in the emulated guest",
            "ms",
            "the kernel has received the frame on the tap; starts when the contract was kept",
        ),
        "way": Row(
            "from its tap to a server behind the uplink",
            "ms",
            "the kernel has received it in the server's network; starts when it received the frame on the tap",
            (
                Bound("first packet from its tap to a server behind the uplink, p50", "<=", WAY_MS, share="p50"),
                Bound("first packet from its tap to a server behind the uplink, p99", "<=", WAY_MS, share="p99"),
            ),
        ),
        "arrival": Row(
            "from the contract to the server, emulation included",
            "ms",
            "the kernel has received it in the server's network; starts when the contract was kept",
        ),
        "ok": Row(
            "children whose first packet arrived",
            "children",
            "the last is killed",
            (Bound("all first packets arrive in every round", "=", "packets", lambda settings: [dict(settings)]),),
        ),
    },
)

BARE, SLOT, GATE = "bare", "slot", "gate"
ROADS = {BARE: "on a bare tap", SLOT: "through its network and the uplink", GATE: "through the gate for TLS"}
_SENT = "the server has the last byte; starts when it has the connection"
SENDING = Family(
    "network.send",
    "throughput out ",
    "a running child; the same one in all ways, in turns",
    {
        "{road}": Row("{by}", "MiB/s", _SENT),
        "cpu.{road}": Row("{by}: CPU time of the VMM per MiB", "ms", _SENT),
        "ratio.{road}": ratio(
            f"{{by}} / {ROADS[BARE]}",
            Bound(f"throughput out {{by}} / {ROADS[BARE]}", ">=", LEAST_SHARE, lambda _: [on_road(SLOT)]),
        ),
    },
)


def on_road(road: str) -> dict[str, str]:
    return {"road": road, "by": ROADS[road]}


@dataclass(frozen=True)
class PacketSpec:
    """`packets`: children that send one; `transfers` of `mib` in each way."""

    packets: int = 20
    transfers: int = 3
    mib: int = 32


@dataclass(frozen=True)
class Sent:
    """One transfer; `cpu_ms` of the VMM per MiB."""

    mib_per_s: float
    cpu_ms: float


_SEND_ONE = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sent = sock.sendto(bytes.fromhex("{content}"), ("{address}", {port}))
sent
"""
# A name is looked for where one is given, as programs do; the answer says how much has arrived.
_SENDER = """
import socket
def send(to, port, first, mib):
    piece = bytes(1 << 16)
    with socket.create_connection((socket.gethostbyname(to), port), 60) as sock:
        sock.sendall(first)
        for _ in range(mib << 4):
            sock.sendall(piece)
        sock.shutdown(socket.SHUT_WR)
        with sock.makefile("rb") as answer:
            return int.from_bytes(answer.read(8), "big")
"""


@dataclass
class _Packets:
    values: dict[str, list[float]] = field(default_factory=lambda: {"frame": [], "way": [], "arrival": []})
    failures: list[str] = field(default_factory=list)


async def measure_packets(ground: Ground, template: Template, site: Site, spec: PacketSpec, title: str) -> Round:
    """One child after the other. A packet that does not arrive is a finding."""
    packets = _Packets()
    with PacketClock.of_server(site.wires.beyond) as server:
        for number in range(1, spec.packets + 1):
            ground.progress.line(f"{number} of {spec.packets}")
            try:
                await _send_first(ground, template, site, server, packets)
            except ForkdError as error:
                packets.failures.append(render_failure(f"{title}: packet {number}", error))
    values: Values = {**packets.values, "ok": len(packets.values["arrival"])}
    return Round(PACKETS.read(values), tuple(packets.failures))


async def _send_first(ground: Ground, template: Template, site: Site, server: PacketClock, packets: _Packets) -> None:
    content = secrets.token_bytes(16)
    code = _SEND_ONE.format(content=content.hex(), address=SERVER, port=PACKET_PORT)
    async with networked(ground, template, site) as (child, nic):
        with PacketClock.of_tap(nic.namespace, nic.tap_name) as tap:
            # Stamps of packets are of another clock than ours.
            kept_s = child.machine.phases.steps["contract"] + time.time() - time.monotonic()
            await expect(child.agent, code, len(content))
            sent_s, arrived_s = await tap.find(content), await server.find(content)
    times_s = {"frame": sent_s - kept_s, "way": arrived_s - sent_s, "arrival": arrived_s - kept_s}
    for name, value_s in times_s.items():
        packets.values[name].append(value_s * 1000)


@asynccontextmanager
async def networked(ground: Ground, template: Template, site: Site) -> AsyncIterator[tuple[Child, Nic]]:
    """A child as the daemon makes one with a network of its pool. Its tap stays open, to be plugged in again."""
    await site.ready()
    identity = new_identities(1)[0]
    name = identity.sandbox_id
    try:
        async with site.leases.given(site.leases.take(name, RULES, (name,), sandbox_id=name)) as nic:
            assert nic is not None
            child = await fork_one(
                ground.engine, ground.frozen, identity, ground.directory, template=template, nic=nic, network=True
            )
            try:
                yield child, nic
            finally:
                await child.kill()
    finally:
        await site.leases.release(name)


async def measure_sending(ground: Ground, template: Template, site: Site, spec: PacketSpec, title: str) -> Round:
    """One VM, plugged from one tap into the other."""
    sent: dict[str, list[Sent]] = {road: [] for road in ROADS}
    try:
        async with networked(ground, template, site) as (child, nic), answering_names(site.wires.beyond):
            with ExitStack() as stack:
                lan = stack.enter_context(made_lan())
                beyond = site.wires.beyond
                sinks = {
                    BARE: stack.enter_context(Sink(lan.namespace, SERVER, SINK_PORT)),
                    SLOT: stack.enter_context(Sink(beyond, SERVER, SINK_PORT)),
                    GATE: stack.enter_context(Sink(beyond, NAMED, TLS_PORT)),
                }
                await expect(child.agent, _SENDER + "callable(send)", True)
                for number in range(spec.transfers):
                    for road in turned(ROADS, number):
                        ground.progress.line(f"{number + 1} of {spec.transfers}, {ROADS[road]}")
                        await child.machine.plug(lan.nic if road == BARE else nic)
                        sent[road].append(await _send(child, road, sinks[road], spec.mib))
    except ForkdError as error:
        return Round.failed(title, error, read_sending(sent))
    return Round(read_sending(sent))


async def _send(child: Child, road: str, sink: Sink, mib: int) -> Sent:
    first = render_hello() if road == GATE else b""
    to, port = (NAME, TLS_PORT) if road == GATE else (SERVER, SINK_PORT)
    wanted = len(first) + (mib << 20)
    before_s = exact_cpu_seconds(child.machine.pid)
    await expect(child.agent, f"send({to!r}, {port}, {first!r}, {mib})", wanted)
    received = sink.take()
    if received.size_bytes != wanted:
        raise ContractBroken(f"The server has {received.size_bytes} bytes of {wanted}")
    return Sent(received.mib_per_s, (exact_cpu_seconds(child.machine.pid) - before_s) * 1000 / mib)


def turned(all_of: Iterable[str], by: int) -> list[str]:
    """Each begins once: what comes first may meet a colder machine."""
    names = list(all_of)
    at = by % len(names)
    return names[at:] + names[:at]


def read_sending(sent: Mapping[str, Sequence[Sent]]) -> dict[Figure, float]:
    """Medians, of ratios those within each turn; what was never sent has none."""
    readings: dict[Figure, float] = {}
    for road, turns in sent.items():
        if turns:
            rate, cpu_ms = (statistics.median(values) for values in zip(*map(astuple, turns), strict=True))
            readings |= SENDING.read({"{road}": rate, "cpu.{road}": cpu_ms}, **on_road(road))
        # A turn that failed is the last, and may lack some.
        shares = [one.mib_per_s / bare.mib_per_s for one, bare in zip(turns, sent[BARE], strict=False)]
        if road != BARE and shares:
            readings |= SENDING.read({"ratio.{road}": statistics.median(shares)}, **on_road(road))
    return readings
