"""A sandbox that this daemon holds: its VM, its agent, its commands. All changes of its state happen under its lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forkd.engines.base import Machine
from forkd.errors import ForkdError, GuestTimeout
from forkd.guest.calls import Agent
from forkd.model.sandbox import State
from forkd.runtime.numpy_version import NumpyVersion
from forkd.runtime.processes import Processes
from forkd.runtime.sandbox import raise_explained

# A guest that is busy or stuck is asked for this long; its owner can still kill it.
HELLO_S = 10.0


class LiveSandbox:
    def __init__(self, sandbox_id: str, machine: Machine, agent: Agent | None, state: State) -> None:
        """Without an agent it is connected when first used: an adopted guest may be paused, or stuck."""
        self.id = sandbox_id
        self.machine = machine
        self.state = state
        self.lock = asyncio.Lock()
        self.processes = Processes(lambda: self.agent)
        self.numpy_version = NumpyVersion()
        self._agent = agent
        self._connecting = asyncio.Lock()

    @property
    def agent(self) -> Agent:
        assert self._agent is not None, "answering() comes first"
        return self._agent

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[LiveSandbox]:
        """With an agent to talk to; a channel that is lost inside the block is explained by what became of the VM."""
        try:
            if self._agent is None or self._agent.channel.closed:
                await self.connect()
            yield self
        except ForkdError as error:
            await raise_explained(error, self.machine, "it was asked")

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
