# Generated from async_spawn.py by tools/unasync.py: do not edit.
"""Forking sandboxes as objects: all or none, and none when it is interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

from forkd.client.arguments import ForkOptions, choose_tag
from forkd.client.controller import Controller
from forkd.client.lifetime import Lifetime
from forkd.client.renewal import Renewal
from forkd.client.shared import leased
from forkd.client.undo import undo
from forkd.wire.api import SandboxInfo

if TYPE_CHECKING:
    from forkd.client.sandbox import Sandbox

S = TypeVar("S", bound="Sandbox")
Attach = Callable[[Controller, SandboxInfo, Renewal], S]


class Sandboxes(list[S]):
    """Sandboxes that were made together. In a `with` block all of them are killed at the end."""

    def __init__(self, made: list[S], controller: Controller, key: str) -> None:
        super().__init__(made)
        self._controller = controller
        self._key = key

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def kill(self) -> int:
        """All of them; how many were still there."""
        try:
            removed = set((self._controller.cancel_spawn(self._key))["removed"])
            # After a day the daemon forgets what it made under which key.
            others = [sandbox.kill() for sandbox in self if sandbox.id not in removed]
        finally:
            self.close()
        return len(removed) + sum(others)

    def close(self) -> None:
        """Let go of them without killing them."""
        for sandbox in self:
            sandbox.close()


def spawn(
    controller: Controller | None,
    tag: str | None,
    n: int,
    attach: Attach[S],
    *,
    source_id: str | None = None,
    memory_limit_mib: int | None = None,
    agent_port: int | None = None,
    **options: Unpack[ForkOptions],
) -> Sandboxes[S]:
    """Forks of the snapshot `tag`; or of the sandbox `source_id`, and `tag` is where that is kept.

    `attach` makes the object of each. An interruption at any moment removes them again.

    No context manager does that: an interrupt could come in its own code, between its end and what follows.
    """
    key = f"sdk-{os.urandom(16).hex()}"
    try:
        with leased(controller) as used:
            begun = time.monotonic()
            if source_id is not None:
                infos = used.fork_sandbox(
                    source_id, n, tag=tag, memory_limit_mib=memory_limit_mib, idempotency_key=key, **options
                )
            else:
                infos = used.spawn_sandboxes(
                    choose_tag(tag),
                    n,
                    memory_limit_mib=memory_limit_mib,
                    agent_port=agent_port,
                    idempotency_key=key,
                    **options,
                )
            lifetime = Lifetime(options.get("timeout_secs"), begun)
            renewal = Renewal(used, {info["id"] for info in infos}, lifetime)
            return Sandboxes([attach(used, info, renewal) for info in infos], used, key)
    except BaseException as error:
        undo(controller, key, error)
        raise
