"""Taking turns: a guest answers so many at a time, and clients are more than that."""

from __future__ import annotations

import asyncio
import enum
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forkd.errors import AgentError
from forkd.runtime.live import LiveSandbox

QUEUE_S = 30.0  # to wait for a turn


class Kind(enum.Enum):
    """How many of a kind at once. The agent takes 64 exchanges in all, those of processes among them."""

    RUN = 32  # exec and eval: as long as they are given
    CALL = 12  # ping and files: short, and not to wait behind the others


_gates: weakref.WeakKeyDictionary[LiveSandbox, dict[Kind, asyncio.Semaphore]] = weakref.WeakKeyDictionary()


@asynccontextmanager
async def turn(live: LiveSandbox, kind: Kind) -> AsyncIterator[None]:
    gate = _find_gate(live, kind)
    if gate.locked():
        await _queue(gate)
    else:
        await gate.acquire()
    try:
        yield
    finally:
        gate.release()


async def _queue(gate: asyncio.Semaphore) -> None:
    try:
        async with asyncio.timeout(QUEUE_S):
            await gate.acquire()
    except TimeoutError:
        error = AgentError(
            f"The guest was busy with others for {QUEUE_S:g} s",
            hint="Ask less at once, or start what takes long as a process",
        )
        error.code = "busy"
        raise error from None


def _find_gate(live: LiveSandbox, kind: Kind) -> asyncio.Semaphore:
    gates = _gates.get(live)
    if gates is None:
        gates = _gates[live] = {each: asyncio.Semaphore(each.value) for each in Kind}
    return gates[kind]
