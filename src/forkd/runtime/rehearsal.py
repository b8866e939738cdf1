"""The rehearsal: a VM does once what every child will do first, so that its forks find all of it warm."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

from forkd.engines.base import Engine, Frozen, Machine
from forkd.errors import CommandNotStarted, ForkdError, GuestDied, WarmupFailed
from forkd.guest.calls import Agent
from forkd.guest.identity import become
from forkd.host.faults import reach
from forkd.model.identity import new_identity
from forkd.runtime.sandbox import raise_explained

_log = logging.getLogger(__name__)

# The first round translates the code, the second one runs it as a child will.
ROUNDS = 2
_SCRAP = "/tmp/.forkd-rehearsal"
EVAL_S = 60.0
# The guest's kernel puts work off: freed memory, statistics, write-back. Done here once, it is not done in every fork,
# where it would take 6 ms and 1.7 MiB (measured: the last of it comes 2.2 s after the rehearsal).
SETTLE_S = 3.0
_RUN_S = 30.0


@contextlib.asynccontextmanager
async def rehearsed(engine: Engine, frozen: Frozen, directory: Path) -> AsyncIterator[tuple[Machine, Agent]]:
    """A VM that has rehearsed, is prepared for a freeze again and stands still. Killed when the block fails."""
    machine = await engine.template(frozen, directory)
    agent: Agent | None = None
    try:
        reach("template.started")
        agent = Agent.attach(await machine.connect())
        try:
            await rehearse(agent, frozen.rehearsal)
            await machine.running()
            await asyncio.sleep(SETTLE_S)
            await agent.prepare_freeze()
        except ForkdError as error:
            await raise_explained(error, machine, "it rehearsed")
        reach("template.rehearsed")
        await machine.pause()
        if machine.death.done():
            raise GuestDied("The template ended while it was made")
        yield machine, agent
    except BaseException:
        if agent is not None:
            agent.close()
        await machine.kill()
        raise


async def rehearse(agent: Agent, code: str | None) -> None:
    """The contract under a name that nobody will have, an evaluation, a command, a file; nothing of it is left.

    What the code raises its forks will see themselves. An interpreter that ended has lost what the warm-up left in it:
    raises WarmupFailed, for no fork may come from that.
    """
    for number in range(ROUNDS):
        await become(agent, new_identity(f"rehearsal-{number}"))
        result = await agent.eval(code or "None", timeout_s=EVAL_S)
        if result.timed_out:
            raise WarmupFailed(
                f"The rehearsal did not finish within {EVAL_S:g} s",
                hint="Rehearse less: forkd snapshot create --rehearse",
            )
        if result.interpreter_restarted:
            raise WarmupFailed("The rehearsal ended the interpreter", hint="Rehearse code that returns")
        if result.error is not None and number == 0:
            _log.warning("A rehearsal raised %s", result.error.type)
        with contextlib.suppress(CommandNotStarted):  # an image need have no more than a Python
            await agent.run(["true"], timeout_s=_RUN_S)
        scrap = f"{_SCRAP}-{secrets.token_hex(6)}"  # guests of the fake engine share a file system
        await agent.write_file(scrap, b"x")
        await agent.remove(scrap)
