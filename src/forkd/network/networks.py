"""Networks of sandboxes, as the daemon asks for them. The hub, a process of its own, does the work."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd import errors
from forkd.errors import ForkdError, HostLacks, NetworkFailed
from forkd.host import netns, network_probe
from forkd.host.faults import fault_point
from forkd.host.process import WatchedProcess, spawn
from forkd.host.tap import open_namespace
from forkd.host.threads import in_thread
from forkd.model.network import AddressRule, Network
from forkd.network import uplink
from forkd.network.channel import Channel, make_pair
from forkd.network.layout import choose_layout, host_name
from forkd.network.lease import Lease, NetworkOptions, Refused, Usage
from forkd.network.resolver import find_resolvers

START_DEADLINE_S = 30.0
CALL_DEADLINE_S = 30.0
_LOG = "hub.log"
# Isolated from the environment, which may be what names the path that we were found by.
_START = """\
import json, sys
sys.path[:] = sys.argv[1].split(":")
from forkd.network.hub import main
main(json.loads(sys.argv[2]))
"""
_MOUNT = "hub"
_HINT = "forkd doctor says more; a sandbox without a network works"

_log = logging.getLogger(__name__)


@dataclass
class _Hub:
    """The one that runs now."""

    process: WatchedProcess
    channel: Channel
    pending: dict[int, asyncio.Future[tuple[dict[str, Any], list[int]]]]
    uplink: network_probe.Kind


class Networks:
    def __init__(self, directory: Path, options: NetworkOptions, on_refused: Callable[[Refused], None]) -> None:
        self._directory, self._options, self._on_refused = directory, options, on_refused
        self._name = host_name(directory)
        self._hub: _Hub | None = None
        self._starting = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[list[int]] | None = None
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
        await self._want(name, network)
        about = {**_about(name, network, names), "vnet_hdr": vnet_hdr, "owner": owner}
        answer, descriptors = await self._call("lease", about)
        fault_point("hub.leased")
        tap = descriptors[0] if descriptors else -1
        return Lease(name, tap, answer["tap_name"], answer["namespace"], answer["address"])

    async def change(self, name: str, network: Network, names: Sequence[str] = ()) -> None:
        """All or nothing. Connections are to be made anew."""
        await self._want(name, network)
        await self._call("change", _about(name, network, names))
        fault_point("hub.changed")

    async def release(self, name: str) -> None:
        """Safe to repeat."""
        if self._hub is not None:
            await self._call("release", {"name": name})
        fault_point("hub.released")
        if self._note_rules(name, ()):
            await self._let_in()

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
            await self._want(name, network)
            answer, _ = await self._call("adopt", _about(name, network, names), [namespace])
        finally:
            os.close(namespace)
        return str(answer["address"])

    def watch(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost

    async def connect(self, name: str, port: int) -> socket.socket:
        """A TCP connection to a port of the guest, made inside its namespace."""
        _, descriptors = await self._call("connect", {"name": name, "port": port})
        if len(descriptors) != 1:
            raise NetworkFailed("The process that serves networks gave no connection")
        sock = socket.socket(fileno=descriptors[0])
        sock.setblocking(False)
        return sock

    async def usage(self, name: str) -> Usage:
        answer, _ = await self._call("usage", {"name": name})
        return Usage(**answer)

    def expect(self, network: Network, count: int) -> None:
        """Keep so many ready with these rules, once there is a hub."""
        self._expected = (network, count)
        if self._hub is not None:
            self._tell_expected(self._hub)

    @property
    def hub_pid(self) -> int | None:
        return self._hub.process.pid if self._hub is not None else None

    async def _call(
        self, do: str, about: dict[str, Any], descriptors: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        hub = await self._running()
        number = next(self._numbers)
        answered: asyncio.Future[tuple[dict[str, Any], list[int]]] = asyncio.get_running_loop().create_future()
        hub.pending[number] = answered
        try:
            await hub.channel.send({"id": number, "do": do, **about}, descriptors)
            async with asyncio.timeout(CALL_DEADLINE_S):
                answer, received = await answered
        except TimeoutError as error:
            raise NetworkFailed(f"The network's {do} took more than {CALL_DEADLINE_S:g} s", hint="Try again") from error
        finally:
            hub.pending.pop(number, None)
        if "error" in answer:
            _close_all(received)
            raise _parse_error(answer["error"])
        return answer["ok"], received

    async def _running(self) -> _Hub:
        if self._why_none is not None:
            await self._look()
        if self._why_none is not None:
            raise HostLacks(self._why_none, hint=_HINT)
        if self._hub is None:
            async with self._starting:
                if self._hub is None:
                    self._hub = await self._start()
        return self._hub

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

    async def _start(self) -> _Hub:
        kind = await in_thread(lambda: network_probe.check_network(self._options.uplink))
        layout = choose_layout(await in_thread(uplink.read_taken))
        ours, theirs = make_pair()
        directory = self._directory / _MOUNT
        directory.mkdir(mode=0o700, exist_ok=True)
        resolvers = self._options.resolvers if self._options.resolvers is not None else find_resolvers()
        joined = [self._user_namespace] if self._user_namespace is not None else []
        with theirs:
            plan = {
                "control": theirs.fileno(),
                "user_namespace": self._user_namespace,
                "directory": str(directory.absolute()),
                "uid": self._options.hub_uid,
                "parent": os.getpid(),
                "block": str(layout.block),
                "uplink": kind,
                "resolvers": list(resolvers),
            }
            process = spawn(
                [sys.executable, "-I", "-c", _START, ":".join(filter(os.path.isabs, sys.path)), json.dumps(plan)],
                output=self._directory / _LOG,
                env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
                inherited_fds=[theirs.fileno(), *joined],
            )
        self._ready = asyncio.get_running_loop().create_future()
        hub = _Hub(process, Channel(ours, self._on_message, self._on_end), {}, kind)
        try:
            async with asyncio.timeout(START_DEADLINE_S):
                (namespace,) = await process.unless_it_exits(self._ready)
        except Exception as error:
            await self._end(hub)
            if isinstance(error, ForkdError):
                raise
            raise NetworkFailed("The process that serves networks did not start", hint=f"See {_LOG}") from error
        try:
            self._hub = hub
            if self._user_namespace is None:
                self._user_namespace = netns.open_owner(namespace)
            if kind == "veth":
                # Of a hub that was killed its end of the uplink may be left, with what it let in.
                await in_thread(lambda: uplink.clean_up(self._name))
                self._wanted = ()
                await in_thread(lambda: uplink.set_up(self._name, layout, namespace))
            fault_point("hub.uplink")
            await self._call("uplink", {"pool": self._options.pool})
        except BaseException as error:
            self._hub = None
            await self._end(hub)
            if isinstance(error, OSError):
                raise NetworkFailed(f"The uplink of networks could not be made: {error}") from error
            raise
        finally:
            os.close(namespace)
        self._tell_expected(hub)
        return hub

    def _on_message(self, message: dict[str, Any], descriptors: list[int]) -> None:
        if self._ready is not None and not self._ready.done() and ("ready" in message or "failed" in message):
            if "failed" in message:
                text = f"The process that serves networks did not start: {message['failed']}"
                hint = message.get("hint") or _HINT
                self._ready.set_exception(HostLacks(text, hint=hint))
            else:
                self._ready.set_result(descriptors)
            return
        if "refused" in message:
            for each in message["refused"]:
                self._on_refused(Refused(**each))
            return
        waiting = self._hub.pending.get(message.get("id", 0)) if self._hub is not None else None
        if waiting is None or waiting.done():
            _close_all(descriptors)
        else:
            waiting.set_result((message, descriptors))

    def _on_end(self) -> None:
        """The hub is gone, and all networks with it: they are closed. The next call starts another."""
        hub, self._hub = self._hub, None
        gone = NetworkFailed("The process that serves networks ended", hint=f"See {_LOG}; try again")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(gone)
        for waiting in hub.pending.values() if hub is not None else ():
            if not waiting.done():
                waiting.set_exception(gone)
        if hub is not None:
            _log.error("The process that serves networks ended")
            hub.process.send_signal(9)
            self._rules.clear()
            self._uses.clear()
            self._on_lost()

    async def _want(self, name: str, network: Network) -> None:
        inside = (rule for rule in network.allowed if isinstance(rule, AddressRule) and rule.means_inside)
        self._note_rules(name, tuple(inside))
        await self._let_in()

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

    async def _let_in(self) -> None:
        """Where rules allow addresses of this host, it has to let sandboxes in."""
        hub = await self._running()
        async with self._wanting:
            wanted = tuple(self._uses)
            if hub.uplink == "veth" and wanted != self._wanted:
                text = uplink.render_wanted(self._name, wanted)
                try:
                    await in_thread(lambda: uplink.run(text))
                except OSError as error:
                    raise NetworkFailed(f"The rules of this host could not be changed: {error}") from error
                self._wanted = wanted

    def _tell_expected(self, hub: _Hub) -> None:
        if self._expected is not None:
            network, count = self._expected
            message = {"id": 0, "do": "expect", "network": network.as_json(), "count": count}
            self._telling = asyncio.ensure_future(hub.channel.send(message))

    async def _end(self, hub: _Hub) -> None:
        hub.channel.close()
        await hub.process.kill()
        self._wanted = ()
        if hub.uplink == "veth":
            await in_thread(lambda: uplink.clean_up(self._name))

    async def _close(self) -> None:
        hub, self._hub = self._hub, None
        if hub is not None:
            await self._end(hub)
        if self._user_namespace is not None:
            os.close(self._user_namespace)
            self._user_namespace = None


def _about(name: str, network: Network, names: Sequence[str]) -> dict[str, Any]:
    return {"name": name, "network": network.as_json(), "names": list(names)}


def _parse_error(raw: dict[str, Any]) -> ForkdError:
    kinds = (kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ForkdError))
    kind = next((kind for kind in kinds if kind.code == raw.get("code")), NetworkFailed)
    return kind(str(raw.get("message")), hint=raw.get("hint"))


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
