"""Ending many sandboxes: several at once, each with an outcome of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd.errors import ForkdError

if TYPE_CHECKING:
    from forkd.client.controller import Controller

_AT_ONCE = 8


@dataclass(frozen=True)
class Killed:
    killed: list[str]
    failed: dict[str, ForkdError]


def kill_all(controller: Controller, ids: Sequence[str]) -> Killed:
    def kill(sandbox_id: str) -> ForkdError | None:
        try:
            controller.kill_sandbox(sandbox_id)
        except ForkdError as error:
            return error
        return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = dict(zip(ids, pool.map(kill, ids), strict=True))
    failed = {sandbox_id: error for sandbox_id, error in outcomes.items() if error is not None}
    return Killed([sandbox_id for sandbox_id in ids if sandbox_id not in failed], failed)
