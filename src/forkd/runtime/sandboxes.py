"""The sandboxes there are: row, VM and port of each, changed together and in an order that survives a crash."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from forkd.engines.base import Death, Engine, ExitReason, tail_of
from forkd.engines.machine import CONSOLE
from forkd.errors import Conflict, ForkdError, GuestDied, InvalidInput, NotFound, NotRunning
from forkd.host.cell import Cell
from forkd.host.cgroup import find_group
from forkd.host.faults import fault_point
from forkd.host.marked import kill_marked
from forkd.host.paths import Home
from forkd.host.system import steady_s
from forkd.host.threads import in_thread
from forkd.model.machine import Limits
from forkd.model.names import parse_name
from forkd.model.sandbox import ID_PREFIX, OnTimeout, State, check_timeout
from forkd.runtime.child import LiveSandbox
from forkd.runtime.ended import REMOVED, RecentlyEnded
from forkd.runtime.events import EventLog
from forkd.runtime.exposed import ExposedPorts
from forkd.runtime.leases import Leases, names_of
from forkd.runtime.ports import AgentPorts
from forkd.runtime.registry import Registry, SandboxQuery, SandboxRecord

_log = logging.getLogger(__name__)

CONSOLE_BYTES = 1024 * 1024
_CAUSE_LIMIT = 2000
_KILLS_AT_ONCE = 16

T = TypeVar("T")


class Sandboxes:
    def __init__(self, home: Home, engine: Engine, registry: Registry, events: EventLog) -> None:
        self.home = home
        self.engine = engine
        self.registry = registry
        self.events = events
        self.live: dict[str, LiveSandbox] = {}
        self.ended = RecentlyEnded()
        self.ports = AgentPorts(self.use)
        self.leases = Leases(events, opened_by_name=engine.opens_taps)
        self.exposed = ExposedPorts(self._connect_to)
        self.on_removed: Callable[[SandboxRecord], None] = lambda _: None
        self._tasks: set[asyncio.Task[Any]] = set()

    def directory(self, record: SandboxRecord) -> Path:
        """Of its VM."""
        return self.home.vms / record.vm

    async def finished(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end, even if the caller stops waiting: a cancelled caller must not leave half of it done."""
        return await asyncio.shield(self.own(work))

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """In the background; cancelled when the daemon stops."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Looking

    def get(self, sandbox_id: str) -> SandboxRecord:
        """By its id or its name."""
        try:
            return self.registry.get_sandbox(sandbox_id)
        except NotFound:
            raise self.ended.absent(sandbox_id) from None

    async def look_at_cell(self, sandbox_id: str) -> Cell | None:
        """What keeps its VMM in; None: it has none that runs."""
        live = self.live.get(sandbox_id)
        return None if live is None else await in_thread(lambda: live.machine.cell)

    def find(self, query: SandboxQuery) -> tuple[list[SandboxRecord], int | None]:
        """One page, and the number after which the next one starts."""
        if query.limit is None:
            return self.registry.list_sandboxes(query), None
        records = self.registry.list_sandboxes(replace(query, limit=query.limit + 1))
        more = len(records) > query.limit
        records = records[: query.limit]
        return records, records[-1].number if more else None

    def counts(self) -> dict[State, int]:
        return self.registry.count_states()

    def use(self, sandbox_id: str) -> AbstractAsyncContextManager[LiveSandbox]:
        """The way to talk to a guest. Raises when it cannot be talked to now, or dies meanwhile."""
        live = self.held(sandbox_id)
        if live.state is not State.RUNNING:
            raise not_running(self.get(sandbox_id))
        return live.answering()

    async def console(self, sandbox_id: str) -> str:
        path = self.directory(self.get(sandbox_id)) / CONSOLE
        return await in_thread(lambda: tail_of(path, CONSOLE_BYTES))

    async def _connect_to(self, sandbox_id: str, port: int) -> socket.socket:
        """To a port of its guest, wherever that is by now."""
        if self.held(sandbox_id).state is not State.RUNNING:
            raise not_running(self.get(sandbox_id))
        return await self.leases.networks.connect(self.get(sandbox_id).vm, port)

    # Changing

    def hold(self, live: LiveSandbox) -> None:
        """From here on its death is noticed."""
        self.live[live.id] = live
        self.watch(live)

    def watch(self, live: LiveSandbox) -> None:
        live.machine.death.add_done_callback(lambda death: self._on_death(live, death))

    async def pause(self, sandbox_id: str) -> SandboxRecord:
        return await self.finished(self._pause(sandbox_id))

    async def _pause(self, sandbox_id: str) -> SandboxRecord:
        live = self.held(sandbox_id)
        async with live.lock:
            if live.state is State.RUNNING:
                await live.machine.pause()
                self._move(live, State.PAUSED, "sandbox.paused")
            elif live.state is not State.PAUSED:
                raise not_running(self.get(sandbox_id))
        return self.get(sandbox_id)

    async def resume(self, sandbox_id: str) -> SandboxRecord:
        return await self.finished(self._resume(sandbox_id))

    async def _resume(self, sandbox_id: str) -> SandboxRecord:
        live = self.held(sandbox_id)
        async with live.lock:
            if live.state is State.PAUSED:
                await self._wake(live)
            elif live.state is not State.RUNNING:
                raise not_running(self.get(sandbox_id))
        return self.get(sandbox_id)

    async def _wake(self, live: LiveSandbox) -> None:
        await live.machine.resume()
        try:
            async with live.answering():
                await live.agent.set_clock()
        except ForkdError:
            # A guest with a wrong clock is not handed out.
            await live.machine.pause()
            raise
        self._move(live, State.RUNNING, "sandbox.resumed")

    async def go_on(self, live: LiveSandbox) -> None:
        """One that was stopped for a moment, for work of ours: whatever that came to, it runs again, on time."""
        await live.machine.resume()
        try:
            async with live.answering():
                await live.agent.set_clock()
        except ForkdError as error:
            _log.warning("The clock of sandbox %s may be late: %s", live.id, error.message)

    async def kill(self, sandbox_id: str, why: str = REMOVED) -> None:
        """However full the disk is. An attempt that fails leaves it `stopping`, and upkeep tries again."""
        await self.finished(self._kill(sandbox_id, why))

    async def kill_all(self) -> int:
        """Running and dead ones; returns how many went."""
        return len(await self.kill_these(record.id for record in self.registry.list_sandboxes()))

    async def kill_these(self, ids: Iterable[str]) -> list[str]:
        """Those of them that went; one that resists holds up no other."""
        gate = asyncio.Semaphore(_KILLS_AT_ONCE)

        async def kill(sandbox_id: str) -> str | None:
            async with gate:
                try:
                    await self.kill(sandbox_id)
                except (NotFound, Conflict):  # it went by itself, or is starting or stopping
                    return None
                except Exception:
                    _log.exception("Sandbox %s could not be ended", sandbox_id)
                    return None
            return sandbox_id

        return [went for went in await asyncio.gather(*map(kill, ids)) if went is not None]

    async def _kill(self, sandbox_id: str, why: str) -> None:
        record = self.get(sandbox_id)
        live = self.live.get(record.id)
        if live is None:
            await self._kill_unheld(record, why)
            return
        async with live.lock:
            if live.id not in self.live:
                raise self.ended.absent(sandbox_id)  # another request was first
            if live.state is not State.STOPPING:
                self.registry.move([live.id], State.STOPPING)
                live.state, live.why_ended = State.STOPPING, why
            fault_point("delete.marked")
            self.exposed.close_of(live.id)
            await live.end()
            await self.leases.release(self.get(live.id).vm)
            fault_point("delete.killed")
            self.forget(live.id, live.why_ended or why)
            del self.live[live.id]
            fault_point("delete.removed")

    async def _kill_unheld(self, record: SandboxRecord, why: str) -> None:
        """One whose VM is gone, whatever its row says. That of one that is starting may come yet."""
        if record.state is State.STARTING:
            raise not_running(record)
        if record.state is not State.DEAD:
            await in_thread(lambda: end_processes(self.directory(record)))
            await self.leases.release(record.vm)
            self.get(record.id)
        self.forget(record.id, why)

    def forget(self, sandbox_id: str, why: str) -> None:
        """Nothing runs for it any more: its files, its port and its row go."""
        record = self.get(sandbox_id)
        self.ports.close(sandbox_id)
        self.exposed.close_of(sandbox_id)
        shutil.rmtree(self.directory(record), ignore_errors=True)
        with self.registry.transaction():
            self.registry.remove_sandboxes([sandbox_id])
            self.events.emit("sandbox.removed", sandbox_id=sandbox_id)
        self.ended.add(sandbox_id, record.name, why)
        self.on_removed(record)

    def set_timeout(
        self,
        sandbox_id: str,
        timeout_s: float | None,
        on_timeout: OnTimeout | None = None,
        *,
        extend: bool = False,
    ) -> SandboxRecord:
        """`extend`: a deadline that is later already stays, and so does having none."""
        check_timeout(timeout_s)
        live = self.held(sandbox_id)
        if live.state not in (State.RUNNING, State.PAUSED):
            raise not_running(self.get(sandbox_id))
        later = timeout_s is None or (live.deadline_s is not None and live.deadline_s < steady_s() + timeout_s)
        with self.registry.transaction():
            if later or not extend:
                self.set_deadline(live, timeout_s)
            if on_timeout is not None:
                self.registry.change(live.id, on_timeout=on_timeout)
        return self.get(live.id)

    def set_deadline(self, live: LiveSandbox, timeout_s: float | None) -> None:
        """In memory on a clock that nobody sets; in the registry, for people and the next daemon, by the wall clock."""
        self.registry.change(live.id, deadline_unix=None if timeout_s is None else time.time() + timeout_s)
        live.deadline_s = None if timeout_s is None else steady_s() + timeout_s

    def rename(self, sandbox_id: str, name: str | None) -> SandboxRecord:
        """None takes its name away. A name can be used in place of the id, so it must not look like one."""
        if name is not None and parse_name(name, "sandbox name").startswith(ID_PREFIX):
            raise InvalidInput(f"A sandbox name must not start with {ID_PREFIX}, got {name}", hint="Ids start with it")
        record = self.get(sandbox_id)
        with self.registry.transaction():
            self.registry.rename(record.id, name)
            self.events.emit("sandbox.renamed", sandbox_id=record.id, data={"name": name})
        if self.leases.has(record.vm):
            self.own(self._rename_in_group(record.id))
        return self.get(record.id)

    async def _rename_in_group(self, sandbox_id: str) -> None:
        try:
            record = self.get(sandbox_id)
            await self.leases.change(record.vm, record.network, names_of(record))
        except ForkdError as error:
            _log.warning("The group of %s does not know its new name: %s", sandbox_id, error.message)

    def bury(self, sandbox_id: str, cause: str) -> None:
        """Its VM is gone without a request. The row and the console stay, to show why."""
        self.ports.close(sandbox_id)
        self.exposed.close_of(sandbox_id)
        changes: dict[str, Any] = {
            "pid": None,
            "cause": cause[:_CAUSE_LIMIT],
            "ended_at_unix": time.time(),
            "deadline_unix": None,
            "ports": {},
        }
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
        self.exposed.close_all()
        await asyncio.gather(*(live.let_go() for live in self.live.values()))
        self.live.clear()

    def held(self, sandbox_id: str) -> LiveSandbox:
        """One whose VM this daemon has."""
        if live := self.live.get(sandbox_id):
            return live
        record = self.get(sandbox_id)
        if record.id not in self.live:
            raise not_running(record)
        return self.live[record.id]

    def _move(self, live: LiveSandbox, to: State, event: str) -> None:
        live.state = to  # what is, counts
        with self.registry.transaction():
            self.registry.move([live.id], to)
            self.events.emit(event, sandbox_id=live.id)

    def _on_death(self, live: LiveSandbox, death: asyncio.Future[Death]) -> None:
        if death.cancelled() or self.live.get(live.id) is not live or live.state is State.STOPPING:
            return
        if live.machine.death is not death:
            return  # of a VM that it has left behind
        del self.live[live.id]
        live.state = State.DEAD
        live.hang_up()
        self.own(self._tidy(live))
        ended = death.result()
        last_words = live.machine.console_tail().strip().splitlines()[-3:]
        why = f"{ended.reason.value} ({ended.status})"
        if ended.reason is ExitReason.OUT_OF_MEMORY:
            why = describe_out_of_memory(self.get(live.id).limits)
        _log.warning("Sandbox %s died: %s", live.id, why)
        self.bury(live.id, "\n".join([why, *last_words]))

    async def _tidy(self, live: LiveSandbox) -> None:
        """Of a VM that is gone: what we hold of it, and what its VMM had started, which has no owner now."""
        await live.machine.release()
        record = self.get(live.id)
        await in_thread(lambda: end_processes(self.directory(record)))
        await self.leases.release(record.vm)


def describe_out_of_memory(limits: Limits) -> str:
    return f"{ExitReason.OUT_OF_MEMORY.value} of {limits.memory_mib} MiB"


def end_processes(directory: Path) -> None:
    """All that a VM in `directory` has started, and the group they are in."""
    kill_marked(directory)
    if group := find_group(directory):
        group.remove()


def not_running(record: SandboxRecord) -> ForkdError:
    if record.state is State.DEAD:
        error: ForkdError = GuestDied(
            f"Sandbox {record.id} is dead: {(record.cause or 'cause unknown').splitlines()[0]}",
            hint="Its console is kept for a while: forkd logs",
            details=record.cause,
        )
        error.status = 409
        return error
    hint = "Resume it first" if record.state is State.PAUSED else None
    return NotRunning(f"Sandbox {record.id} is {record.state.value}", hint=hint)
