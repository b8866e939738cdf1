"""What networks refused, as events: the same within a moment is one, and a sandbox has so many in a minute."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from forkd.host.system import steady_s
from forkd.network.lease import Refused

# Refusals of the same thing within so long are one event.
WINDOW_S = 1.0
# So many events of one VM in so long; the rest is counted into a last one.
MOST_EVENTS = 30
CAP_S = 60.0
MORE = "more"

Emit = Callable[[str, dict[str, Any]], None]


@dataclass
class _Account:
    """Of one VM."""

    since_s: float
    emitted: int = 0
    waiting: dict[Refused, int] = field(default_factory=dict)
    more: int = 0

    def take(self, refused: Refused) -> None:
        key = replace(refused, count=1)
        if key in self.waiting or self.emitted + len(self.waiting) < MOST_EVENTS:
            self.waiting[key] = self.waiting.get(key, 0) + refused.count
        else:
            self.more += refused.count

    def flush(self, now_s: float) -> list[dict[str, Any]]:
        """What is to be told now. Pure, but for the account itself."""
        told = [render_refused(key, count) for key, count in self.waiting.items()]
        self.emitted += len(told)
        self.waiting.clear()
        if now_s - self.since_s >= CAP_S:
            if self.more:
                told.append({"reason": MORE, "count": self.more})
            self.since_s, self.emitted, self.more = now_s, 0, 0
        return told


def render_refused(refused: Refused, count: int) -> dict[str, Any]:
    return {
        "reason": refused.reason,
        "asked": refused.asked,
        "address": refused.address,
        "port": refused.port,
        "protocol": refused.protocol,
        "count": count,
    }


class Refusals:
    """`emit` gets the name of the VM and the data of the event."""

    def __init__(self, emit: Emit) -> None:
        self.totals: Counter[str] = Counter()  # by reason
        self._emit = emit
        self._accounts: dict[str, _Account] = {}
        self._timer: asyncio.TimerHandle | None = None

    def take(self, refused: Refused) -> None:
        self.totals[refused.reason] += refused.count
        account = self._accounts.setdefault(refused.name, _Account(steady_s()))
        account.take(refused)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._on_time)

    def forget(self, name: str) -> None:
        """The VM is gone: the last of it is told now."""
        if account := self._accounts.pop(name, None):
            for data in account.flush(account.since_s + CAP_S):
                self._emit(name, data)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for name in list(self._accounts):
            self.forget(name)

    def _on_time(self) -> None:
        self._timer = None
        now_s = steady_s()
        for name, account in list(self._accounts.items()):
            for data in account.flush(now_s):
                self._emit(name, data)
            if not account.emitted and not account.more:
                del self._accounts[name]
        if self._accounts:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_S, self._on_time)
