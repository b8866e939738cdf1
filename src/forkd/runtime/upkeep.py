"""What a daemon does without being asked: deadlines, ends that failed, forgetting the dead, the registry's disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forkd.errors import ForkdError, NotFound
from forkd.host.system import steady_s
from forkd.model.sandbox import OnTimeout, State
from forkd.runtime.child import LiveSandbox
from forkd.runtime.ended import FORGOTTEN, TIMED_OUT
from forkd.runtime.sandboxes import Sandboxes

_log = logging.getLogger(__name__)

TICK_S = 0.5
DEAD_KEPT_S = 600.0
SPAWN_KEYS_KEPT_S = 24 * 3600.0
_FORGET_EVERY_TICKS = 20
_LAND_EVERY_TICKS = 2
# After an end that failed.
RETRY_S = 2.0
# The same trouble is logged this often.
_COMPLAIN_EVERY_S = 60.0
# Less is how clocks are kept right, and changes no deadline that anybody would notice.
_JUMP_S = 1.0


class Upkeep:
    """No error ends it: what failed is logged now and then, and tried again. A sandbox that resists holds up no other.

    Deadlines are on a clock that nobody sets; the stored ones, which are of the wall clock, follow its jumps.
    """

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._ending: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        self._complained: dict[str, float] = {}
        self._wall_offset_s = time.time() - steady_s()
        self._ticks = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._task is not None and not self._task.done()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._task = asyncio.create_task(self._run(), name="upkeep")
        try:
            yield
        finally:
            tasks = [self._task, *self._ending.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for step in (self.end_due, self.follow_wall_clock, self.tidy):
                try:
                    step()
                except Exception as error:
                    self._complain(step.__name__, error)
            self._ticks += 1
            await asyncio.sleep(TICK_S)

    def end_due(self) -> None:
        """Begin what is due, each in a task of its own: none waits for another."""
        now = steady_s()
        for live in list(self._sandboxes.live.values()):
            if self._is_due(live, now) and live.id not in self._ending and self._not_before.get(live.id, 0.0) <= now:
                self._ending[live.id] = asyncio.create_task(self._end(live), name=f"end {live.id}")
        for sandbox_id in self._not_before.keys() - self._sandboxes.live.keys():
            del self._not_before[sandbox_id]

    def _is_due(self, live: LiveSandbox, now_s: float) -> bool:
        if live.state is State.STOPPING:
            return not live.lock.locked()  # an attempt to end it has failed
        return live.deadline_s is not None and live.deadline_s <= now_s

    async def _end(self, live: LiveSandbox) -> None:
        try:
            await self._expire(live)
        except NotFound:
            pass  # it went by itself meanwhile
        except Exception as error:
            self._not_before[live.id] = steady_s() + RETRY_S
            self._complain(f"the end of {live.id}", error)
        finally:
            del self._ending[live.id]

    async def _expire(self, live: LiveSandbox) -> None:
        sandboxes = self._sandboxes
        action = sandboxes.get(live.id).on_timeout
        if live.state is not State.STOPPING and live.id not in self._not_before:
            sandboxes.events.emit("sandbox.timeout", sandbox_id=live.id, data={"action": action.value})
        if live.state is State.STOPPING or action is OnTimeout.KILL:
            await sandboxes.kill(live.id, TIMED_OUT)
            return
        deadline_s = live.deadline_s
        if live.state is State.RUNNING:
            await sandboxes.pause(live.id)
        if live.deadline_s == deadline_s:  # else it got a new one meanwhile
            sandboxes.set_deadline(live, None)

    def follow_wall_clock(self) -> None:
        """After a jump the stored times are what they were to people: so many seconds from now, or ago."""
        offset_s = time.time() - steady_s()
        jump_s = offset_s - self._wall_offset_s
        if abs(jump_s) < _JUMP_S:
            return
        _log.warning("The wall clock jumped by %.1f s; deadlines stay as long as they were", jump_s)
        registry = self._sandboxes.registry
        with registry.transaction():
            registry.shift_times(jump_s)
            for live in self._sandboxes.live.values():
                if live.deadline_s is not None:
                    registry.change(live.id, deadline_unix=live.deadline_s + offset_s)
        self._wall_offset_s = offset_s

    def tidy(self) -> None:
        registry = self._sandboxes.registry
        if self._ticks % _LAND_EVERY_TICKS == 0:
            registry.land()
            registry.checkpoint()
        if self._ticks % _FORGET_EVERY_TICKS == 0:
            now = time.time()
            for sandbox_id in registry.list_ended_before(now - DEAD_KEPT_S):
                self._sandboxes.forget(sandbox_id, FORGOTTEN)
            registry.forget_spawns_before(now - SPAWN_KEYS_KEPT_S)

    def _complain(self, about: str, error: Exception) -> None:
        now = steady_s()
        self._complained = {key: at for key, at in self._complained.items() if at > now - _COMPLAIN_EVERY_S}
        if about in self._complained:
            return
        self._complained[about] = now
        if isinstance(error, ForkdError):
            _log.warning("Upkeep, %s: %s", about, error.message)
        else:
            _log.error("Upkeep, %s, failed", about, exc_info=error)
