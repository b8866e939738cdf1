"""Snapshots as the daemon serves them: the store's, and those in the making or failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forkd.engines.base import Engine, Frozen
from forkd.errors import Conflict, ForkdError, NoCapacity, NotFound
from forkd.host.faults import fault_point
from forkd.host.paths import Home
from forkd.host.threads import in_thread
from forkd.image import Image, ImageStore
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag, parse_tag
from forkd.model.network import NO_NETWORK, Network
from forkd.runtime.events import EventLog
from forkd.runtime.freeze import Warmup, create_snapshot, frozen_of
from forkd.runtime.leases import Leases
from forkd.runtime.origin import Branch, Origin, TemplateView
from forkd.runtime.registry import Registry, SandboxRecord, SnapshotJob
from forkd.runtime.snapshot_view import (
    FAILED,
    WRITING,
    Described,
    SnapshotDetail,
    SnapshotView,
    describe_shape,
    find_ancestry,
    on_disk,
    parse_shape,
    ready_view,
    stored_of,
    unusable_view,
)
from forkd.runtime.templates import Templates
from forkd.store.retention import Policy as RetentionPolicy
from forkd.store.retention import Pruned, choose_to_prune
from forkd.store.snapshots import Snapshot, SnapshotStore

_log = logging.getLogger(__name__)

# Parents that boot at once, and how many more may wait for their turn.
BOOTS_AT_ONCE = 2
MAX_JOBS = 16


@dataclass(frozen=True)
class SnapshotRequest:
    tag: SnapshotTag
    image: str
    machine: MachineSpec
    warmup: Warmup
    replace: bool = False
    network: Network = NO_NETWORK


@dataclass(frozen=True)
class Pruning:
    removed: tuple[Pruned, ...]
    kept: int


@dataclass
class _Making:
    """A job of this daemon. `error` is kept for callers that wait."""

    request: SnapshotRequest
    begun_at_unix: float
    progress: str = "waiting for its turn"
    task: asyncio.Task[None] | None = None
    error: ForkdError | None = None


class Snapshots:
    def __init__(
        self,
        home: Home,
        engine: Engine,
        registry: Registry,
        events: EventLog,
        templates: Templates,
        leases: Leases | None = None,
    ) -> None:
        self._leases = leases or Leases(events, opened_by_name=engine.opens_taps)
        self.store = SnapshotStore(home.snapshots)
        self._home = home
        self._engine = engine
        self._images = ImageStore(home)
        self._registry = registry
        self._events = events
        self._templates = templates
        self.branches: dict[SnapshotTag, Branch] = {}  # those being written
        self._making: dict[SnapshotTag, _Making] = {}
        self._turns = asyncio.Semaphore(BOOTS_AT_ONCE)

    @property
    def in_flight(self) -> int:
        return len(self._making)

    # Looking

    def list(self) -> list[SnapshotView]:
        listing = self.store.list()
        views = {snapshot.manifest.tag: ready_view(snapshot) for snapshot in listing.snapshots}
        for entry in listing.unusable:
            views[entry.tag] = unusable_view(entry.tag, entry.directory, entry.error)
        for job in self._registry.list_jobs():
            views[job.tag] = self._overlaid(job, views.get(job.tag))
        return [views[tag] for tag in sorted(views)]

    def get(self, tag: str) -> SnapshotView:
        parsed = parse_tag(tag)
        job = self._registry.find_job(parsed)
        stored: SnapshotView | None = None
        try:
            stored = ready_view(self.store.get(parsed))
        except NotFound:
            if job is None:
                raise
        except ForkdError as error:
            stored = unusable_view(parsed, self.store.root / parsed, error)
        if job is not None:
            return self._overlaid(job, stored)
        assert stored is not None
        return stored

    def look_at(self, view: SnapshotView) -> SnapshotDetail:
        """Blocks: it looks at all manifests, for those that depend on it."""
        if view.manifest is None:
            return SnapshotDetail(view)
        try:
            snapshot = self.store.get(view.tag)
        except NotFound:  # since it was listed
            return SnapshotDetail(view)
        return SnapshotDetail(
            view,
            memory_logical_bytes=view.manifest.machine.memory_mib * 2**20,
            memory_physical_bytes=on_disk(snapshot, "memory", "pages", "extents"),
            vmstate_bytes=sum(entry.size for name, entry in view.manifest.files.items() if name == "state"),
            ancestors=tuple(each.manifest.tag for each in snapshot.ancestors),
            dependents=self.store.dependents(view.tag),
            unique_bytes=snapshot.disk_bytes(),
        )

    @contextlib.asynccontextmanager
    async def held(self, tag: SnapshotTag) -> AsyncIterator[Origin]:
        """Verified, as its engine sees it, and safe from removal while the block runs.

        A branch that is still being written is forked from its template.
        """
        branch = self.branches.get(tag)
        if branch is not None and branch.template is not None:
            with branch.template.in_use():
                yield branch.origin()
            self._note_first_child(branch)
            return
        if (branch is not None or tag in self._making) and not self.store.has(tag):
            raise Conflict(f"Snapshot {tag} is still being made", hint="Wait until its status is ready")
        with contextlib.ExitStack() as stack:

            def hold() -> tuple[Snapshot, Frozen]:
                snapshot = stack.enter_context(self.store.held(tag))
                return snapshot, frozen_of(snapshot, self._images.open(snapshot.manifest.image_id))

            # In a thread, as what was never verified is hashed; letting go is only a close.
            snapshot, frozen = await in_thread(hold)
            made_of, ancestry = describe_shape(snapshot.manifest), find_ancestry(snapshot.manifest)
            template = self._templates.find(frozen)
            yield Origin(tag, frozen, template, made_of, ancestry, network=snapshot.manifest.network)

    def _note_first_child(self, branch: Branch) -> None:
        if branch.first_child_s is None:
            branch.first_child_s = time.monotonic() - branch.begun
            branch.has_child.set()
            data = {"pause_ms": round(branch.pause_s * 1000, 1), "ready_ms": round(branch.first_child_s * 1000, 1)}
            self._events.emit("snapshot.first_child", snapshot_tag=branch.tag, data=data)

    def describe(self, record: SandboxRecord) -> Described:
        """What the snapshot of a sandbox says of itself; less where that is gone."""
        with contextlib.suppress(ForkdError):
            manifest = self.store.get(record.snapshot_tag).manifest
            if describe_shape(manifest) == record.made_of:
                return Described(manifest.image_id, manifest.machine, manifest.warm, manifest.rehearsal)
        return parse_shape(record)

    def check_free(self, tag: SnapshotTag) -> None:
        """Raise Conflict when a snapshot has this tag, or is about to."""
        if tag in self._making or tag in self.branches:
            raise Conflict(f"Snapshot {tag} is being made already", hint="Wait for it, or remove it")
        if (self.store.root / tag).is_dir():
            raise Conflict(f"Snapshot {tag} exists already", hint="Choose another tag")

    # Making

    async def create(self, request: SnapshotRequest) -> SnapshotView:
        self._leases.check(request.network)
        image = await in_thread(lambda: self._images.open(request.image))
        tag = request.tag
        if tag in self._making or tag in self.branches:
            raise Conflict(f"Snapshot {tag} is being made already", hint="Wait for it, or remove it")
        if not request.replace and (self.store.root / tag).is_dir():
            raise Conflict(f"Snapshot {tag} exists already", hint="Choose another tag or ask to replace it")
        if len(self._making) >= MAX_JOBS:
            raise NoCapacity(f"{MAX_JOBS} snapshots are being made already", hint="Wait until one of them is ready")
        making = _Making(request, time.time())
        with self._registry.transaction(durable=True):
            self._registry.record_job(SnapshotJob(tag, WRITING, making.begun_at_unix))
            self._events.emit("snapshot.writing", snapshot_tag=tag)
        fault_point("snapshot.recorded")
        self._making[tag] = making
        making.task = asyncio.create_task(self._make(making, image), name=f"snapshot {tag}")
        return self.get(tag)

    async def warm(self, tag: str) -> TemplateView:
        """Make a template of a snapshot ahead of its first fork; the one there is, when there is one."""
        parsed = parse_tag(tag)
        async with self.held(parsed) as origin:
            if origin.frozen is None:
                raise Conflict(f"Snapshot {tag} is a branch that is being written, and is quick already")
            return await self._templates.warm(origin.frozen, parsed)

    async def wait(self, tag: str) -> SnapshotView:
        """Until it is ready; raises what it failed with. The caller may give up: the snapshot goes on."""
        if (branch := self.branches.get(parse_tag(tag))) is not None and branch.task is not None:
            await asyncio.wait([branch.task])
            if branch.error is not None:
                raise branch.error
        making = self._making.get(parse_tag(tag))
        if making is not None and making.task is not None:
            await asyncio.wait([making.task])
            if making.error is not None:
                raise making.error
        return self.get(tag)

    async def remove(self, tag: str, *, cascade: bool = False, force: bool = False) -> None:
        """One that is being made is given up; what it was to replace stays.

        Layers over it are a Conflict, unless they go too (`cascade`) or may be of no use from then on (`force`).
        """
        parsed = parse_tag(tag)
        given_up = await self._give_up(parsed)
        removed: tuple[SnapshotTag, ...] = (parsed,)
        if not given_up:
            failed = self._registry.find_job(parsed) is not None
            try:
                removed = await in_thread(lambda: self.store.remove(parsed, cascade=cascade, force=force))
            except NotFound:
                if not failed:
                    raise
            # Afterwards: a user of the snapshot would have kept it, and might have begun another one.
            for each in removed:
                await self._templates.drop(self.store.root / each)
        with self._registry.transaction():
            for each in removed:
                self._registry.remove_job(each)
                self._events.emit("snapshot.removed", snapshot_tag=each, data={"given_up": given_up})

    async def compact(self, tag: SnapshotTag, to: SnapshotTag) -> SnapshotView:
        """The same as a snapshot that needs no other."""
        self.check_free(to)
        self.get(tag)
        await in_thread(lambda: self.store.compact(tag, to))
        fault_point("compact.published")
        self._events.emit("snapshot.ready", snapshot_tag=to, data={"compacted": tag})
        return self.get(to)

    async def prune(self, policy: RetentionPolicy, in_use: Collection[str], *, dry_run: bool) -> Pruning:
        """By rules. One that came into use meanwhile stays."""
        stored = [stored_of(snapshot) for snapshot in (await in_thread(self.store.list)).snapshots]
        # What no branch made is not pruned.
        made = {view.tag for view in self.list() if view.manifest is not None and view.manifest.origin is None}
        doomed = choose_to_prune(stored, policy, {*made, *map(SnapshotTag, in_use)}, time.time())
        removed = []
        for each in doomed:
            if not dry_run:
                try:
                    await self.remove(each.tag)
                except (Conflict, NotFound) as error:
                    _log.info("Snapshot %s is not pruned: %s", each.tag, error.message)
                    continue
            removed.append(each)
        return Pruning(tuple(removed), len(stored) - len(removed))

    def check_not_making(self, tag: SnapshotTag) -> None:
        if tag in self._making or tag in self.branches:
            raise Conflict(f"Snapshot {tag} is being made", hint="Wait until it is ready, or remove it")

    def tell_of_imported(self, tags: Sequence[SnapshotTag]) -> None:
        """These came with a pack; templates are of what they replaced."""
        for tag in tags:
            with self._registry.transaction():
                self._registry.remove_job(tag)
                self._events.emit("snapshot.ready", snapshot_tag=tag)
            self._templates.drop_soon(self.store.root / tag)

    async def close(self) -> None:
        """The daemon stops: unfinished jobs are given up, and recorded as failed for the next daemon."""
        for tag in list(self._making):
            await self._give_up(tag)

    def recover(self) -> None:
        """After a crash: what was under way is either there or it is not."""
        for job in self._registry.list_jobs():
            if job.status != WRITING:
                continue
            if self.store.has(job.tag):
                self._registry.remove_job(job.tag)
                self._events.emit("snapshot.ready", snapshot_tag=job.tag)
            else:
                self.fail(job.tag, job.begun_at_unix, Conflict("The daemon ended while it was being made"))

    async def give_up_branch(self, branch: Branch) -> None:
        if branch.task is not None:
            branch.task.cancel()
            await asyncio.wait([branch.task])

    async def _give_up(self, tag: SnapshotTag) -> bool:
        if (branch := self.branches.get(tag)) is not None:
            if branch.task is None:
                raise Conflict(f"Snapshot {tag} is being written", hint="Wait until its status is ready")
            await self.give_up_branch(branch)
            return not self.store.has(tag)  # it may have been complete already
        making = self._making.get(tag)
        if making is None or making.task is None:
            return False
        making.task.cancel()
        await asyncio.wait([making.task])
        return True

    async def _make(self, making: _Making, image: Image) -> None:
        request = making.request
        directory = self._home.vms / f"boot-{secrets.token_hex(4)}"
        try:
            async with self._turns:
                directory.mkdir(mode=0o700)
                await self._create(making, image, directory)
            with self._registry.transaction():
                self._registry.remove_job(request.tag)
                self._events.emit("snapshot.ready", snapshot_tag=request.tag)
            self._templates.drop_soon(self.store.root / request.tag)  # of what was replaced
        except asyncio.CancelledError:
            making.error = Conflict(f"Snapshot {request.tag} was given up")
            self.fail(request.tag, making.begun_at_unix, making.error)
            raise
        except ForkdError as error:
            making.error = error
            self.fail(request.tag, making.begun_at_unix, error)
        except Exception as error:
            _log.exception("Making snapshot %s failed", request.tag)
            making.error = ForkdError(f"Making snapshot {request.tag} failed: {type(error).__name__}")
            self.fail(request.tag, making.begun_at_unix, making.error)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            del self._making[request.tag]

    async def _create(self, making: _Making, image: Image, directory: Path) -> None:
        """With its network while it warms up, which ends with it."""
        request, lease = making.request, None
        if not request.network.off:
            lease = self._leases.take(directory.name, request.network, (), snapshot_tag=request.tag)
        try:
            async with self._leases.given(lease) as nic:
                await create_snapshot(
                    self._engine,
                    self.store,
                    image,
                    request.tag,
                    request.machine,
                    request.warmup,
                    directory,
                    replace=request.replace,
                    progress=_Progress(self._events, making),
                    network=request.network,
                    nic=nic,
                )
        finally:
            await self._leases.release(directory.name)

    def fail(self, tag: SnapshotTag, begun_at_unix: float, error: ForkdError) -> None:
        with self._registry.transaction():
            self._registry.record_job(SnapshotJob(tag, FAILED, begun_at_unix, error.message, error.code))
            self._events.emit("snapshot.failed", snapshot_tag=tag, data={"error": error.message, "code": error.code})

    def _overlaid(self, job: SnapshotJob, stored: SnapshotView | None) -> SnapshotView:
        """What a job makes of what is stored. A failed attempt to replace a snapshot leaves that as it was."""
        if job.status == FAILED and stored is not None:
            return replace(stored, warning=job.warning, code=job.code)
        making, branch = self._making.get(job.tag), self.branches.get(job.tag)
        if branch is not None:
            return SnapshotView(
                job.tag,
                self.store.root / job.tag,
                int(job.begun_at_unix),
                WRITING,
                progress=branch.progress,
                branch=branch,
            )
        return SnapshotView(
            job.tag,
            self.store.root / job.tag,
            int(job.begun_at_unix),
            job.status,
            job.warning,
            job.code,
            progress=making.progress if making else None,
        )


class _Progress:
    """Stages are events; lines are only the latest news."""

    def __init__(self, events: EventLog, making: _Making) -> None:
        self._events = events
        self._making = making

    def stage(self, text: str) -> None:
        self._making.progress = text
        self._events.emit("snapshot.progress", snapshot_tag=self._making.request.tag, data={"stage": text})

    def line(self, text: str) -> None:
        self._making.progress = text
