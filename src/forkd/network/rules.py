"""Rules of a sandbox's namespace as texts of nftables. Pure: a text is one transaction.

`render_base` denies everything, and is loaded before any interface is up. What a `Network` allows goes into chains that
are empty there, so that giving a sandbox its rules is a small text. All that a guest sends passes, in this order:
its own address and whole packets (ingress), the quota of bytes, connections known already, limits, what is never
reached, denied rules, its group, other sandboxes, allowed addresses (one, or a range within a private one), this host
and private ranges, then wider ranges, names or all.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forkd.model.network import (
    ALL_PORTS,
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    NEVER_RANGES,
    PRIVATE_RANGES,
    AddressRule,
    DomainRule,
    Mode,
    Network,
    Ports,
)

TAP = "tap0"
UP = "up0"
GATE_PORT = 8443
TLS_PORT = 443
LOG_GROUP = 1
# Of all connections of a sandbox at one time, and new ones; quotas are for less.
MAX_CONNECTIONS = 4096
_NEW_PER_S, _NEW_BURST = 500, 1000
_LOGS_PER_S, _LOGS_BURST = 20, 40
_DNS_LIMIT = "limit rate 400/second burst 800 packets"
_ARP_PER_S = 50
# Addresses with ports that names stand for, at one time.
MAX_NAMED = 2048
_MAX_HOST_ADDRESSES = 4096

# Why something was refused, as the log and `Refused` have it.
REASONS = ("address", "private", "denied", "connections", "quota")
_FILLED = ("deny_rules", "allow_rules", "rest_rules", "group_out", "group_in", "group_nat", "gate_rules", "limit_rules")
_QUOTA_CHAINS = ("quota_out", "quota_in")

Named = tuple[str, tuple[int, int]]  # an address, and ports from and to


@dataclass(frozen=True)
class Counted:
    """What the counters of a namespace say: they go on when its rules are made anew."""

    bytes_in: int = 0
    bytes_out: int = 0
    refused: int = 0  # packets

    @property
    def bytes(self) -> int:
        return self.bytes_in + self.bytes_out


NOTHING = Counted()


def render_base(
    address: str, block: ipaddress.IPv4Network, host_addresses: Iterable[str], counted: Counted = NOTHING
) -> str:
    """Nothing passes, in a namespace that has the tap. `address`: its own among the sandboxes."""
    return "\n".join(
        [
            _INGRESS,
            "table ip forkd {",
            f" set names {{ type ipv4_addr . inet_service; flags interval, timeout; size {MAX_NAMED * 2}; }}",
            f" set host {{ type ipv4_addr; size {_MAX_HOST_ADDRESSES}; {_elements(host_addresses)} }}",
            f" counter bytes_in {{ packets 0 bytes {counted.bytes_in} }}",
            f" counter bytes_out {{ packets 0 bytes {counted.bytes_out} }}",
            f" counter refused {{ packets {counted.refused} bytes 0 }}",
            *(f" chain {name} {{ }}" for name in (*_FILLED, *_QUOTA_CHAINS)),
            *(_render_refusal(reason) for reason in REASONS),
            _render_chains(block),
            "}",
        ]
    )


def render_remove() -> str:
    """What `render_base` made, whether it is there or not."""
    lines = []
    for family in ("netdev", "ip"):
        lines += [f"add table {family} forkd", f"delete table {family} forkd"]
    return "\n".join(lines)


def render_policy(network: Network, address: str, block: ipaddress.IPv4Network, *, used_bytes: int = 0) -> str:
    """What the network allows, for chains that are empty."""
    if network.off:
        return ""
    lines = _render_rules(network)
    lines += [f"add rule ip forkd {line}" for line in _render_group(network, address, block)]
    if network.max_connections is not None:
        lines.append(f"add rule ip forkd limit_rules ct count over {network.max_connections} goto refuse_connections")
    if network.max_bytes is not None:
        lines.append(f"add quota ip forkd max {{ over {network.max_bytes} bytes used {used_bytes} bytes }}")
        lines.append('add rule ip forkd quota_out quota name "max" goto refuse_quota')
        lines.append('add rule ip forkd quota_in quota name "max" drop')
    return "\n".join(lines)


def render_change(
    before: Network,
    after: Network,
    address: str,
    block: ipaddress.IPv4Network,
    *,
    used_bytes: int,
    named: Mapping[Named, int],
) -> str:
    """From one network's rules to another's. `named`: what names still stand for, and for how many seconds."""
    lines = [f"flush chain ip forkd {name}" for name in (*_FILLED, *_QUOTA_CHAINS)]
    if before.max_bytes is not None:
        lines.append("delete quota ip forkd max")
    lines += ["flush set ip forkd names", render_policy(after, address, block, used_bytes=used_bytes)]
    if named:
        lines.append(f"add element ip forkd names {{ {_render_named(named)} }}")
    return "\n".join(line for line in lines if line)


def render_new_named(named: Mapping[Named, int]) -> str:
    """Let names stand for addresses that are not in the set: much quicker, as nothing is removed."""
    return f"add element ip forkd names {{ {_render_named(named)} }}"


def render_named(named: Mapping[Named, int]) -> str:
    """Let names stand for addresses for so many seconds from now, also where they do already."""
    plain, timed = ", ".join(_element(each) for each in named), _render_named(named)
    # An element that is there keeps its time when it is added again, and one that is not there cannot be removed.
    return "\n".join(
        f"{verb} element ip forkd names {{ {what} }}"
        for verb, what in (("add", timed), ("delete", plain), ("add", timed))
    )


def render_host_addresses(addresses: Iterable[str]) -> str:
    listed = ", ".join(addresses)
    add = f"\nadd element ip forkd host {{ {listed} }}" if listed else ""
    return "flush set ip forkd host" + add


def ports_of(network: Network, name: str) -> Ports:
    """Ports of a name that the rules allow, with none: the name is refused. Not for mode open.

    In pieces that are the same for all names, so that no two in the set overlap, which nftables refuses.
    """
    if network.finds_name(name) is None:
        return ()
    domains = [rule for rule in network.allowed if isinstance(rule, DomainRule)]
    wanted = merged(tuple(ports for rule in domains if rule.matches(name) for ports in rule.ports))
    cuts = sorted({cut for rule in domains for low, high in rule.ports for cut in (low, high + 1)})
    pieces = ((low, after - 1) for low, after in itertools.pairwise(cuts))
    return tuple(piece for piece in pieces if any(low <= piece[0] and piece[1] <= high for low, high in wanted))


def render_ports(ports: Ports) -> str:
    return "{ " + ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in merged(ports)) + " }"


def merged(ports: Ports) -> Ports:
    """Sorted, and without overlaps, which nftables refuses in a set."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(ports):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], high))
        else:
            found.append((low, high))
    return tuple(found)


def _render_rules(network: Network) -> list[str]:
    lines = []
    for rule in _addresses(network.denied):
        lines += [f"add rule ip forkd deny_rules {match} goto refuse_denied" for match in _matches(rule)]
        lines += [f"add rule ip forkd gate_rules {match} return" for match in _tls(rule)]
    for rule in _addresses(network.allowed):
        chain = "allow_rules" if rule.means_inside else "rest_rules"
        lines += [f"add rule ip forkd {chain} {match} accept" for match in _matches(rule)]
        lines += [f"add rule ip forkd gate_rules {match} return" for match in _tls(rule)]
    if network.mode is Mode.OPEN:
        lines += [f"add rule ip forkd rest_rules {match} accept" for match in ("meta l4proto { tcp, udp }", _ECHO)]
    elif any(isinstance(rule, DomainRule) for rule in network.allowed):
        # What goes to the gate never comes by here.
        lines.append(f"add rule ip forkd rest_rules tcp dport != {TLS_PORT} ip daddr . tcp dport @names accept")
        lines.append(f"add rule ip forkd gate_rules ip daddr . tcp dport @names redirect to :{GATE_PORT}")
    return lines


def _render_group(network: Network, address: str, block: ipaddress.IPv4Network) -> list[str]:
    """The hub knows who is in which group, and lets nothing else through."""
    if network.group is None:
        return []
    new = ("meta l4proto { tcp, udp }", _ECHO)
    return [
        *(f"group_out ip daddr {block} ip daddr != {address} {match} accept" for match in new),
        *(f"group_in ip saddr {block} {match} accept" for match in new),
        f"group_nat ip saddr {block} ip daddr {address} dnat to {GUEST_ADDRESS}",
    ]


def _addresses(rules: Iterable[AddressRule | DomainRule]) -> list[AddressRule]:
    return [rule for rule in rules if isinstance(rule, AddressRule)]


def _matches(rule: AddressRule) -> list[str]:
    """Echo requests have no port: they go with a rule for all ports."""
    where = _where(rule)
    if rule.ports == ALL_PORTS:
        return [f"{where} meta l4proto {{ tcp, udp }}".strip(), f"{where} {_ECHO}".strip()]
    return [f"{where} meta l4proto {{ tcp, udp }} th dport {render_ports(rule.ports)}".strip()]


def _tls(rule: AddressRule) -> list[str]:
    return [_where(rule)] if any(low <= TLS_PORT <= high for low, high in rule.ports) else []


def _where(rule: AddressRule) -> str:
    return f"ip daddr {rule.network}" if rule.network.prefixlen else ""


def _element(named: Named) -> str:
    address, (low, high) = named
    return f"{address} . {low}" if low == high else f"{address} . {low}-{high}"


def _render_named(named: Mapping[Named, int]) -> str:
    return ", ".join(f"{_element(each)} timeout {seconds}s" for each, seconds in named.items())


def _set(networks: Iterable[ipaddress.IPv4Network]) -> str:
    return "{ " + ", ".join(map(str, networks)) + " }"


def _elements(addresses: Iterable[str]) -> str:
    listed = ", ".join(addresses)
    return f"elements = {{ {listed} }};" if listed else ""


def _render_refusal(reason: str) -> str:
    return f""" chain refuse_{reason} {{
  counter name "refused"
  limit rate {_LOGS_PER_S}/second burst {_LOGS_BURST} packets log prefix "{reason}" group {LOG_GROUP} snaplen 64
  meta l4proto tcp reject with tcp reset
  reject with icmp admin-prohibited
 }}"""


_ECHO = "icmp type echo-request"
_PROTOCOLS = "ip protocol { tcp, udp, icmp }"
# Before anything is put together or looked up: whole IPv4 packets from the guest's own address, without options.
_INGRESS = f"""table netdev forkd {{
 chain ingress {{
  type filter hook ingress device "{TAP}" priority 0; policy drop;
  ether type arp arp operation request arp daddr ip {GATEWAY_ADDRESS} limit rate {_ARP_PER_S}/second accept
  ether type ip ip saddr {GUEST_ADDRESS} ip hdrlength 5 ip frag-off & 0x3fff == 0 {_PROTOCOLS} accept
 }}
}}"""


def _render_chains(block: ipaddress.IPv4Network) -> str:
    return f""" chain stray {{
  meta l4proto tcp tcp flags & rst == 0 reject with tcp reset
  drop
 }}
 chain bounded {{
  limit rate over {_NEW_PER_S}/second burst {_NEW_BURST} packets goto refuse_connections
  ct count over {MAX_CONNECTIONS} goto refuse_connections
  jump limit_rules
 }}
 chain judged {{
  ip daddr {_set(NEVER_RANGES)} goto refuse_private
  jump deny_rules
  jump group_out
  ip daddr {block} goto refuse_private
  jump allow_rules
  ip daddr @host goto refuse_private
  ip daddr {_set(PRIVATE_RANGES)} goto refuse_private
  jump rest_rules
  goto refuse_address
 }}
 chain from_guest {{
  ct state established,related accept
  ct state invalid goto stray
  jump bounded
  goto judged
 }}
 chain to_guest {{
  ct state established,related accept
  ct state invalid drop
  jump group_in
  drop
 }}
 chain to_gateway {{
  ct state established,related accept
  ct state invalid goto stray
  ip daddr {GATEWAY_ADDRESS} meta l4proto {{ tcp, udp }} th dport 53 {_DNS_LIMIT} accept
  ip daddr {GATEWAY_ADDRESS} {_ECHO} accept
  jump bounded
  ct status dnat tcp dport {GATE_PORT} accept
  goto refuse_private
 }}
 chain forward {{
  type filter hook forward priority 0; policy drop;
  iifname "{TAP}" oifname "{UP}" goto from_guest
  iifname "{UP}" oifname "{TAP}" goto to_guest
 }}
 chain input {{
  type filter hook input priority 0; policy drop;
  iifname "{TAP}" goto to_gateway
  iifname "{UP}" ct state established,related accept
 }}
 chain counted_out {{
  type filter hook prerouting priority -300; policy accept;
  iifname "{TAP}" counter name "bytes_out" jump quota_out
 }}
 chain counted_in {{
  type filter hook postrouting priority 0; policy accept;
  oifname != "{TAP}" accept
  counter name "bytes_in"
  meta l4proto tcp tcp flags & rst != 0 accept
  icmp type destination-unreachable accept
  jump quota_in
 }}
 chain arriving {{
  type nat hook prerouting priority -100; policy accept;
  iifname "{TAP}" tcp dport {TLS_PORT} ip daddr != {block} jump gate_rules
  iifname "{UP}" jump group_nat
 }}
 chain leaving {{
  type nat hook postrouting priority 100; policy accept;
  oifname "{UP}" masquerade
 }}"""


def render_hub(block: ipaddress.IPv4Network, uplink: str, *, translate: bool) -> str:
    """Of the hub's own namespace: sandboxes reach the uplink, and those of their group; nothing reaches the hub."""
    back = "ct state established,related accept" if translate else "accept"
    leaving = f'chain leaving {{ type nat hook postrouting priority 100; oifname "{uplink}" masquerade; }}'
    return f"""table ip hub {{
 map group_of {{ type ipv4_addr : mark; }}
 set members {{ type ipv4_addr . mark; }}
 chain forward {{
  type filter hook forward priority 0; policy drop;
  iifname "v*" oifname "{uplink}" ip saddr {block} ip daddr != {block} accept
  iifname "{uplink}" oifname "v*" ip saddr != {block} {back}
  iifname "v*" oifname "v*" meta mark set ip saddr map @group_of
  iifname "v*" oifname "v*" ip daddr . meta mark @members accept
 }}
 chain input {{
  type filter hook input priority 0; policy drop;
  iifname != "v*" {"ct state established,related accept" if translate else "icmp type echo-request accept"}
 }}
 {leaving if translate else ""}
}}"""


def render_join(address: str, group: int) -> str:
    return f"""add element ip hub group_of {{ {address} : {group} }}
add element ip hub members {{ {address} . {group} }}"""


def render_leave(address: str, group: int) -> str:
    return f"""delete element ip hub group_of {{ {address} : {group} }}
delete element ip hub members {{ {address} . {group} }}"""
