"""What Firecracker is asked, by value."""

import json
from pathlib import Path

import pytest

from forkd.agent.port import parse_vsock_port
from forkd.engines.base import BootSpec
from forkd.engines.firecracker.plan import (
    AGENT_VSOCK_PORT,
    ANSWER_DEADLINE_S,
    Call,
    can_override_taps,
    check_platform,
    find_fork_lack,
    parse_paused,
    render_boot,
    render_freeze,
    render_load,
    render_look,
    render_pause,
    render_platform,
    render_resume,
)
from forkd.engines.qemu.args import Ram, Slot, render_args
from forkd.errors import EngineFailed, InvalidInput, SnapshotIncompatible
from forkd.host.firecracker import Binaries
from forkd.host.system import parse_cpu, read_cpuinfo
from forkd.model.machine import CPU_TEMPLATES, MachineSpec
from forkd.model.network import GUEST_MAC


def boot(machine: MachineSpec) -> dict[str, Call]:
    spec = BootSpec(machine, Path("/host/vmlinuz"), Path("/host/initrd"), Path("/host/root.erofs"))
    return {call.path: call for call in render_boot(spec, kernel="kernel", initrd="initrd", root="root.erofs")}


def test_a_machine_is_put_together_and_then_started() -> None:
    calls = boot(MachineSpec(256, 2))
    assert {call.method for call in calls.values()} == {"PUT"}
    assert {path: call.body for path, call in calls.items() if path != "/boot-source"} == {
        "/machine-config": {"vcpu_count": 2, "mem_size_mib": 256, "smt": False},
        "/drives/root": {
            "drive_id": "root",
            "path_on_host": "root.erofs",
            "is_root_device": False,
            "is_read_only": True,
        },
        "/vsock": {"guest_cid": 3, "uds_path": "agent.sock"},
        "/entropy": {},
        "/actions": {"action_type": "InstanceStart"},
    }
    assert list(calls)[-1] == "/actions"


def test_nothing_of_the_hosts_paths_is_frozen_into_a_machine() -> None:
    calls = [*boot(MachineSpec()).values(), *render_freeze("out/state", "out/memory"), render_load("state", "memory")]
    assert not any("/host" in json.dumps(dict(call.body or {})) for call in calls)
    named = [
        value
        for call in calls
        for key, value in (call.body or {}).items()
        if key.endswith("_path") or key == "path_on_host"
    ]
    assert len(named) >= 6
    assert not any(str(value).startswith("/") for value in named)


def test_the_kernel_is_told_what_qemus_is_and_where_the_agent_listens() -> None:
    body = boot(MachineSpec())["/boot-source"].body or {}
    assert (body["kernel_image_path"], body["initrd_path"]) == ("kernel", "initrd")
    words = body["boot_args"].split()
    assert parse_vsock_port(body["boot_args"]) == AGENT_VSOCK_PORT == 1024
    assert {"console=ttyS0", "panic=-1", "reboot=k", "pci=off", "8250.nr_uarts=1", "i8042.dumbkbd"} <= set(words)
    assert "clocksource=tsc" in words
    spec = BootSpec(MachineSpec(), Path("/k"), Path("/i"), Path("/r"))
    slot = Slot("sb-1", 5, 6, 7, 8)
    args = render_args("qemu", "kvm", spec, slot, Ram(Path("/m"), shared=True), incoming=False, forkable=False)
    assert set(args[args.index("-append") + 1].split()) < set(words)


@pytest.mark.parametrize("template", CPU_TEMPLATES)
def test_a_cpu_template_is_asked_for_only_when_it_was(template: str) -> None:
    body = boot(MachineSpec(256, 1, template))["/machine-config"].body or {}
    assert body["cpu_template"] == template
    assert "cpu_template" not in (boot(MachineSpec(256, 1))["/machine-config"].body or {})


def test_firecracker_runs_32_vcpus_and_no_more() -> None:
    assert (boot(MachineSpec(256, 32))["/machine-config"].body or {})["vcpu_count"] == 32
    with pytest.raises(InvalidInput, match="33 vCPUs") as caught:
        boot(MachineSpec(256, 33))
    assert caught.value.hint is not None and "1 to 32" in caught.value.hint


def test_a_freeze_pauses_and_writes_everything_in_its_own_time() -> None:
    pause, create = render_freeze("out/state", "out/memory")
    assert pause == render_pause() == Call("PATCH", "/vm", {"state": "Paused"})
    assert (create.method, create.path) == ("PUT", "/snapshot/create")
    assert create.body == {"snapshot_type": "Full", "snapshot_path": "out/state", "mem_file_path": "out/memory"}
    assert create.deadline_s > ANSWER_DEADLINE_S


def test_a_fork_maps_the_memory_file_and_runs_at_once() -> None:
    load = render_load("state", "memory")
    assert (load.method, load.path) == ("PUT", "/snapshot/load")
    assert load.body == {
        "snapshot_path": "state",
        "mem_backend": {"backend_type": "File", "backend_path": "memory"},
        "resume_vm": True,
    }


def test_a_network_interface_is_there_when_asked_for_and_each_child_has_its_own() -> None:
    spec = BootSpec(MachineSpec(), Path("/k"), Path("/i"), Path("/r"))
    calls = render_boot(spec, kernel="kernel", initrd="initrd", root="root.erofs", tap="tap-parent")
    (nic,) = [call for call in calls if call.path.startswith("/network-interfaces/")]
    assert nic.body == {"iface_id": "eth0", "guest_mac": GUEST_MAC, "host_dev_name": "tap-parent"}
    assert calls[-1].path == "/actions"
    overrides = (render_load("state", "memory", "tap-child").body or {})["network_overrides"]
    assert overrides == [{"iface_id": nic.body["iface_id"], "host_dev_name": "tap-child"}]


def test_a_machine_can_go_on() -> None:
    assert render_resume() == Call("PATCH", "/vm", {"state": "Resumed"})
    assert str(render_look()) == "GET /"


def test_only_a_vm_that_runs_or_was_paused_can_be_taken_over_from_firecracker() -> None:
    assert parse_paused({"id": "x", "state": "Running"}) is False
    assert parse_paused({"id": "x", "state": "Paused"}) is True
    for other in ({"state": "Not started"}, {"state": 5}, {}, "what", None):
        with pytest.raises(EngineFailed, match="says that the VM is"):
            parse_paused(other)


CPUINFO = "model name\t: A CPU\nflags\t\t: sse avx\n"
HERE = render_platform(Binaries(Path("/f"), "1.12.1", None), CPUINFO, "6.1.0-54-amd64", network=True)


def test_version_cpu_and_kernel_are_recorded() -> None:
    assert {
        "firecracker": "1.12.1",
        "cpu": parse_cpu(CPUINFO),
        "network": "tap",
        "kernel": "6.1.0-54-amd64",
        "nic": "virtio-net",
    } == HERE
    without = render_platform(Binaries(Path("/f"), "1", None), read_cpuinfo(), "6", network=False)
    assert all(without.values()) and without["network"] == "none" and "nic" not in without


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


@pytest.mark.parametrize(
    ("version", "forked"), [("1.12.1", True), ("1.15.1", True), ("1.16.0", False), ("1.17.0", True)]
)
def test_a_firecracker_whose_guests_hear_nothing_after_a_pause_is_not_forked(version: str, forked: bool) -> None:
    assert (find_fork_lack(version) is None) is forked
