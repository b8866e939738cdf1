"""How long a sandbox lives: 300 s from its last use, unless whoever makes it says otherwise."""

from __future__ import annotations


class SinceUse(float):
    """Seconds that begin again with each use. A plain number is a fixed end."""


DEFAULT_LIFETIME_S = SinceUse(300)


class Lifetime:
    """What is known here of the deadline the daemon keeps. Times are those of the monotonic clock.

    Asking the daemon for more time with every call would double the calls: it is asked when half of it is used up.
    """

    def __init__(self, seconds: float | None, begun: float) -> None:
        """`begun`: before the daemon was asked, so that its deadline is not earlier than ours."""
        self._seconds = seconds if isinstance(seconds, SinceUse) else None
        self._until = begun + (self._seconds or 0.0)

    def missing(self, now: float, takes_s: float = 0.0) -> float | None:
        """The seconds to ask for, from now, before a call that may take `takes_s`; None: enough are left."""
        if self._seconds is None or self._until - now >= self._seconds / 2 + takes_s:
            return None
        return self._seconds + takes_s

    def extend(self, now: float, seconds: float) -> None:
        self._until = now + seconds
