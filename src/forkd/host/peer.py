"""Which user holds the other end of a loopback TCP connection.

The kernel says so for one socket over netlink (sock_diag(7)); where that is missing, in /proc/net/tcp. An end that
its owner has closed belongs to nobody: the kernel then reports user 0 and inode 0, which does not mean root.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
# struct inet_diag_req_v2: family, protocol, extensions, padding, states; then the id of one socket
_REQUEST = struct.Struct("=BBBxI")
_SOCKET_ID = struct.Struct("!HH4s12x4s12xIQ")  # ports and addresses of both sides, interface, cookie (all ones: any)
# struct inet_diag_msg: family, state, timer, retransmits; the id; expires, receive and send queue, uid, inode
_ANSWER = struct.Struct("=BBBB48sIIIII")
_ALL_STATES = 0xFFFFFFFF
_REPLY_BYTES = 4096
_NETLINK_S = 1.0

_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2, _CLOSE_WAIT = 1, 4, 5, 8
# Theirs, connected to ours, perhaps half-closed; ours, as long as nobody else can have taken their address.
_THEIR_STATES = frozenset({_ESTABLISHED, _FIN_WAIT1, _FIN_WAIT2})
_OUR_STATES = frozenset({_ESTABLISHED, _CLOSE_WAIT})

Address = tuple[str, int]


def find_peer_uid(sock: socket.socket) -> int | None:
    """The user who holds the other end of an accepted IPv4 connection from this host; None when unknown."""
    try:
        ours, theirs = sock.getsockname(), sock.getpeername()
        uid = find_owner(theirs, ours)
        # Checked last: while our end is connected, what we found was its other end.
        if sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] not in _OUR_STATES:
            return None
    except OSError:
        return None
    return uid


def find_owner(local: Address, remote: Address) -> int | None:
    """The user of the connected socket with these addresses."""
    try:
        return _ask_kernel(local, remote)
    except OSError:
        table = Path("/proc/net/tcp").read_text()
        return parse_table(table, local, remote)


def render_question(local: Address, remote: Address) -> bytes:
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, _ALL_STATES)
    addresses = socket.inet_aton(local[0]), socket.inet_aton(remote[0])
    body += _SOCKET_ID.pack(local[1], remote[1], *addresses, 0, (1 << 64) - 1)
    return _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0) + body


def parse_answer(answer: bytes) -> int | None:
    """The user, or None for a socket without an owner; OSError when the kernel refused."""
    if len(answer) < _HEADER.size + 4:
        raise OSError(errno.EPROTO, "The kernel's answer is too short")
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _NLMSG_ERROR:
        code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        raise OSError(code, os.strerror(code))
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _HEADER.size + _ANSWER.size:
        raise OSError(errno.EPROTO, "The kernel's answer has another type")
    _, state, _, _, _, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    return _owner(state, uid, inode)


def parse_table(table: str, local: Address, remote: Address) -> int | None:
    """The same from the text of /proc/net/tcp."""
    wanted = [_render_address(local), _render_address(remote)]
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[1:3] == wanted:
            return _owner(int(fields[3], 16), int(fields[7]), int(fields[9]))
    return None


def _ask_kernel(local: Address, remote: Address) -> int | None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(_NETLINK_S)
        netlink.sendto(render_question(local, remote), (0, 0))
        return parse_answer(netlink.recv(_REPLY_BYTES))


def _owner(state: int, uid: int, inode: int) -> int | None:
    return uid if inode != 0 and state in _THEIR_STATES else None


def _render_address(address: Address) -> str:
    (number,) = struct.unpack("=I", socket.inet_aton(address[0]))
    return f"{number:08X}:{address[1]:04X}"
