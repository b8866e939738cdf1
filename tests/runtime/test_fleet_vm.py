"""The fleet over real VMs: what the fake engine cannot show."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime.engines import open_engine
from forkd.runtime.fleet import Fleet, FleetOptions
from forkd.runtime.snapshots import SnapshotRequest
from forkd.runtime.warmup import Warmup

pytestmark = pytest.mark.vm

TAG = parse_tag("warm")


def test_a_vm_wakes_from_a_pause_with_the_right_time_and_is_adopted(fake_home: Home) -> None:
    async def first() -> str:
        async with asyncio.timeout(120), Fleet.opened(fake_home, open_engine("qemu", outlive=True)) as fleet:
            await fleet.snapshots.create(
                SnapshotRequest(TAG, "python", MachineSpec(256), Warmup("import time\nx = 41"))
            )
            await fleet.snapshots.wait(TAG)
            (record,) = (await fleet.spawn(SandboxSpec(TAG))).records
            await fleet.pause(record.id)
            await asyncio.sleep(3)
            await fleet.resume(record.id)
            async with fleet.use(record.id) as live:
                asked_at = time.time()
                answer = await live.agent.eval("x += 1; time.time()")
            assert asked_at - 1.5 < answer.value < time.time() + 1.5, "its clock stood still"
            return record.id

    async def second(sandbox_id: str) -> None:
        options = FleetOptions(on_stop="kill")
        async with asyncio.timeout(120), Fleet.opened(fake_home, open_engine("qemu", outlive=True), options) as fleet:
            assert fleet.get(sandbox_id).state is State.RUNNING
            async with fleet.use(sandbox_id) as live:
                assert (await live.agent.eval("x")).value == 42

    sandbox_id = asyncio.run(first())
    assert list(find_marked(fake_home.vms)) == [fake_home.vms / sandbox_id]
    asyncio.run(second(sandbox_id))
    assert find_marked(fake_home.vms) == {}


def test_a_vm_that_is_killed_from_outside_is_dead_and_says_so(fake_home: Home) -> None:
    async def run() -> None:
        options = FleetOptions(on_stop="kill")
        async with asyncio.timeout(120), Fleet.opened(fake_home, open_engine("qemu", outlive=True), options) as fleet:
            await fleet.snapshots.create(SnapshotRequest(TAG, "python", MachineSpec(256), Warmup("x = 1")))
            await fleet.snapshots.wait(TAG)
            killed, spared = (await fleet.spawn(SandboxSpec(TAG, n=2))).records
            assert killed.pid is not None
            os.kill(killed.pid, signal.SIGKILL)
            while fleet.get(killed.id).state is not State.DEAD:
                await asyncio.sleep(0.05)
            assert "SIGKILL" in (fleet.get(killed.id).cause or "")
            async with fleet.use(spared.id) as live:
                assert (await live.agent.eval("x")).value == 1

    asyncio.run(run())
    assert find_marked(fake_home.vms) == {}
