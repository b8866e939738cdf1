"""What a daemon does without being asked: deadlines, forgetting the dead."""

from __future__ import annotations

import asyncio
import logging
import time

from forkd.errors import ForkdError
from forkd.model.sandbox import OnTimeout, SandboxRecord, State
from forkd.runtime.roster import Roster

_log = logging.getLogger(__name__)

TICK_S = 0.5
DEAD_KEPT_S = 600.0
SPAWN_KEYS_KEPT_S = 24 * 3600.0
_FORGET_EVERY_TICKS = 20


async def keep_up(roster: Roster) -> None:
    """Until cancelled. A sandbox that resists holds up no other, and is tried again."""
    ticks = 0
    while True:
        now = time.time()
        due = [_expire(roster, record) for record in roster.registry.list_due(now)]
        for outcome in await asyncio.gather(*due, return_exceptions=True):
            if isinstance(outcome, ForkdError):
                _log.warning("Upkeep: %s", outcome.message)
            elif isinstance(outcome, Exception):
                _log.error("Upkeep failed", exc_info=outcome)
        if ticks % _FORGET_EVERY_TICKS == 0:
            forget(roster, now)
        ticks += 1
        await asyncio.sleep(TICK_S)


def forget(roster: Roster, now: float) -> None:
    for sandbox_id in roster.registry.list_ended_before(now - DEAD_KEPT_S):
        roster.forget(sandbox_id)
    roster.registry.forget_spawns_before(now - SPAWN_KEYS_KEPT_S)


async def _expire(roster: Roster, record: SandboxRecord) -> None:
    roster.events.emit("sandbox.timeout", sandbox_id=record.id, data={"action": record.on_timeout.value})
    if record.on_timeout is OnTimeout.KILL:
        await roster.kill(record.id)
        return
    roster.registry.change(record.id, deadline_unix=None)
    if record.state is State.RUNNING:
        await roster.finished(roster.pause(record.id))
