"""What the daemon serves: sandboxes, snapshots, workspaces and events of one home, owned by one process at a time."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forkd.engines.base import Engine
from forkd.errors import Conflict, NotFound
from forkd.host.cgroup import remove_groups
from forkd.host.files import owned
from forkd.host.marked import kill_marked
from forkd.host.paths import DAEMON_LOCK, Home, ensure_home, ensure_private
from forkd.host.system import start_time_ticks
from forkd.host.threads import in_thread
from forkd.model.names import SnapshotTag
from forkd.network.lease import NoNetworks, OpenNetworks
from forkd.runtime.branches import DEFAULT_AT_ONCE, Branches
from forkd.runtime.checkpoints import Checkpoints
from forkd.runtime.derive import Deriver
from forkd.runtime.events import EventLog
from forkd.runtime.lineage import DEFAULT_LINEAGE_POLICY, Lineage, LineagePolicy, find_lineage
from forkd.runtime.networks import SandboxNetworks
from forkd.runtime.origin import DEFAULT_POLICY, TemplatePolicy
from forkd.runtime.packs import Packs
from forkd.runtime.recovery import recover
from forkd.runtime.registry import Registry, SandboxRecord
from forkd.runtime.restore import Restorer
from forkd.runtime.sandboxes import Sandboxes
from forkd.runtime.snapshot_view import FAILED, FORK_PREFIX, is_checkpoint, is_left_over, is_nobodys
from forkd.runtime.snapshots import Pruning, Snapshots
from forkd.runtime.spawn import Spawner
from forkd.runtime.templates import Templates
from forkd.runtime.upkeep import Upkeep
from forkd.runtime.workspaces import Workspaces
from forkd.store.retention import Policy as RetentionPolicy


@dataclass(frozen=True)
class RuntimeOptions:
    on_stop: Literal["keep", "kill"] = "keep"
    unenforced_limits: Literal["refuse", "drop"] = "refuse"
    templates: TemplatePolicy = DEFAULT_POLICY
    lineage: LineagePolicy = DEFAULT_LINEAGE_POLICY
    branches_at_once: int = DEFAULT_AT_ONCE
    networks: OpenNetworks | None = None  # None: no sandbox has one


_DEFAULT = RuntimeOptions()
NETWORK_DIRECTORY = "network"


class Runtime:
    def __init__(self, home: Home, engine: Engine, registry: Registry, options: RuntimeOptions = _DEFAULT) -> None:
        self.home = home
        self.engine = engine
        self.registry = registry
        self.events = EventLog(registry)
        self.sandboxes = Sandboxes(home, engine, registry, self.events)
        self.templates = Templates(engine, home.vms, options.templates)
        self.snapshots = Snapshots(home, engine, registry, self.events, self.templates, self.sandboxes.leases)
        self.packs = Packs(home, engine, self.snapshots)
        drop_limits = options.unenforced_limits == "drop"
        self.branches = Branches(self.sandboxes, self.snapshots, self.templates, options.branches_at_once)
        spawner = Spawner(
            self.sandboxes,
            self.snapshots,
            self.templates,
            self.branches,
            drop_limits=drop_limits,
            lineage=options.lineage,
        )
        self.spawn, self.fork, self.cancel_spawn = spawner.spawn, spawner.fork, spawner.cancel
        self.checkpoints = Checkpoints(self.sandboxes, self.snapshots, self.branches)
        self.deriver = Deriver(self.sandboxes, self.snapshots, self.branches, spawner)
        self.derive = self.deriver.derive
        self.workspaces = Workspaces(registry, self.sandboxes, self.snapshots, self.branches, self.spawn)
        self.sandboxes.on_removed = self._on_removed
        self.branches.on_left_behind = self._collect_soon
        self.networks = SandboxNetworks(self.sandboxes)
        self.restorer = Restorer(self.sandboxes, self.networks)
        self.upkeep = Upkeep(self.sandboxes)

    @property
    def ready(self) -> bool:
        """Recovery is over, and deadlines are looked after."""
        return self.upkeep.alive

    @classmethod
    @asynccontextmanager
    async def opened(cls, home: Home, engine: Engine, options: RuntimeOptions = _DEFAULT) -> AsyncIterator[Runtime]:
        """Take the home over: adopt what runs, finish or roll back what was under way. VMs outlive the block."""
        with _owned_home(home), contextlib.closing(Registry(home.registry)) as registry:
            runtime = cls(home, engine, registry, options)
            async with contextlib.AsyncExitStack() as stack:
                leases = runtime.sandboxes.leases
                if options.networks is None:
                    leases.networks = NoNetworks("this daemon gives none (see the setting network)")
                else:
                    opening = options.networks(home.runtime / NETWORK_DIRECTORY, leases.take_refusal)
                    leases.networks = await stack.enter_async_context(opening)
                stack.push_async_callback(runtime._close, options)
                leases.networks.watch(runtime.restorer.on_lost)
                await recover(runtime.sandboxes, runtime.networks)
                runtime.snapshots.recover()
                await runtime.deriver.recover()
                await runtime.workspaces.recover()
                await runtime.collect()
                runtime.packs.recover()
                runtime.events.emit("daemon.started", data={"pid": os.getpid(), "engine": engine.name})
                async with runtime.upkeep.running():
                    yield runtime

    async def _close(self, options: RuntimeOptions) -> None:
        self.events.emit("daemon.stopping")
        await self.branches.close()
        await self.packs.close()
        await self.snapshots.close()
        await self.templates.close()
        if options.on_stop == "kill":
            await self.sandboxes.kill_all()
        await self.sandboxes.close()
        self.sandboxes.leases.close()

    def _on_removed(self, record: SandboxRecord) -> None:
        if record.branch_count or record.snapshot_tag.startswith(FORK_PREFIX):
            self._collect_soon()

    def _collect_soon(self) -> None:
        self.sandboxes.own(self.collect())

    async def collect(self) -> None:
        """Remove what only sandboxes that are gone needed: their checkpoints, and what their forks came from.

        What layers or sandboxes stand on stays until they are gone too.
        """
        records = self.registry.list_sandboxes()
        alive, used = {record.id for record in records}, {record.snapshot_tag for record in records}
        for job in self.registry.list_jobs():
            if job.status == FAILED and is_nobodys(job.tag, alive) and not (self.home.snapshots / job.tag).exists():
                self.registry.remove_job(job.tag)
        left = {view.tag for view in self.snapshots.list() if is_left_over(view, alive, used)}
        removed: set[SnapshotTag] | None = None
        while left and removed != set():  # those that lie over others go first, in as many rounds as that takes
            removed = set()
            for tag in left:
                with contextlib.suppress(Conflict, NotFound):
                    await self.snapshots.remove(tag)
                    removed.add(tag)
            left -= removed

    async def lineage(self) -> Lineage:
        views, records = self.snapshots.list(), self.registry.list_sandboxes()
        # In a thread: it looks at files and processes of all.
        return await in_thread(lambda: find_lineage([self.snapshots.look_at(view) for view in views], records))

    async def prune(self, policy: RetentionPolicy, *, dry_run: bool) -> Pruning:
        """Never what a sandbox, a workspace or another snapshot needs."""
        records = self.registry.list_sandboxes()
        in_use = {record.snapshot_tag for record in records}
        in_use |= {view.tag for view in self.snapshots.list() if is_checkpoint(view, {each.id for each in records})}
        in_use |= {row.source_snapshot_tag for row in self.registry.list_workspaces()}
        in_use |= {row.current_state_tag for row in self.registry.list_workspaces() if row.current_state_tag}
        return await self.snapshots.prune(policy, in_use, dry_run=dry_run)


@contextmanager
def _owned_home(home: Home) -> Iterator[None]:
    """One daemon for a home, and one for a runtime directory: each would take the other's VMs for strays."""
    ensure_private(home.runtime)
    ensure_home(home.root)
    ensure_private(home.vms)
    hint = "Use it, or stop it with: forkd down"
    with owned(home.root / DAEMON_LOCK, f"A daemon for {home.root} runs already", hint):
        with owned(home.runtime / DAEMON_LOCK, f"A daemon in {home.runtime} runs already", hint):
            yield


@contextmanager
def session(runtime: Path) -> Iterator[Path]:
    """A fresh runtime directory of a run without a daemon; always removed afterwards.

        <runtime>/<pid>-<start time>/<machine>/   sockets and console of each VM

    What a killed run left behind is swept by the next one. The owner is in the directory's name, so there is no instant
    at which a directory exists without an owner.
    """
    ensure_private(runtime)
    sweep(runtime)
    pid = os.getpid()
    directory = runtime / f"{pid}-{start_time_ticks(pid)}"
    directory.mkdir(mode=0o700, exist_ok=True)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        remove_groups(directory)


def sweep(runtime: Path) -> list[str]:
    """Kill the VMs and remove the directories of runs that are over; returns the names of those runs."""
    swept = []
    for directory in runtime.iterdir():
        owner = _parse_owner(directory.name)
        if owner is None or start_time_ticks(owner[0]) == owner[1]:
            continue
        kill_marked(directory)
        remove_groups(directory)
        shutil.rmtree(directory, ignore_errors=True)
        swept.append(directory.name)
    return swept


def _parse_owner(name: str) -> tuple[int, int] | None:
    """A pid and its start time, or None: zero and numbers that no pid can have."""
    pid, _, started = name.partition("-")
    if not (pid.isdecimal() and started.isdecimal() and len(pid) < 10 and len(started) < 20 and int(pid)):
        return None
    return int(pid), int(started)
