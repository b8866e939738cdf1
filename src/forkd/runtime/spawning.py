"""Spawning: n sandboxes reserved in one transaction, forked, and made known in one more. All of them, or none.

A request may carry a key of its sender's choice: sent again, it is answered with what came of the first.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from forkd.engines.base import Phases, Way
from forkd.errors import Conflict, NotFound
from forkd.host.cgroup import enforceable
from forkd.host.faults import reach
from forkd.model.identity import check_env
from forkd.model.machine import parse_count
from forkd.model.sandbox import SandboxRecord, SandboxSpec, State
from forkd.runtime.admission import admit_children, look, starts_at_once
from forkd.runtime.live import LiveSandbox
from forkd.runtime.registry import IdempotencyKey, check_same_request
from forkd.runtime.roster import Roster
from forkd.runtime.snapshots import Snapshots
from forkd.runtime.spawn import Forked, child_mib, fork_children, kill_all, new_identities
from forkd.runtime.templates import Templates


@dataclass(frozen=True)
class Spawned:
    records: tuple[SandboxRecord, ...]
    failed: int = 0
    contract_s: tuple[float, ...] = ()  # how long each child took to become someone
    fork_s: float = 0.0  # the engine's part: until all VMs ran and had kept the contract
    ways: tuple[Way, ...] = ()  # how each child came to be
    phases: tuple[Phases, ...] = ()


class Spawner:
    def __init__(
        self, roster: Roster, snapshots: Snapshots, templates: Templates, *, drop_limits: bool = False
    ) -> None:
        """`drop_limits`: those that this host cannot enforce, instead of refusing them."""
        self._roster = roster
        self._snapshots = snapshots
        self._templates = templates
        self._drop_limits = drop_limits
        self._starting = 0
        self._gate = asyncio.Semaphore(starts_at_once(look()))
        self._under_way: dict[tuple[str, str], tuple[str, asyncio.Future[Spawned]]] = {}

    async def spawn(self, spec: SandboxSpec, key: IdempotencyKey | None) -> Spawned:
        parse_count(spec.n)
        check_env(spec.env)
        if key is None:
            return await self._roster.finished(self._spawn(spec, None))
        seat = (key.owner, key.key)
        if seat in self._under_way:
            digest, outcome = self._under_way[seat]
            check_same_request(digest, key)
            return await asyncio.shield(outcome)
        if (made := self._roster.registry.find_spawn(key)) is not None:
            return self._made_before(made)
        outcome = asyncio.ensure_future(self._roster.finished(self._spawn(spec, key)))
        self._under_way[seat] = (key.digest, outcome)
        outcome.add_done_callback(lambda _: self._under_way.pop(seat, None))
        return await asyncio.shield(outcome)

    def _made_before(self, ids: tuple[str, ...]) -> Spawned:
        records = []
        for sandbox_id in ids:
            try:
                records.append(self._roster.get(sandbox_id))
            except NotFound:
                continue
        if not records:
            raise Conflict(
                "What was spawned with this idempotency key has been removed since", hint="Use a new key to spawn more"
            )
        return Spawned(tuple(records), failed=len(ids) - len(records))

    async def _spawn(self, spec: SandboxSpec, key: IdempotencyKey | None) -> Spawned:
        if self._drop_limits:
            spec = replace(spec, limits=enforceable(spec.limits))
        async with self._snapshots.held(spec.snapshot_tag) as frozen:
            template = self._templates.find(frozen)
            admit_children(spec.n + self._starting, look(), child_mib(template))
            reach("spawn.begun")
            identities = new_identities(spec.n, env=spec.env)
            ids = [identity.sandbox_id for identity in identities]
            self._starting += spec.n
            try:
                self._reserve(spec, ids, key)
                reach("spawn.reserved")
                begun = time.monotonic()
                forked = await fork_children(
                    self._roster.engine,
                    frozen,
                    identities,
                    self._roster.home.vms,
                    limits=spec.limits,
                    template=template,
                    gate=self._gate,
                    allow_partial=spec.allow_partial,
                )
            except BaseException:
                self._roll_back(ids, key)
                raise
            finally:
                self._starting -= spec.n
            fork_s = time.monotonic() - begun
            reach("spawn.forked")
            try:
                spawned = replace(self._commit(spec, ids, forked), fork_s=fork_s)
            except BaseException:
                await kill_all(forked.sandboxes)
                self._roll_back(ids, key)
                raise
            if template is None:
                self._templates.want(frozen, spec.snapshot_tag)
            return spawned

    def _reserve(self, spec: SandboxSpec, ids: list[str], key: IdempotencyKey | None) -> None:
        roster, now = self._roster, time.time()
        ports = {sandbox_id: roster.ports.open(sandbox_id, spec.agent_port, serve=False) for sandbox_id in ids}
        with roster.registry.transaction():
            roster.registry.insert_sandboxes(
                SandboxRecord(
                    number=0,
                    id=sandbox_id,
                    snapshot_tag=spec.snapshot_tag,
                    state=State.STARTING,
                    created_at_unix=now,
                    engine=roster.engine.name,
                    isolation=roster.engine.isolation,
                    agent_port=ports[sandbox_id],
                    limits=spec.limits,
                    on_timeout=spec.on_timeout,
                    labels=spec.labels,
                    metadata=spec.metadata,
                    workspace=spec.workspace,
                )
                for sandbox_id in ids
            )
            if key is not None:
                roster.registry.record_spawn(key, ids, now)
            for sandbox_id in ids:
                roster.events.emit("sandbox.created", sandbox_id=sandbox_id, snapshot_tag=spec.snapshot_tag)

    def _commit(self, spec: SandboxSpec, ids: list[str], forked: Forked) -> Spawned:
        roster = self._roster
        deadline = None if spec.timeout_s is None else time.time() + spec.timeout_s
        alive = {sandbox.id: sandbox for sandbox in forked.sandboxes}
        lost = [sandbox_id for sandbox_id in ids if sandbox_id not in alive]
        with roster.registry.transaction():
            changes = {
                sandbox_id: {
                    "pid": sandbox.machine.pid,
                    "deadline_unix": deadline,
                    "way": sandbox.machine.phases.way.value,
                }
                for sandbox_id, sandbox in alive.items()
            }
            roster.registry.move(list(alive), State.RUNNING, changes)
            roster.registry.remove_sandboxes(lost)
            for sandbox_id in alive:
                roster.events.emit("sandbox.running", sandbox_id=sandbox_id, snapshot_tag=spec.snapshot_tag)
        reach("spawn.committed")
        for sandbox_id in lost:
            roster.ports.close(sandbox_id)
        for sandbox_id in ids:
            if sandbox_id in alive:
                sandbox = alive[sandbox_id]
                roster.hold(LiveSandbox(sandbox_id, sandbox.machine, sandbox.agent, State.RUNNING))
                roster.ports.serve(sandbox_id)
        records = tuple(roster.get(sandbox_id) for sandbox_id in ids if sandbox_id in alive)
        phases = tuple(sandbox.machine.phases for sandbox in alive.values())
        return Spawned(
            records,
            len(lost),
            contract_s=tuple(map(_contract_s, phases)),
            ways=tuple(each.way for each in phases),
            phases=phases,
        )

    def _roll_back(self, ids: list[str], key: IdempotencyKey | None) -> None:
        roster = self._roster
        for sandbox_id in ids:
            roster.ports.close(sandbox_id)
        with roster.registry.transaction():
            roster.registry.remove_sandboxes(ids)
            if key is not None:
                roster.registry.forget_spawn(key)
            for sandbox_id in ids:
                roster.events.emit("sandbox.removed", sandbox_id=sandbox_id)


def _contract_s(phases: Phases) -> float:
    return phases.steps["contract"] - phases.steps.get("resume", phases.begun)
