"""A live VM forked from a snapshot, and why one died."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NoReturn

from forkd.engines.base import ExitReason, Machine
from forkd.errors import ChannelClosed, ForkdError, GuestDied
from forkd.guest.calls import Agent
from forkd.guest.identity import ForkProof
from forkd.model.identity import Identity

# A VMM whose channel just closed is dying; its exit status follows within moments.
_DEATH_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Sandbox:
    identity: Identity
    machine: Machine
    agent: Agent
    proof: ForkProof

    @property
    def id(self) -> str:
        return self.identity.sandbox_id

    async def kill(self) -> None:
        self.agent.close()
        await self.machine.kill()

    async def release(self) -> None:
        """Leave it running, for another process to adopt."""
        self.agent.close()
        await self.machine.release()


async def raise_explained(error: ForkdError, machine: Machine, during: str) -> NoReturn:
    explained = await explain(error, machine, during)
    if explained is error:
        raise error
    raise explained from error


async def explain(error: ForkdError, machine: Machine, during: str) -> ForkdError:
    """The error to raise instead: a channel that closed means that the VM is gone, and the console knows why."""
    if not isinstance(error, ChannelClosed):
        return error
    try:
        async with asyncio.timeout(_DEATH_DEADLINE_S):
            death = await asyncio.shield(machine.death)
    except TimeoutError:
        return error
    details = "\n".join(part for part in (death.vmm_output, machine.console_tail().strip()) if part)
    return GuestDied(
        f"The VM ended while {during}: {death.reason.value} ({death.status})",
        hint=_HINTS.get(death.reason),
        details=details or None,
    )


_HINTS = {
    ExitReason.OUT_OF_MEMORY: "Ask for a higher memory limit: what the VMM needs for itself counts too",
    ExitReason.PANICKED: "The guest's kernel gave up; more --memory often helps",
    ExitReason.POWERED_OFF: "The guest shut itself down, or had too little memory to start: try more --memory",
    ExitReason.UNKNOWN: "Was it killed, by hand or for lack of memory?",
    ExitReason.CRASHED: "The VMM ended unexpectedly; was it killed, by hand or for lack of memory?",
}
