"""How many VMs a machine can take."""

import os
import shutil
from pathlib import Path

import pytest

from forkd.errors import NoCapacity
from forkd.host.system import CHILD_MIB
from forkd.runtime.admission import (
    DISK_RESERVE_MIB,
    RESERVE_MIB,
    STARTS_PER_CPU,
    Capacity,
    admit_boot,
    admit_children,
    disk_mib,
    look,
)


def test_children_start_as_many_at_once_as_the_cpus_are_worth() -> None:
    assert admit_children(100, Capacity(100_000, 4)) == 4 * STARTS_PER_CPU
    assert admit_children(3, Capacity(100_000, 4)) == 3
    assert admit_children(5, Capacity(100_000, 0)) == 1


def test_children_that_just_fit_are_admitted_and_one_more_is_not() -> None:
    capacity = Capacity(RESERVE_MIB + 10 * CHILD_MIB, 2)
    assert admit_children(10, capacity) > 0
    with pytest.raises(NoCapacity, match="11 children") as caught:
        admit_children(11, capacity)
    assert caught.value.hint is not None and "at most 10 now" in caught.value.hint


@pytest.mark.parametrize("available_mib", [0, 1, RESERVE_MIB - 1, RESERVE_MIB + CHILD_MIB - 1])
def test_without_memory_beyond_the_reserve_not_even_one_is_admitted(available_mib: int) -> None:
    with pytest.raises(NoCapacity) as caught:
        admit_children(1, Capacity(available_mib, 8))
    assert caught.value.hint is not None and "at most 0 now" in caught.value.hint


def test_a_boot_counts_with_all_its_memory() -> None:
    admit_boot(512, Capacity(512 + RESERVE_MIB, 1), 100_000)
    with pytest.raises(NoCapacity, match="512 MiB does not fit") as caught:
        admit_boot(512, Capacity(511 + RESERVE_MIB, 1), 100_000)
    assert caught.value.hint is not None and "--memory" in caught.value.hint


def test_a_boot_needs_as_much_disk_as_memory() -> None:
    admit_boot(512, Capacity(100_000, 1), 512 + DISK_RESERVE_MIB)
    with pytest.raises(NoCapacity, match="on disk") as caught:
        admit_boot(512, Capacity(100_000, 1), 511 + DISK_RESERVE_MIB)
    assert caught.value.hint is not None and "FORKD_HOME" in caught.value.hint


def test_what_is_looked_at_is_this_machine() -> None:
    capacity = look()
    assert capacity.available_mib > 0
    assert capacity.cpus == len(os.sched_getaffinity(0))
    assert abs(disk_mib(Path("/tmp")) - shutil.disk_usage("/tmp").free // 2**20) < 1024
