"""Connections that the kernel knows in the calling thread's network namespace."""

from __future__ import annotations

import socket
import struct

from forkd.host.netlink import Message, Netlink

_NETFILTER = 12
_DELETE = 1 << 8 | 2


def flush() -> None:
    """Forget all: their packets are then judged as those of no connection."""
    with Netlink(_NETFILTER) as link:
        link.do(Message(_DELETE, 0, struct.pack("!BBH", socket.AF_INET, 0, 0)))
