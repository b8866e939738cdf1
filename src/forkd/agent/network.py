"""The guest's network: a default route that is there or not, and the end of connections that are another VM's now.

The initramfs gives the interface its address, and no route: programs in a sandbox without network fail at once. All
that ever changes is that route, by one message to the kernel. Messages and sockets are made before the freeze.
"""

from __future__ import annotations

import _socket
import errno
import fcntl
import os
from struct import Struct

from forkd.wire.agent import GATEWAY, INTERFACE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, List, Tuple

    Outcome = Tuple[bool, str, int]  # whether it is up, the address ("": no interface), connections that were reset

_NETLINK, _ROUTE, _SOCK_DIAG = 16, 0, 4
_INET, _INET6 = 2, 10
_TCP, _UDP = 6, 17
_REQUEST, _ACK, _DUMP, _REPLACE, _CREATE = 0x1, 0x4, 0x300, 0x100, 0x400
_ERROR, _DONE = 2, 3
_NEW_ROUTE, _DELETE_ROUTE, _BY_FAMILY, _DESTROY = 24, 25, 20, 21
_MAIN_TABLE, _BOOT, _UNIVERSE, _NOWHERE, _UNICAST, _ONLINK = 254, 3, 0, 255, 1, 4
_OIF, _GATEWAY = 4, 5
_SIOCGIFADDR, _SIOCGIFINDEX = 0x8915, 0x8933

_HEADER = Struct("=IHHII")  # length, type, flags, sequence, port
_ROUTE_MESSAGE = Struct("=BBBBBBBBI")
_ATTRIBUTE = Struct("=HH4s")
_DIAG_REQUEST = Struct("=BBBBI48s")  # family, protocol, extensions, pad, states, socket
_INT = Struct("=i")
_IFREQ = Struct("16s24s")
_SOCKET_AT, _SOCKET_BYTES = 4, 48  # of a socket in an answer: its ports, addresses, interface and cookie
_SOURCE_AT, _DESTINATION_AT, _ADDRESS_BYTES = 4, 20, 16

# All but those that listen (10), are closed (7) or only waited for (6).
_TCP_STATES = 0xFFF & ~(1 << 10 | 1 << 7 | 1 << 6) | 1 << 12
_CONNECTED = 1 << 1
_WHAT = ((_INET, _TCP, _TCP_STATES), (_INET6, _TCP, _TCP_STATES), (_INET, _UDP, _CONNECTED), (_INET6, _UDP, _CONNECTED))
_READ_BYTES = 64 * 1024
_WAIT_S = 10.0
_MAPPED = bytes(10) + b"\xff\xff"
_LOOPBACK_6 = bytes(15) + b"\x01"


class Network:
    """Of this VM. Whether it is up is remembered, and a fork inherits that."""

    def __init__(self) -> None:
        self._up = False
        self._address = ""
        self._add = self._remove = b""
        self._route: _socket.socket | None = None

    def prepare(self) -> None:
        """Open what a fork needs, and do once what it does: under emulation the first time is the slow one."""
        self._find()
        if self._address and not self._up:
            self.switch(True)
            self.switch(False)

    def switch(self, up: bool, forked: bool = False) -> Outcome:
        """`forked`: connections of before belong to the VM we come from. Raises OSError; then nothing is up."""
        if up == self._up and not (forked and up):
            return up, self._address, 0
        if up and not self._address:
            self._find()
            if not self._address:
                raise OSError(errno.ENODEV, "there is no interface %s with an address" % INTERFACE)
        reset = 0
        if self._up:
            # Without a route first: what a reset sends to the other side would be sent in the name of the other VM.
            self._up = False
            self._tell(self._remove, errno.ESRCH)
            reset = reset_connections()
        if up:
            self._tell(self._add, 0)
            self._up = True
        return up, self._address, reset

    def close(self) -> None:
        if self._route is not None:
            self._route.close()
            self._route = None

    def _find(self) -> None:
        self.close()
        self._route = open_netlink(_ROUTE)
        sock = _socket.socket(_INET, _socket.SOCK_DGRAM | _socket.SOCK_CLOEXEC)
        try:
            asked = _IFREQ.pack(INTERFACE.encode(), b"")
            self._address = _socket.inet_ntoa(fcntl.ioctl(sock, _SIOCGIFADDR, asked)[20:24])
            index = _INT.unpack_from(fcntl.ioctl(sock, _SIOCGIFINDEX, asked), 16)[0]
        except OSError:
            self._address = ""
            return
        finally:
            sock.close()
        self._add = render_route(_NEW_ROUTE, _CREATE | _REPLACE, index)
        self._remove = render_route(_DELETE_ROUTE, 0, index)

    def _tell(self, message: bytes, allowed: int) -> None:
        assert self._route is not None
        self._route.send(message)
        answer = self._route.recv(_READ_BYTES)
        number = -_INT.unpack_from(answer, _HEADER.size)[0]
        if number and number != allowed:
            raise OSError(number, "the route could not be changed: " + os.strerror(number))


def open_netlink(protocol: int) -> _socket.socket:
    sock = _socket.socket(_NETLINK, _socket.SOCK_RAW | _socket.SOCK_CLOEXEC, protocol)
    sock.settimeout(_WAIT_S)
    return sock


def render_route(kind: int, flags: int, index: int) -> bytes:
    """The default route by the gateway, which is reached on the link though no route leads to it."""
    scope = _NOWHERE if kind == _DELETE_ROUTE else _UNIVERSE
    body = _ROUTE_MESSAGE.pack(_INET, 0, 0, 0, _MAIN_TABLE, _BOOT, scope, _UNICAST, _ONLINK)
    body += _ATTRIBUTE.pack(8, _GATEWAY, _socket.inet_aton(GATEWAY)) + _ATTRIBUTE.pack(8, _OIF, _INT.pack(index))
    return render_message(kind, flags | _ACK, body)


def render_message(kind: int, flags: int, body: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(body), kind, flags | _REQUEST, 1, 0) + body


def parse_messages(data: bytes) -> Iterator[Tuple[int, bytes]]:
    """Kind and body of each."""
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, at)[:2]
        if length < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def reset_connections() -> int:
    """End all that lead out of this machine, as if the other side had: who reads or writes one is told at once.

    Returns how many. Sockets that listen, and connections inside the machine, stay.
    """
    sock = open_netlink(_SOCK_DIAG)
    try:
        ended = 0
        for family, protocol, states in _WHAT:
            for found in list_sockets(sock, family, protocol, states):
                if leads_out(family, found):
                    body = _DIAG_REQUEST.pack(family, protocol, 0, 0, 0, found)
                    sock.send(render_message(_DESTROY, _ACK, body))
                    number = -_INT.unpack_from(sock.recv(_READ_BYTES), _HEADER.size)[0]
                    if number not in (0, errno.ENOENT):  # it has just ended by itself
                        raise OSError(number, "a connection could not be reset: " + os.strerror(number))
                    ended += not number
        return ended
    finally:
        sock.close()


def list_sockets(sock: Any, family: int, protocol: int, states: int) -> List[bytes]:
    """The names that the kernel has for them."""
    sock.send(render_message(_BY_FAMILY, _DUMP, _DIAG_REQUEST.pack(family, protocol, 0, 0, states, b"")))
    found: List[bytes] = []
    while True:
        for kind, body in parse_messages(sock.recv(_READ_BYTES)):
            if kind == _DONE:
                return found
            if kind == _ERROR:
                number = -_INT.unpack_from(body)[0]
                raise OSError(number, "the connections could not be listed: " + os.strerror(number))
            found.append(body[_SOCKET_AT : _SOCKET_AT + _SOCKET_BYTES])


def leads_out(family: int, found: bytes) -> bool:
    source = found[_SOURCE_AT : _SOURCE_AT + _ADDRESS_BYTES]
    destination = found[_DESTINATION_AT : _DESTINATION_AT + _ADDRESS_BYTES]
    if source == destination:
        return False
    if family == _INET:
        return destination[0] != 127
    if destination.startswith(_MAPPED):
        return destination[12] != 127
    return destination != _LOOPBACK_6
