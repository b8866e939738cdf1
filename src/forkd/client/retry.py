"""Whether a failed attempt is made again, and after what wait."""

from __future__ import annotations

import enum
import json
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forkd.client.call import Again, Call
from forkd.errors import NoCapacity

if TYPE_CHECKING:
    import httpx

    Outcome = httpx.Response | httpx.HTTPError

MAX_ATTEMPTS = 4
MAX_TOTAL_S = 20.0  # from the first attempt; past it no new one is begun
FIRST_WAIT_S = 0.1
MAX_WAIT_S = 2.0


class Fate(enum.Enum):
    """What is known of an attempt that did not succeed."""

    UNSENT = "nothing of it can have arrived"
    LOST = "it may have arrived; its answer did not"
    SLOW = "no answer in time"
    BUSY = "refused for now: 503 with Retry-After, and not for lack of memory or disk"
    ANSWERED = "an answer that another attempt will not change"


@dataclass(frozen=True)
class Failure:
    fate: Fate
    retry_after_s: float | None = None


class Attempts:
    """The attempts of one call: what came of each, and when to make the next."""

    def __init__(self, call: Call[Any]) -> None:
        self._call = call
        self._started = time.monotonic()
        self._number = 1
        self._may_have_arrived = False
        self._found_nobody = False

    def is_success(self, response: httpx.Response) -> bool:
        deleted_before = response.status_code == 404 and self._call.gone_is_done and self._may_have_arrived
        return response.is_success or deleted_before

    def finds_nobody(self, outcome: Outcome) -> bool:
        """The first time that nobody listens there. Who only wants to know whether somebody does gets that answer."""
        import httpx

        nobody = isinstance(outcome, httpx.ConnectError) and not self._call.probe and not self._found_nobody
        self._found_nobody = self._found_nobody or nobody
        return nobody

    def next_wait(self, outcome: Outcome) -> float | None:
        """Seconds until the next attempt, None to give up."""
        failure = classify(outcome)
        self._may_have_arrived = self._may_have_arrived or failure.fate is Fate.LOST
        if self._call.probe:
            return None
        elapsed_s = time.monotonic() - self._started
        wait_s = decide_wait(self._call.again, failure, self._number, elapsed_s, random.random())
        self._number += 1
        return wait_s


def classify(outcome: Outcome) -> Failure:
    import httpx

    if not isinstance(outcome, httpx.Response):
        return Failure(fate_of(outcome))
    retry_after_s = parse_retry_after(outcome.headers.get("retry-after"))
    if outcome.status_code == 503 and retry_after_s is not None and not _is_full(outcome.content):
        return Failure(Fate.BUSY, retry_after_s)
    return Failure(Fate.ANSWERED)


def _is_full(body: bytes) -> bool:
    """Memory and disk come free when somebody frees them, not within seconds: the caller learns of it at once."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(answer, dict) and answer.get("code") == NoCapacity.code


def fate_of(error: httpx.HTTPError) -> Fate:
    import httpx

    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout):
        return Fate.UNSENT
    return Fate.SLOW if isinstance(error, httpx.TimeoutException) else Fate.LOST


def decide_wait(again: Again, failure: Failure, attempt: int, elapsed_s: float, chance: float) -> float | None:
    """Pure: time and chance come in as numbers. `attempt` counts from 1; `chance` is in [0, 1)."""
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
    """Whole seconds. The form with a date comes from proxies, and is not waited for."""
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 6:
        return None
    return float(text)
