"""Ten thousand packets against real rules, compared with a model of what may pass that shares nothing with them.

Frames are written to taps as a hostile guest would, and what leaves the host is read on the wire behind it.
"""

import asyncio
import ipaddress
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support_world import HOST, OTHER, PRIVATE, RESOLVER, ROUTER, WEB, Guest, World, made_world, needs_world

from forkd.host import netns
from forkd.model.network import GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, parse_network
from forkd.network.networks import NetworkOptions, Networks

pytestmark = [needs_world, pytest.mark.usefixtures("nothing_left")]

PACKETS = 10_000
_MAGIC = b"forkd packet "
_SETTLE_S = 0.5
_SYN, _ACK, _RST, _FIN, _PSH = 2, 16, 4, 1, 8
_FLAGS = (_SYN,) * 12 + (_ACK, _SYN | _ACK, _FIN, _RST, _PSH | _ACK, _FIN | _ACK, 0, 63, _SYN | _FIN, _SYN | _RST)
_PORTS = (80, 80, 443, 53, 22, 25, 8000, 8001, 8050, 8100, 8101, 1, 65535)
_ADDRESSES = (
    *(
        WEB,
        WEB,
        OTHER,
        OTHER,
        "203.0.113.30",
        "203.0.113.127",
        "203.0.113.128",
        "203.0.113.255",
        "198.51.100.7",
        "8.8.8.8",
    ),
    *(PRIVATE, "10.1.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254"),
    *(
        "100.64.0.1",
        "100.127.240.16",
        "100.127.240.17",
        "100.127.240.2",
        "100.127.240.1",
        "100.127.240.5",
        "198.18.0.1",
    ),
    *(HOST, "127.0.0.1", "0.0.0.0", "0.1.2.3", "192.0.0.1", "192.0.0.2", "192.0.0.3", "224.0.0.251", "239.1.1.1"),
    *("240.0.0.1", "255.255.255.255"),
)
_BLOCK = "100.127.240.0/20"
_NEVER = ("0.0.0.0/8", "127.0.0.0/8", "192.0.0.0/24", "224.0.0.0/4", "240.0.0.0/4", _BLOCK)
_NOT_PUBLIC = ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "198.18.0.0/15")


@dataclass(frozen=True)
class Policy:
    """What a network allows, in the words of this test: ranges with ports, None for all with echo."""

    network: dict[str, object]
    allow: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    deny: tuple[tuple[str, tuple[int, int] | None], ...] = ()
    named: tuple[tuple[str, tuple[int, int]], ...] = ()
    public: bool = False
    wide: tuple[str, ...] = ()


POLICIES = (
    Policy({"allow": ["allowed.test", "other.test:8000-8001"]}, named=((WEB, (80, 80)), (OTHER, (8000, 8001)))),
    Policy(
        {"allow": ["203.0.113.0/24:80,8000-8100"]},
        allow=(("203.0.113.0/24", (80, 80)), ("203.0.113.0/24", (8000, 8100))),
    ),
    Policy({"mode": "open"}, public=True),
    Policy(
        {"mode": "open", "allow": ["10.77.0.0/16"], "deny": ["203.0.113.0/25"]},
        allow=(("10.77.0.0/16", None),),
        deny=(("203.0.113.0/25", None),),
        public=True,
    ),
    Policy(
        {"allow": ["203.0.113.0/24", "allowed.test:443"], "deny": [f"{OTHER}:22-80"]},
        allow=(("203.0.113.0/24", None),),
        deny=((OTHER, (22, 80)),),
    ),
    Policy({"group": "team"}),
    Policy(
        {"allow": ["10.0.0.0/8"], "deny": ["10.1.0.0/16:22"]},
        allow=(("10.0.0.0/8", None),),
        deny=(("10.1.0.0/16", (22, 22)),),
    ),
    # A wide range is never for what is not public.
    Policy({"allow": ["0.0.0.0/0"]}, public=True),
    Policy({"allow": ["8.0.0.0/5", "192.0.0.0/3"]}, wide=("8.0.0.0/5", "192.0.0.0/3")),
)


@dataclass(frozen=True)
class Packet:
    number: int
    to: str
    protocol: int  # 6, 17, 1, or another
    port: int  # or the type of ICMP
    flags: int = _SYN
    source: str = GUEST_ADDRESS
    ethertype: int = 0x0800
    to_mac: str = GATEWAY_MAC
    fragment: int = 0
    options: bytes = b""
    ttl: int = 64
    damage: str = ""  # "sum", "cut", "length"

    @property
    def mark(self) -> bytes:
        return _MAGIC + b"%06d" % self.number


def may_leave(policy: Policy, packet: Packet) -> bool:
    """The model."""
    ordinary = packet.ethertype == 0x0800 and packet.to_mac == GATEWAY_MAC and packet.source == GUEST_ADDRESS
    whole = not packet.fragment and not packet.options and not packet.damage and packet.ttl > 3
    if not ordinary or not whole or packet.to == HOST or within(packet.to, *_NEVER):
        return False
    if packet.protocol == 1:
        if packet.port != 8:
            return False
    elif packet.protocol not in (6, 17) or (packet.protocol == 6 and packet.flags != _SYN):
        return False
    if any(matches(packet, rule) for rule in policy.deny):
        return False
    if any(matches(packet, rule) for rule in policy.allow):
        return True
    if within(packet.to, *_NOT_PUBLIC):
        return False
    named = packet.protocol == 6 and packet.port != 443 and any(matches(packet, rule) for rule in policy.named)
    return policy.public or named or within(packet.to, *policy.wide)


def matches(packet: Packet, rule: tuple[str, tuple[int, int] | None]) -> bool:
    where, ports = rule
    if not within(packet.to, where):
        return False
    return ports is None or (packet.protocol != 1 and ports[0] <= packet.port <= ports[1])


def within(address: str, *ranges: str) -> bool:
    return any(ipaddress.ip_address(address) in ipaddress.ip_network(each) for each in ranges)


def make_packet(chance: random.Random, number: int) -> Packet:
    protocol = chance.choice((6, 6, 6, 17, 17, 1, 47, 132, 2) if chance.random() < 0.2 else (6, 6, 17, 1))
    port = chance.choice((8, 8, 8, 0, 3, 5, 13)) if protocol == 1 else chance.choice(_PORTS)
    packet = Packet(number, chance.choice(_ADDRESSES), protocol, port)
    if protocol == 6:
        packet = spoiled(packet, flags=chance.choice(_FLAGS))
    if chance.random() < 0.3:
        packet = spoiled(packet, **chance.choice(_SPOILED))
    return packet


_SPOILED: tuple[dict[str, object], ...] = (
    {"source": "192.0.0.1"},
    {"source": "192.0.0.3"},
    {"source": "127.0.0.1"},
    {"source": WEB},
    {"source": "100.127.240.16"},
    {"source": "0.0.0.0"},
    {"ethertype": 0x86DD},
    {"ethertype": 0x0806},
    {"ethertype": 0x8100},
    {"ethertype": 0x88CC},
    {"to_mac": "02:66:6b:64:00:77"},
    {"to_mac": "ff:ff:ff:ff:ff:ff"},
    {"fragment": 0x2000},
    {"fragment": 0x0001},
    {"fragment": 0x2010},
    {"options": b"\x01\x01\x01\x00"},
    {"options": b"\x83\x07\x04" + socket.inet_aton(WEB) + b"\x00"},  # by way of another address
    {"ttl": 1},
    {"ttl": 2},
    {"damage": "sum"},
    {"damage": "cut"},
    {"damage": "length"},
)


def spoiled(packet: Packet, **changes: object) -> Packet:
    return Packet(**{**packet.__dict__, **changes})  # type: ignore[arg-type]


def render(packet: Packet) -> bytes:
    source_port = 1024 + packet.number % 60_000
    data = packet.mark
    if packet.protocol == 6:
        head = struct.pack("!HHIIBBHHH", source_port, packet.port, packet.number, 0, 5 << 4, packet.flags, 8192, 0, 0)
        body = with_sum(packet, head, data, 16)
    elif packet.protocol == 17:
        body = with_sum(packet, struct.pack("!HHHH", source_port, packet.port, 8 + len(data), 0), data, 6)
    elif packet.protocol == 1:
        head = struct.pack("!BBHHH", packet.port, 0, 0, source_port, packet.number & 0xFFFF)
        body = head[:2] + struct.pack("!H", checksum(head + data)) + head[4:] + data
    else:
        body = data
    words = (20 + len(packet.options)) // 4
    total = words * 4 + len(body) + (50 if packet.damage == "length" else 0)
    fields = (64 + words, 0, total, packet.number & 0xFFFF, packet.fragment, packet.ttl, packet.protocol)
    addresses = socket.inet_aton(packet.source) + socket.inet_aton(packet.to)
    header = struct.pack("!BBHHHBBH", *fields, 0) + addresses + packet.options
    total_sum = checksum(header) ^ (0x5555 if packet.damage == "sum" else 0)
    header = header[:10] + struct.pack("!H", total_sum) + header[12:]
    frame = mac(packet.to_mac) + mac(GUEST_MAC) + struct.pack("!H", packet.ethertype) + header + body
    return frame[: 14 + 24] if packet.damage == "cut" else frame


def with_sum(packet: Packet, head: bytes, data: bytes, at: int) -> bytes:
    length = len(head) + len(data)
    pseudo = (
        socket.inet_aton(packet.source) + socket.inet_aton(packet.to) + struct.pack("!BBH", 0, packet.protocol, length)
    )
    total = checksum(pseudo + head + data)
    return head[:at] + struct.pack("!H", total) + head[at + 2 :] + data


def checksum(data: bytes) -> int:
    padded = data + b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


@pytest.fixture
def world() -> Iterator[World]:
    with made_world() as world:
        yield world


@pytest.fixture
def wire(world: World) -> Iterator[socket.socket]:
    """Everything that comes out of the host."""
    with netns.inside(world.beyond):
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800))
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
        sock.setblocking(False)
        yield sock


def read_wire(wire: socket.socket) -> Iterator[bytes]:
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        try:
            data, where = wire.recvfrom(2048)
        except BlockingIOError:
            time.sleep(0.01)
            continue
        from_host = socket.inet_ntoa(data[12:16]) not in (RESOLVER, ROUTER) and where[2] != socket.PACKET_OUTGOING
        if from_host and where[0] == "eth0" and socket.inet_ntoa(data[16:20]) != RESOLVER:
            yield data


async def test_none_gets_out_that_should_not_and_none_is_refused_that_should(
    world: World, wire: socket.socket, tmp_path: Path
) -> None:
    seed = int(os.environ.get("FORKD_TEST_SEED", "") or random.SystemRandom().randrange(1 << 32))
    print(f"FORKD_TEST_SEED={seed}")
    chance = random.Random(seed)
    options = NetworkOptions(uplink="veth", pool=1, resolvers=(RESOLVER,))
    wrong: list[str] = []
    passed = 0
    async with Networks.opened(tmp_path, options, lambda _: None) as networks:
        for place, policy in enumerate(POLICIES):
            lease = await networks.lease(f"s{place}", parse_network(policy.network))
            with Guest(lease.tap) as guest:
                for name in ("allowed.test", "other.test") if policy.named else ():
                    assert (await asyncio.to_thread(guest.ask, name))[0] == "NOERROR"
            list(read_wire(wire))
            count = PACKETS // len(POLICIES)
            packets = {number: make_packet(chance, number) for number in range(place * count, (place + 1) * count)}
            seen = await asyncio.to_thread(send, lease.tap, list(packets.values()), wire)
            for number, packet in packets.items():
                passed += number in seen
                if may_leave(policy, packet) != (number in seen):
                    wrong.append(f"{policy.network} {packet} {'left' if number in seen else 'was refused'}")
            if strange := seen & {-1}:
                wrong.append(f"{len(strange)} packets that nobody sent left")
            os.close(lease.tap)
            await networks.release(lease.name)
    assert wrong == [], f"{len(wrong)} of {PACKETS}, seed {seed}: {wrong[:5]}"
    assert passed > PACKETS / 20, "the test tries what is allowed, too"


def send(tap: int, packets: list[Packet], wire: socket.socket) -> set[int]:
    """Numbers of those that left; -1: one that is none of ours."""
    seen: set[int] = set()
    for begin in range(0, len(packets), 250):
        for packet in packets[begin : begin + 250]:
            try:
                os.write(tap, render(packet))
            except OSError:
                continue  # too short to be a packet at all
        for data in read_wire(wire):
            at = data.find(_MAGIC)
            seen.add(int(data[at + len(_MAGIC) : at + len(_MAGIC) + 6]) if at >= 0 else -1)
    return seen
