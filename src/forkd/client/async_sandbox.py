"""A sandbox as an object, from an event loop: Sandbox with `await`."""

from __future__ import annotations

import builtins
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Any, Self

from forkd.client import plans
from forkd.client.async_controller import AsyncController
from forkd.client.async_handles import follow
from forkd.client.async_sandbox_commands import AsyncCommands, AsyncPty
from forkd.client.async_sandbox_files import AsyncFiles
from forkd.client.call import Plan
from forkd.client.calls import commands, sandboxes
from forkd.client.calls.sandboxes import Spawn
from forkd.client.execution import Execution, execution_of, repr_of, value_of
from forkd.client.output import Callback
from forkd.client.sandbox import EVAL_TIMEOUT_S
from forkd.client.shared import lease_controller, leased, release_controller
from forkd.wire.api import PingResponse, SandboxInfo

_Unopened = tuple[AsyncController | None, Plan[SandboxInfo], float]


class AsyncSandbox:
    """Arguments and methods are those of Sandbox. `await AsyncSandbox(…)` forks it, and so does `async with`.

    `controller`: else the one all sandboxes of this event loop share, which is closed with the last of them: by `kill`,
    by the end of `async with`, or by `close` for one that is to live on.
    """

    commands: AsyncCommands
    files: AsyncFiles
    pty: AsyncPty

    def __init__(
        self,
        tag: str | None = None,
        target: str | None = None,
        timeout: float = EVAL_TIMEOUT_S,
        *,
        spawn: bool = True,
        controller: AsyncController | None = None,
    ) -> None:
        self._unopened: _Unopened | None = (controller, plans.open_sandbox(tag, target, spawn), timeout)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._ready().__await__()

    async def _ready(self) -> Self:
        if self._unopened is not None:
            unopened, self._unopened = self._unopened, None
            await self._open(*unopened)
        return self

    @classmethod
    async def create(
        cls,
        tag: str | None = None,
        timeout: float | None = None,
        *,
        envs: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        on_timeout: str | None = None,
        memory_limit_mib: int | None = None,
        cpu_limit: float | None = None,
        pids_limit: int | None = None,
        io_limit_mib_s: int | None = None,
        controller: AsyncController | None = None,
    ) -> Self:
        """Fork one. `timeout` is how long it may live, in seconds, as with E2B; None: until it is killed.

        `on_timeout` is what happens then: "kill" or "pause". `envs` is for its commands and code. A limit that the
        daemon's host cannot enforce is refused with Unsupported.
        """
        spawn = Spawn(
            plans.choose_tag(tag),
            memory_limit_mib=memory_limit_mib,
            cpu_limit=cpu_limit,
            pids_limit=pids_limit,
            io_limit_mib_s=io_limit_mib_s,
            timeout_secs=timeout,
            on_timeout=on_timeout,
            env=envs,
            labels=labels,
            metadata=metadata,
        )
        return await cls.__new__(cls)._open(controller, plans.create(spawn))

    @classmethod
    async def connect(
        cls, sandbox_id: str, timeout: float | None = None, *, controller: AsyncController | None = None
    ) -> Self:
        """One that exists; a paused one is resumed. `timeout` sets how long it may live from now."""
        return await cls.__new__(cls)._open(controller, plans.connect(sandbox_id, timeout))

    @classmethod
    async def list(
        cls,
        *,
        state: str | None = None,
        snapshot_tag: str | None = None,
        labels: Mapping[str, str] | None = None,
        metadata: Mapping[str, str] | None = None,
        controller: AsyncController | None = None,
    ) -> list[SandboxInfo]:
        """All that match all of it."""
        async with leased(controller) as used:
            return await used.list_sandboxes(state=state, snapshot_tag=snapshot_tag, labels=labels, metadata=metadata)

    async def _open(
        self, controller: AsyncController | None, plan: Plan[SandboxInfo], timeout: float = EVAL_TIMEOUT_S
    ) -> Self:
        async with leased(controller) as used:
            info = await used.transport.perform(plan)
            return self._attach(used, info, timeout, leased=controller is None)

    def _attach(self, controller: AsyncController, info: SandboxInfo, timeout: float, *, leased: bool) -> Self:
        self._unopened = None
        self._lease = lease_controller(controller) if leased else None
        self._controller = controller
        self._transport = transport = controller.transport
        self._timeout, self._id, self._tag = timeout, info["id"], info["snapshot_tag"]
        self.commands = AsyncCommands(transport, self._id)
        self.files = AsyncFiles(transport, self._id)
        self.pty = AsyncPty(transport, self._id)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self._id!r}, tag={self._tag!r})"

    async def __aenter__(self) -> Self:
        return await self._ready()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def id(self) -> str:
        return self._id

    @property
    def sandbox_id(self) -> str:
        return self._id

    @property
    def tag(self) -> str:
        return self._tag

    async def info(self) -> SandboxInfo:
        return await self._transport.send(sandboxes.get_sandbox(self._id))

    async def get_info(self) -> SandboxInfo:
        return await self.info()

    async def is_running(self) -> bool:
        """False when it is paused, dead or gone."""
        return await self._transport.perform(plans.is_running(self._id))

    async def ping(self) -> PingResponse:
        return await self._transport.send(sandboxes.ping_sandbox(self._id))

    async def set_timeout(self, timeout: float | None, on_timeout: str | None = None) -> SandboxInfo:
        """How long it may live, in seconds from now; None: until it is killed."""
        return await self._transport.send(sandboxes.set_sandbox_timeout(self._id, timeout, on_timeout))

    async def pause(self) -> SandboxInfo:
        return await self._transport.send(sandboxes.pause_sandbox(self._id))

    async def resume(self) -> SandboxInfo:
        return await self._transport.send(sandboxes.resume_sandbox(self._id))

    async def kill(self) -> bool:
        """False when it was gone already."""
        try:
            return await self._transport.perform(plans.kill(self._id))
        finally:
            await self.close()

    async def close(self) -> None:
        """Let go of it without killing it."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await release_controller(lease)

    async def console(self) -> str:
        return await self._transport.send(sandboxes.sandbox_console(self._id))

    async def fork(self, count: int = 1) -> builtins.list[Self]:
        """`count` new ones that go on from where this one is. Unsupported until the daemon can branch."""
        made = await self._transport.perform(plans.fork(self._id, count))
        new, leased = type(self).__new__, self._lease is not None
        return [new(type(self))._attach(self._controller, info, self._timeout, leased=leased) for info in made]

    async def eval(self, code: str, timeout: float | None = None) -> str:
        """The repr of the last expression, "None" when there is none; what the code raised becomes EvalFailed."""
        return repr_of(await self._transport.send(commands.eval_code(self._id, code, timeout or self._timeout)))

    async def eval_value(self, code: str, timeout: float | None = None) -> Any:
        """The value of the last expression itself, when JSON has such values."""
        return value_of(await self._transport.send(commands.eval_code(self._id, code, timeout or self._timeout)))

    async def run_code(
        self,
        code: str,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        timeout: float | None = None,
    ) -> Execution:
        """Results, output and the error if any, none of which is raised. Names stay defined for the next call."""
        limit_s = timeout or plans.COMMAND_TIMEOUT_S
        if on_stdout is None and on_stderr is None:
            return execution_of(await self._transport.send(commands.eval_code(self._id, code, limit_s)))
        events = self._transport.output(commands.eval_stream(self._id, code, limit_s))
        return (await follow(events, on_stdout, on_stderr)).execution()
