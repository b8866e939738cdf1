"""The runtime over real VMs: what the fake engine cannot show."""

import asyncio
import os
import signal
import time

import pytest
from runtime_cases import evaluate, opened, until

from forkd.engines.base import Engine, Opening
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime.doctor import open_engine
from forkd.runtime.runtime import Runtime

pytestmark = pytest.mark.vm

TAG = parse_tag("warm")


@pytest.fixture
def engine() -> Engine:
    return open_engine("qemu", Opening(outlive=True))


async def test_a_vm_wakes_from_a_pause_with_the_right_time_and_is_adopted(vm_home: Home, engine: Engine) -> None:
    async with asyncio.timeout(120), Runtime.opened(vm_home, engine) as runtime:
        (record,) = (await runtime.spawn(SandboxSpec(TAG))).records
        await runtime.sandboxes.pause(record.id)
        await asyncio.sleep(3)
        await runtime.sandboxes.resume(record.id)
        asked_at = time.time()
        clock = await evaluate(runtime, record.id, "x += 1; time.time()")
        assert asked_at - 1.5 < clock < time.time() + 1.5, "its clock stood still"
    assert list(find_marked(vm_home.vms)) == [vm_home.vms / record.id]
    async with opened(vm_home, engine, make_warm=False) as runtime:
        assert runtime.sandboxes.get(record.id).state is State.RUNNING
        assert await evaluate(runtime, record.id, "x") == 42


async def test_a_vm_that_is_killed_from_outside_is_dead_and_says_so(vm_home: Home, engine: Engine) -> None:
    async with opened(vm_home, engine, make_warm=False) as runtime:
        killed, spared = (await runtime.spawn(SandboxSpec(TAG, n=2))).records
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        await until(lambda: runtime.sandboxes.get(killed.id).state is State.DEAD, "its death")
        assert "SIGKILL" in (runtime.sandboxes.get(killed.id).cause or "")
        assert await evaluate(runtime, spared.id, "x") == 41
