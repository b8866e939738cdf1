"""Spawning: n sandboxes reserved in one transaction, forked, and made known in one more. All of them, or none.

A request may carry a key of its sender's choice: sent again, it is answered with what came of the first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from forkd.engines.base import Phases, Way
from forkd.errors import Conflict, NotFound
from forkd.host.cgroup import enforceable
from forkd.host.faults import fault_point
from forkd.host.system import steady_s
from forkd.host.threads import in_thread
from forkd.model.machine import NO_LIMITS, parse_count
from forkd.model.names import SnapshotTag, check_env
from forkd.model.network import NO_NETWORK
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime.admission import admit_children, look, starts_at_once
from forkd.runtime.branches import Branches
from forkd.runtime.child import LiveSandbox
from forkd.runtime.fork import Forked, child_mib, fork_children, kill_all, new_identities
from forkd.runtime.leases import Batch
from forkd.runtime.lineage import DEFAULT_LINEAGE_POLICY, Growth, LineagePolicy, check_growth
from forkd.runtime.origin import Origin
from forkd.runtime.registry import IdempotencyKey, SandboxRecord, check_same_request
from forkd.runtime.sandboxes import Sandboxes
from forkd.runtime.snapshots import Snapshots
from forkd.runtime.templates import Templates

FindOrigin = Callable[[], AbstractAsyncContextManager[Origin]]

# Far more than can be on their way at one moment.
_CANCELLED_KEPT = 10_000


@dataclass(frozen=True)
class Spawned:
    records: tuple[SandboxRecord, ...]
    failed: int = 0
    phases: tuple[Phases, ...] = ()  # of each child; none when the same request had made them before
    fork_s: float = 0.0  # the engine's part: until all VMs ran and had kept the contract
    pause_s: float = 0.0  # how long the sandbox stood still that they were forked from

    @property
    def ways(self) -> tuple[Way, ...]:
        """How each child came to be."""
        return tuple(each.way for each in self.phases)

    @property
    def contract_s(self) -> tuple[float, ...]:
        """How long each child took to take its new identity."""
        return tuple(each.steps["contract"] - each.steps.get("resume", each.begun) for each in self.phases)


class Spawner:
    def __init__(
        self,
        sandboxes: Sandboxes,
        snapshots: Snapshots,
        templates: Templates,
        branches: Branches,
        *,
        drop_limits: bool = False,
        lineage: LineagePolicy = DEFAULT_LINEAGE_POLICY,
    ) -> None:
        """`drop_limits`: those that this host cannot enforce, instead of refusing them."""
        self._branches = branches
        self._lineage = lineage
        self._sandboxes = sandboxes
        self._snapshots = snapshots
        self._templates = templates
        self._drop_limits = drop_limits
        self._starting = 0
        self._gate = asyncio.Semaphore(starts_at_once(look()))
        self._cancelled: dict[tuple[str, str], None] = {}  # the newest last
        self._under_way: dict[tuple[str, str], tuple[str, asyncio.Future[Spawned]]] = {}

    async def spawn(self, spec: SandboxSpec, key: IdempotencyKey | None = None) -> Spawned:
        return await self._once(spec, key, lambda: self._snapshots.held(spec.snapshot_tag))

    async def fork(
        self, sandbox_id: str, spec: SandboxSpec, key: IdempotencyKey | None = None, tag: SnapshotTag | None = None
    ) -> Spawned:
        """Sandboxes that start where another one is, which goes on. Its limits are theirs, unless others are asked.

        With `tag` what they start from is kept under it.
        """
        record = self._sandboxes.get(sandbox_id)
        limits = record.limits if spec.limits == NO_LIMITS else spec.limits
        spec = replace(spec, snapshot_tag=tag or record.snapshot_tag, limits=limits)
        return await self._once(spec, key, lambda: self._branches.captured(record.id, tag))

    async def _once(self, spec: SandboxSpec, key: IdempotencyKey | None, find: FindOrigin) -> Spawned:
        parse_count(spec.n)
        check_env(spec.env)
        if key is None:
            return await self._sandboxes.finished(self._spawn(spec, None, find))
        slot = (key.owner, key.key)
        if slot in self._cancelled:
            raise Conflict("The spawn of this idempotency key was cancelled", hint="Use a new key to spawn more")
        if slot in self._under_way:
            digest, outcome = self._under_way[slot]
            check_same_request(digest, key)
            return await asyncio.shield(outcome)
        if (made := self._sandboxes.registry.find_spawn(key)) is not None:
            return self._made_before(made)
        outcome = asyncio.ensure_future(self._sandboxes.finished(self._spawn(spec, key, find)))
        self._under_way[slot] = (key.digest, outcome)
        outcome.add_done_callback(lambda _: self._under_way.pop(slot, None))
        return await asyncio.shield(outcome)

    async def cancel(self, owner: str, key: str) -> list[str]:
        """Remove what this key made, and refuse it from now on: its request may still be on its way to us.

        Returns the ids that were removed. Goes on to the end even if the caller stops waiting.
        """
        return await self._sandboxes.finished(self._cancel((owner, key)))

    async def _cancel(self, slot: tuple[str, str]) -> list[str]:
        self._cancelled[slot] = None
        if len(self._cancelled) > _CANCELLED_KEPT:
            del self._cancelled[next(iter(self._cancelled))]
        if slot in self._under_way:
            await asyncio.wait([self._under_way[slot][1]])
        return await self._sandboxes.kill_these(self._sandboxes.registry.list_spawned(*slot))

    def _made_before(self, ids: tuple[str, ...]) -> Spawned:
        records = []
        for sandbox_id in ids:
            try:
                records.append(self._sandboxes.get(sandbox_id))
            except NotFound:
                continue
        if not records:
            raise Conflict(
                "The sandboxes of this idempotency key have been removed since", hint="Use a new key to spawn more"
            )
        return Spawned(tuple(records), failed=len(ids) - len(records))

    async def _spawn(self, spec: SandboxSpec, key: IdempotencyKey | None, find: FindOrigin) -> Spawned:
        if self._drop_limits:
            spec = replace(spec, limits=enforceable(spec.limits))
        async with find() as origin:
            template = origin.template
            admit_children(spec.n + self._starting, look(), child_mib(template))
            await self._check_growth(spec, origin)
            network = origin.network if spec.network is None else spec.network
            leases = self._sandboxes.leases
            leases.check(network)
            if not network.off and origin.frozen is not None:
                self._sandboxes.engine.check_nic(origin.frozen)
            fault_point("spawn.begun")
            identities = new_identities(spec.n, env=spec.env)
            ids = [identity.sandbox_id for identity in identities]
            self._starting += spec.n
            batch: Batch | None = None
            try:
                self._reserve(replace(spec, network=network), origin, ids, key)
                fault_point("spawn.reserved")
                begun = time.monotonic()
                # All at once, beside the forks: each waits for its own alone.
                batch = leases.begin(ids, network)
                forked = await fork_children(
                    self._sandboxes.engine,
                    origin.frozen,
                    identities,
                    self._sandboxes.home.vms,
                    limits=spec.limits,
                    template=template,
                    gate=self._gate,
                    allow_partial=spec.allow_partial,
                    give_nic=None if batch is None else batch.give,
                    network=not network.off,
                )
            except BaseException:
                await leases.give_up(batch, ids)
                self._roll_back(ids, key)
                raise
            finally:
                self._starting -= spec.n
            fork_s = time.monotonic() - begun
            fault_point("spawn.forked")
            try:
                spawned = replace(self._commit(spec, ids, forked), fork_s=fork_s, pause_s=origin.pause_s)
            except BaseException:
                try:
                    await kill_all(forked.sandboxes)
                finally:
                    await leases.give_up(batch, ids)
                    self._roll_back(ids, key)
                raise
            if forked.errors:
                await leases.give_up(batch, list(forked.errors))
            if template is None and origin.frozen is not None:
                self._templates.want(origin.frozen, origin.tag)
            return spawned

    async def _check_growth(self, spec: SandboxSpec, origin: Origin) -> None:
        growth, records = Growth(origin.ancestry, spec.owner, spec.n), self._sandboxes.registry.list_sandboxes()
        if self._lineage.lineage_memory_mib or self._lineage.token_memory_mib:
            await in_thread(lambda: check_growth(self._lineage, growth, records))
        else:
            check_growth(self._lineage, growth, records)

    def _reserve(self, spec: SandboxSpec, origin: Origin, ids: list[str], key: IdempotencyKey | None) -> None:
        sandboxes, now = self._sandboxes, time.time()
        ports = {sandbox_id: sandboxes.ports.open(sandbox_id, spec.agent_port, serve=False) for sandbox_id in ids}
        with sandboxes.registry.transaction(durable=True):
            sandboxes.registry.insert_sandboxes(
                SandboxRecord(
                    number=0,
                    id=sandbox_id,
                    snapshot_tag=origin.tag,
                    state=State.STARTING,
                    created_at_unix=now,
                    engine=sandboxes.engine.name,
                    isolation=sandboxes.engine.isolation,
                    agent_port=ports[sandbox_id],
                    limits=spec.limits,
                    on_timeout=spec.on_timeout,
                    labels=spec.labels,
                    metadata=spec.metadata,
                    workspace=spec.workspace,
                    parent_id=origin.ancestry.parent_id,
                    lineage=origin.ancestry.lineage or sandbox_id,
                    depth=origin.ancestry.depth,
                    forked_at_unix=origin.ancestry.forked_at_unix,
                    owner=spec.owner,
                    made_of=origin.made_of,
                    network=spec.network or NO_NETWORK,
                )
                for sandbox_id in ids
            )
            if key is not None:
                sandboxes.registry.record_spawn(key, ids, now)
            for sandbox_id in ids:
                sandboxes.events.emit("sandbox.created", sandbox_id=sandbox_id, snapshot_tag=origin.tag)

    def _commit(self, spec: SandboxSpec, ids: list[str], forked: Forked) -> Spawned:
        sandboxes = self._sandboxes
        deadline_unix, deadline_s = None, None
        if spec.timeout_s is not None:
            deadline_unix, deadline_s = time.time() + spec.timeout_s, steady_s() + spec.timeout_s
        alive = {sandbox.id: sandbox for sandbox in forked.sandboxes}
        lost = [sandbox_id for sandbox_id in ids if sandbox_id not in alive]
        with sandboxes.registry.transaction(durable=True):
            changes = {
                sandbox_id: {
                    "pid": sandbox.machine.pid,
                    "deadline_unix": deadline_unix,
                    "way": sandbox.machine.phases.way,
                }
                for sandbox_id, sandbox in alive.items()
            }
            sandboxes.registry.move(list(alive), State.RUNNING, changes)
            sandboxes.registry.remove_sandboxes(lost)
            for sandbox_id in alive:
                sandboxes.events.emit("sandbox.running", sandbox_id=sandbox_id, snapshot_tag=spec.snapshot_tag)
        fault_point("spawn.committed")
        for sandbox_id in lost:
            sandboxes.ports.close(sandbox_id)
        for sandbox_id in ids:
            if sandbox_id in alive:
                sandbox = alive[sandbox_id]
                live = LiveSandbox(sandbox_id, sandbox.machine, sandbox.agent, State.RUNNING)
                live.deadline_s = deadline_s
                sandboxes.hold(live)
                sandboxes.ports.serve(sandbox_id)
        records = tuple(sandboxes.get(sandbox_id) for sandbox_id in ids if sandbox_id in alive)
        return Spawned(records, len(lost), tuple(sandbox.machine.phases for sandbox in alive.values()))

    def _roll_back(self, ids: list[str], key: IdempotencyKey | None) -> None:
        sandboxes = self._sandboxes
        for sandbox_id in ids:
            sandboxes.ports.close(sandbox_id)
        with sandboxes.registry.transaction():
            sandboxes.registry.remove_sandboxes(ids)
            if key is not None:
                sandboxes.registry.forget_spawn(key)
            for sandbox_id in ids:
                sandboxes.events.emit("sandbox.removed", sandbox_id=sandbox_id)
