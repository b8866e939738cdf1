"""Taps in the network namespace of another process. As root, which may make one."""

import os
import subprocess
from collections.abc import Iterator

import pytest

from forkd.errors import EngineFailed
from forkd.host.tap import has_tun, make_tap

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not has_tun(), reason="needs root and /dev/net/tun")


@pytest.fixture
def elsewhere() -> Iterator[int]:
    """A process with a network of its own."""
    process = subprocess.Popen(
        ["unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && echo ready && exec sleep 60"],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield process.pid
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_a_tap_is_up_there_and_its_owners_and_not_here(elsewhere: int) -> None:
    make_tap("fdtest0", elsewhere, 12345)
    there = f"/proc/{elsewhere}/root/sys/class/net/fdtest0"
    with open(f"{there}/owner") as owner, open(f"{there}/flags") as flags:
        assert owner.read().strip() == "12345"
        assert int(flags.read(), 16) & 1, "it is up"
    assert "fdtest0" not in os.listdir("/sys/class/net")


def test_we_are_still_in_our_own_network(elsewhere: int) -> None:
    ours = os.readlink("/proc/thread-self/ns/net")
    make_tap("fdtest0", elsewhere, 0)
    assert os.readlink("/proc/thread-self/ns/net") == ours != os.readlink(f"/proc/{elsewhere}/ns/net")


def test_what_cannot_be_made_is_an_error_with_its_name(elsewhere: int) -> None:
    with pytest.raises(EngineFailed, match="interface lo"):
        make_tap("lo", elsewhere, 0)


def test_a_process_that_is_gone_is_an_error() -> None:
    with pytest.raises(EngineFailed):
        make_tap("fdtest0", 2**22 + 1, 0)
