"""Forking n children of a snapshot: admitted, in parallel, each one proved to be someone of its own."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from forkd.engines.base import Engine, Frozen
from forkd.errors import ForkdError
from forkd.guest.calls import Agent
from forkd.guest.identity import become
from forkd.model.identity import new_identity
from forkd.model.machine import parse_count
from forkd.runtime.admission import admit_children, look
from forkd.runtime.sandbox import Sandbox, raise_explained

AfterFork = Callable[[Sandbox], Awaitable[None]]


async def fork_children(
    engine: Engine,
    frozen: Frozen,
    n: int,
    directory: Path,
    *,
    env: Mapping[str, str] | None = None,
    after: AfterFork | None = None,
) -> list[Sandbox]:
    """All n, or none and the first error. `after` runs for each child as part of its start."""
    gate = asyncio.Semaphore(admit_children(parse_count(n), look()))
    engine.check(frozen)
    ready: list[Sandbox] = []

    async def start() -> None:
        async with gate:
            admit_children(1, look())  # again: those before it, and others, have taken memory since
            sandbox = await fork_one(engine, frozen, directory, env=env)
            ready.append(sandbox)
            if after is not None:
                await after(sandbox)

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(n):
                tasks.create_task(start())
    except BaseExceptionGroup as group:
        await kill_all(ready)
        first = _first(group)
        raise first from first.__cause__
    except BaseException:
        await kill_all(ready)
        raise
    return ready


async def fork_one(engine: Engine, frozen: Frozen, directory: Path, *, env: Mapping[str, str] | None = None) -> Sandbox:
    """One child that has kept the fork contract; one that has not is killed before the error is raised."""
    identity = new_identity(f"sb-{secrets.token_hex(5)}", env=env)
    machine = await engine.fork(frozen, directory / identity.sandbox_id)
    agent: Agent | None = None
    try:
        agent = Agent.attach(machine.take_channel())
        try:
            # Sent before the guest runs: it is there, waiting, when the guest wakes up.
            proof = await become(agent, identity)
        except ForkdError as error:
            await raise_explained(error, machine, "it was forked")
        await machine.running()
    except BaseException:
        if agent is not None:
            agent.close()
        await machine.kill()
        raise
    machine.phases.mark("contract", time.monotonic())
    return Sandbox(identity, machine, agent, proof)


async def kill_all(sandboxes: list[Sandbox]) -> None:
    """All of them, even when one resists; its error is raised at the end."""
    for outcome in await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes), return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
