"""Snapshots as the daemon serves them: the store's, and those in the making or failed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Sequence
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
from forkd.runtime.events import EventLog
from forkd.runtime.freeze import Warmup, create_snapshot, frozen_of
from forkd.runtime.registry import Registry, SnapshotJob
from forkd.runtime.templates import Templates, TemplateView
from forkd.store.manifest import Manifest
from forkd.store.snapshots import Snapshot, SnapshotStore

_log = logging.getLogger(__name__)

# Parents that boot at once, and how many more may wait for their turn.
BOOTS_AT_ONCE = 2
MAX_JOBS = 16

WRITING, READY, FAILED = "writing", "ready", "failed"


@dataclass(frozen=True)
class SnapshotRequest:
    tag: SnapshotTag
    image: str
    machine: MachineSpec
    warmup: Warmup
    replace: bool = False


@dataclass(frozen=True)
class SnapshotView:
    tag: SnapshotTag
    directory: Path
    created_at_unix: int
    status: str
    warning: str | None = None
    code: str | None = None
    manifest: Manifest | None = None
    progress: str | None = None


@dataclass(frozen=True)
class SnapshotDetail:
    view: SnapshotView
    memory_logical_bytes: int
    memory_physical_bytes: int
    vmstate_bytes: int


@dataclass
class _Making:
    """A job of this daemon. `error` is kept for callers that wait."""

    request: SnapshotRequest
    begun_at_unix: float
    progress: str = "waiting for its turn"
    task: asyncio.Task[None] | None = None
    error: ForkdError | None = None


class Snapshots:
    def __init__(self, home: Home, engine: Engine, registry: Registry, events: EventLog, templates: Templates) -> None:
        self.store = SnapshotStore(home.snapshots)
        self._home = home
        self._engine = engine
        self._images = ImageStore(home)
        self._registry = registry
        self._events = events
        self._templates = templates
        self._making: dict[SnapshotTag, _Making] = {}
        self._turns = asyncio.Semaphore(BOOTS_AT_ONCE)

    @property
    def in_flight(self) -> int:
        return len(self._making)

    # Looking

    def list(self) -> list[SnapshotView]:
        listing = self.store.list()
        views = {snapshot.manifest.tag: _ready(snapshot) for snapshot in listing.snapshots}
        for entry in listing.unusable:
            views[entry.tag] = _unusable(entry.tag, entry.directory, entry.error)
        for job in self._registry.list_jobs():
            views[job.tag] = self._overlaid(job, views.get(job.tag))
        return [views[tag] for tag in sorted(views)]

    def get(self, tag: str) -> SnapshotView:
        parsed = parse_tag(tag)
        job = self._registry.find_job(parsed)
        stored: SnapshotView | None = None
        try:
            stored = _ready(self.store.get(parsed))
        except NotFound:
            if job is None:
                raise
        except ForkdError as error:
            stored = _unusable(parsed, self.store.root / parsed, error)
        if job is not None:
            return self._overlaid(job, stored)
        assert stored is not None
        return stored

    def detail(self, tag: str) -> SnapshotDetail:
        view = self.get(tag)
        if view.manifest is None:
            return SnapshotDetail(view, 0, 0, 0)
        sizes = {name: entry.size for name, entry in view.manifest.files.items()}
        memory = view.directory / "memory"
        try:
            physical = memory.stat().st_blocks * 512
        except OSError:
            physical = 0
        return SnapshotDetail(view, sizes.get("memory", 0), physical, sizes.get("state", 0))

    @contextlib.asynccontextmanager
    async def held(self, tag: SnapshotTag) -> AsyncIterator[Frozen]:
        """Verified, as its engine sees it, and safe from removal while the block runs."""
        if tag in self._making and not self.store.has(tag):
            raise Conflict(f"Snapshot {tag} is still being made", hint="Wait until its status is ready")
        with contextlib.ExitStack() as stack:

            def hold() -> Frozen:
                snapshot = stack.enter_context(self.store.held(tag))
                return frozen_of(snapshot, self._images.open(snapshot.manifest.image_id))

            # In a thread, as what was never verified is hashed; letting go is only a close.
            yield await in_thread(hold)

    # Making

    async def create(self, request: SnapshotRequest) -> SnapshotView:
        image = await in_thread(lambda: self._images.open(request.image))
        tag = request.tag
        if tag in self._making:
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
        async with self.held(parsed) as frozen:
            return await self._templates.warm(frozen, parsed)

    async def wait(self, tag: str) -> SnapshotView:
        """Until it is ready; raises what it failed with. The caller may give up: the snapshot goes on."""
        making = self._making.get(parse_tag(tag))
        if making is not None and making.task is not None:
            await asyncio.wait([making.task])
            if making.error is not None:
                raise making.error
        return self.get(tag)

    async def remove(self, tag: str) -> None:
        """One that is being made is given up; what it was to replace stays."""
        parsed = parse_tag(tag)
        given_up = await self._give_up(parsed)
        if not given_up:
            failed = self._registry.find_job(parsed) is not None
            try:
                await in_thread(lambda: self.store.remove(parsed))
            except NotFound:
                if not failed:
                    raise
            # Afterwards: a user of the snapshot would have kept it, and might have begun another one.
            await self._templates.drop(self.store.root / parsed)
        with self._registry.transaction():
            self._registry.remove_job(parsed)
            self._events.emit("snapshot.removed", snapshot_tag=parsed, data={"given_up": given_up})

    def check_not_making(self, tag: SnapshotTag) -> None:
        if tag in self._making:
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
                self._fail(job.tag, job.begun_at_unix, Conflict("The daemon ended while it was being made"))

    async def _give_up(self, tag: SnapshotTag) -> bool:
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
                )
            with self._registry.transaction():
                self._registry.remove_job(request.tag)
                self._events.emit("snapshot.ready", snapshot_tag=request.tag)
            self._templates.drop_soon(self.store.root / request.tag)  # of what was replaced
        except asyncio.CancelledError:
            making.error = Conflict(f"Snapshot {request.tag} was given up")
            self._fail(request.tag, making.begun_at_unix, making.error)
            raise
        except ForkdError as error:
            making.error = error
            self._fail(request.tag, making.begun_at_unix, error)
        except Exception as error:
            _log.exception("Making snapshot %s failed", request.tag)
            making.error = ForkdError(f"Making snapshot {request.tag} failed: {type(error).__name__}")
            self._fail(request.tag, making.begun_at_unix, making.error)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            del self._making[request.tag]

    def _fail(self, tag: SnapshotTag, begun_at_unix: float, error: ForkdError) -> None:
        with self._registry.transaction():
            self._registry.record_job(SnapshotJob(tag, FAILED, begun_at_unix, error.message, error.code))
            self._events.emit("snapshot.failed", snapshot_tag=tag, data={"error": error.message, "code": error.code})

    def _overlaid(self, job: SnapshotJob, stored: SnapshotView | None) -> SnapshotView:
        """What a job makes of what is stored. A failed attempt to replace a snapshot leaves that as it was."""
        if job.status == FAILED and stored is not None:
            return replace(stored, warning=job.warning, code=job.code)
        making = self._making.get(job.tag)
        return SnapshotView(
            job.tag,
            self.store.root / job.tag,
            int(job.begun_at_unix),
            job.status,
            job.warning,
            job.code,
            progress=making.progress if making else None,
        )


def _ready(snapshot: Snapshot) -> SnapshotView:
    manifest = snapshot.manifest
    return SnapshotView(manifest.tag, snapshot.directory, manifest.created_at_unix, READY, manifest=manifest)


def _unusable(tag: SnapshotTag, directory: Path, error: ForkdError) -> SnapshotView:
    try:
        modified_unix = int(directory.stat().st_mtime)
    except OSError:  # removed while we looked
        modified_unix = 0
    return SnapshotView(tag, directory, modified_unix, FAILED, error.message, error.code)


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
