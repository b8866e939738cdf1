"""The shape of a machine, its limits, and how many children one fork may have."""

import math

import pytest

from forkd.errors import InvalidInput
from forkd.model.machine import (
    CPU_TEMPLATES,
    MAX_CHILDREN,
    MAX_MEMORY_MIB,
    MAX_VCPUS,
    MIN_MEMORY_MIB,
    NO_LIMITS,
    Limits,
    MachineSpec,
    parse_count,
)


@pytest.mark.parametrize(
    ("memory_mib", "vcpus"), [(MIN_MEMORY_MIB, 1), (MAX_MEMORY_MIB, MAX_VCPUS), (512, 1), (MachineSpec().memory_mib, 1)]
)
def test_the_bounds_themselves_are_allowed(memory_mib: int, vcpus: int) -> None:
    spec = MachineSpec(memory_mib, vcpus)
    assert (spec.memory_mib, spec.vcpus) == (memory_mib, vcpus)


@pytest.mark.parametrize("memory_mib", [MIN_MEMORY_MIB - 1, 0, -1, MAX_MEMORY_MIB + 1, 10**18, math.nan])
def test_memory_out_of_bounds_is_refused_with_what_is_allowed(memory_mib: int) -> None:
    with pytest.raises(InvalidInput, match="memory") as caught:
        MachineSpec(memory_mib=memory_mib)
    assert caught.value.hint is not None and str(MIN_MEMORY_MIB) in caught.value.hint


@pytest.mark.parametrize("vcpus", [0, -1, MAX_VCPUS + 1, 10**9])
def test_vcpus_out_of_bounds_are_refused_with_what_is_allowed(vcpus: int) -> None:
    with pytest.raises(InvalidInput, match="vCPUs") as caught:
        MachineSpec(vcpus=vcpus)
    assert caught.value.hint is not None and str(MAX_VCPUS) in caught.value.hint


def test_cpu_templates_are_those_of_firecracker_or_none() -> None:
    assert MachineSpec().cpu_template is None
    assert [MachineSpec(cpu_template=name).cpu_template for name in CPU_TEMPLATES] == list(CPU_TEMPLATES)
    for name in ("", "t2", "T3", "None", "T2 "):
        with pytest.raises(InvalidInput, match="CPU template") as caught:
            MachineSpec(cpu_template=name)
        assert caught.value.hint is not None and "T2CL" in caught.value.hint


def test_a_count_within_bounds_is_taken() -> None:
    assert [parse_count(n) for n in (1, 100, MAX_CHILDREN)] == [1, 100, MAX_CHILDREN]
    assert MAX_CHILDREN == 1000


@pytest.mark.parametrize("n", [0, -1, 1001, 10**9])
def test_a_count_out_of_bounds_is_refused_with_what_is_allowed(n: int) -> None:
    with pytest.raises(InvalidInput, match=f"Cannot fork {n} children") as caught:
        parse_count(n)
    assert caught.value.hint == "Use 1 to 1000"


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
    (value,) = asked.values()
    with pytest.raises(InvalidInput, match=rf"(?m)The .*limit.* must be between .* and .*, got {value}$") as refused:
        Limits(**asked)  # type: ignore[arg-type]
    assert "for none" in (refused.value.hint or "")


def test_limits_are_said_in_words() -> None:
    assert str(Limits(memory_mib=64, cpus=0.25, pids=40, io_mib_s=8)) == (
        "64 MiB of memory, 0.25 cores, 40 processes, 8 MiB/s of disk I/O"
    )
    assert str(Limits(memory_mib=1048576)) == "1048576 MiB of memory"
    assert str(NO_LIMITS) == "none"
