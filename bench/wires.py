"""The network that is measured in, made for the run: a host, a world behind it with servers, a bare tap, clocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import ssl
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Self, cast

import dns.message
import dns.rdatatype
import dns.rrset

from forkd.engines.base import Nic
from forkd.errors import HostLacks, NetworkFailed
from forkd.host import netlink, netns, nftables
from forkd.host.tap import has_tun, open_tap
from forkd.model.network import GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, GUEST_PREFIX

# Reached through the router of the world, and by a rule for its address.
SERVER = "203.0.113.10"
# What the name stands for: reached by a rule for the name, and by TLS only through the gate.
NAMED, NAME = "203.0.113.20", "bench.test"
SINK_PORT, PACKET_PORT, TLS_PORT = 8000, 8001, 443
_HOST, _ROUTER = "198.51.100.2", "198.51.100.1"
_DNS_PORT, _TTL_S = 53, 300
_TAP = "tap0"

_DEADLINE_S = 60.0
_PACKET_DEADLINE_S = 10.0
_LOOK_S = 0.001
_PIECE_BYTES = 1 << 20
_ALL_FRAMES = 0x0003
_SO_TIMESTAMPNS = 35
_TIMESPEC = struct.Struct("=qq")


def why_no_wires() -> str | None:
    """Why networks cannot be measured on this host."""
    if os.geteuid() != 0:
        return "networks are measured in namespaces made for the run, which needs root"
    if not has_tun():
        return "a VM needs /dev/net/tun for a network"
    try:
        nftables.load_library()
    except HostLacks as lack:
        return lack.message
    return None


@dataclass(frozen=True)
class Wires:
    """Network namespaces: of the host that has sandboxes, and of the world behind it."""

    host: int
    beyond: int


@contextlib.contextmanager
def made_wires() -> Iterator[Wires]:
    """The calling thread, and threads and processes that it starts, are on that host meanwhile."""
    with contextlib.ExitStack() as stack:
        before, host, beyond = netns.open_current(), netns.new_namespace(), netns.new_namespace()
        for namespace in (before, host, beyond):
            stack.callback(os.close, namespace)
        _connect(host, beyond)
        netns.enter(host)
        stack.callback(netns.enter, before)
        yield Wires(host, beyond)


def _connect(host: int, beyond: int) -> None:
    with netns.inside(host), netlink.Netlink() as here:
        macs = "02:00:00:00:00:01", "02:00:00:00:00:02"
        here.do(netlink.render_add_veth("eth0", macs[0], "eth0", macs[1], peer_namespace=beyond))
        up = _set_up(here, "eth0", _HOST, 24)
        here.do(netlink.render_route("0.0.0.0/0", up, gateway=_ROUTER))
    with netns.inside(beyond), netlink.Netlink() as there:
        _set_up(there, "eth0", _ROUTER, 24)
        loopback = _index(there, "lo")
        there.do(*(netlink.render_add_address(loopback, address, 32) for address in (SERVER, NAMED)))


def _set_up(links: netlink.Netlink, name: str, address: str, prefix: int) -> int:
    index = _index(links, name)
    links.do(
        netlink.render_set_link(_index(links, "lo"), up=True),
        netlink.render_add_address(index, address, prefix),
        netlink.render_set_link(index, up=True),
    )
    return index


def _index(links: netlink.Netlink, name: str) -> int:
    found = links.find_link(name)
    assert found is not None, name
    return found.index


@dataclass(frozen=True)
class Lan:
    """A tap and a server in one namespace, with nothing in between."""

    nic: Nic
    namespace: int


@contextlib.contextmanager
def made_lan() -> Iterator[Lan]:
    with contextlib.ExitStack() as stack:
        namespace = netns.new_namespace()
        stack.callback(os.close, namespace)
        with netns.inside(namespace), netlink.Netlink() as links:
            tap = open_tap(_TAP)
            stack.callback(os.close, tap)
            links.do(netlink.render_set_link(_index(links, _TAP), mac=GATEWAY_MAC))
            index = _set_up(links, _TAP, GATEWAY_ADDRESS, GUEST_PREFIX)
            links.do(
                netlink.render_neighbour(index, GUEST_ADDRESS, GUEST_MAC),
                netlink.render_add_address(_index(links, "lo"), SERVER, 32),
            )
        yield Lan(Nic(tap, _TAP, f"/proc/{os.getpid()}/fd/{namespace}"), namespace)


@dataclass(frozen=True)
class Received:
    """`seconds`: from the connection until its last byte."""

    size_bytes: int
    seconds: float

    @property
    def mib_per_s(self) -> float:
        return self.size_bytes / 2**20 / self.seconds


class Sink:
    """A TCP server that throws away what it is sent and answers how much that was, one connection at a time."""

    def __init__(self, namespace: int, address: str, port: int) -> None:
        self._listener = netns.socket_inside(namespace, socket.SOCK_STREAM)
        self._listener.bind((address, port))
        self._listener.listen()
        self._received: queue.SimpleQueue[Received] = queue.SimpleQueue()
        # Not in the event loop of those who measure: what it waits for would be measured too.
        self._thread = threading.Thread(target=self._serve, name="sink")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the one who waits for a connection
        self._thread.join(_DEADLINE_S)
        self._listener.close()

    def take(self) -> Received:
        """What came last; its client has been answered."""
        try:
            return self._received.get(timeout=_PACKET_DEADLINE_S)
        except queue.Empty:
            raise NetworkFailed("The server was sent nothing") from None

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # A client that goes away is a failure of who measures, who misses its answer.
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_DEADLINE_S)
                self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        begun, size, piece = time.monotonic(), 0, bytearray(_PIECE_BYTES)
        while got := connection.recv_into(piece, _PIECE_BYTES, socket.MSG_TRUNC):
            size += got
        self._received.put(Received(size, time.monotonic() - begun))
        connection.sendall(size.to_bytes(8, "big"))


class PacketClock:
    """When the kernel received a packet, by its own stamp."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)

    @classmethod
    def of_server(cls, namespace: int) -> PacketClock:
        """Of datagrams that arrive at the server."""
        sock = netns.socket_inside(namespace, socket.SOCK_DGRAM)
        sock.bind((SERVER, PACKET_PORT))
        return cls(sock)

    @classmethod
    def of_tap(cls, namespace: str, name: str) -> PacketClock:
        """Of frames that a VM sends to a tap, before any rule has seen them."""
        opened = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sock = netns.socket_inside(opened, socket.SOCK_RAW, socket.AF_PACKET, socket.htons(_ALL_FRAMES))
        finally:
            os.close(opened)
        sock.bind((name, _ALL_FRAMES))
        return cls(sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    async def find(self, content: bytes) -> float:
        """When the packet that ends so came, in seconds of CLOCK_REALTIME. Others are forgotten."""
        deadline = time.monotonic() + _PACKET_DEADLINE_S
        while time.monotonic() < deadline:
            try:
                packet, ancillary, _, _ = self._socket.recvmsg(2048, socket.CMSG_SPACE(_TIMESPEC.size))
            except BlockingIOError:
                await asyncio.sleep(_LOOK_S)
                continue
            if packet.endswith(content):
                return parse_stamp(ancillary)
        raise NetworkFailed(f"A packet did not come within {_PACKET_DEADLINE_S:g} s")


def parse_stamp(ancillary: list[tuple[int, int, bytes]]) -> float:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = _TIMESPEC.unpack(data)
            return float(seconds + nanoseconds / 1e9)
    raise NetworkFailed("The kernel gave a packet no time stamp")


@contextlib.asynccontextmanager
async def answering_names(namespace: int) -> AsyncIterator[None]:
    """A resolver that knows one name."""
    sock = netns.socket_inside(namespace, socket.SOCK_DGRAM)
    sock.bind((SERVER, _DNS_PORT))
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(_Names, sock=sock)
    try:
        yield
    finally:
        transport.close()


class _Names(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self._transport.sendto(answer_name(data), address)


def answer_name(question: bytes) -> bytes:
    """Every name stands for the same address; of other kinds there is nothing. Pure."""
    asked = dns.message.from_wire(question)
    answer = dns.message.make_response(asked)
    name, kind = asked.question[0].name, dns.rdatatype.to_text(asked.question[0].rdtype)
    if kind == "A":
        answer.answer.append(dns.rrset.from_text(name, _TTL_S, "IN", "A", NAMED))
    return answer.to_wire()


def render_hello() -> bytes:
    """The first message of a TLS client that wants the name."""
    context = ssl.create_default_context()
    sent = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=NAME)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()
