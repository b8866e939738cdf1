"""A sandbox as an object: the forkd SDK's class of this name, and E2B's everyday surface, through the daemon."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Self, Unpack

from forkd.client.arguments import (
    COMMAND_TIMEOUT_S,
    SandboxOptions,
    check_envs,
    check_lifetime,
    choose_tag,
    code_limit,
    port_of,
)
from forkd.client.async_branching import AsyncBranching
from forkd.client.async_controller import AsyncController
from forkd.client.async_files import AsyncFiles
from forkd.client.async_merging import AsyncMerging
from forkd.client.async_networking import AsyncNetworking
from forkd.client.async_processes import AsyncCommands, AsyncPty, async_follow
from forkd.client.async_renewal import AsyncRenewal
from forkd.client.async_spawn import AsyncSandboxes, async_spawn
from forkd.client.lifetime import DEFAULT_LIFETIME_S, Lifetime
from forkd.client.output import Callback
from forkd.client.results import Execution, execution_of, repr_of, value_of
from forkd.client.shared import AsyncOpening, async_lease_controller, async_leased, async_release_controller
from forkd.errors import InvalidInput, NotFound
from forkd.wire.api import PingResponse, SandboxInfo

EVAL_TIMEOUT_S = 30.0


class AsyncSandbox(AsyncMerging, AsyncOpening, AsyncBranching, AsyncNetworking):
    """Fork one from `tag` (else FORKD_TAG, else "pyagent"). In a `with` block it is killed at the end.

    With `spawn=False` the one whose guest_addr is `target` (else FORKD_TARGET) is found instead. `timeout` is for
    `eval`, in seconds. `controller`: else one that sandboxes share. The asynchronous one is forked by `await` or by
    `async with`, and lets go of the shared controller in `kill`, at the end of its block, or in `close`.
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
        if spawn:
            port = None if target is None else port_of(target)
            self._opens(partial(self._fork, controller, choose_tag(tag), port, timeout))
        else:
            self._opens(partial(self._find, controller, target or os.environ.get("FORKD_TARGET"), timeout))

    async def _fork(self, controller: AsyncController | None, tag: str, port: int | None, timeout: float) -> None:
        leased = controller is None
        await async_spawn(
            controller, tag, 1, lambda used, info, _: self._attach(used, info, timeout, leased=leased), agent_port=port
        )

    async def _find(self, controller: AsyncController | None, target: str | None, timeout: float) -> None:
        if not target:
            raise InvalidInput(
                "No target to find a sandbox by", hint="Give target=, or a sandbox id to Sandbox.connect"
            )
        async with async_leased(controller) as used:
            for info in await used.list_sandboxes():
                if info["guest_addr"] == target:
                    self._attach(used, info, timeout, leased=controller is None)
                    return
        raise NotFound(f"No sandbox answers at {target}", hint="The addresses are guest_addr in: forkd ls --json")

    @classmethod
    async def create(
        cls,
        tag: str | None = None,
        timeout: float | None = DEFAULT_LIFETIME_S,
        *,
        envs: Mapping[str, str] | None = None,
        memory_limit_mib: int | None = None,
        controller: AsyncController | None = None,
        **options: Unpack[SandboxOptions],
    ) -> Self:
        """Fork one. `timeout` is how long it may live, in seconds; None: until it is killed.

        Without `timeout` it lives 300 s from its last use through this object. `envs` is for its commands and code. A
        limit that the daemon's host cannot enforce is refused with Unsupported.
        """
        made = await cls.create_many(
            tag, 1, timeout, envs=envs, memory_limit_mib=memory_limit_mib, controller=controller, **options
        )
        return made[0]

    @classmethod
    async def create_many(
        cls,
        tag: str | None,
        n: int,
        timeout: float | None = DEFAULT_LIFETIME_S,
        *,
        envs: Mapping[str, str] | None = None,
        memory_limit_mib: int | None = None,
        controller: AsyncController | None = None,
        **options: Unpack[SandboxOptions],
    ) -> AsyncSandboxes[Self]:
        """Fork `n` with one request: all or none. A list; in a `with` block all are killed at the end.

        The rest as with `create`. Without `timeout` the use of one keeps all of them alive.
        """
        leased = controller is None
        return await async_spawn(
            controller,
            choose_tag(tag),
            n,
            lambda used, info, renewal: cls.__new__(cls)._attach(used, info, EVAL_TIMEOUT_S, renewal, leased=leased),
            memory_limit_mib=memory_limit_mib,
            timeout_secs=check_lifetime(timeout),
            env=check_envs(envs),
            **options,
        )

    @classmethod
    async def connect(
        cls, sandbox_id: str, timeout: float | None = DEFAULT_LIFETIME_S, *, controller: AsyncController | None = None
    ) -> Self:
        """One that exists; a paused one is resumed.

        `timeout` is how long it may live from now, at least: a life is never made shorter by this. Without `timeout`
        these are 300 s from its last use; None leaves its life as it is.
        """
        check_lifetime(timeout)
        async with async_leased(controller) as used:
            info = await used.get_sandbox(sandbox_id)
            if info["state"] == "paused":
                info = await used.resume_sandbox(sandbox_id)
            renewal = AsyncRenewal(used, {info["id"]}, Lifetime(timeout, time.monotonic()))
            if timeout is not None and info["deadline_unix"] is not None:
                info = await used.set_sandbox_timeout(sandbox_id, timeout, extend=True)
            return cls.__new__(cls)._attach(used, info, EVAL_TIMEOUT_S, renewal, leased=controller is None)

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
        async with async_leased(controller) as used:
            return await used.list_sandboxes(state=state, snapshot_tag=snapshot_tag, labels=labels, metadata=metadata)

    def _attach(
        self,
        controller: AsyncController,
        info: SandboxInfo,
        timeout: float,
        renewal: AsyncRenewal | None = None,
        *,
        leased: bool,
    ) -> Self:
        self._lease = async_lease_controller(controller) if leased else None
        self._renewal = renewal
        self._plain = controller  # for calls that do not use the sandbox
        if renewal is not None:
            controller = AsyncController.over(controller.transport.renewing(renewal))
        self._controller = controller
        self._timeout, self._id, self._tag = timeout, info["id"], info["snapshot_tag"]
        self.commands = AsyncCommands(controller, self._id)
        self.files = AsyncFiles(controller, self._id)
        self.pty = AsyncPty(controller, self._id)
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self._id!r}, tag={self._tag!r})"

    async def __aexit__(self, *raised: object) -> None:
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
        return await self._controller.get_sandbox(self._id)

    async def get_info(self) -> SandboxInfo:
        return await self.info()

    async def is_running(self) -> bool:
        """False when it is paused, dead or gone."""
        try:
            info = await self.info()
        except NotFound:
            return False
        return info["state"] == "running"

    async def ping(self) -> PingResponse:
        return await self._controller.ping_sandbox(self._id)

    async def set_timeout(self, timeout: float | None, on_timeout: str | None = None) -> SandboxInfo:
        """How long it may live, in seconds from now; None: until it is killed. From then on use does not extend it."""
        info = await self._plain.set_sandbox_timeout(self._id, check_lifetime(timeout), on_timeout)
        self._stop_renewing()
        return info

    def _stop_renewing(self) -> None:
        if self._renewal is not None:
            self._renewal.release(self._id)

    async def rename(self, name: str | None) -> SandboxInfo:
        """A name that can be used in place of the id, unique in its home; None takes it away."""
        return await self._controller.rename_sandbox(self._id, name)

    async def pause(self) -> SandboxInfo:
        return await self._controller.pause_sandbox(self._id)

    async def resume(self) -> SandboxInfo:
        return await self._controller.resume_sandbox(self._id)

    async def kill(self) -> bool:
        """False when it was gone already."""
        self._stop_renewing()
        try:
            await self._plain.kill_sandbox(self._id)
        except NotFound:
            return False
        finally:
            await self.close()
        return True

    async def close(self) -> None:
        """Let go of it without killing it."""
        lease, self._lease = self._lease, None
        if lease is not None:
            await async_release_controller(lease)

    async def console(self) -> str:
        return await self._controller.sandbox_console(self._id)

    async def fork(
        self,
        count: int = 1,
        timeout: float | None = DEFAULT_LIFETIME_S,
        *,
        tag: str | None = None,
        envs: Mapping[str, str] | None = None,
        memory_limit_mib: int | None = None,
        **options: Unpack[SandboxOptions],
    ) -> AsyncSandboxes[Self]:
        """`count` new ones that go on from where this one is, all or none. It runs on itself.

        They live as those of `create_many` do, and have this one's limits unless others are given. `tag` keeps the
        state they start from as a snapshot; else nothing is left of it but them.
        """
        leased, made = self._lease is not None, type(self)
        return await async_spawn(
            self._plain,
            tag,
            count,
            lambda used, info, renewal: made.__new__(made)._attach(used, info, self._timeout, renewal, leased=leased),
            source_id=await self._used(),
            memory_limit_mib=memory_limit_mib,
            timeout_secs=check_lifetime(timeout),
            env=check_envs(envs),
            **options,
        )

    async def _used(self) -> str:
        """Its id, for a call through the plain controller that uses it nevertheless."""
        if self._renewal is not None:
            await self._renewal.use()
        return self._id

    async def _lost(self) -> None:
        self._stop_renewing()
        await self.close()

    async def eval(self, code: str, timeout: float | None = None) -> str:
        """The repr of the last expression, "None" when there is none; what the code raised becomes EvalFailed."""
        return repr_of(await self._controller.eval_code(self._id, code, code_limit(timeout, self._timeout)))

    async def eval_value(self, code: str, timeout: float | None = None) -> Any:
        """The value of the last expression itself, when JSON has such values."""
        return value_of(await self._controller.eval_code(self._id, code, code_limit(timeout, self._timeout)))

    async def run_code(
        self,
        code: str,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        timeout: float | None = None,
    ) -> Execution:
        """Results, output and the error if any, none of which is raised. Names stay defined for the next call."""
        limit_s = code_limit(timeout, COMMAND_TIMEOUT_S)
        if on_stdout is None and on_stderr is None:
            return execution_of(await self._controller.eval_code(self._id, code, limit_s))
        events = self._controller.eval_stream(self._id, code, limit_s)
        collector = await async_follow(events, on_stdout, on_stderr)
        return collector.execution()
