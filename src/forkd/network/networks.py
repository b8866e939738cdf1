"""Networks of sandboxes, as the daemon asks for them. The hub, a process of its own, does the work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from forkd.errors import ForkdError, HostLacks, NetworkFailed, NotFound
from forkd.host import netns, network_probe
from forkd.host.faults import fault_point
from forkd.host.tap import open_namespace
from forkd.host.threads import in_thread
from forkd.model.network import AddressRule, Network
from forkd.network import uplink
from forkd.network.hub_process import START_HINT, HubProcess, ended
from forkd.network.layout import choose_layout, host_name
from forkd.network.lease import Lease, NetworkOptions, Refused, Usage
from forkd.network.resolver import find_resolvers

_MOUNT = "hub"

_log = logging.getLogger(__name__)


class Networks:
    def __init__(self, directory: Path, options: NetworkOptions, on_refused: Callable[[Refused], None]) -> None:
        self._directory, self._options, self._on_refused = directory, options, on_refused
        self._name = host_name(directory)
        self._hub: HubProcess | None = None
        self._starting: asyncio.Task[HubProcess] | None = None
        self._linked = False  # this host has its end of an uplink, and rules for it
        self._user_namespace: int | None = None
        self._why_none: str | None = None
        # Address rules of all sandboxes, how many have each, and those that this host lets in.
        self._rules: dict[str, tuple[AddressRule, ...]] = {}
        self._uses: Counter[AddressRule] = Counter()
        self._wanted: tuple[AddressRule, ...] = ()
        self._wanting = asyncio.Lock()
        self._expected: tuple[Network, int] | None = None
        self._on_lost: Callable[[], None] = lambda: None

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(
        cls, directory: Path, options: NetworkOptions, on_refused: Callable[[Refused], None]
    ) -> AsyncIterator[Networks]:
        """First removes what a killed daemon left. The hub is started when it is needed."""
        networks = cls(directory, options, on_refused)
        await in_thread(lambda: directory.mkdir(mode=0o700, parents=True, exist_ok=True))
        await networks._look()
        try:
            yield networks
        finally:
            await networks._close()

    def why_none(self) -> str | None:
        """Why this host can give no network; None: it can."""
        return self._why_none

    async def lease(
        self,
        name: str,
        network: Network,
        names: Sequence[str] = (),
        *,
        vnet_hdr: bool = False,
        owner: int | None = None,
    ) -> Lease:
        """Its rules are in force. With `vnet_hdr` the tap is for its owner to open by name, once."""
        hub = await self._running()
        await self._want(hub, name, network)
        about = {**_about(name, network, names), "vnet_hdr": vnet_hdr, "owner": owner}
        answer, descriptors = await hub.call("lease", about)
        fault_point("hub.leased")
        tap = descriptors[0] if descriptors else -1
        return Lease(name, tap, answer["tap_name"], answer["namespace"], answer["address"])

    async def change(self, name: str, network: Network, names: Sequence[str] = ()) -> None:
        """All or nothing. Connections are to be made anew."""
        hub = self._serving(name)
        await self._want(hub, name, network)
        await hub.call("change", _about(name, network, names))
        fault_point("hub.changed")

    async def release(self, name: str) -> None:
        """Safe to repeat."""
        if self._hub is not None:
            await self._hub.call("release", {"name": name})
        fault_point("hub.released")
        if self._note_rules(name, ()) and self._hub is not None:
            await self._let_in(self._hub)

    async def adopt(self, name: str, tap: int, network: Network, names: Sequence[str] = ()) -> str:
        """That of a VM which an earlier daemon left, by its tap: before the first lease. Or an earlier hub: any time.

        Returns its address among the sandboxes.
        """
        try:
            namespace = open_namespace(tap)
        except OSError as error:
            raise NetworkFailed(f"The tap of {name} is gone: {error.strerror}") from error
        try:
            if self._hub is None and self._user_namespace is None:
                # Only in the user namespace that owns it may a hub enter it.
                self._user_namespace = netns.open_owner(namespace)
            hub = await self._running()
            await self._want(hub, name, network)
            answer, _ = await hub.call("adopt", _about(name, network, names), [namespace])
        finally:
            os.close(namespace)
        return str(answer["address"])

    def watch(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost

    async def connect(self, name: str, port: int) -> socket.socket:
        """A TCP connection to a port of the guest, made inside its namespace."""
        _, descriptors = await self._serving(name).call("connect", {"name": name, "port": port})
        if len(descriptors) != 1:
            raise NetworkFailed("The process that serves networks gave no connection")
        sock = socket.socket(fileno=descriptors[0])
        sock.setblocking(False)
        return sock

    async def usage(self, name: str) -> Usage:
        answer, _ = await self._serving(name).call("usage", {"name": name})
        return Usage(**answer)

    def expect(self, network: Network, count: int) -> None:
        """Keep so many ready with these rules, once there is a hub."""
        self._expected = (network, count)
        if self._hub is not None:
            self._tell_expected(self._hub)

    @property
    def hub_pid(self) -> int | None:
        return self._hub.pid if self._hub is not None else None

    def _serving(self, name: str) -> HubProcess:
        """Nothing is started to say that there is nothing: without a hub nobody has a network."""
        if self._hub is None:
            raise NotFound(f"{name[:80]} has no network")
        return self._hub

    async def _running(self) -> HubProcess:
        if self._why_none is not None:
            await self._look()
        if self._why_none is not None:
            raise HostLacks(self._why_none, hint=START_HINT)
        if self._hub is None:
            if self._starting is None:
                self._starting = asyncio.ensure_future(self._start())
                self._starting.add_done_callback(self._started)
            # One start for all who wait: it goes on when one of them stops.
            return await asyncio.shield(self._starting)
        return self._hub

    def _started(self, starting: asyncio.Task[HubProcess]) -> None:
        self._starting = None
        if not starting.cancelled():
            starting.exception()  # looked at: nobody may wait for it any more

    async def _look(self) -> None:
        """At the host; and what is left of an earlier daemon goes."""
        try:
            if os.geteuid() == 0:
                await in_thread(lambda: uplink.clean_up(self._name))
            await in_thread(lambda: network_probe.check_network(self._options.uplink))
        except ForkdError as error:
            self._why_none = error.message
        except OSError as error:
            self._why_none = f"The packet filter of this host cannot be used: {error}"
        else:
            self._why_none = None

    async def _start(self) -> HubProcess:
        kind = await in_thread(lambda: network_probe.check_network(self._options.uplink))
        layout = choose_layout(await in_thread(uplink.read_taken))
        directory = self._directory / _MOUNT
        directory.mkdir(mode=0o700, exist_ok=True)
        plan = {
            "user_namespace": self._user_namespace,
            "directory": str(directory.absolute()),
            "uid": self._options.hub_uid,
            "block": str(layout.block),
            "uplink": kind,
            "resolvers": list(self._options.resolvers if self._options.resolvers is not None else find_resolvers()),
        }
        joined = [self._user_namespace] if self._user_namespace is not None else []
        hub = HubProcess(plan, self._directory, joined, self._on_refused, self._on_end)
        try:
            namespace = await hub.wait_ready()
            try:
                if self._user_namespace is None:
                    self._user_namespace = netns.open_owner(namespace)
                if kind == "veth":
                    # Of a hub that was killed its end of the uplink may be left, with what it let in.
                    await self._clean_up()
                    self._linked = True
                    await in_thread(lambda: uplink.set_up(self._name, layout, namespace))
            finally:
                os.close(namespace)
            fault_point("hub.uplink")
            await hub.call("uplink", {"pool": self._options.pool})
            if hub.gone:
                raise ended()
        except BaseException as error:
            await hub.end()
            await self._clean_up()
            if isinstance(error, OSError):
                raise NetworkFailed(f"The uplink of networks could not be made: {error}") from error
            raise
        self._hub = hub
        self._tell_expected(hub)
        return hub

    def _on_end(self, hub: HubProcess) -> None:
        """The next lease, or who is told, starts another."""
        if hub is self._hub:
            self._hub = None
            _log.error("The process that serves networks ended")
            self._rules.clear()
            self._uses.clear()
            self._on_lost()

    async def _want(self, hub: HubProcess, name: str, network: Network) -> None:
        inside = (rule for rule in network.allowed if isinstance(rule, AddressRule) and rule.means_inside)
        self._note_rules(name, tuple(inside))
        await self._let_in(hub)

    def _note_rules(self, name: str, rules: tuple[AddressRule, ...]) -> tuple[AddressRule, ...]:
        """What it had before. Counted, as there may be a thousand with the same."""
        before = self._rules.pop(name, ())
        if rules:
            self._rules[name] = rules
        self._uses.update(rules)
        self._uses.subtract(before)
        for rule in before:
            if not self._uses[rule]:
                del self._uses[rule]
        return before

    async def _let_in(self, hub: HubProcess) -> None:
        """Where rules allow addresses of this host, it has to let sandboxes in."""
        async with self._wanting:
            wanted = tuple(self._uses)
            if hub is self._hub and self._linked and wanted != self._wanted:
                text = uplink.render_wanted(self._name, wanted)
                try:
                    await in_thread(lambda: uplink.run(text))
                except OSError as error:
                    raise NetworkFailed(f"The rules of this host could not be changed: {error}") from error
                self._wanted = wanted

    def _tell_expected(self, hub: HubProcess) -> None:
        if self._expected is not None:
            network, count = self._expected
            hub.tell("expect", {"network": network.as_json(), "count": count})

    async def _clean_up(self) -> None:
        """Also when the hub that it was made for is gone."""
        self._wanted = ()
        if self._linked:
            await in_thread(lambda: uplink.clean_up(self._name))
            self._linked = False

    async def _close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        hub, self._hub = self._hub, None
        if hub is not None:
            await hub.end()
        await self._clean_up()
        if self._user_namespace is not None:
            os.close(self._user_namespace)
            self._user_namespace = None


def _about(name: str, network: Network, names: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "network": network.as_json(), "names": list(names)}
