"""The place that tests marked `lab` run in has what they are promised."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from forkd.host.kvm import probe_kvm
from forkd.image import Image
from lab.host import CONTROLLERS, find_lack

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
NAME = f"lab{os.getpid()}"

only_in_the_machine = pytest.mark.skipif(Path("/lab/tree") != ROOT, reason="is about the lab machine")


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_nothing_is_lacking() -> None:
    assert find_lack() is None


def test_kvm_runs_a_guest_at_the_speed_of_the_machine() -> None:
    verdict = probe_kvm()
    assert verdict.usable, verdict


@only_in_the_machine
def test_no_guest_can_run_on_the_first_processor() -> None:
    assert os.sched_getaffinity(0) == {1, 2} and os.cpu_count() == 3


def test_a_control_group_below_the_top_has_every_controller() -> None:
    group = Path("/sys/fs/cgroup") / NAME
    group.mkdir()
    try:
        assert set((group / "cgroup.controllers").read_text().split()) >= CONTROLLERS
        (group / "memory.max").write_text("67108864")
        assert (group / "memory.max").read_text() == "67108864\n"
    finally:
        group.rmdir()


def test_a_tap_can_be_made() -> None:
    run("ip", "tuntap", "add", "dev", NAME, "mode", "tap")
    try:
        assert NAME in run("ip", "-brief", "link")
    finally:
        run("ip", "link", "del", NAME)


def test_a_network_namespace_is_reached_over_a_veth() -> None:
    run("ip", "netns", "add", NAME)
    try:
        run("ip", "link", "add", NAME, "type", "veth", "peer", "name", "inner", "netns", NAME)
        assert "inner" in run("ip", "netns", "exec", NAME, "ip", "-brief", "link")
    finally:
        run("ip", "netns", "del", NAME)


def test_nftables_takes_rules_that_masquerade_and_refuse() -> None:
    run("nft", "add", "table", "inet", NAME)
    try:
        run("nft", f"add chain inet {NAME} out {{ type nat hook postrouting priority 100; }}")
        run("nft", f"add rule inet {NAME} out ip saddr 10.9.0.0/16 masquerade")
        run("nft", f"add chain inet {NAME} in {{ type filter hook input priority 0; }}")
        run("nft", f"add rule inet {NAME} in ip saddr 10.9.0.1 ct state new limit rate 9/second counter reject")
        assert "masquerade" in run("nft", "list", "table", "inet", NAME)
    finally:
        run("nft", "delete", "table", "inet", NAME)


@pytest.mark.parametrize("device", ["/dev/kvm", "/dev/net/tun", "/dev/vhost-net", "/dev/vhost-vsock"])
def test_a_device_opens(device: str) -> None:
    os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))


@pytest.mark.parametrize("program", ["firecracker", "jailer", "qemu-system-x86_64"])
def test_a_vmm_runs(program: str) -> None:
    assert "version" in run(program, "--version").lower() or " v1." in run(program, "--version")


@only_in_the_machine
def test_the_tree_cannot_be_written_to() -> None:
    with pytest.raises(OSError) as caught:
        (ROOT / "written").write_text("by a test")
    assert caught.value.errno == errno.EROFS


@only_in_the_machine
def test_the_image_is_there_without_a_build_and_on_a_block_device(python_image: Image) -> None:
    # There is no network to build it from.
    assert os.major(python_image.root.stat().st_dev) != 0
