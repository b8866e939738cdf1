"""Forking sandboxes as objects: all or none, and none when it is interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from forkd.client.arguments import ForkOptions, choose_tag
from forkd.client.async_controller import AsyncController
from forkd.client.async_renewal import AsyncRenewal
from forkd.client.lifetime import Lifetime
from forkd.client.shared import async_leased
from forkd.client.undo import async_undo
from forkd.wire.api import SandboxInfo

if TYPE_CHECKING:
    from forkd.client.async_sandbox import AsyncSandbox

S = TypeVar("S", bound="AsyncSandbox")
Attach = Callable[[AsyncController, SandboxInfo, AsyncRenewal], S]


class AsyncSandboxes(list[S]):
    """Sandboxes that were made together. In a `with` block all of them are killed at the end."""

    def __init__(self, made: list[S], controller: AsyncController, key: str) -> None:
        super().__init__(made)
        self._controller = controller
        self._key = key

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.kill()

    async def kill(self) -> int:
        """All of them; how many were still there."""
        try:
            removed = set((await self._controller.cancel_spawn(self._key))["removed"])
            # After a day the daemon forgets what it made under which key.
            others = [await sandbox.kill() for sandbox in self if sandbox.id not in removed]
        finally:
            await self.close()
        return len(removed) + sum(others)

    async def close(self) -> None:
        """Let go of them without killing them."""
        for sandbox in self:
            await sandbox.close()


async def async_spawn(
    controller: AsyncController | None,
    tag: str | None,
    n: int,
    attach: Attach[S],
    *,
    source_id: str | None = None,
    memory_limit_mib: int | None = None,
    agent_port: int | None = None,
    **options: Unpack[ForkOptions],
) -> AsyncSandboxes[S]:
    """Forks of the snapshot `tag`; or of the sandbox `source_id`, and `tag` is where that is kept.

    `attach` makes the object of each. An interruption at any moment removes them again.

    No context manager does that: an interrupt could come in its own code, between its end and what follows.
    """
    key = f"sdk-{os.urandom(16).hex()}"
    try:
        async with async_leased(controller) as used:
            begun = time.monotonic()
            if source_id is not None:
                infos = await used.fork_sandbox(
                    source_id, n, tag=tag, memory_limit_mib=memory_limit_mib, idempotency_key=key, **options
                )
            else:
                infos = await used.spawn_sandboxes(
                    choose_tag(tag),
                    n,
                    memory_limit_mib=memory_limit_mib,
                    agent_port=agent_port,
                    idempotency_key=key,
                    **options,
                )
            lifetime = Lifetime(options.get("timeout_secs"), begun)
            renewal = AsyncRenewal(used, {info["id"] for info in infos}, lifetime)
            return AsyncSandboxes([attach(used, info, renewal) for info in infos], used, key)
    except BaseException as error:
        await async_undo(controller, key, error)
        raise
