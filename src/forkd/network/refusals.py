"""What was refused, told once for many: a guest can be refused thousands of times a second."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from forkd.network.lease import Refused

# Different ones of one sandbox that wait to be told; further ones are counted with the last reason only.
MAX_WAITING = 64
_PROTOCOLS = {1: "icmp", 6: "tcp", 17: "udp"}


@dataclass(frozen=True)
class Packet:
    protocol: str
    address: str  # where it was to go
    port: int | None


def parse_packet(payload: bytes) -> Packet | None:
    """From the IP header on; None when it is not whole enough to tell."""
    if len(payload) < 20 or payload[0] >> 4 != 4:
        return None
    header = (payload[0] & 15) * 4
    protocol = _PROTOCOLS.get(payload[9], str(payload[9]))
    ports = payload[header + 2 : header + 4]
    port = int.from_bytes(ports) if protocol in ("tcp", "udp") and len(ports) == 2 else None
    return Packet(protocol, str(ipaddress.IPv4Address(payload[16:20])), port)


class Refusals:
    """Those of one sandbox since they were taken last."""

    def __init__(self) -> None:
        self._waiting: dict[Refused, int] = {}

    def add(self, refused: Refused) -> bool:
        """True: it is the first that waits."""
        first = not self._waiting
        if refused not in self._waiting and len(self._waiting) >= MAX_WAITING:
            refused = replace(refused, asked=None, address=None, port=None)
        self._waiting[refused] = self._waiting.get(refused, 0) + 1
        return first

    def take(self) -> list[Refused]:
        taken = [replace(refused, count=count) for refused, count in self._waiting.items()]
        self._waiting.clear()
        return taken
