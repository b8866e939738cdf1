"""Sandboxes that have ended lately: whoever asks for one learns what became of it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from forkd.errors import NotFound
from forkd.host.system import steady_s
from forkd.runtime.registry import absent

KEPT = 1000

REMOVED = "was removed"
TIMED_OUT = "ended at its timeout"
FORGOTTEN = "was dead for long, and was removed"
_HINTS = {TIMED_OUT: "Ask for a longer timeout, or extend it while the sandbox runs"}


@dataclass(frozen=True)
class _End:
    sandbox_id: str
    why: str
    at_s: float


class RecentlyEnded:
    """The last ones, by id and by name; in memory only."""

    def __init__(self) -> None:
        self._ends: OrderedDict[str, _End] = OrderedDict()

    def add(self, sandbox_id: str, name: str | None, why: str) -> None:
        for key in (sandbox_id, name):
            if key is not None:
                self._ends[key] = _End(sandbox_id, why, steady_s())
                self._ends.move_to_end(key)
        while len(self._ends) > KEPT:
            self._ends.popitem(last=False)

    def absent(self, sandbox_id: str) -> NotFound:
        """The error for a sandbox, by its id or name, that is not there."""
        end = self._ends.get(sandbox_id)
        if end is None:
            return absent(sandbox_id)
        shown = end.sandbox_id if end.sandbox_id == sandbox_id else f"{sandbox_id} ({end.sandbox_id})"
        message = f"Sandbox {shown} {end.why} {render_age(steady_s() - end.at_s)} ago"
        return NotFound(message, hint=_HINTS.get(end.why, "List those there are with: forkd ls"))


def render_age(age_s: float) -> str:
    """In the largest unit that leaves a number of at least one."""
    for seconds, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if age_s >= seconds:
            return f"{int(age_s // seconds)} {unit}"
    return f"{max(0, int(age_s))} s"
