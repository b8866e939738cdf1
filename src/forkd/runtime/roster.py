"""The sandboxes there are: row, VM and port of each, changed together and in an order that survives a crash."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

from forkd.engines.base import Death, Engine, ExitReason, tail_of
from forkd.engines.machine import CONSOLE
from forkd.errors import ForkdError, GuestDied, InvalidInput, NotRunning
from forkd.host.cgroup import find_group
from forkd.host.faults import reach
from forkd.host.marked import kill_marked
from forkd.host.paths import Home
from forkd.host.threads import in_thread
from forkd.model.limits import Limits
from forkd.model.sandbox import OnTimeout, SandboxRecord, State, check_timeout, parse_sandbox_id
from forkd.runtime.events import EventLog
from forkd.runtime.live import LiveSandbox
from forkd.runtime.ports import AgentPorts
from forkd.runtime.registry import Registry, absent

_log = logging.getLogger(__name__)

CONSOLE_BYTES = 1024 * 1024
_CAUSE_LIMIT = 2000

T = TypeVar("T")


class Roster:
    def __init__(self, home: Home, engine: Engine, registry: Registry, events: EventLog) -> None:
        self.home = home
        self.engine = engine
        self.registry = registry
        self.events = events
        self.live: dict[str, LiveSandbox] = {}
        self.ports = AgentPorts(self.use)
        self._tasks: set[asyncio.Task[Any]] = set()

    def directory(self, sandbox_id: str) -> Path:
        return self.home.vms / sandbox_id

    async def finished(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to its end whoever stops waiting for it: a caller that goes away must not leave half of it done."""
        return await asyncio.shield(self._own(work))

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Looking

    def get(self, sandbox_id: str) -> SandboxRecord:
        try:
            return self.registry.get_sandbox(parse_sandbox_id(sandbox_id))
        except InvalidInput:
            raise absent(sandbox_id) from None

    def use(self, sandbox_id: str) -> AbstractAsyncContextManager[LiveSandbox]:
        """The way to talk to a guest. Raises when it cannot be talked to now, or dies meanwhile."""
        live = self.live.get(sandbox_id)
        if live is None or live.state is not State.RUNNING:
            raise _not_running(self.get(sandbox_id))
        return live.answering()

    def console(self, sandbox_id: str) -> str:
        return tail_of(self.directory(self.get(sandbox_id).id) / CONSOLE, CONSOLE_BYTES)

    # Changing

    def hold(self, live: LiveSandbox) -> None:
        """From here on its death is noticed."""
        self.live[live.id] = live
        live.machine.death.add_done_callback(lambda death: self._on_death(live, death))

    async def pause(self, sandbox_id: str) -> SandboxRecord:
        live = self._held(sandbox_id)
        async with live.lock:
            if live.state is State.RUNNING:
                await live.machine.pause()
                self._move(live, State.PAUSED, "sandbox.paused")
            elif live.state is not State.PAUSED:
                raise _not_running(self.get(sandbox_id))
        return self.get(sandbox_id)

    async def resume(self, sandbox_id: str) -> SandboxRecord:
        live = self._held(sandbox_id)
        async with live.lock:
            if live.state is State.PAUSED:
                await self._resume(live)
            elif live.state is not State.RUNNING:
                raise _not_running(self.get(sandbox_id))
        return self.get(sandbox_id)

    async def _resume(self, live: LiveSandbox) -> None:
        await live.machine.resume()
        try:
            async with live.answering():
                await live.agent.set_clock()
        except ForkdError:
            # A guest with a wrong clock is not handed out.
            await live.machine.pause()
            raise
        self._move(live, State.RUNNING, "sandbox.resumed")

    async def kill(self, sandbox_id: str) -> None:
        await self.finished(self._kill(sandbox_id))

    async def _kill(self, sandbox_id: str) -> None:
        live = self.live.get(sandbox_id)
        if live is None:
            record = self.get(sandbox_id)
            if record.state is not State.DEAD:
                raise _not_running(record)
            self.forget(sandbox_id)
            return
        async with live.lock:
            if sandbox_id not in self.live:
                raise absent(sandbox_id)  # somebody else was first
            if live.state is not State.STOPPING:
                self.registry.move([sandbox_id], State.STOPPING)
                live.state = State.STOPPING
            reach("delete.marked")
            await live.end()
            reach("delete.killed")
            del self.live[sandbox_id]
            self.forget(sandbox_id)
            reach("delete.removed")

    def forget(self, sandbox_id: str) -> None:
        """Nothing runs for it any more: its files, its port and its row go."""
        self.ports.close(sandbox_id)
        shutil.rmtree(self.directory(sandbox_id), ignore_errors=True)
        with self.registry.transaction():
            self.registry.remove_sandboxes([sandbox_id])
            self.events.emit("sandbox.removed", sandbox_id=sandbox_id)

    def set_timeout(self, sandbox_id: str, timeout_s: float | None, on_timeout: OnTimeout | None) -> SandboxRecord:
        check_timeout(timeout_s)
        record = self.get(sandbox_id)
        if record.state not in (State.RUNNING, State.PAUSED):
            raise _not_running(record)
        deadline = None if timeout_s is None else time.time() + timeout_s
        self.registry.change(sandbox_id, deadline_unix=deadline, on_timeout=(on_timeout or record.on_timeout).value)
        return self.get(sandbox_id)

    def bury(self, sandbox_id: str, cause: str) -> None:
        """Its VM is gone and nobody asked for that. The row and the console stay for whoever wants to know why."""
        self.ports.close(sandbox_id)
        changes = {"pid": None, "cause": cause[:_CAUSE_LIMIT], "ended_at_unix": time.time(), "deadline_unix": None}
        with self.registry.transaction():
            self.registry.move([sandbox_id], State.DEAD, {sandbox_id: changes})
            self.events.emit("sandbox.dead", sandbox_id=sandbox_id, data={"cause": cause[:_CAUSE_LIMIT]})

    async def close(self) -> None:
        """Let go of all VMs; they run on. What was under way is cancelled and rolls itself back."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.ports.close_all()
        await asyncio.gather(*(live.let_go() for live in self.live.values()))
        self.live.clear()

    def _held(self, sandbox_id: str) -> LiveSandbox:
        live = self.live.get(sandbox_id)
        if live is None:
            raise _not_running(self.get(sandbox_id))
        return live

    def _move(self, live: LiveSandbox, to: State, event: str) -> None:
        with self.registry.transaction():
            self.registry.move([live.id], to)
            self.events.emit(event, sandbox_id=live.id)
        live.state = to

    def _on_death(self, live: LiveSandbox, death: asyncio.Future[Death]) -> None:
        if death.cancelled() or self.live.get(live.id) is not live or live.state is State.STOPPING:
            return
        del self.live[live.id]
        live.state = State.DEAD
        live.hang_up()
        self._own(self._tidy(live))
        ended = death.result()
        last_words = live.machine.console_tail().strip().splitlines()[-3:]
        why = f"{ended.reason.value} ({ended.status})"
        if ended.reason is ExitReason.OUT_OF_MEMORY:
            why = describe_out_of_memory(self.get(live.id).limits)
        _log.warning("Sandbox %s died: %s", live.id, why)
        self.bury(live.id, "\n".join([why, *last_words]))

    async def _tidy(self, live: LiveSandbox) -> None:
        """Of a VM that is gone: what we hold of it, and what its VMM had started, which is nobody's now."""
        await live.machine.release()
        await in_thread(lambda: end_processes(self.directory(live.id)))


def describe_out_of_memory(limits: Limits) -> str:
    return f"{ExitReason.OUT_OF_MEMORY.value} of {limits.memory_mib} MiB"


def end_processes(directory: Path) -> None:
    """All that a VM in `directory` has started, and the group they are in."""
    kill_marked(directory)
    if group := find_group(directory):
        group.remove()


def _not_running(record: SandboxRecord) -> ForkdError:
    if record.state is State.DEAD:
        error: ForkdError = GuestDied(
            f"Sandbox {record.id} is dead: {(record.cause or 'nobody knows why').splitlines()[0]}",
            hint="Its console is kept for a while: forkd logs",
            details=record.cause,
        )
        error.status = 409
        return error
    hint = "Resume it first" if record.state is State.PAUSED else None
    return NotRunning(f"Sandbox {record.id} is {record.state.value}", hint=hint)
