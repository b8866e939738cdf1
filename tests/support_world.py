"""A small internet in network namespaces: a host that networks run on, servers behind it, and stand-ins for guests.

    guest ── tap ── slot ── hub ── host 192.0.2.1 ── 192.0.2.2 world: 203.0.113.0/24, resolver 192.0.2.53

The calling thread is in the host's namespace while the world is there; nothing touches the machine's own network.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import os
import select
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import dns.flags
import dns.message
import dns.rcode
import dns.rrset
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from forkd.errors import HostLacks
from forkd.host import netlink, netns, nftables
from forkd.host.tap import has_tun, open_tap
from forkd.model.network import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, GUEST_PREFIX

HOST = "192.0.2.1"
ROUTER = "192.0.2.2"
RESOLVER = "192.0.2.53"
WEB, OTHER, THIRD = "203.0.113.10", "203.0.113.20", "203.0.113.30"
PRIVATE = "10.77.0.5"  # reached through the world's router
_WORLD_ADDRESSES = (RESOLVER, WEB, OTHER, THIRD, PRIVATE)
_DEADLINE_S = 5.0
HTTP_PORT, ECHO_PORT, TLS_PORT = 80, 7, 443
RANGE_PORTS = (8000, 8001)


def why_no_world() -> str | None:
    if os.geteuid() != 0 or not has_tun():
        return "needs root and /dev/net/tun"
    try:
        nftables.load_library()
    except HostLacks as error:
        return error.message
    return None


needs_world = pytest.mark.skipif(why_no_world() is not None, reason=why_no_world() or "")


@dataclass
class World:
    host: int
    beyond: int
    records: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # name: (type, value)
    ttl_s: int = 300
    dns_down: bool = False
    asked: list[str] = field(default_factory=list)
    seen: list[tuple[str, int, str]] = field(default_factory=list)  # connections: address, port, kind

    def __post_init__(self) -> None:
        self.records = {
            "allowed.test": [("A", WEB)],
            "www.allowed.test": [("CNAME", "allowed.test.")],
            "other.test": [("A", OTHER)],
            "shared.test": [("A", WEB)],
            "rebind.allowed.test": [("A", PRIVATE), ("A", HOST)],
            "through.allowed.test": [("CNAME", "denied.test.")],
            "denied.test": [("A", OTHER)],
            "many.allowed.test": [("A", f"203.0.113.{number}") for number in range(100, 220)],
        }


@contextlib.contextmanager
def made_world() -> Iterator[World]:
    before = netns.open_current()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, before)
        host, beyond = netns.new_namespace(), netns.new_namespace()
        stack.callback(os.close, host)
        stack.callback(os.close, beyond)
        _wire(host, beyond)
        world = World(host, beyond)
        stack.enter_context(_served(world))
        netns.enter(host)
        stack.callback(netns.enter, before)
        yield world


def host_network() -> object:
    """What forkd could leave in the network of this thread: rules, links, forwarding."""
    with netlink.Netlink() as links:
        names = [link.name for link in links.links()]
    return nftables.run("list ruleset"), names, Path("/proc/sys/net/ipv4/ip_forward").read_text()


def hub_holds(pid: int) -> tuple[int, int]:
    """Descriptors of the process that serves networks, and links in the network of its threads."""
    ours = os.stat("/proc/self/ns/net").st_ino
    for task in Path(f"/proc/{pid}/task").iterdir():
        if os.stat(task / "ns/net").st_ino != ours:
            links = len((task / "net/dev").read_text().splitlines()) - 2
            return len(os.listdir(f"/proc/{pid}/fd")), links
    raise AssertionError("The hub has no network of its own")


def _wire(host: int, beyond: int) -> None:
    with netns.inside(beyond), netlink.Netlink() as there:
        with netns.inside(host), netlink.Netlink() as here:
            macs = "02:00:00:00:00:01", "02:00:00:00:00:02"
            here.do(netlink.render_add_veth("eth0", macs[0], "eth0", macs[1], peer_namespace=beyond))
            up, loopback = here.find_link("eth0"), here.find_link("lo")
            assert up is not None and loopback is not None
            here.do(
                netlink.render_set_link(loopback.index, up=True),
                netlink.render_add_address(up.index, HOST, 24),
                netlink.render_set_link(up.index, up=True),
            )
            here.do(netlink.render_route("0.0.0.0/0", up.index, gateway=ROUTER))
        up, loopback = there.find_link("eth0"), there.find_link("lo")
        assert up is not None and loopback is not None
        there.do(netlink.render_set_link(loopback.index, up=True), netlink.render_add_address(up.index, ROUTER, 24))
        there.do(*(netlink.render_add_address(loopback.index, address, 32) for address in _WORLD_ADDRESSES))
        there.do(netlink.render_set_link(up.index, up=True))


@contextlib.contextmanager
def _served(world: World) -> Iterator[None]:
    """All servers of the world, in a thread of their own."""
    loop = asyncio.new_event_loop()
    with contextlib.ExitStack() as sockets, tempfile.TemporaryDirectory(prefix="fkd-world-") as directory:
        certificate = _make_certificate(Path(directory))
        with netns.inside(world.beyond):
            plain = [sockets.enter_context(_bound(socket.SOCK_STREAM, port)) for port in (HTTP_PORT, *RANGE_PORTS)]
            secure = sockets.enter_context(_bound(socket.SOCK_STREAM, TLS_PORT))
            # By address: an answer has to come from where the question went.
            datagrams = [sockets.enter_context(_bound(socket.SOCK_DGRAM, ECHO_PORT, each)) for each in _WORLD_ADDRESSES]
            names = sockets.enter_context(_bound(socket.SOCK_DGRAM, 53, RESOLVER))
            names_tcp = sockets.enter_context(_bound(socket.SOCK_STREAM, 53))

        closing: list[asyncio.Server | asyncio.BaseTransport] = []

        async def start() -> None:
            for sock in plain:
                closing.append(await asyncio.start_server(lambda r, w: _speak(world, "http", r, w), sock=sock))
            tls = asyncio.start_server(lambda r, w: _speak(world, "tls", r, w), sock=secure, ssl=certificate)
            closing.append(await tls)
            closing.append(await asyncio.start_server(lambda r, w: _answer_stream(world, r, w), sock=names_tcp))
            for kind, sock in [*(("echo", each) for each in datagrams), ("dns", names)]:
                protocol = _Datagrams(world, kind)
                closing.append((await loop.create_datagram_endpoint(lambda each=protocol: each, sock=sock))[0])

        loop.set_exception_handler(lambda *_: None)  # connections that are cut are what tests do
        loop.run_until_complete(start())
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_DEADLINE_S)
            for each in closing:
                each.close()
            _cancel_all(loop)
            loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks))
    loop.run_until_complete(asyncio.sleep(0.01))  # for what the ends of connections still have to do


def _bound(kind: int, port: int, address: str = "0.0.0.0") -> socket.socket:
    sock = socket.socket(socket.AF_INET, kind)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.setblocking(False)
    return sock


async def _speak(world: World, kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The number of bytes that a line asks for; `wait` keeps the connection open, and echoes. And a web page."""
    address, port = writer.get_extra_info("sockname")
    world.seen.append((address, port, kind))
    try:
        while (line := (await reader.readline()).strip()) == b"wait":
            writer.write(b"waiting\n")
            await writer.drain()
        if line.startswith(b"GET "):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.0 200 OK\r\nContent-Length: 6\r\n\r\nhello\n")
        else:
            writer.write(b"x" * int(line or b"0"))
        writer.close()
        await writer.wait_closed()
    except BaseException as error:
        writer.transport.abort()
        # The other side has gone, or speaks something else.
        if not isinstance(error, (OSError, ValueError, asyncio.IncompleteReadError)):
            raise


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, world: World, kind: str) -> None:
        self._world, self._kind = world, kind

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        answer = data if self._kind == "echo" else _answer(self._world, data, udp=True)
        if answer is not None:
            self._transport.sendto(answer, address)


async def _answer_stream(world: World, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        size = int.from_bytes(await reader.readexactly(2))
        answer = _answer(world, await reader.readexactly(size), udp=False)
        if answer is not None:
            writer.write(len(answer).to_bytes(2) + answer)
            await writer.drain()
    writer.close()


def _answer(world: World, data: bytes, *, udp: bool) -> bytes | None:
    question = dns.message.from_wire(data)
    name = question.question[0].name
    asked = name.to_text(omit_final_dot=True).lower()
    world.asked.append(asked)
    if world.dns_down:
        return None
    response = dns.message.make_response(question)
    if asked not in world.records:
        response.set_rcode(dns.rcode.NXDOMAIN)
    while asked in world.records:
        found, owner = world.records[asked], name
        kinds = {kind for kind, _ in found}
        for kind in kinds:
            values = [value for each, value in found if each == kind]
            response.answer.append(dns.rrset.from_text_list(owner, world.ttl_s, "IN", kind, values))
        if "CNAME" not in kinds:
            break
        name = dns.name.from_text(found[0][1])
        asked = name.to_text(omit_final_dot=True).lower()
    if udp and len(response.to_wire(max_size=65535)) > 1232:
        response.answer.clear()
        response.flags |= dns.flags.TC
    return response.to_wire(max_size=65535)


def _make_certificate(directory: Path) -> ssl.SSLContext:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "allowed.test")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - datetime.timedelta(days=1))
    signed = made.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    path = directory / "pem"
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


class Guest:
    """A namespace as a guest has it, whose frames are carried to and from a slot's tap."""

    def __init__(self, tap: int) -> None:
        self._slot_tap = os.dup(tap)
        self.namespace = netns.new_namespace()
        with netns.inside(self.namespace), netlink.Netlink() as links:
            self._tap = open_tap("eth0")
            link, loopback = links.find_link("eth0"), links.find_link("lo")
            assert link is not None and loopback is not None
            links.do(
                netlink.render_set_link(loopback.index, up=True),
                netlink.render_set_link(link.index, mac=GUEST_MAC),
                netlink.render_add_address(link.index, GUEST_ADDRESS, GUEST_PREFIX),
                netlink.render_set_link(link.index, up=True),
            )
            links.do(netlink.render_route("0.0.0.0/0", link.index, gateway=GATEWAY_ADDRESS))
        os.set_blocking(self._slot_tap, False)
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        os.close(self._stopped)
        self._thread.join(_DEADLINE_S)
        for descriptor in (self._stop, self._tap, self._slot_tap, self.namespace):
            os.close(descriptor)

    def plug(self, tap: int) -> None:
        """Into another tap, as a fork is."""
        os.set_blocking(tap, False)
        os.dup2(tap, self._slot_tap)

    def __enter__(self) -> "Guest":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, address: str, port: int) -> socket.socket:
        sock = netns.socket_inside(self.namespace, socket.SOCK_STREAM)
        sock.settimeout(_DEADLINE_S)
        try:
            sock.connect((address, port))
        except OSError:
            sock.close()
            raise
        return sock

    def fetch(self, address: str, port: int = HTTP_PORT, size: int = 5) -> int:
        """Bytes that came back."""
        with self.connect(address, port) as sock:
            return _ask_for(sock, size)

    def fetch_tls(self, address: str, name: str | None, port: int = TLS_PORT, size: int = 5) -> int:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with self.connect(address, port) as sock, context.wrap_socket(sock, server_hostname=name) as secure:
            return _ask_for(secure, size)

    def echo(self, address: str, data: bytes = b"hello", port: int = ECHO_PORT, wait_s: float = 1.0) -> bytes:
        with netns.socket_inside(self.namespace, socket.SOCK_DGRAM) as sock:
            sock.settimeout(wait_s)
            sock.connect((address, port))
            sock.send(data)
            return sock.recv(2048)

    def ping(self, address: str, wait_s: float = 1.0) -> bool:
        with netns.socket_inside(self.namespace, socket.SOCK_RAW, protocol=socket.IPPROTO_ICMP) as sock:
            sock.settimeout(wait_s)
            body = struct.pack("!BBHHH", 8, 0, 0, 1, 1)
            total = sum(struct.unpack("!4H", body))
            sock.sendto(struct.pack("!BBHHH", 8, 0, ~total & 0xFFFF, 1, 1), (address, 0))
            with contextlib.suppress(TimeoutError):
                return sock.recv(2048)[20] == 0
        return False

    def ask(self, name: str, kind: str = "A", *, tcp: bool = False) -> tuple[str, list[str]]:
        """The code, and the addresses."""
        return self.ask_raw(dns.message.make_query(name, kind).to_wire(), tcp=tcp)

    def ask_raw(self, data: bytes, *, tcp: bool = False) -> tuple[str, list[str]]:
        if tcp:
            with self.connect(GATEWAY_ADDRESS, 53) as sock:
                sock.sendall(len(data).to_bytes(2) + data)
                with sock.makefile("rb") as stream:
                    answer = stream.read(int.from_bytes(stream.read(2)))
        else:
            answer = self.echo(GATEWAY_ADDRESS, data, 53, _DEADLINE_S)
        message = dns.message.from_wire(answer)
        if message.flags & dns.flags.TC:
            return "TRUNCATED", []
        found = [str(each) for rrset in message.answer for each in rrset if rrset.rdtype == 1]
        return dns.rcode.to_text(message.rcode()), found

    def _carry(self) -> None:
        poll = select.poll()
        for descriptor in (self._tap, self._slot_tap, self._stop):
            poll.register(descriptor, select.POLLIN)
        other = {self._tap: self._slot_tap, self._slot_tap: self._tap}
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._stop:
                    return
                with contextlib.suppress(OSError):
                    for _ in range(64):
                        os.write(other[descriptor], os.read(descriptor, 65536))


def _ask_for(sock: socket.socket, size: int) -> int:
    sock.sendall(b"%d\n" % size)
    got = 0
    while piece := sock.recv(1 << 18):
        got += len(piece)
    return got


def in_block(address: str, block: str) -> bool:
    return ipaddress.IPv4Address(address) in ipaddress.IPv4Network(block)
