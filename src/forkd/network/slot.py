"""A sandbox's place: a namespace with its tap, its rules, a link to the hub, and the sockets that serve it.

Called in the thread of the hub that owns the namespaces, which is in the hub's own one in between.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forkd.host import conntrack, netlink, netns, nftables
from forkd.host.nflog import PacketLog
from forkd.host.tap import open_tap
from forkd.model.network import (
    GATEWAY_ADDRESS,
    GATEWAY_MAC,
    GUEST_ADDRESS,
    GUEST_MAC,
    GUEST_PREFIX,
    NO_NETWORK,
    Network,
)
from forkd.network import rules
from forkd.network.layout import HUB_MAC, Layout

_DNS_PORT = 53
_BACKLOG = 64
_SNAP_BYTES = 64
# Index of the first sandbox's link in the hub: known, so that it need not be looked for.
_FIRST_LINK = 1000
# In a new namespace; those of interfaces before there are any.
_SWITCHES = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv6/conf/default/disable_ipv6": "1",
    "ipv4/ip_forward": "1",
    "ipv4/conf/all/rp_filter": "1",
    "ipv4/conf/default/rp_filter": "1",
    "ipv4/conf/all/accept_redirects": "0",
    "ipv4/conf/default/send_redirects": "0",
    "ipv4/conf/all/send_redirects": "0",
    # A packet in the middle of a connection that was made elsewhere, before a fork, does not begin one here.
    "netfilter/nf_conntrack_tcp_loose": "0",
}


@dataclass(frozen=True)
class TapKind:
    """Firecracker opens a tap by its name, as its owner, and with a header before each packet; QEMU takes ours."""

    vnet_hdr: bool = False
    owner: int | None = None


class SlotGone(OSError):
    """It was removed, and the number of its descriptor may be another namespace's by now."""


@dataclass(eq=False)
class Slot:
    index: int
    address: str
    namespace: int
    kind: TapKind
    tap: int | None
    dns: socket.socket
    dns_tcp: socket.socket
    gate: socket.socket
    log: PacketLog
    link: int  # index of its link in the hub
    network: Network = NO_NETWORK
    names: tuple[str, ...] = ()
    host_addresses: frozenset[str] = field(default_factory=frozenset)
    used_bytes: int = 0  # of its quota, before we had it
    gone: bool = False

    def close(self) -> None:
        self.gone = True
        for each in (self.dns, self.dns_tcp, self.gate, self.log):
            each.close()
        self.close_tap()
        os.close(self.namespace)

    def close_tap(self) -> None:
        if self.tap is not None:
            os.close(self.tap)
            self.tap = None


class SlotMaker:
    """Makes slots from the hub's namespace, which the calling thread must be in."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._home = netns.open_current()
        self._hub = netlink.Netlink()

    def make(self, index: int, kind: TapKind, host_addresses: Sequence[str]) -> Slot:
        """Up and linked, and nothing passes."""
        with contextlib.ExitStack() as undo:
            netns.enter_new()
            undo.callback(netns.enter, self._home)
            namespace = nftables.move_away(netns.open_current())
            undo.callback(os.close, namespace)
            tap = nftables.move_away(open_tap(rules.TAP, vnet_hdr=kind.vnet_hdr, owner=kind.owner))
            if kind.vnet_hdr:
                os.close(tap)  # for another to attach to
            slot = self._furnish(index, kind, namespace, None if kind.vnet_hdr else tap, host_addresses)
            undo.pop_all()
        netns.enter(self._home)
        return slot

    def adopt(self, index: int, namespace: int, host_addresses: Sequence[str]) -> Slot:
        """A namespace that another hub left: all is made anew but the tap, which its VM uses. Takes it over."""
        namespace = nftables.move_away(namespace)
        with netns.inside(namespace), netlink.Netlink() as there:
            # It may be on its way out with the other hub's namespace.
            if (old := there.find_link(rules.UP)) is not None:
                with contextlib.suppress(OSError):
                    there.do(netlink.render_remove_link(old.index))
            counted = read_counted() if _has_rules() else rules.NOTHING
            nftables.run(rules.render_remove() + "\n" + self._render_base(index, host_addresses, counted))
            slot = self._furnish(index, TapKind(), namespace, None, host_addresses, loaded=True)
        slot.used_bytes = counted.bytes
        return slot

    def remove(self, slot: Slot) -> None:
        """Cut off at once, also when somebody still holds the tap.

        Without a route to it the hub takes nothing from it either. Its link goes with its namespace: removing it here
        would cost tens of milliseconds.
        """
        with contextlib.suppress(OSError):  # gone already, with its namespace
            self._hub.do(netlink.render_remove_route(f"{slot.address}/32", slot.link))
        slot.close()

    def run(self, slot: Slot, text: str) -> None:
        with self.inside(slot):
            nftables.run(text)

    def change(self, slot: Slot, network: Network, text: str) -> None:
        """Other rules; connections are to be made anew, as the kernel lets known ones pass."""
        with self.inside(slot):
            nftables.run(text)
            # Before what may fail: from here on these are the rules that there are.
            slot.network = network
            conntrack.flush()

    @contextlib.contextmanager
    def inside(self, slot: Slot) -> Iterator[None]:
        """Raises SlotGone. Slots are removed in this thread too, so it cannot go meanwhile."""
        if slot.gone:
            raise SlotGone(errno.ENETDOWN, "The sandbox has no network any more")
        netns.enter(slot.namespace)
        try:
            yield
        finally:
            netns.enter(self._home)

    def socket_inside(self, slot: Slot) -> socket.socket:
        with self.inside(slot):
            return _stream()

    def _render_base(self, index: int, host_addresses: Sequence[str], counted: rules.Counted = rules.NOTHING) -> str:
        return rules.render_base(self.layout.address(index), self.layout.block, host_addresses, counted)

    def _furnish(
        self,
        index: int,
        kind: TapKind,
        namespace: int,
        tap: int | None,
        host_addresses: Sequence[str],
        *,
        loaded: bool = False,
    ) -> Slot:
        """In the namespace. The rules first: nothing is up before they are there."""
        if not loaded:
            nftables.run(self._render_base(index, host_addresses))
            for name, value in _SWITCHES.items():
                _switch(name, value)
        link = self._link(index, namespace)
        with contextlib.ExitStack() as undo:
            sockets = [undo.enter_context(sock) for sock in (_dns_socket(), _listener(_DNS_PORT))]
            gate = undo.enter_context(_listener(rules.GATE_PORT))
            log = PacketLog(rules.LOG_GROUP, _SNAP_BYTES)
            undo.pop_all()
        return Slot(
            index=index,
            address=self.layout.address(index),
            namespace=namespace,
            kind=kind,
            tap=tap,
            dns=sockets[0],
            dns_tcp=sockets[1],
            gate=gate,
            log=log,
            link=link,
            host_addresses=frozenset(host_addresses),
        )

    def _link(self, index: int, namespace: int) -> int:
        """From the namespace to the hub. Both ends know each other, so that nobody has to ask."""
        address, mac, hub_end = self.layout.address(index), self.layout.mac(index), _FIRST_LINK + index
        veth = netlink.render_add_veth(f"v{index}", HUB_MAC, rules.UP, mac, peer_namespace=namespace, index=hub_end)
        try:
            self._hub.do(veth)
        except FileExistsError:  # of a sandbox before, whose namespace somebody still holds
            self._hub.do(netlink.render_remove_link(hub_end))
            self._hub.do(veth)
        with netlink.Netlink() as there:
            links = {link.name: link.index for link in there.links()}
            tap, up = links[rules.TAP], links[rules.UP]
            there.do(
                netlink.render_set_link(tap, mac=GATEWAY_MAC),
                netlink.render_add_address(tap, GATEWAY_ADDRESS, GUEST_PREFIX),
                netlink.render_set_link(tap, up=True),
                netlink.render_neighbour(tap, GUEST_ADDRESS, GUEST_MAC),
                netlink.render_add_address(up, address, 32),
                netlink.render_set_link(up, up=True),
            )
            self._hub.do(
                netlink.render_set_link(hub_end, up=True),
                netlink.render_route(f"{address}/32", hub_end),
                netlink.render_neighbour(hub_end, address, mac),
            )
            there.do(
                netlink.render_route(f"{self.layout.gateway}/32", up),
                netlink.render_neighbour(up, self.layout.gateway, HUB_MAC),
                netlink.render_route("0.0.0.0/0", up, gateway=self.layout.gateway),
            )
        return hub_end


def read_counted() -> rules.Counted:
    """Of the namespace that the calling thread is in."""
    listed = nftables.run_json("list counters table ip forkd")
    counters = {each["counter"]["name"]: each["counter"] for each in listed if "counter" in each}
    return rules.Counted(counters["bytes_in"]["bytes"], counters["bytes_out"]["bytes"], counters["refused"]["packets"])


def _has_rules() -> bool:
    listed = nftables.run_json("list tables ip")
    return any(each["table"]["name"] == "forkd" for each in listed if "table" in each)


def _switch(name: str, value: str) -> None:
    path = Path("/proc/sys/net", name)
    # IPv6 may not be in this kernel at all.
    if not name.startswith("ipv6/") or path.exists():
        path.write_text(value)


def _dns_socket() -> socket.socket:
    sock = moved(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    sock.bind((GATEWAY_ADDRESS, _DNS_PORT))
    return sock


def _listener(port: int) -> socket.socket:
    sock = _stream()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((GATEWAY_ADDRESS, port))
    sock.listen(_BACKLOG)
    return sock


def _stream() -> socket.socket:
    return moved(socket.socket(socket.AF_INET, socket.SOCK_STREAM))


def moved(sock: socket.socket) -> socket.socket:
    """The same, out of the way of nftables, and it never blocks."""
    away = socket.socket(fileno=nftables.move_away(sock.detach()))
    away.setblocking(False)
    return away
