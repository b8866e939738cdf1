"""Which addresses the sandboxes of one daemon have among themselves. Pure.

One block holds them all, chosen so that nothing the host has or reaches lies in it:

    +1    the daemon's end of the uplink
    +2    the hub's end of the uplink
    +5    the hub, as gateway of every sandbox
    +16   the first sandbox
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import NetworkFailed

BLOCK_PREFIX = 20
_FIRST = 16
# First those that few networks use: the end of the range for carriers, then of the private ones.
_CANDIDATES = tuple(
    ipaddress.IPv4Network(text) for text in ("100.127.0.0/16", "10.213.0.0/16", "172.29.0.0/16", "192.168.192.0/18")
)

UPLINK_PREFIX = 30
# Ends of links within the hub: their addresses are known, so nothing has to be asked for.
HUB_MAC = "02:66:6b:64:01:00"
UPLINK_MAC = "02:66:6b:64:02:00"
UPLINK_HUB_MAC = "02:66:6b:64:02:01"
UPLINK_NAME = "out0"  # in the hub


@dataclass(frozen=True)
class Layout:
    block: ipaddress.IPv4Network

    @property
    def uplink_host(self) -> str:
        return str(self.block[1])

    @property
    def uplink_hub(self) -> str:
        return str(self.block[2])

    @property
    def gateway(self) -> str:
        return str(self.block[5])

    @property
    def slots(self) -> int:
        return self.block.num_addresses - _FIRST - 1

    def address(self, index: int) -> str:
        if not 0 <= index < self.slots:
            raise NetworkFailed(f"The sandboxes have all {self.slots} addresses of {self.block}", hint="End some")
        return str(self.block[_FIRST + index])

    def mac(self, index: int) -> str:
        return f"02:66:6b:65:{index >> 8:02x}:{index & 0xFF:02x}"


def choose_layout(taken: Iterable[ipaddress.IPv4Network]) -> Layout:
    """`taken`: what the host has an address in or a route to; a default route takes nothing."""
    used = [network for network in taken if network.prefixlen > 0]
    for block in _blocks():
        if not any(block.overlaps(network) for network in used):
            return Layout(block)
    ranges = ", ".join(map(str, _CANDIDATES))
    raise NetworkFailed(
        f"This host uses every address range that sandboxes could have: {ranges}",
        hint=f"Leave a /{BLOCK_PREFIX} of one of them free of addresses and routes",
    )


def host_name(directory: Path) -> str:
    """Of the daemon's end of the uplink, and of its rules: the same for each daemon of a home."""
    place = os.fsencode(os.path.realpath(directory))
    return "fkd" + hashlib.sha256(place).hexdigest()[:8]


def _blocks() -> Iterator[ipaddress.IPv4Network]:
    for candidate in _CANDIDATES:
        yield from reversed(list(candidate.subnets(new_prefix=BLOCK_PREFIX)))
