"""Sandboxes come and go, by the hundred: no process, descriptor, socket, task, row or file stays."""

import asyncio
import time
from pathlib import Path

import pytest
from support_sizes import sized
from support_world import THIRD, host_network, hub_holds, made_world, needs_world

from bench.inventory import find_leaks, settle, take_inventory
from bench.load import CycleSpec, measure_cycles
from bench.served import TAG, Served, make_snapshot, served
from forkd.host.paths import Home
from forkd.image import Image

# Of the daemon, over all cycles: what a leak of a few KiB in each would exceed.
GROWTH_MIB = 16.0
STEADY_S = 1.0


def check(daemon: Served, count: int, network: object = "none") -> None:
    cycles = asyncio.run(measure_cycles(daemon, CycleSpec(count, 4, network)))
    assert cycles.answers.errors == []
    assert len(cycles.answers.took_ms) == count
    assert cycles.leaks == []
    assert cycles.after.resident_mib - cycles.before.resident_mib < GROWTH_MIB


@pytest.mark.timeout(600)
def test_sandboxes_of_the_fake_engine_leave_nothing(fake_daemon: Served) -> None:
    check(fake_daemon, sized(100, full=1000))


@pytest.mark.vm
@pytest.mark.timeout(600)
def test_virtual_machines_leave_nothing(vm_daemon: Served) -> None:
    check(vm_daemon, sized(20, full=100))


@pytest.mark.vm
@needs_world
@pytest.mark.timeout(900)
def test_virtual_machines_with_networks_leave_nothing(
    python_image: Image, built_home: Home, tmp_path: Path, nothing_left: None
) -> None:
    rules = {"mode": "egress", "allow": [THIRD, "allowed.test"]}
    with made_world():
        before = host_network()
        (tmp_path / "home").mkdir()
        with served("qemu", built_home.images, tmp_path / "home") as daemon:
            make_snapshot(daemon, "import sys")
            with daemon.rest() as rest:
                (first,) = rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG, "network": rules})
                rest.ask("DELETE", f"/v1/sandboxes/{first['id']}")
            hub = find_hub(daemon.pid)
            idle = settled(hub)
            check(daemon, sized(40, full=1000), rules)
            assert find_hub(daemon.pid) == hub
            assert settled(hub) == idle
        assert host_network() == before


def find_hub(daemon: int) -> int:
    below = Path(f"/proc/{daemon}/task").glob("*/children")
    children = {pid for path in below for pid in path.read_text().split()}
    (hub,) = (pid for pid in children if b"forkd.network.hub" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return int(hub)


def settled(hub: int) -> tuple[int, int]:
    """What it holds once its pool is full again."""
    last, now = None, hub_holds(hub)
    while now != last:
        time.sleep(STEADY_S)
        last, now = now, hub_holds(hub)
    return now


def test_a_sandbox_that_stays_is_seen_in_every_way_it_could_leak(fake_daemon: Served) -> None:
    with fake_daemon.rest() as rest:
        # The first fork of a snapshot notes that its files were checked.
        (first,) = rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG})
        rest.ask("DELETE", f"/v1/sandboxes/{first['id']}")
        before = take_inventory(fake_daemon)
        (sandbox,) = rest.ask("POST", "/v1/sandboxes", {"snapshot_tag": TAG})
        leaks = find_leaks(before, take_inventory(fake_daemon))
        assert f"process {sandbox['pid']}" in leaks
        assert "listening socket" in leaks and "descriptor of socket" in leaks
        assert "row of sandboxes" in leaks
        assert f"file run/vms/{sandbox['id']}" in leaks
        rest.ask("DELETE", f"/v1/sandboxes/{sandbox['id']}")
        assert asyncio.run(settle(before, lambda: take_inventory(fake_daemon))) == []
