"""Forks of live VMs, as the tests make them: greeted, told who they are, and looked at from outside."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from engine_cases import Case

from forkd.engines.base import Engine, Machine
from forkd.guest.calls import Agent
from forkd.guest.identity import become
from forkd.model.identity import Identity, new_identity
from forkd.model.limits import NO_LIMITS, Limits
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.spawn import fork_one, kill_all, new_identities
from forkd.wire.agent import padding


async def greet(machine: Machine, identity: Identity, *, settled: bool = False) -> Sandbox:
    """A fork that was told who it is, or is gone.

    One that is not `settled` goes on in the stream of its source, perhaps in the middle of a frame, of which the rest
    will never come: then zeros complete it.
    """
    agent: Agent | None = None
    try:
        agent = Agent.attach(await machine.connect())
        if not settled:
            agent.channel.send(padding())
        proof = await become(agent, identity)
        await machine.running()
        return Sandbox(identity, machine, agent, proof)
    except BaseException:
        if agent is not None:
            agent.close()
        await machine.kill()
        raise


async def fork_live(
    engine: Engine,
    source: Machine,
    run: Path,
    *,
    settled: bool = False,
    limits: Limits = NO_LIMITS,
    name: str | None = None,
) -> Sandbox:
    identity = new_identities(1)[0] if name is None else new_identity(name)
    machine = await engine.fork_live(source, run / identity.sandbox_id, limits, settled=settled)
    return await greet(machine, identity, settled=settled)


@asynccontextmanager
async def started(case: Case, run: Path, name: str | None = None) -> AsyncIterator[Sandbox]:
    """A child that was started from the snapshot's files; killed at the end."""
    identity = new_identities(1)[0] if name is None else new_identity(name)
    child = await fork_one(case.engine, case.frozen, identity, run)
    try:
        yield child
    finally:
        await child.kill()


@asynccontextmanager
async def live_forks(
    engine: Engine, source: Machine, run: Path, count: int, *, settled: bool = False
) -> AsyncIterator[list[Sandbox]]:
    forks: list[Sandbox] = []
    try:
        for _ in range(count):
            forks.append(await fork_live(engine, source, run, settled=settled))
        yield forks
    finally:
        await kill_all(forks)


@asynccontextmanager
async def rehearsed(case: Case, run: Path, name: str = "template") -> AsyncIterator[Machine]:
    """A template that has done once what its forks will do, and stands still; killed at the end."""
    machine = await case.engine.template(case.frozen, run / name)
    agent: Agent | None = None
    try:
        agent = Agent.attach(await machine.connect())
        await become(agent, new_identity("rehearsal"))
        await machine.running()
        await agent.eval("past + 1")
        await agent.run(["true"])
        await agent.prepare_freeze()
        await machine.pause()
        yield machine
    finally:
        if agent is not None:
            agent.close()
        await machine.kill()


async def value_of(sandbox: Sandbox, code: str) -> Any:
    """Of an expression, in the guest's warmed interpreter."""
    result = await sandbox.agent.eval(code)
    assert result.ok, result.error
    return result.value


async def values_of(sandboxes: Iterable[Sandbox], code: str) -> list[Any]:
    return [await value_of(sandbox, code) for sandbox in sandboxes]
