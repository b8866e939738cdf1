"""Branches: a running sandbox frozen where it is. It stands still for moments, and goes on.

On an engine that forks live VMs the branch is a fork that never runs: it is the template of its tag at once, and what
differs from the parent is written from it in the background. On others the sandbox pauses while that is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

from forkd.engines.base import Engine, Machine
from forkd.errors import Conflict, ForkdError, NoCapacity, NotForkable
from forkd.host.faults import fault_point
from forkd.host.system import FORKED_CHILD_MIB
from forkd.host.threads import in_thread, offloaded
from forkd.model.names import SnapshotTag
from forkd.model.sandbox import State
from forkd.runtime.admission import admit_children, look
from forkd.runtime.branch_files import (
    PREFIX,
    BranchRequest,
    Mode,
    Written,
    check_parent,
    is_root_of,
    new_tag,
    read_back,
    render_manifest,
    write_memory,
)
from forkd.runtime.child import LiveSandbox
from forkd.runtime.events import EventLog
from forkd.runtime.origin import Ancestry, Branch, Origin, Template
from forkd.runtime.registry import SandboxRecord, SnapshotJob
from forkd.runtime.sandboxes import Sandboxes, not_running
from forkd.runtime.snapshot_view import FORK_PREFIX, WRITING, SnapshotView
from forkd.runtime.snapshots import Snapshots
from forkd.runtime.templates import Templates
from forkd.store.apart import write_layer_apart
from forkd.store.chain import MAX_DEPTH
from forkd.store.layers import write_layer
from forkd.store.snapshots import Snapshot

_log = logging.getLogger(__name__)

DEFAULT_AT_ONCE = 4
# How long a daemon that stops waits for what is being written.
STOP_S = 30.0
# How long the writing of a branch waits for its first child.
FIRST_CHILD_S = 0.15


@dataclass(frozen=True)
class _Frozen:
    """What was captured: a VM that stands still, of which all is still to be written."""

    machine: Machine
    pause_s: float
    at_unix: float
    half_sent_bytes: int

    def template(self, tag: SnapshotTag) -> Template:
        return Template(None, tag, self.machine, None, 0, 0.0, False, self.half_sent_bytes)


class Branches:
    def __init__(
        self, sandboxes: Sandboxes, snapshots: Snapshots, templates: Templates, at_once: int = DEFAULT_AT_ONCE
    ) -> None:
        """`at_once`: how many may be written at a time."""
        self.at_once = at_once
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._templates = templates
        self.on_left_behind: Callable[[], None] = lambda: None  # a branch is complete whose sandbox is gone

    @property
    def in_flight(self) -> int:
        return len(self._snapshots.branches)

    @property
    def _engine(self) -> Engine:
        return self._sandboxes.engine

    @property
    def _events(self) -> EventLog:
        return self._sandboxes.events

    async def branch(self, sandbox_id: str, request: BranchRequest) -> Branch:
        """Returns when it can be forked from; `written` waits for the disk. Goes on when its caller does not wait."""
        return await self._sandboxes.finished(self._branch(sandbox_id, request))

    async def written(self, branch: Branch) -> SnapshotView:
        """Until it is on disk; raises what it failed with."""
        if branch.task is not None:
            await asyncio.wait([branch.task])
        if branch.error is not None:
            raise branch.error
        return self._snapshots.get(branch.tag)

    async def close(self) -> None:
        """What is being written is finished, within bounds, and all templates that are not on disk end."""
        tasks = [branch.task for branch in self._snapshots.branches.values() if branch.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        for branch in list(self._snapshots.branches.values()):
            await self._snapshots.give_up_branch(branch)

    # Capturing

    async def _branch(self, sandbox_id: str, request: BranchRequest) -> Branch:
        begun = time.monotonic()
        if request.tag is not None:
            self._snapshots.check_free(request.tag)
        record, live = self._sandboxes.get(sandbox_id), self._sandboxes.held(sandbox_id)
        tag = request.tag or new_tag(record.id)
        self.check_turn(tag)
        check_parent(request, record)
        ancestry = Ancestry(record.id, record.lineage, record.depth + 1, time.time())
        auto = request.auto or request.tag is None
        branch = Branch(tag, record.snapshot_tag, record.made_of, ancestry, 0.0, begun, request.checkpoint, auto)
        branch.network = record.network
        self._snapshots.branches[tag] = branch
        try:
            with self._sandboxes.registry.transaction(durable=True):
                self._sandboxes.registry.record_job(SnapshotJob(tag, WRITING, time.time()))
                self._events.emit("snapshot.writing", sandbox_id=record.id, snapshot_tag=tag)
            fault_point("branch.recorded")
            await self._capture(branch, live, record, request)
        except BaseException as error:
            self._fail(branch, error if isinstance(error, ForkdError) else Conflict("The branch was given up"))
            raise
        with self._sandboxes.registry.transaction():
            self._sandboxes.registry.count_branch(record.id)
        return branch

    def check_turn(self, tag: SnapshotTag | None) -> None:
        """Raise Conflict when one of this tag is being written, NoCapacity when too many are."""
        if tag is not None:
            self._snapshots.check_not_making(tag)
        if self.in_flight >= self.at_once:
            raise NoCapacity(
                f"{self.at_once} branches are being written already",
                hint="Wait until one is ready, or raise the setting branch_concurrency",
            )

    async def _capture(self, branch: Branch, live: LiveSandbox, record: SandboxRecord, request: BranchRequest) -> None:
        parents = contextlib.AsyncExitStack()
        try:
            parent = await self._hold_parent(parents, request, record)
            branch.parent_tag = parent.manifest.tag if parent else None
            async with live.lock:
                if live.state not in (State.RUNNING, State.PAUSED):
                    raise not_running(self._sandboxes.get(record.id))
                if request.settled:
                    await live.agent.prepare_freeze()
                frozen = await self._fork_paused(live)
                if frozen is None:
                    async with parents:
                        await self._write_paused(branch, live, record, request, parent)
                    return
            fault_point("branch.forked")
            branch.pause_s = frozen.pause_s
            branch.template = frozen.template(branch.tag)
            branch.task = asyncio.create_task(
                self._write_behind(branch, record, request, parent, parents), name=f"branch {branch.tag}"
            )
        except BaseException:
            await parents.aclose()
            raise

    async def _fork_paused(self, live: LiveSandbox) -> _Frozen | None:
        """A fork of it that does not run; None where the engine or this VM cannot be forked live."""
        if self._engine.why_no_live_forks() is not None:
            return None
        directory = self._sandboxes.home.vms / f"{PREFIX}{secrets.token_hex(6)}"
        if live.state is State.RUNNING:
            await live.reach()  # the fork goes on in the stream of its agent, which has to be there
        admit_children(1, look(), FORKED_CHILD_MIB)
        begun, at_unix, half_sent = time.monotonic(), time.time(), live.half_sent_bytes
        try:
            machine = await self._engine.fork_live(live.machine, directory, paused=True)
        except NotForkable as error:
            _log.warning("Sandbox %s is paused to be branched: %s", live.id, error.message)
            return None
        pause_s = machine.phases.pause_s
        waited_s = time.monotonic() - begun if pause_s is None else pause_s
        return _Frozen(machine, waited_s, at_unix, half_sent)

    async def _hold_parent(
        self, parents: contextlib.AsyncExitStack, request: BranchRequest, record: SandboxRecord
    ) -> Snapshot | None:
        """What its difference is to; None: all of it is written. Kept from removal until that is done."""
        if request.mode is Mode.FULL:
            return None
        tag = request.parent_tag or record.snapshot_tag
        held = self._snapshots.store.held(tag)
        try:
            snapshot = await parents.enter_async_context(offloaded(held))
        except ForkdError as error:
            _log.info("A branch of %s holds all of its memory: %s", record.id, error.message)
            return None
        return snapshot if snapshot.depth < MAX_DEPTH else None

    @contextlib.asynccontextmanager
    async def captured(self, sandbox_id: str, tag: SnapshotTag | None = None) -> AsyncIterator[Origin]:
        """What forks of a sandbox start from, for as long as the block runs. No tag is left where the engine can.

        With `tag` it is kept under that, unless the block fails.
        """
        record, live = self._sandboxes.get(sandbox_id), self._sandboxes.held(sandbox_id)
        frozen = None
        if tag is None:
            async with live.lock:
                if live.state not in (State.RUNNING, State.PAUSED):
                    raise not_running(self._sandboxes.get(record.id))
                frozen = await self._fork_paused(live)
        if frozen is None:
            chosen = BranchRequest(new_tag(record.id, FORK_PREFIX), auto=True) if tag is None else BranchRequest(tag)
            branch = await self._branch(record.id, chosen)
            try:
                async with self._snapshots.held(branch.tag) as origin:
                    yield replace(origin, pause_s=branch.pause_s)
            except BaseException:
                with contextlib.suppress(ForkdError):
                    await self._snapshots.remove(branch.tag)
                raise
            return
        ancestry = Ancestry(record.id, record.lineage, record.depth + 1, frozen.at_unix)
        template = frozen.template(record.snapshot_tag)
        try:
            yield Origin(record.snapshot_tag, None, template, record.made_of, ancestry, frozen.pause_s, record.network)
        finally:
            self._sandboxes.own(template.end())  # beside us: nobody waits for it

    # Writing

    async def _write_behind(
        self,
        branch: Branch,
        record: SandboxRecord,
        request: BranchRequest,
        parent: Snapshot | None,
        parents: contextlib.AsyncExitStack,
    ) -> None:
        """From the template, which never runs. Its end, and that of the task, is the end of the branch."""
        template = branch.template
        assert template is not None
        try:
            async with parents:
                if not request.eager:
                    # Writing takes a core, and the template for a moment: who forks it at once is quicker.
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(FIRST_CHILD_S):
                            await branch.has_child.wait()
                await self._write(branch, template.machine, record, request, parent)
        except asyncio.CancelledError:
            self._fail(branch, Conflict(f"Branch {branch.tag} was given up"))
            await template.end()
            raise
        except ForkdError as error:
            self._fail(branch, error)
            await template.end()
        except Exception as error:
            _log.exception("Writing branch %s failed", branch.tag)
            self._fail(branch, ForkdError(f"Writing branch {branch.tag} failed: {type(error).__name__}"))
            await template.end()
        else:
            if request.settled:
                await template.end()  # a template that rehearses is made from the files
            else:
                await self._templates.adopt(self._snapshots.store.root / branch.tag, template)
            if record.id not in self._sandboxes.live:
                self.on_left_behind()

    async def _write_paused(
        self,
        branch: Branch,
        live: LiveSandbox,
        record: SandboxRecord,
        request: BranchRequest,
        parent: Snapshot | None,
    ) -> None:
        """The sandbox stands still until all that differs is in files."""
        begun, stopped = time.monotonic(), False

        async def go_on() -> None:
            nonlocal stopped
            if stopped:
                stopped = False
                await self._sandboxes.go_on(live)
            branch.pause_s = branch.pause_s or time.monotonic() - begun

        try:
            if live.state is State.RUNNING:
                await live.machine.pause()
                stopped = True
            await self._write(branch, live.machine, record, request, parent, go_on)
        finally:
            await go_on()

    async def _write(
        self,
        branch: Branch,
        machine: Machine,
        record: SandboxRecord,
        request: BranchRequest,
        parent: Snapshot | None,
        captured: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`captured`: what is to be done once the machine is not needed any more."""
        store, begun = self._snapshots.store, time.monotonic()
        async with offloaded(store.created(branch.tag, replace_existing=False)) as (staging, seal):
            saved = await self._engine.save(machine, staging)
            fault_point("branch.saved")
            if parent is not None and saved.memory is not None and not is_root_of(parent, saved.memory):
                parent = None  # another snapshot has the tag by now
            # A process of its own takes a while to start, which a source that stands still does not have.
            write = write_layer_apart if captured is None else write_layer
            dirty, written = await in_thread(lambda: write_memory(saved.memory, parent, staging, write))
            fault_point("branch.pages")
            if captured is not None:
                await captured()
            sizes = Written(round((time.monotonic() - begun) * 1000), dirty, written)
            source = self._snapshots.describe(record)
            manifest = render_manifest(
                branch, record, request, source, self._engine.name, saved.platform, parent, sizes
            )
            await in_thread(lambda: seal(manifest))
            fault_point("branch.sealed")
        fault_point("branch.published")
        with self._sandboxes.registry.transaction():
            self._sandboxes.registry.remove_job(branch.tag)
            self._events.emit("snapshot.ready", sandbox_id=record.id, snapshot_tag=branch.tag)
        try:
            # Read back once, now: the first fork from its files need not.
            await in_thread(lambda: read_back(store, branch.tag))
        finally:
            self._snapshots.branches.pop(branch.tag, None)

    def _fail(self, branch: Branch, error: ForkdError) -> None:
        branch.error = error
        if self._snapshots.branches.pop(branch.tag, None) is not None:
            self._snapshots.fail(branch.tag, time.time(), error)
