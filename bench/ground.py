"""What forks of live VMs are measured on: an engine, a frozen parent, a place for VMs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.guest import evaluate
from forkd.engines.base import Engine, Frozen, Machine, Way
from forkd.errors import ContractBroken, EngineFailed, ForkdError
from forkd.guest.calls import Agent
from forkd.guest.identity import become
from forkd.image import Progress
from forkd.model.identity import Identity
from forkd.runtime.sandbox import Sandbox, explain
from forkd.runtime.spawn import fork_one, new_identities
from forkd.runtime.templates import Template, Templates
from forkd.wire.agent import padding

_TAG = "bench"


@dataclass(frozen=True)
class Ground:
    engine: Engine
    frozen: Frozen
    directory: Path
    progress: Progress


@dataclass(frozen=True)
class LiveTimes:
    """`pause_ms`: how long the source stood still. `answer_ms`: from the call to the answer of the fork."""

    pause_ms: float
    answer_ms: float


@asynccontextmanager
async def templated(ground: Ground) -> AsyncIterator[Template]:
    templates = Templates(ground.engine, ground.directory)
    try:
        await templates.warm(ground.frozen, _TAG)
        template = templates.find(ground.frozen)
        if template is None:
            raise EngineFailed("The template ended as soon as it was made")
        yield template
    finally:
        await templates.close()


@asynccontextmanager
async def sandboxed(ground: Ground, template: Template) -> AsyncIterator[Sandbox]:
    """A VM to be forked while it runs, made as forkd makes them."""
    sandbox = await fork_one(ground.engine, ground.frozen, new_identities(1)[0], ground.directory, template=template)
    try:
        if sandbox.machine.phases.way is not Way.FORK:
            raise ContractBroken(f"{sandbox.id} was started, and not forked from the template")
        yield sandbox
    finally:
        await sandbox.kill()


@asynccontextmanager
async def forked_live(ground: Ground, source: Sandbox) -> AsyncIterator[tuple[Agent, LiveTimes]]:
    """A fork of a running VM that has become someone of its own and answered; it is killed at the end."""
    identity = new_identities(1)[0]
    begun = time.monotonic()
    machine = await ground.engine.fork_live(source.machine, ground.directory / identity.sandbox_id)
    agent: Agent | None = None
    try:
        try:
            agent = await greet(machine, identity)
            await evaluate(agent)
            answered = time.monotonic()
            pause_s = machine.phases.pause_s
            if pause_s is None:
                raise EngineFailed(f"{identity.sandbox_id} does not say how long its source stood still")
            yield agent, LiveTimes(pause_s * 1000, (answered - begun) * 1000)
        except ForkdError as error:
            explained = await explain(error, machine, "it was forked from a live VM")
            raise explained from error
    finally:
        if agent is not None:
            agent.close()
        await machine.kill()


async def greet(machine: Machine, identity: Identity) -> Agent:
    """The stream of its source goes on, perhaps in the middle of a frame, which has to be completed first."""
    agent = Agent.attach(await machine.connect())
    try:
        agent.channel.send(padding())
        await become(agent, identity)
        await machine.running()
    except BaseException:
        agent.close()
        raise
    return agent
