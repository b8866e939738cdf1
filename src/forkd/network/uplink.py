"""The way out of the hub: rules and a link in the daemon's own network as root, or pasta.

What a killed daemon left there has a name that only its home has, so the next one finds it. Its link is gone by
itself, with the hub's namespace.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterable, Sequence
from pathlib import Path

from forkd.host import netlink, nftables
from forkd.host.network_probe import FORWARDING_TABLE, PREFIX
from forkd.model.network import ALL_PORTS, AddressRule
from forkd.network.layout import UPLINK_HUB_MAC, UPLINK_MAC, UPLINK_NAME, UPLINK_PREFIX, Layout
from forkd.network.rules import render_ports

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


def read_taken() -> list[ipaddress.IPv4Network]:
    """What this network has an address in or a route to."""
    with netlink.Netlink() as links:
        addresses = [ipaddress.IPv4Network((each.address, each.prefix), strict=False) for each in links.addresses()]
        return [*addresses, *(route.network for route in links.routes())]


def render_uplink(name: str, layout: Layout) -> str:
    """Sandboxes go out under this host's address, and reach neither this host nor each other by this way."""
    return f"""table inet {name} {{
 chain wanted {{ }}
 chain forward {{
  type filter hook forward priority 0; policy accept;
  iifname "{name}" oifname "{name}" drop
  iifname "{name}" ip saddr != {layout.block} drop
  iifname "{name}" meta nfproto ipv6 drop
  oifname "{name}" ct state established,related accept
  oifname "{name}" drop
 }}
 chain input {{
  type filter hook input priority 0; policy accept;
  iifname "{name}" ct state established,related accept
  iifname "{name}" ip saddr {layout.block} jump wanted
  iifname "{name}" drop
 }}
 chain leaving {{
  type nat hook postrouting priority 100; policy accept;
  ip saddr {layout.block} oifname != "{name}" masquerade
 }}
}}"""


def render_wanted(name: str, rules: Iterable[AddressRule]) -> str:
    """Of this host's own addresses, what rules of sandboxes allow: each sandbox's own rules say who."""
    lines = [f"flush chain inet {name} wanted"]
    for rule in rules:
        where = f"ip daddr {rule.network} " if rule.network.prefixlen else ""
        ports = "" if rule.ports == ALL_PORTS else f" th dport {render_ports(rule.ports)}"
        lines.append(f"add rule inet {name} wanted {where}meta l4proto {{ tcp, udp }}{ports} accept")
        if rule.ports == ALL_PORTS:
            lines.append(f"add rule inet {name} wanted {where}icmp type echo-request accept")
    return "\n".join(lines)


# While forwarding is on because of us, this host does not become a router for others.
_FORWARDING = f"""table inet {FORWARDING_TABLE} {{
 chain forward {{
  type filter hook forward priority 0; policy accept;
  iifname != "{PREFIX}*" oifname != "{PREFIX}*" drop
 }}
}}"""


def set_up(name: str, layout: Layout, hub_namespace: int) -> None:
    """As root. The rules first: nothing is forwarded before they are there."""
    nftables.run(render_uplink(name, layout))
    if _FORWARD.read_text().strip() == "0":
        nftables.run(f"add table inet {FORWARDING_TABLE}\ndelete table inet {FORWARDING_TABLE}\n{_FORWARDING}")
        _FORWARD.write_text("1")
    veth = netlink.render_add_veth(name, UPLINK_MAC, UPLINK_NAME, UPLINK_HUB_MAC, peer_namespace=hub_namespace)
    with netlink.Netlink() as links:
        links.do(veth)
        found = links.find_link(name)
        assert found is not None
        with contextlib.suppress(FileNotFoundError):  # no IPv6 in this kernel
            Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
        links.do(
            netlink.render_add_address(found.index, layout.uplink_host, UPLINK_PREFIX),
            netlink.render_set_link(found.index, up=True),
        )
        links.do(netlink.render_route(str(layout.block), found.index, gateway=layout.uplink_hub))


def clean_up(name: str) -> None:
    """What `set_up` made, of this daemon or one before it; safe to repeat."""
    tables = [table for table in _tables() if table.startswith(PREFIX)]
    with netlink.Netlink() as links:
        found = links.find_link(name)
        if found is not None:
            with contextlib.suppress(OSError):  # its other end is on its way out, and takes it along
                links.do(netlink.render_remove_link(found.index))
    if set(tables) <= {name} and FORWARDING_TABLE in _tables():
        # The last of all daemons here. First off, then the rules that go with it.
        _FORWARD.write_text("0")
        nftables.run(f"delete table inet {FORWARDING_TABLE}")
    if name in tables:
        nftables.run(f"delete table inet {name}")


def _tables() -> Sequence[str]:
    listed = nftables.run_json("list tables inet")
    return [each["table"]["name"] for each in listed if "table" in each]


def run(text: str) -> None:
    nftables.run(text)
