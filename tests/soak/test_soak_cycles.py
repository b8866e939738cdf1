"""Sandboxes that come and go, by the hundred: no process, descriptor, socket, task, row or file stays."""

from __future__ import annotations

import asyncio

import pytest

from bench.cycles import Cycles, CycleSpec, measure_cycles
from bench.inventory import find_leaks, settle, take_inventory
from bench.served import TAG, Served

# Of the daemon, over all cycles: what a leak of a few KiB in each would exceed.
GROWTH_MIB = 16.0


def check(cycles: Cycles, count: int) -> None:
    assert cycles.answers.errors == []
    assert len(cycles.answers.took_ms) == count
    assert cycles.leaks == []
    assert cycles.after.resident_mib - cycles.before.resident_mib < GROWTH_MIB


@pytest.mark.timeout(600)
def test_a_thousand_sandboxes_of_the_fake_engine_leave_nothing(fake_daemon: Served) -> None:
    check(asyncio.run(measure_cycles(fake_daemon, CycleSpec(cycles=1000, at_once=4))), 1000)


@pytest.mark.vm
@pytest.mark.timeout(600)
def test_a_hundred_virtual_machines_leave_nothing(vm_daemon: Served) -> None:
    check(asyncio.run(measure_cycles(vm_daemon, CycleSpec(cycles=100, at_once=4))), 100)


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
        assert settle(fake_daemon, before) == []
