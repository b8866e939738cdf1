"""How many connections a listener holds, and which of them gives way when there are too many."""

from __future__ import annotations

from typing import Protocol

# Of the files that this process may have open, for one listener: with two listeners, half is left for the VMs.
SHARE = 4


class Holder(Protocol):
    """A connection, as far as the cap knows it."""

    def evict(self) -> None: ...


def fit_cap(asked: int, open_files: int) -> int:
    """As many as were asked for, if the files allow it."""
    return max(1, min(asked, open_files // SHARE))


class ConnectionCap:
    """At most `most` at a time. A request that was let in keeps its connection; the others give way to new ones.

    First the oldest stranger: none of its requests was let in so far. Then the one that has been idle for longest.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._strangers: dict[Holder, None] = {}  # dicts, as sets that keep their order
        self._idle: dict[Holder, None] = {}
        self._busy: set[Holder] = set()

    def __len__(self) -> int:
        return len(self._strangers) + len(self._idle) + len(self._busy)

    def make_room(self) -> bool:
        """For one more. False: all of them are in use."""
        if len(self) < self.most:
            return True
        for giving_way in (self._strangers, self._idle):
            if giving_way:
                oldest = next(iter(giving_way))
                del giving_way[oldest]
                oldest.evict()
                return True
        return False

    def enter(self, holder: Holder) -> None:
        self._strangers[holder] = None

    def let_in(self, holder: Holder) -> None:
        """A request of it was."""
        if self._knows(holder):
            self.leave(holder)
            self._busy.add(holder)

    def rest(self, holder: Holder) -> None:
        """Its request is answered."""
        if holder in self._busy:
            self._busy.discard(holder)
            self._idle[holder] = None

    def leave(self, holder: Holder) -> None:
        self._strangers.pop(holder, None)
        self._idle.pop(holder, None)
        self._busy.discard(holder)

    def _knows(self, holder: Holder) -> bool:
        """Not so when it was evicted a moment ago."""
        return holder in self._strangers or holder in self._idle
