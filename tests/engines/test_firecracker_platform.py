"""What a VM that Firecracker froze must find again."""

from __future__ import annotations

from pathlib import Path

import pytest

from forkd.engines.firecracker.binary import can_override_taps, check_platform, render_platform
from forkd.errors import SnapshotIncompatible
from forkd.host.cpu import parse_cpu, read_cpuinfo
from forkd.host.firecracker import Binaries

CPUINFO = "model name\t: A CPU\nflags\t\t: sse avx\n"
HERE = render_platform(Binaries(Path("/f"), "1.12.1", None), CPUINFO, "6.1.0-54-amd64", network=True)


def test_version_cpu_and_kernel_are_recorded() -> None:
    assert {
        "firecracker": "1.12.1",
        "cpu": parse_cpu(CPUINFO),
        "network": "tap",
        "kernel": "6.1.0-54-amd64",
    } == HERE
    assert all(render_platform(Binaries(Path("/f"), "1", None), read_cpuinfo(), "6", network=False).values())


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("firecracker", "1.11.0", "Firecracker 1.11.0, this host has 1.12.1"),
        ("firecracker", "1.12.1-dev", "Firecracker 1.12.1-dev, this host has 1.12.1"),
        ("cpu", "Another CPU flags-123", "the CPU Another CPU flags-123, this host has A CPU"),
        ("network", "none", "the network none, this host has tap"),
    ],
)
def test_another_version_cpu_or_network_is_refused_with_both(key: str, value: str, told: str) -> None:
    with pytest.raises(SnapshotIncompatible) as caught:
        check_platform({**HERE, key: value}, HERE)
    assert told in caught.value.message and caught.value.hint


@pytest.mark.parametrize("key", ["firecracker", "cpu", "network"])
def test_a_snapshot_that_does_not_say_is_refused(key: str) -> None:
    with pytest.raises(SnapshotIncompatible):
        check_platform({name: value for name, value in HERE.items() if name != key}, HERE)


def test_the_hosts_kernel_may_be_another() -> None:
    check_platform(HERE, HERE)
    check_platform({**HERE, "kernel": "5.10.0"}, HERE)
    check_platform({name: value for name, value in HERE.items() if name != "kernel"}, HERE)


def test_a_version_that_cannot_give_a_child_another_tap_is_known() -> None:
    assert [can_override_taps(version) for version in ("1.7.0", "1.11.9", "1.12.0", "1.13.0-dev", "2.0")] == [
        False,
        False,
        True,
        True,
        True,
    ]
