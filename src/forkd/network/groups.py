"""Who is in which group: sandboxes of one reach each other. Pure; the hub's rules are rendered from here."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from forkd.model.network import GROUP_DOMAIN, is_name
from forkd.network import rules


@dataclass
class Groups:
    _numbers: dict[str, int] = field(default_factory=dict)
    _group_of: dict[str, str] = field(default_factory=dict)  # by address
    # Of a group: a name, and who has it, the last one found first: while a sandbox is rewound two VMs have it.
    _names: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    _next: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def find(self, group: str | None, name: str) -> str | None:
        """The address of a member."""
        holders = self._names.get(group, {}).get(name) if group is not None else None
        return holders[-1] if holders else None

    def put(self, address: str, group: str | None, names: tuple[str, ...]) -> str | None:
        """Into a group, or none, under these names; the rules for it. None: they stay as they are."""
        before = self._group_of.get(address)
        if before is not None:
            self._forget_names(before, address)
        if group is not None:
            known = self._names.setdefault(group, {})
            for name in dict.fromkeys(names):
                if is_name(f"{name}.{GROUP_DOMAIN}"):
                    known.setdefault(name, []).append(address)
        if before == group:
            return None
        texts = [rules.render_leave(address, self._numbers[before])] if before is not None else []
        if group is None:
            self._group_of.pop(address, None)
        else:
            number = self._numbers.setdefault(group, next(self._next))
            self._group_of[address] = group
            texts.append(rules.render_join(address, number))
        self._forget_empty()
        return "\n".join(texts)

    def leave(self, address: str) -> str | None:
        return self.put(address, None, ())

    def _forget_names(self, group: str, address: str) -> None:
        known = self._names.get(group, {})
        for name in [name for name, holders in known.items() if address in holders]:
            known[name].remove(address)
            if not known[name]:
                del known[name]

    def _forget_empty(self) -> None:
        used = set(self._group_of.values())
        for group in [group for group in self._numbers if group not in used]:
            del self._numbers[group]
            self._names.pop(group, None)
