"""Packets that a rule of nftables logs to a group: read from a socket in the namespace it was made in."""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass

from forkd.host.netlink import Message, Netlink, attribute, parse_attributes, parse_messages
from forkd.host.nftables import move_away

_NETFILTER = 12
_SUBSYSTEM = 4 << 8
_PACKET, _CONFIG = _SUBSYSTEM | 0, _SUBSYSTEM | 1
_CFG_CMD, _CFG_MODE, _CFG_FLUSH_PACKETS = 1, 2, 5
_BIND, _COPY_PACKET = 1, 2
_ATTR_PAYLOAD, _ATTR_PREFIX = 9, 10
_RECEIVE_BYTES = 1 << 16
_FAMILY_HEADER = struct.Struct("!BBH")


@dataclass(frozen=True)
class Logged:
    prefix: str
    payload: bytes  # from the IP header on, cut as the rule says


class PacketLog:
    """Bound to a group of the calling thread's namespace."""

    def __init__(self, group: int, snap_bytes: int) -> None:
        self._netlink = Netlink(_NETFILTER)
        try:
            self._netlink.do(*render_bind(group, snap_bytes))
        except OSError:
            self._netlink.close()
            raise
        self._socket = socket.socket(fileno=move_away(os.dup(self._netlink.fileno())))
        self._netlink.close()
        self._socket.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def read(self) -> list[Logged]:
        """What is there now; some are lost when there were too many."""
        try:
            return parse_logged(self._socket.recv(_RECEIVE_BYTES))
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return []
            raise


def render_bind(group: int, snap_bytes: int) -> tuple[Message, ...]:
    header = _FAMILY_HEADER.pack(socket.AF_UNSPEC, 0, group)
    return (
        Message(_CONFIG, 0, header + attribute(_CFG_CMD, struct.pack("!B", _BIND))),
        Message(_CONFIG, 0, header + attribute(_CFG_MODE, struct.pack("!IBx", snap_bytes, _COPY_PACKET))),
        # One at a time: the reader wants to tell at once.
        Message(_CONFIG, 0, header + attribute(_CFG_FLUSH_PACKETS, struct.pack("!I", 1))),
    )


def parse_logged(data: bytes) -> list[Logged]:
    found = []
    for kind, _sequence, body in parse_messages(data):
        if kind == _PACKET:
            fields = parse_attributes(body[_FAMILY_HEADER.size :])
            prefix = fields.get(_ATTR_PREFIX, b"").rstrip(b"\0").decode(errors="replace")
            found.append(Logged(prefix, fields.get(_ATTR_PAYLOAD, b"")))
    return found
