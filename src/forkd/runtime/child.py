"""A live VM forked from a snapshot: as its fork made it, and as the daemon holds it; and why one died."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NoReturn

from forkd.engines.base import ExitReason, Machine
from forkd.errors import AgentError, ChannelClosed, Conflict, ForkdError, GuestDied, GuestTimeout
from forkd.guest.agent import Agent
from forkd.guest.identity import ForkProof
from forkd.model.names import Identity
from forkd.model.sandbox import State
from forkd.runtime.processes import Processes
from forkd.wire.agent import MAX_FRAME

# A VMM whose channel just closed is dying; its exit status follows within moments.
_DEATH_DEADLINE_S = 10.0
# A guest that is busy or stuck is asked for this long; its owner can still kill it.
HELLO_S = 10.0
QUEUE_S = 30.0  # to wait for a turn

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Child:
    identity: Identity
    machine: Machine
    agent: Agent
    proof: ForkProof

    @property
    def id(self) -> str:
        return self.identity.sandbox_id

    @property
    def vm(self) -> str:
        """The name of its directory."""
        return self.machine.directory.name

    async def kill(self) -> None:
        self.agent.close()
        await self.machine.kill()

    async def release(self) -> None:
        """Leave it running, for another process to adopt."""
        self.agent.close()
        await self.machine.release()


class Turn(enum.Enum):
    """How many requests of a kind a guest gets at once. Its agent takes 64 exchanges, those of processes included."""

    RUN = 32  # exec and eval: as long as they are given
    CALL = 12  # ping and files: short, and must not wait behind the others


class LiveSandbox:
    """A sandbox that this daemon holds: its VM, agent and commands. Its state changes only under its lock."""

    def __init__(self, sandbox_id: str, machine: Machine, agent: Agent | None, state: State) -> None:
        """Without an agent it is connected when first used: an adopted guest may be paused, or stuck."""
        self.id = sandbox_id
        self.machine = machine
        self.state = state
        self.deadline_s: float | None = None  # on the clock of steady_s
        self.why_ended: str | None = None
        # Of an adopted one: what its guest is told when it is reached, as the last daemon may not have come to it.
        self.owed_network: bool | None = None
        self.lock = asyncio.Lock()
        self.processes = Processes(lambda: self.agent)
        self._agent = agent
        self._connecting = asyncio.Lock()
        self._gates = {kind: asyncio.Semaphore(kind.value) for kind in Turn}

    @property
    def agent(self) -> Agent:
        assert self._agent is not None, "answering() comes first"
        return self._agent

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[LiveSandbox]:
        """With an agent to talk to; a channel that is lost inside the block is explained by what became of the VM."""
        machine = self.machine
        try:
            await self.reach()
            yield self
        except ForkdError as error:
            if self.machine is not machine and isinstance(error, ChannelClosed):
                raise Conflict(f"Sandbox {self.id} was moved to another moment while it was asked") from error
            await raise_explained(error, machine, "it was asked")

    def move_to(self, machine: Machine, agent: Agent) -> Machine:
        """Another VM takes the place of its own, which is returned, to be ended."""
        self.hang_up()
        old, self.machine, self._agent = self.machine, machine, agent
        self.processes = Processes(lambda: self.agent)
        return old

    @asynccontextmanager
    async def turn(self, kind: Turn) -> AsyncIterator[None]:
        """Wait until fewer than the agent can take are under way."""
        gate = self._gates[kind]
        try:
            async with asyncio.timeout(QUEUE_S if gate.locked() else None):
                await gate.acquire()
        except TimeoutError:
            error = AgentError(
                f"The guest was busy with others for {QUEUE_S:g} s",
                hint="Ask less at once, or start what takes long as a process",
            )
            error.code = "busy"
            raise error from None
        try:
            yield
        finally:
            gate.release()

    async def reach(self) -> None:
        """Have a client at its agent."""
        if self._agent is None or self._agent.channel.closed:
            await self.connect()

    async def connect(self) -> None:
        """Anew, when the channel was never there or was lost while the VM lives."""
        async with self._connecting:
            if self._agent is not None and not self._agent.channel.closed:
                return
            sock = await self.machine.connect()
            try:
                self._agent = await Agent.connect(sock, deadline_s=HELLO_S)
            except GuestTimeout as error:
                raise GuestTimeout(
                    f"The guest of {self.id} did not answer within {HELLO_S:g} s",
                    hint="It may be stuck: see forkd logs, or remove it",
                ) from error
            await self._tell_network(self._agent)

    async def _tell_network(self, agent: Agent) -> None:
        """An agent that is told what it knows does nothing. Only a guest without an interface cannot be told."""
        owed, self.owed_network = self.owed_network, None
        if owed is None:
            return
        try:
            await agent.set_network(owed)
        except AgentError as error:
            _log.log(logging.WARNING if owed else logging.DEBUG, "The guest of %s: %s", self.id, error.message)

    @property
    def half_sent_bytes(self) -> int:
        """What its agent may still wait for, at most, wherever the VM is stopped."""
        return MAX_FRAME if self._agent is None else self._agent.channel.largest_sent

    async def let_go(self) -> None:
        """Stop holding it; the VM runs on."""
        self.hang_up()
        await self.machine.release()

    async def end(self) -> None:
        self.hang_up()
        await self.machine.kill()

    def hang_up(self) -> None:
        self.processes.close()
        if self._agent is not None:
            self._agent.close()


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
