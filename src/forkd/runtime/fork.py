"""Forking children of a snapshot: admitted, in parallel, each one with a proven identity of its own."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Engine, Frozen, Machine, Nic, Way
from forkd.errors import EngineFailed, ForkdError, GuestDied, GuestTimeout
from forkd.guest.agent import Agent
from forkd.host.faults import fault_point
from forkd.host.system import CHILD_MIB, FORKED_CHILD_MIB
from forkd.model.machine import NO_LIMITS, Limits, parse_count
from forkd.model.names import Identity, new_identity
from forkd.model.sandbox import new_sandbox_id
from forkd.runtime.admission import admit_children, look, starts_at_once
from forkd.runtime.child import Child, raise_explained
from forkd.runtime.contract import keep_contract
from forkd.runtime.origin import Template
from forkd.runtime.templates import fork_machine
from forkd.wire.agent import MAX_FRAME

AfterFork = Callable[[Child], Awaitable[None]]
# The network interface of a child, by its id, for as long as it starts.
GiveNic = Callable[[str], AbstractAsyncContextManager[Nic | None]]


@dataclass(frozen=True)
class Forked:
    """The children that came up, in the order asked for, and the errors of the others, by sandbox id."""

    sandboxes: list[Child]
    errors: Mapping[str, ForkdError]


def new_identities(n: int, *, env: Mapping[str, str] | None = None) -> list[Identity]:
    return [new_identity(new_sandbox_id(), env=env) for _ in range(parse_count(n))]


async def fork_children(
    engine: Engine,
    frozen: Frozen | None,
    identities: Sequence[Identity],
    directory: Path,
    *,
    limits: Limits = NO_LIMITS,
    template: Template | None = None,
    gate: asyncio.Semaphore | None = None,
    after: AfterFork | None = None,
    allow_partial: bool = False,
    give_nic: GiveNic | None = None,
    network: bool = False,
) -> Forked:
    """All of them, or none and the first error. With `allow_partial` those that can, and an error when none could.

    `template`: what to fork, instead of starting a VMM for each. `gate` bounds how many start at once, where starts of
    others count too. `after` runs for each child as part of its start. `network`: they are to use the interface that
    `give_nic` gives. On cancellation, and on an error that is not a ForkdError, all children are killed.
    """
    capacity = look()
    admit_children(1 if allow_partial else parse_count(len(identities)), capacity, child_mib(template))
    _check(engine, frozen)
    gate = gate or asyncio.Semaphore(starts_at_once(capacity))
    ready: dict[str, Child] = {}
    errors: dict[str, ForkdError] = {}

    async def start(identity: Identity) -> None:
        async with gate:
            # Again: those before it, and others, have taken memory since.
            admit_children(1, look(), child_mib(template))
            giving = contextlib.nullcontext() if give_nic is None else give_nic(identity.sandbox_id)
            async with giving as nic:
                sandbox = await fork_one(
                    engine, frozen, identity, directory, limits, template, nic=nic, network=network
                )
            ready[sandbox.id] = sandbox
            if after is not None:
                await after(sandbox)

    async def try_start(identity: Identity) -> None:
        try:
            await start(identity)
        except ForkdError as error:
            errors[identity.sandbox_id] = error
            if failed := ready.pop(identity.sandbox_id, None):
                await failed.kill()

    try:
        with template.in_use() if template else contextlib.nullcontext():
            async with asyncio.TaskGroup() as tasks:
                for identity in identities:
                    tasks.create_task(try_start(identity) if allow_partial else start(identity))
    except BaseExceptionGroup as group:
        await kill_all(ready.values())
        first = _first(group)
        raise first from first.__cause__
    except BaseException:
        await kill_all(ready.values())
        raise
    if not ready:
        raise next(iter(errors.values()))
    return Forked([ready[one.sandbox_id] for one in identities if one.sandbox_id in ready], errors)


def _check(engine: Engine, frozen: Frozen | None) -> None:
    if frozen is not None:
        engine.check(frozen)


def child_mib(template: Template | None) -> int:
    """What the next child is expected to need."""
    return FORKED_CHILD_MIB if template and template.usable else CHILD_MIB


async def fork_one(
    engine: Engine,
    frozen: Frozen | None,
    identity: Identity,
    directory: Path,
    limits: Limits = NO_LIMITS,
    template: Template | None = None,
    *,
    name: str | None = None,
    nic: Nic | None = None,
    network: bool = False,
) -> Child:
    """One child that has kept the fork contract; one that has not is killed before the error is raised.

    `name`: of its directory, where that is not its id. `network`: it is to use its interface for more than ways in.
    """
    try:
        machine = await fork_machine(engine, frozen, directory / (name or identity.sandbox_id), limits, template, nic)
        fault_point("spawn.started")
        forked = machine.phases.way is Way.FORK
        with template.judged(limits) if template and forked else contextlib.nullcontext():
            half_sent = _half_sent_bytes(frozen, template if forked else None) if engine.streams_go_on else 0
            return await prove(machine, identity, half_sent, network=network)
    except (EngineFailed, GuestDied, GuestTimeout) as error:
        if limits != NO_LIMITS:
            limited = f"Its limits may be too low for the guest: {limits}"
            error.hint = limited if error.hint is None else f"{error.hint}. {limited}"
        raise


def _half_sent_bytes(frozen: Frozen | None, template: Template | None) -> int:
    if template is not None:
        return template.half_sent_bytes
    return 0 if frozen is None or frozen.settled else MAX_FRAME


async def prove(machine: Machine, identity: Identity, half_sent_bytes: int = 0, *, network: bool = False) -> Child:
    """Give it an identity of its own and have it prove that, or kill it.

    `half_sent_bytes`: its agent may wait for the rest of a frame of at most so many, which is completed first.
    """
    agent: Agent | None = None
    try:
        try:
            agent, proof = await keep_contract(machine, identity, half_sent_bytes, network)
        except ForkdError as error:
            await raise_explained(error, machine, "it was forked")
        await machine.running()
    except BaseException:
        if agent is not None:
            agent.close()
        await machine.kill()
        raise
    machine.phases.mark("contract", time.monotonic())
    return Child(identity, machine, agent, proof)


async def kill_all(sandboxes: Iterable[Child]) -> None:
    """All of them, even when one resists; its error is raised at the end."""
    for outcome in await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
