"""Whether the host of the tests can enforce limits: some hold where it can, some where it cannot."""

import pytest

from forkd.host.cgroup import find_lack, find_place

CAN_LIMIT_MEMORY = find_lack(find_place(), "memory") is None

can_limit_memory = pytest.mark.skipif(not CAN_LIMIT_MEMORY, reason="no memory controller for control groups of ours")
cannot_limit_memory = pytest.mark.skipif(CAN_LIMIT_MEMORY, reason="this host can enforce a memory limit")


def enforced(memory_limit_mib: int) -> int | None:
    """What a daemon that drops limits it cannot enforce makes of one."""
    return memory_limit_mib if CAN_LIMIT_MEMORY else None
