"""Sandboxes come and go, by the hundred: no process, descriptor, socket, task, row or file stays."""

import asyncio

import pytest
from support_sizes import sized

from bench.inventory import find_leaks, settle, take_inventory
from bench.load import CycleSpec, measure_cycles
from bench.served import TAG, Served

# Of the daemon, over all cycles: what a leak of a few KiB in each would exceed.
GROWTH_MIB = 16.0


def check(daemon: Served, count: int) -> None:
    cycles = asyncio.run(measure_cycles(daemon, CycleSpec(cycles=count, at_once=4)))
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
