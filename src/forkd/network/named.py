"""Which addresses a sandbox may reach because a name stands for them, and until when. Pure: the caller tells the time.

The rules' set is filled from here; the gate and refused connections look names up in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from forkd.model.network import Mode, Network, Ports
from forkd.network.rules import MAX_NAMED, Named, ports_of

# How long an address stays reachable after its answer: what the answer says within these, and some more, as a program
# connects a while after it asked.
SHORTEST_S, LONGEST_S, SLACK_S = 60, 3600, 120
_MAX_NAMES_OF_ADDRESS = 32


class SetFull(Exception):
    """The sandbox has asked for too many names."""


class NamedAddresses:
    def __init__(self) -> None:
        self._until: dict[Named, float] = {}
        self._names: dict[str, dict[str, float]] = {}

    def plan(self, addresses: Iterable[str], ports: Ports, ttl_s: int, now: float) -> dict[Named, int]:
        """What to put into the set, with its seconds; nothing where it lasts long enough. Raises SetFull.

        `ports`: as `ports_of` returns them.
        """
        self._forget(now)
        lasting = min(max(ttl_s, SHORTEST_S), LONGEST_S)
        wanted = [(address, each) for address in addresses for each in ports]
        plan = {each: lasting + SLACK_S for each in wanted if self._until.get(each, 0.0) < now + lasting}
        if len(self._until.keys() | plan.keys()) > MAX_NAMED:
            raise SetFull
        return plan

    def is_new(self, plan: Mapping[Named, int]) -> bool:
        """None of it can be in the set."""
        return not any(each in self._until for each in plan)

    def note(self, names: Iterable[str], addresses: Iterable[str], plan: Mapping[Named, int], now: float) -> None:
        """The plan is in force."""
        self._until |= {each: now + seconds for each, seconds in plan.items()}
        listed = list(names)
        for address in addresses:
            known = self._names.setdefault(address, {})
            for name in listed:
                known.pop(name, None)
                known[name] = now + LONGEST_S + SLACK_S
            while len(known) > _MAX_NAMES_OF_ADDRESS:
                del known[next(iter(known))]

    def find_name(self, address: str) -> str | None:
        """The last that stood for an address."""
        return next(reversed(self._names.get(address, {})), None)

    def stands_for(self, name: str, address: str) -> bool:
        return name in self._names.get(address, {})

    def left(self, network: Network, now: float) -> dict[Named, int]:
        """What other rules leave in the set, with its seconds."""
        found: dict[Named, int] = {}
        for address, names in self._names.items():
            until = max((each for (known, _), each in self._until.items() if known == address), default=now)
            if until > now:
                ports = {each for name in names for each in self._ports(network, name)}
                found |= {(address, each): max(1, int(until - now)) for each in ports}
        return dict(list(found.items())[:MAX_NAMED])

    def keep(self, network: Network, now: float) -> None:
        """Other rules are in force, and the set is as `left` said."""
        self._until = {each: now + seconds for each, seconds in self.left(network, now).items()}
        for address, names in self._names.items():
            if network.mode is Mode.EGRESS:
                self._names[address] = {name: until for name, until in names.items() if self._ports(network, name)}

    @staticmethod
    def _ports(network: Network, name: str) -> Ports:
        return ports_of(network, name) if network.mode is Mode.EGRESS else ()

    def _forget(self, now: float) -> None:
        self._until = {each: until for each, until in self._until.items() if until > now}
        for address, names in list(self._names.items()):
            kept = {name: until for name, until in names.items() if until > now}
            if kept:
                self._names[address] = kept
            else:
                del self._names[address]
        # In mode open nothing is in the set, and names are remembered only to tell of them.
        while len(self._names) > MAX_NAMED:
            del self._names[next(iter(self._names))]
