"""Limits: what can be asked for at all."""

from __future__ import annotations

import math

import pytest

from forkd.errors import InvalidInput
from forkd.model.limits import NO_LIMITS, Limits


@pytest.mark.parametrize(
    "asked",
    [
        {"memory_mib": 0},
        {"memory_mib": -1},
        {"memory_mib": 1 << 31},
        {"cpus": 0.0},
        {"cpus": 0.001},
        {"cpus": math.nan},
        {"cpus": math.inf},
        {"cpus": 5000.0},
        {"pids": 0},
        {"pids": 1 << 30},
        {"io_mib_s": 0},
        {"io_mib_s": 1 << 31},
    ],
)
def test_a_limit_that_can_never_be_is_refused_with_what_can(asked: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=r"is no (memory limit|CPU limit|limit of)") as refused:
        Limits(**asked)  # type: ignore[arg-type]
    assert "to" in (refused.value.hint or "")


def test_limits_are_said_in_words() -> None:
    assert str(Limits(memory_mib=64, cpus=0.25, pids=40, io_mib_s=8)) == (
        "64 MiB of memory, 0.25 cores, 40 processes, 8 MiB/s of disk I/O"
    )
    assert str(Limits(memory_mib=1048576)) == "1048576 MiB of memory"
    assert str(NO_LIMITS) == "none"
