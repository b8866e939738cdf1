"""What the daemon serves: sandboxes, snapshots, workspaces and events of one home, owned by one process at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Literal

from forkd.engines.base import Engine
from forkd.errors import Conflict, NotFound
from forkd.host.files import owned
from forkd.host.paths import DAEMON_LOCK, Home, ensure_private
from forkd.model.names import parse_tag
from forkd.model.sandbox import OnTimeout, SandboxRecord, SandboxSpec, State
from forkd.runtime.adoption import recover
from forkd.runtime.events import EventLog
from forkd.runtime.live import LiveSandbox
from forkd.runtime.registry import IdempotencyKey, Registry, SandboxQuery
from forkd.runtime.roster import Roster
from forkd.runtime.snapshots import Snapshots, SnapshotView
from forkd.runtime.spawning import Spawned, Spawner
from forkd.runtime.templates import DEFAULT_POLICY, TemplatePolicy, Templates, TemplateView
from forkd.runtime.upkeep import keep_up
from forkd.runtime.workspaces import Workspaces

_KILLS_AT_ONCE = 16


@dataclass(frozen=True)
class FleetOptions:
    on_stop: Literal["keep", "kill"] = "keep"
    unenforced_limits: Literal["refuse", "drop"] = "refuse"
    templates: TemplatePolicy = DEFAULT_POLICY


_DEFAULT = FleetOptions()


@dataclass(frozen=True)
class Lineage:
    """Each snapshot with the sandboxes forked from it; orphans' snapshot is gone."""

    snapshots: tuple[tuple[SnapshotView, tuple[SandboxRecord, ...]], ...]
    orphans: tuple[SandboxRecord, ...]


class Fleet:
    def __init__(self, home: Home, engine: Engine, registry: Registry, options: FleetOptions = _DEFAULT) -> None:
        self.home = home
        self.engine = engine
        self.registry = registry
        self.events = EventLog(registry)
        self.roster = Roster(home, engine, registry, self.events)
        self.templates = Templates(engine, home.vms, options.templates)
        self.snapshots = Snapshots(home, engine, registry, self.events, self.templates)
        self.workspaces = Workspaces(registry, self)
        self.ready = False
        self._spawner = Spawner(
            self.roster, self.snapshots, self.templates, drop_limits=options.unenforced_limits == "drop"
        )

    @classmethod
    @asynccontextmanager
    async def opened(cls, home: Home, engine: Engine, options: FleetOptions = _DEFAULT) -> AsyncIterator[Fleet]:
        """Take the home over: adopt what runs, finish or roll back what was under way. VMs outlive the block."""
        with _owned_home(home), contextlib.closing(Registry(home.registry)) as registry:
            fleet = cls(home, engine, registry, options)
            try:
                await recover(fleet.roster)
                fleet.snapshots.recover()
                fleet.ready = True
                fleet.events.emit("daemon.started", data={"pid": os.getpid(), "engine": engine.name})
                upkeep = asyncio.create_task(keep_up(fleet.roster), name="upkeep")
                try:
                    yield fleet
                finally:
                    upkeep.cancel()
                    await asyncio.gather(upkeep, return_exceptions=True)
            finally:
                await fleet._close(options)

    async def _close(self, options: FleetOptions) -> None:
        self.ready = False
        self.events.emit("daemon.stopping")
        await self.snapshots.close()
        await self.templates.close()
        if options.on_stop == "kill":
            await self.kill_all()
        await self.roster.close()

    async def warm(self, tag: str) -> TemplateView:
        """Make a template of a snapshot ahead of its first fork; the one there is, when there is one."""
        parsed = parse_tag(tag)
        async with self.snapshots.held(parsed) as frozen:
            return await self.templates.warm(frozen, parsed)

    # Sandboxes

    async def spawn(self, spec: SandboxSpec, *, key: IdempotencyKey | None = None) -> Spawned:
        return await self._spawner.spawn(spec, key)

    def find(self, query: SandboxQuery) -> tuple[list[SandboxRecord], int | None]:
        """One page, and the number after which the next one starts."""
        if query.limit is None:
            return self.registry.list_sandboxes(query), None
        records = self.registry.list_sandboxes(replace(query, limit=query.limit + 1))
        more = len(records) > query.limit
        records = records[: query.limit]
        return records, records[-1].number if more else None

    def get(self, sandbox_id: str) -> SandboxRecord:
        return self.roster.get(sandbox_id)

    async def kill(self, sandbox_id: str) -> None:
        await self.roster.kill(sandbox_id)

    async def kill_all(self) -> int:
        """Those that run and those that died; returns how many went."""
        records = self.registry.list_sandboxes()
        gate = asyncio.Semaphore(_KILLS_AT_ONCE)

        async def kill(record: SandboxRecord) -> int:
            async with gate:
                try:
                    await self.roster.kill(record.id)
                except (NotFound, Conflict):  # it went by itself, or is on its way in or out
                    return 0
            return 1

        return sum(await asyncio.gather(*map(kill, records)))

    async def pause(self, sandbox_id: str) -> SandboxRecord:
        return await self.roster.finished(self.roster.pause(sandbox_id))

    async def resume(self, sandbox_id: str) -> SandboxRecord:
        return await self.roster.finished(self.roster.resume(sandbox_id))

    def set_timeout(
        self, sandbox_id: str, timeout_s: float | None, on_timeout: OnTimeout | None = None
    ) -> SandboxRecord:
        return self.roster.set_timeout(sandbox_id, timeout_s, on_timeout)

    def use(self, sandbox_id: str) -> AbstractAsyncContextManager[LiveSandbox]:
        return self.roster.use(sandbox_id)

    def console(self, sandbox_id: str) -> str:
        return self.roster.console(sandbox_id)

    def counts(self) -> dict[State, int]:
        return self.registry.count_states()

    async def spawn_for_workspace(self, spec: SandboxSpec) -> SandboxRecord:
        return (await self.spawn(spec)).records[0]

    def lineage(self) -> Lineage:
        children: dict[str, list[SandboxRecord]] = {}
        for record in self.registry.list_sandboxes():
            children.setdefault(record.snapshot_tag, []).append(record)
        snapshots = tuple((view, tuple(children.pop(view.tag, ()))) for view in self.snapshots.list())
        return Lineage(snapshots, tuple(record for orphans in children.values() for record in orphans))


@contextlib.contextmanager
def _owned_home(home: Home) -> Iterator[None]:
    """One daemon for a home, and one for a runtime directory: each would take the other's VMs for strays."""
    ensure_private(home.runtime)
    home.root.mkdir(parents=True, exist_ok=True)
    ensure_private(home.vms)
    hint = "Use it, or stop it with: forkd down"
    with owned(home.root / DAEMON_LOCK, f"A daemon for {home.root} runs already", hint):
        with owned(home.runtime / DAEMON_LOCK, f"A daemon in {home.runtime} runs already", hint):
            yield
