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
    _names: dict[str, dict[str, str]] = field(default_factory=dict)  # of a group: a name, its address
    _next: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def members(self, group: str | None) -> dict[str, str]:
        return self._names.get(group, {}) if group is not None else {}

    def put(self, address: str, group: str | None, names: tuple[str, ...]) -> str | None:
        """Into a group, or none, under these names; the rules for it. None: they stay as they are."""
        before = self._group_of.get(address)
        self._forget_names(address)
        if group is not None:
            known = self._names.setdefault(group, {})
            known |= {name: address for name in names if is_name(f"{name}.{GROUP_DOMAIN}")}
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

    def _forget_names(self, address: str) -> None:
        for names in self._names.values():
            for name in [name for name, known in names.items() if known == address]:
                del names[name]

    def _forget_empty(self) -> None:
        used = set(self._group_of.values())
        for group in [group for group in self._numbers if group not in used]:
            del self._numbers[group]
            self._names.pop(group, None)
