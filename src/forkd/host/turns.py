"""Long work in a thread of a process whose other threads are in a hurry."""

from __future__ import annotations

import time

_TURN_S = 0.00025
# Long enough for another thread to wake up and take the interpreter.
_AWAY_S = 1e-6


class Turns:
    """For long work in a thread: others get the interpreter often, not only after 5 ms each time that they want it.

    They may be holding a VM still, call by call.
    """

    wanted = True  # False in a process that has no such threads

    def __init__(self) -> None:
        self._over_at = time.monotonic() + _TURN_S

    def give_way(self) -> None:
        """Does nothing until the turn is over, so it may be called in a loop."""
        if self.wanted and time.monotonic() > self._over_at:
            time.sleep(_AWAY_S)
            self._over_at = time.monotonic() + _TURN_S
