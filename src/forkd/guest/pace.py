"""How fast a guest may take the daemon's time."""

from __future__ import annotations


class Pace:
    """A bucket of `burst` steps that fills at `rate_hz`. Pure: the caller brings the time."""

    def __init__(self, rate_hz: float, burst: int) -> None:
        self._rate_hz = rate_hz
        self._burst = burst
        self._left = float(burst)
        self._at_s: float | None = None

    def spend(self, steps: int, now_s: float) -> float:
        """Take `steps`; how many seconds to pause before the next ones, mostly none."""
        if self._at_s is not None:
            self._left = min(self._burst, self._left + (now_s - self._at_s) * self._rate_hz)
        self._at_s = now_s
        self._left -= steps
        return max(0.0, -self._left / self._rate_hz)
