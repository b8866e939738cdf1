"""Interfaces, addresses, routes and neighbours through rtnetlink. Messages are rendered by pure functions.

A message acts on the network namespace that its socket was made in.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

_NEWLINK, _DELLINK, _GETLINK = 16, 17, 18
_NEWADDR, _GETADDR = 20, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWNEIGH = 28
_ERROR, _DONE = 2, 3

_REQUEST, _ACK, _DUMP, _REPLACE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x300, 0x100, 0x200, 0x400
_NESTED = 0x8000

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_TABLE = 1, 4, 5, 15
_NDA_DST, _NDA_LLADDR = 1, 2
_UP, _PERMANENT = 0x1, 0x80
_TABLE_MAIN, _PROTO_STATIC, _UNICAST, _ONLINK = 254, 4, 1, 4
_SCOPE_UNIVERSE, _SCOPE_LINK = 0, 253

_RECEIVE_BYTES = 1 << 16
_ANSWER_DEADLINE_S = 5.0
GROUP_IPV4_ADDRESSES = 0x10

Attributes = dict[int, bytes]


@dataclass(frozen=True)
class Link:
    index: int
    name: str
    up: bool


@dataclass(frozen=True)
class Address:
    index: int
    address: ipaddress.IPv4Address
    prefix: int


@dataclass(frozen=True)
class Route:
    network: ipaddress.IPv4Network
    index: int | None
    gateway: ipaddress.IPv4Address | None


@dataclass(frozen=True)
class Message:
    """`kind` and `flags` as in nlmsghdr, and all behind it."""

    kind: int
    flags: int
    body: bytes


def render_add_veth(
    name: str, mac: str, peer: str, peer_mac: str, *, peer_namespace: int | None = None, index: int = 0
) -> Message:
    """Both ends are down. The peer is made in its namespace, so its name need not be free here.

    `index`: of this end; 0 leaves it to the kernel.
    """
    there = _link_header(0) + _named(peer) + attribute(_IFLA_ADDRESS, _mac(peer_mac))
    if peer_namespace is not None:
        there += attribute(_IFLA_NET_NS_FD, struct.pack("=i", peer_namespace))
    info = attribute(_INFO_KIND, b"veth\0") + nested(_INFO_DATA, attribute(_VETH_PEER, there))
    here = _link_header(index) + _named(name) + attribute(_IFLA_ADDRESS, _mac(mac))
    return Message(_NEWLINK, _CREATE | _EXCLUSIVE, here + nested(_IFLA_LINKINFO, info))


def render_set_link(
    index: int, *, up: bool | None = None, mac: str | None = None, name: str | None = None, namespace: int | None = None
) -> Message:
    body = _link_header(index, 0 if up is None else _UP, _UP if up else 0)
    body += attribute(_IFLA_ADDRESS, _mac(mac)) if mac is not None else b""
    body += _named(name) if name is not None else b""
    body += attribute(_IFLA_NET_NS_FD, struct.pack("=i", namespace)) if namespace is not None else b""
    return Message(_NEWLINK, 0, body)


def render_remove_link(index: int) -> Message:
    return Message(_DELLINK, 0, _link_header(index))


def render_add_address(index: int, address: str, prefix: int) -> Message:
    packed = socket.inet_aton(address)
    header = struct.pack("=BBBBI", socket.AF_INET, prefix, 0, _SCOPE_UNIVERSE, index)
    body = header + attribute(_IFA_LOCAL, packed) + attribute(_IFA_ADDRESS, packed)
    return Message(_NEWADDR, _CREATE | _REPLACE, body)


def render_route(network: str, index: int, *, gateway: str | None = None) -> Message:
    """Replaces one to the same network. A gateway counts as on the link, whatever addresses that has."""
    to = ipaddress.IPv4Network(network)
    scope, flags = (_SCOPE_LINK, 0) if gateway is None else (_SCOPE_UNIVERSE, _ONLINK)
    header = struct.pack(
        "=BBBBBBBBI", socket.AF_INET, to.prefixlen, 0, 0, _TABLE_MAIN, _PROTO_STATIC, scope, _UNICAST, flags
    )
    body = header + (attribute(_RTA_DST, to.network_address.packed) if to.prefixlen else b"")
    body += attribute(_RTA_OIF, struct.pack("=I", index))
    body += attribute(_RTA_GATEWAY, socket.inet_aton(gateway)) if gateway is not None else b""
    return Message(_NEWROUTE, _CREATE | _REPLACE, body)


def render_remove_route(network: str, index: int) -> Message:
    """One without a gateway."""
    return Message(_DELROUTE, 0, render_route(network, index).body)


def render_neighbour(index: int, address: str, mac: str) -> Message:
    """Permanent: it is never asked for."""
    header = struct.pack("=BxxxiHBB", socket.AF_INET, index, _PERMANENT, 0, 0)
    body = header + attribute(_NDA_DST, socket.inet_aton(address)) + attribute(_NDA_LLADDR, _mac(mac))
    return Message(_NEWNEIGH, _CREATE | _REPLACE, body)


def attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


def nested(kind: int, value: bytes) -> bytes:
    return attribute(kind | _NESTED, value)


def parse_attributes(data: bytes) -> Attributes:
    """The last of each kind; stops at what is cut off."""
    found, at = {}, 0
    while at + 4 <= len(data):
        size, kind = struct.unpack_from("=HH", data, at)
        if size < 4 or at + size > len(data):
            break
        found[kind & ~_NESTED] = data[at + 4 : at + size]
        at += size + -size % 4
    return found


def parse_messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Kind, sequence number and body of each message in one datagram."""
    at = 0
    while at + 16 <= len(data):
        size, kind, _flags, sequence, _port = struct.unpack_from("=IHHII", data, at)
        if size < 16 or at + size > len(data):
            return
        yield kind, sequence, data[at + 16 : at + size]
        at += size + -size % 4


def parse_link(body: bytes) -> Link:
    _family, _type, index, flags, _change = struct.unpack_from("=BxHiII", body)
    name = parse_attributes(body[16:]).get(_IFLA_IFNAME, b"")
    return Link(index, name.rstrip(b"\0").decode(errors="replace"), bool(flags & _UP))


def parse_address(body: bytes) -> Address | None:
    """None: not of IPv4."""
    family, prefix, _flags, _scope, index = struct.unpack_from("=BBBBI", body)
    found = parse_attributes(body[8:])
    packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
    if family != socket.AF_INET or packed is None:
        return None
    return Address(index, ipaddress.IPv4Address(packed), prefix)


def parse_route(body: bytes) -> Route | None:
    """None: not of IPv4, or not one by which packets leave."""
    family, prefix, _src, _tos, _table, _proto, _scope, kind, _flags = struct.unpack_from("=BBBBBBBBI", body)
    if family != socket.AF_INET or kind != _UNICAST:
        return None
    found = parse_attributes(body[12:])
    to = ipaddress.IPv4Address(found.get(_RTA_DST, bytes(4)))
    out, gateway = found.get(_RTA_OIF), found.get(_RTA_GATEWAY)
    return Route(
        ipaddress.IPv4Network((to, prefix)),
        struct.unpack("=I", out)[0] if out else None,
        ipaddress.IPv4Address(gateway) if gateway else None,
    )


class Netlink:
    """A socket in the namespace of the thread that makes it; any thread may use it then, one at a time."""

    def __init__(self, protocol: int = socket.NETLINK_ROUTE, groups: int = 0) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        self._socket.bind((0, groups))
        self._socket.settimeout(_ANSWER_DEADLINE_S)
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def drain(self) -> None:
        """Forget what was sent to the groups."""
        self._socket.setblocking(False)
        try:
            while self._socket.recv(_RECEIVE_BYTES):
                pass
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno != errno.ENOBUFS:  # more was lost, which is forgotten as well
                raise
        finally:
            self._socket.settimeout(_ANSWER_DEADLINE_S)

    def do(self, *messages: Message) -> None:
        """All in one system call; the first that the kernel refuses is raised as OSError, later ones are done."""
        first = self._sequence + 1
        data = b"".join(self._framed(message, _ACK) for message in messages)
        self._socket.send(data)
        pending, refused = set(range(first, self._sequence + 1)), 0
        while pending:
            for kind, sequence, body in parse_messages(self._socket.recv(_RECEIVE_BYTES)):
                if kind == _ERROR and sequence in pending:
                    pending.discard(sequence)
                    refused = refused or -struct.unpack_from("=i", body)[0]
        if refused:
            raise OSError(refused, os.strerror(refused))

    def dump(self, message: Message) -> list[bytes]:
        """The bodies of the answers to one question."""
        self._socket.send(self._framed(message, _DUMP))
        bodies: list[bytes] = []
        while True:
            for kind, sequence, body in parse_messages(self._socket.recv(_RECEIVE_BYTES)):
                if sequence != self._sequence:
                    continue
                if kind == _DONE:
                    return bodies
                if kind == _ERROR:
                    number = -struct.unpack_from("=i", body)[0]
                    raise OSError(number, os.strerror(number))
                bodies.append(body)

    def links(self) -> list[Link]:
        return [parse_link(body) for body in self.dump(Message(_GETLINK, 0, _link_header(0)))]

    def find_link(self, name: str) -> Link | None:
        return next((link for link in self.links() if link.name == name), None)

    def addresses(self) -> list[Address]:
        question = Message(_GETADDR, 0, struct.pack("=BBBBI", socket.AF_INET, 0, 0, 0, 0))
        return [found for body in self.dump(question) if (found := parse_address(body)) is not None]

    def routes(self) -> list[Route]:
        question = Message(_GETROUTE, 0, struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0))
        return [found for body in self.dump(question) if (found := parse_route(body)) is not None]

    def _framed(self, message: Message, flags: int) -> bytes:
        self._sequence += 1
        size = 16 + len(message.body)
        header = struct.pack("=IHHII", size, message.kind, _REQUEST | flags | message.flags, self._sequence, 0)
        return header + message.body + bytes(-size % 4)


def _link_header(index: int, change: int = 0, flags: int = 0) -> bytes:
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, change)


def _named(name: str) -> bytes:
    return attribute(_IFLA_IFNAME, name.encode() + b"\0")


def _mac(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))
