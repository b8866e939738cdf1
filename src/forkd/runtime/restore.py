"""When the process that serves networks ends, all networks are lost at once: they are taken over by the next one.

Until then a sandbox reaches nothing. One whose network cannot be had again lives on without, and its events say so.
"""

from __future__ import annotations

import asyncio
import logging

from forkd.errors import ForkdError
from forkd.model.sandbox import State
from forkd.runtime.child import LiveSandbox
from forkd.runtime.networks import SandboxNetworks
from forkd.runtime.sandboxes import Sandboxes

# One that ends again and again takes the networks with it for good.
ATTEMPTS = 3
_RETRY_S = 0.5
# What was being started when it ended is either held soon, or gone.
STARTING_S = 120.0
_LOOK_S = 0.05

_log = logging.getLogger(__name__)


class Restorer:
    def __init__(self, sandboxes: Sandboxes, networks: SandboxNetworks) -> None:
        self._sandboxes = sandboxes
        self._networks = networks
        self._leases = sandboxes.leases
        self._one_at_a_time = asyncio.Lock()

    def on_lost(self) -> None:
        self._leases.lose_all()
        self._sandboxes.own(self._restore())

    async def _restore(self) -> None:
        async with self._one_at_a_time:
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(_RETRY_S)
                last = attempt == ATTEMPTS - 1
                await asyncio.gather(*(self._restore_one(vm, last=last) for vm in self._leases.lost))
                if not self._leases.lost:
                    return

    async def _restore_one(self, vm: str, *, last: bool) -> None:
        live = await self._find(vm)
        if live is None:
            return
        async with live.lock:
            record = self._sandboxes.get(live.id)
            if record.vm != vm or vm not in self._leases.lost or live.state not in (State.RUNNING, State.PAUSED):
                return
            try:
                await self._leases.restore(record, live.machine)
            except (ForkdError, OSError) as error:
                _log.warning("The network of %s could not be taken over: %s", record.id, error)
                if last:
                    await self._networks.lose(record, live.machine, error)
                return
            self._sandboxes.events.emit("network.restored", sandbox_id=record.id)

    async def _find(self, vm: str) -> LiveSandbox | None:
        """Who has it. None: it is gone, or nobody's that could be given it again."""
        try:
            async with asyncio.timeout(STARTING_S):
                while vm in self._leases.lost:
                    for live in self._sandboxes.live.values():
                        if self._sandboxes.get(live.id).vm == vm:
                            return live
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            _log.warning("The network of %s is lost: it belongs to no sandbox", vm)
            await self._leases.release(vm)
        return None
