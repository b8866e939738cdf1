"""Two hundred clients at once: every command is answered, with its own output, and the daemon does not grow."""

import asyncio

import pytest
from support_sizes import sized

from bench.load import LoadSpec, measure_load
from bench.served import Served

GROWTH_MIB = 16.0


@pytest.mark.timeout(600)
def test_two_hundred_clients_get_their_own_answers_and_leave_nothing(fake_daemon: Served) -> None:
    load = asyncio.run(measure_load(fake_daemon, LoadSpec(clients=200, sandboxes=20, seconds=sized(3, full=10))))
    assert load.answers.errors == []
    # Each of them at least once: nobody is left waiting for ever behind the others.
    assert len(load.answers.took_ms) >= 200
    assert load.leaks == []
    assert load.late.resident_mib - load.before.resident_mib < GROWTH_MIB
    assert load.late.descriptors <= load.before.descriptors + 200
    assert load.after.descriptors <= load.before.descriptors
    assert load.late.threads <= load.before.threads
