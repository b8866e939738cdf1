"""The fork contract with a VM that may lose its stream when it wakes up."""

from __future__ import annotations

import asyncio

from forkd.engines.base import Machine
from forkd.errors import ChannelClosed
from forkd.guest.agent import Agent
from forkd.guest.identity import ForkProof, become
from forkd.model.names import Identity

_MORE_ATTEMPTS = 2
# A VMM whose channel just closed is dying, as a rule.
_DEATH_DEADLINE_S = 1.0


async def keep_contract(
    machine: Machine, identity: Identity, half_sent_bytes: int = 0, network: bool = False
) -> tuple[Agent, ForkProof]:
    """An agent that kept the contract, asked again when its stream was lost and the VM lives.

    A guest on vsock resets its connections when it wakes up, and may take ours for one of the past. The contract sets
    things and adds to nothing, so it may be kept twice.
    """
    for _ in range(_MORE_ATTEMPTS):
        try:
            return await _try(machine, identity, half_sent_bytes, network)
        except ChannelClosed:
            await asyncio.wait([machine.death], timeout=_DEATH_DEADLINE_S)
            if machine.death.done():
                raise
    return await _try(machine, identity, half_sent_bytes, network)


async def _try(machine: Machine, identity: Identity, half_sent_bytes: int, network: bool) -> tuple[Agent, ForkProof]:
    agent = Agent.attach(await machine.connect())
    try:
        if half_sent_bytes:
            agent.channel.pad(half_sent_bytes)
        # Sent before the guest runs, where the engine can: it is there, waiting, when the guest wakes up.
        return agent, await become(agent, identity, network)
    except BaseException:
        agent.close()
        raise
