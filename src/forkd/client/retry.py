"""Whether a failed attempt is made again, and after what wait. Pure: time and chance come in as numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from forkd.client.call import Again

MAX_ATTEMPTS = 4
MAX_TOTAL_S = 20.0  # from the first attempt; past it no new one is begun
FIRST_WAIT_S = 0.1
MAX_WAIT_S = 2.0


class Fate(enum.Enum):
    """What is known of an attempt that brought no success."""

    UNSENT = "nothing of it can have arrived"
    LOST = "it may have arrived; its answer did not"
    SLOW = "no answer in time"
    BUSY = "refused for now: 503 with Retry-After"
    ANSWERED = "an answer that another attempt will not change"


@dataclass(frozen=True)
class Failure:
    fate: Fate
    retry_after_s: float | None = None


def decide_wait(again: Again, failure: Failure, attempt: int, elapsed_s: float, chance: float) -> float | None:
    """Seconds until the next attempt, None to give up. `attempt` counts from 1; `chance` is in [0, 1)."""
    if attempt >= MAX_ATTEMPTS or not _may_repeat(again, failure.fate):
        return None
    # At least half, so that clients which failed together do not come back together, nor at once.
    wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1)) * (0.5 + chance / 2)
    if failure.retry_after_s is not None:
        wait_s = max(wait_s, failure.retry_after_s)
    return wait_s if elapsed_s + wait_s <= MAX_TOTAL_S else None


def _may_repeat(again: Again, fate: Fate) -> bool:
    if fate is Fate.UNSENT:
        return True
    return again is Again.SAFE and fate in (Fate.LOST, Fate.BUSY)


def parse_retry_after(text: str | None) -> float | None:
    """Whole seconds; the form with a date is for proxies, and no reason to wait."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 6:
        return None
    return float(text)
