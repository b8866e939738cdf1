"""The hub: a process of the daemon that owns the networks of all sandboxes. It ends with the daemon.

Its main thread stays in the daemon's network, to ask the host's resolvers; a second one owns the namespaces. All are
owned by its user namespace: it has no rights over the host. It is asked through a channel (`channel.py`):

    {"id": 1, "do": "lease", ...}      answered by {"id": 1, "ok": {...}} or {"id": 1, "error": {...}}
    {"refused": [...]}                 from the hub, at any time
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import dns.rdata

from forkd.errors import ForkdError, NetworkFailed, NotFound
from forkd.host import netlink, netns, nftables
from forkd.model.network import Network, parse_network
from forkd.network import rules
from forkd.network.channel import Channel
from forkd.network.groups import Groups
from forkd.network.layout import UPLINK_NAME, UPLINK_PREFIX, Layout
from forkd.network.lease import Refused
from forkd.network.listener import Room
from forkd.network.pasta import Pasta, has_way_out
from forkd.network.pool import Pool
from forkd.network.privileges import die_with, give_up_rights, raise_open_files
from forkd.network.resolver import Resolver
from forkd.network.sandbox import Sandbox
from forkd.network.slot import SlotMaker, TapKind

T = TypeVar("T")

_MAX_NAMES = 8
_MAX_ROOM = 8192

_log = logging.getLogger(__name__)


class Hub:
    def __init__(self, layout: Layout, resolver: Resolver, uplink: str) -> None:
        self.layout, self.resolver, self._uplink = layout, resolver, uplink
        self.room = Room(choose_room(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        # One thread for all namespaces: they change one after the other.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="namespaces")
        self._sandboxes: dict[str, Sandbox] = {}
        # Of each name, while somebody wants it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._host_addresses: frozenset[str] = frozenset()
        self._groups = Groups()
        self._pasta: Pasta | None = None
        self.channel: Channel | None = None
        self.maker: SlotMaker
        self.pool: Pool
        self._tasks: set[asyncio.Task[None]] = set()
        self.ended = asyncio.Event()

    async def open(self) -> int:
        """Make the hub's own namespace; a descriptor of it."""
        self._watch_addresses()
        self.maker = await self.in_namespaces(self._make_namespace)
        self.pool = Pool(self.maker, self.in_namespaces, lambda: self._host_addresses)
        return await self.in_namespaces(netns.open_current)

    async def in_namespaces(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def find_member(self, group: str | None, name: str) -> str | None:
        return self._groups.find(group, name)

    def is_ours(self, address: str) -> bool:
        return address in self._host_addresses or ipaddress.IPv4Address(address) in self.layout.block

    def tell(self, refused: list[Refused]) -> None:
        if refused and self.channel is not None:
            self._spawn(self.channel.send({"refused": [asdict(each) for each in refused]}))

    def on_message(self, message: dict[str, Any], descriptors: list[int]) -> None:
        self._spawn(self._serve(message, descriptors))

    async def _serve(self, message: dict[str, Any], descriptors: list[int]) -> None:
        assert self.channel is not None
        number, given = message.get("id"), list(descriptors)
        sent: list[int] = []
        try:
            work = _WORK.get(str(message.get("do")))
            if work is None:
                raise NetworkFailed(f"The hub cannot do {str(message.get('do'))[:40]!r}")
            answer: dict[str, Any] = {"id": number, "ok": await work(self, message, given, sent)}
        except ForkdError as error:
            answer = {"id": number, "error": {"code": error.code, "message": error.message, "hint": error.hint}}
        except Exception as error:
            _log.error("%s failed", message.get("do"), exc_info=not isinstance(error, OSError))
            text = f"The network's {message.get('do')} failed: {error}"
            answer = {"id": number, "error": {"code": NetworkFailed.code, "message": text[:500], "hint": None}}
        try:
            await self.channel.send(answer, sent)
        finally:
            for descriptor in (*given, *sent):
                os.close(descriptor)

    async def _set_uplink(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        """The daemon has made its end, or there is none to make."""
        if self._uplink == "pasta":
            self._pasta = Pasta(await self.in_namespaces(netns.open_current), self.layout, on_end=self.ended.set)
            await self._pasta.start(lambda: self.in_namespaces(has_way_out))
        else:
            await self.in_namespaces(self._set_veth)
        self.pool.want(int(message["pool"]))
        return {}

    async def _lease(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        name, network, names = _parse_who(message)
        owner = message.get("owner")
        kind = TapKind(bool(message.get("vnet_hdr")), int(owner) if owner is not None else None)
        async with self._turn(name):
            if name in self._sandboxes:
                raise NetworkFailed(f"{name} has a network already")
            slot = await self.pool.take(kind, network)
            await self._let_in(Sandbox(name, slot, self), names)
        if slot.tap is not None:
            sent.append(slot.tap)
            slot.tap = None
        return {
            "tap_name": rules.TAP,
            "address": slot.address,
            "namespace": f"/proc/{os.getpid()}/fd/{slot.namespace}",
        }

    async def _adopt(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        name, network, names = _parse_who(message)
        async with self._turn(name):
            if name in self._sandboxes or len(given) != 1:
                raise NetworkFailed(f"{name} cannot be taken over")
            slot = await self.pool.adopt(given.pop(), network)
            await self._let_in(Sandbox(name, slot, self), names)
        return {"address": slot.address}

    async def _change(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        name, network, names = _parse_who(message)
        async with self._turn(name):
            sandbox = self._get(name)
            async with sandbox.changing:
                if network != sandbox.network:  # else it has another name, which is no reason to cut it off
                    await self._set_rules(sandbox, network)
                await self._regroup(sandbox, names)
        return {}

    async def _set_rules(self, sandbox: Sandbox, network: Network) -> None:
        used = await self.in_namespaces(sandbox.read_usage)
        text = self.pool.render_change(sandbox.slot, network, used.bytes_in + used.bytes_out, sandbox.named)
        await self.in_namespaces(lambda: self.maker.change(sandbox.slot, network, text))
        sandbox.named.keep(network, time.monotonic())
        sandbox.cut_gate()

    async def _release(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        name = str(message.get("name"))
        async with self._turn(name):
            sandbox = self._sandboxes.pop(name, None)
            if sandbox is not None:
                sandbox.stop()
                if (text := self._groups.leave(sandbox.slot.address)) is not None:
                    await self.in_namespaces(lambda: nftables.run(text))
                await self.pool.give_back(sandbox.slot)
        return {}

    async def _connect(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        port = int(message["port"])
        try:
            sock = await self._get(str(message.get("name"))).connect(port)
        except OSError as error:
            reason = "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise NetworkFailed(f"Port {port} of the guest cannot be reached: {reason}") from error
        sent.append(sock.detach())
        return {}

    async def _read_usage(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        return asdict(await self.in_namespaces(self._get(str(message.get("name"))).read_usage))

    async def _expect(self, message: dict[str, Any], given: list[int], sent: list[int]) -> dict[str, Any]:
        self.pool.expect(parse_network(message.get("network")), int(message["count"]))
        return {}

    async def _let_in(self, sandbox: Sandbox, names: tuple[str, ...]) -> None:
        """Its rules are in force."""
        try:
            await self._regroup(sandbox, names)
        except BaseException:
            await self.pool.give_back(sandbox.slot)
            raise
        self._sandboxes[sandbox.name] = sandbox
        sandbox.start()

    async def _regroup(self, sandbox: Sandbox, names: tuple[str, ...]) -> None:
        text = self._groups.put(sandbox.slot.address, sandbox.network.group, names)
        if text is not None:
            await self.in_namespaces(lambda: nftables.run(text))

    def _turn(self, name: str) -> asyncio.Lock:
        """One after the other, as they were asked for: what is released while it is being leased is released."""
        return self._turns.setdefault(name, asyncio.Lock())

    def _get(self, name: str) -> Sandbox:
        sandbox = self._sandboxes.get(name)
        if sandbox is None:
            raise NotFound(f"{name[:80]} has no network")
        return sandbox

    def _make_namespace(self) -> SlotMaker:
        netns.enter_new()
        nftables.run(rules.render_hub(self.layout.block, UPLINK_NAME, translate=self._uplink == "pasta"))
        for switch, value in _SWITCHES.items():
            Path("/proc/sys/net/ipv4", switch).write_text(value)
        with netlink.Netlink() as links:
            loopback = next(link.index for link in links.links() if link.name == "lo")
            # The gateway of all sandboxes is an address of ours, whatever links there are.
            gateway = netlink.render_add_address(loopback, self.layout.gateway, 32)
            links.do(netlink.render_set_link(loopback, up=True), gateway)
        return SlotMaker(self.layout)

    def _set_veth(self) -> None:
        with netlink.Netlink() as links:
            found = links.find_link(UPLINK_NAME)
            if found is None:
                raise NetworkFailed("The daemon's end of the uplink is not there")
            links.do(
                netlink.render_add_address(found.index, self.layout.uplink_hub, UPLINK_PREFIX),
                netlink.render_set_link(found.index, up=True),
            )
            links.do(netlink.render_route("0.0.0.0/0", found.index, gateway=self.layout.uplink_host))

    def _watch_addresses(self) -> None:
        """Of the host: denied to sandboxes, as they come and go."""
        # In the main thread, which is in the daemon's network.
        self._news = netlink.Netlink(groups=netlink.GROUP_IPV4_ADDRESSES)
        self._read_addresses()
        asyncio.get_running_loop().add_reader(self._news.fileno(), self._on_news)

    def _on_news(self) -> None:
        self._news.drain()
        self._read_addresses()
        self._spawn(self.pool.refresh_all())

    def _read_addresses(self) -> None:
        with netlink.Netlink() as links:
            self._host_addresses = frozenset(str(each.address) for each in links.addresses())

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("A task of the hub failed: %s", error)


Work = Callable[[Hub, dict[str, Any], list[int], list[int]], Awaitable[dict[str, Any]]]
_WORK: dict[str, Work] = {
    "uplink": Hub._set_uplink,
    "lease": Hub._lease,
    "adopt": Hub._adopt,
    "change": Hub._change,
    "release": Hub._release,
    "connect": Hub._connect,
    "usage": Hub._read_usage,
    "expect": Hub._expect,
}
_SWITCHES = {
    "ip_forward": "1",
    "conf/all/rp_filter": "1",
    "conf/default/rp_filter": "1",
    "conf/all/send_redirects": "0",
}


def choose_room(open_files: int) -> int:
    """Connections that all guests together may have to us: each through the gate is two. Half is for all else. Pure."""
    return min(open_files // 4, _MAX_ROOM)


def _parse_who(message: dict[str, Any]) -> tuple[str, Any, tuple[str, ...]]:
    name, names = message.get("name"), message.get("names", [])
    if not isinstance(name, str) or not 0 < len(name) <= 200:
        raise NetworkFailed("A network is for a sandbox with a name")
    if not isinstance(names, list) or len(names) > _MAX_NAMES or not all(isinstance(each, str) for each in names):
        raise NetworkFailed("The names of a sandbox in its group must be a short list of texts")
    return name, parse_network(message.get("network")), tuple(each.lower() for each in names)


async def _run(plan: dict[str, Any], control: socket.socket) -> None:
    layout = Layout(ipaddress.IPv4Network(plan["block"]))
    hub = Hub(layout, Resolver(plan["resolvers"]), plan["uplink"])
    namespace = await hub.open()
    hub.channel = Channel(control, hub.on_message, hub.ended.set)
    try:
        await hub.channel.send({"ready": True}, [namespace])
        os.close(namespace)
        await hub.ended.wait()
    except ForkdError as error:
        _log.error("%s", error)
    # All that we have goes with us, and nothing has to be told to anybody.
    os._exit(0)


def main(plan: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    control = socket.socket(fileno=plan["control"])
    try:
        # What is read later may be closed to the user that we become.
        dns.rdata.load_all_types()  # type: ignore[no-untyped-call]
        nftables.load_library()
        give_up_rights(Path(plan["directory"]), plan["uid"], plan["user_namespace"])
        die_with(plan["parent"])
        raise_open_files()
        asyncio.run(_run(plan, control))
    except (ForkdError, OSError) as error:
        text = {"failed": str(error)[:500], "hint": getattr(error, "hint", None)}
        with contextlib.suppress(OSError):
            control.send(json.dumps(text).encode())
        sys.exit(1)
