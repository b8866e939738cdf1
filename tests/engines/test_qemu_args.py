"""What QEMU is told, and what is read off it. Pure."""

from pathlib import Path

import pytest

from forkd.engines.base import BootSpec, ExitReason, tail_of
from forkd.engines.qemu.args import Binary, Ram, Slot, parse_version, render_args, render_platform
from forkd.engines.qemu.machine import parse_exit, parse_paused
from forkd.engines.qemu.nic import parse_tap, render_nic
from forkd.errors import EngineFailed, HostLacks
from forkd.host.process import ExitStatus
from forkd.host.system import parse_cpu
from forkd.model.machine import MachineSpec

SPEC = BootSpec(MachineSpec(256, 2), Path("/k/vmlinuz"), Path("/k/initrd"), Path("/i/root,1.erofs"))
SEAT = Slot("sb-1", console_fd=5, root_fd=6, agent_fd=7, qmp_fd=8)


def after(args: list[str], option: str) -> str:
    return args[args.index(option) + 1]


def parent(accelerator: str = "tcg") -> list[str]:
    ram = Ram(Path("/m/memory"), shared=True)
    return render_args(["qemu"], accelerator, SPEC, SEAT, ram, incoming=False, forkable=False)


def child(accelerator: str = "tcg", *, forkable: bool = False) -> list[str]:
    ram = Ram(Path("/m/memory"), shared=False)
    return render_args(["qemu"], accelerator, SPEC, SEAT, ram, incoming=True, forkable=forkable)


def test_a_parent_writes_through_to_its_memory_file_and_boots_a_kernel() -> None:
    args = parent()
    assert "share=on" in after(args, "-object")
    assert (after(args, "-kernel"), after(args, "-initrd")) == ("/k/vmlinuz", "/k/initrd")
    assert "-incoming" not in args


def test_a_child_maps_the_memory_privately_and_boots_nothing() -> None:
    args = child()
    assert "share=off" in after(args, "-object")
    assert after(args, "-incoming") == "defer"
    assert "-kernel" not in args and "-initrd" not in args


def test_parent_and_child_are_the_same_machine() -> None:
    different = {"-object", "-S", "-kernel", "-initrd", "-append", "-incoming"}
    machines = []
    for args in (parent(), child()):
        machines.append([a for a, before in zip(args, ["", *args[:-1]], strict=True) if not {a, before} & different])
    assert machines[0] == machines[1]


def test_the_image_is_never_writable_and_reached_by_what_was_inherited() -> None:
    args = parent()
    assert "readonly=on" in after(args, "-drive")
    assert "file=/dev/fdset/2," in after(args, "-drive")
    assert "fd=6,set=2" in args
    assert not any("root,1.erofs" in arg for arg in args)


def test_nothing_of_the_user_or_of_defaults_gets_in_and_qemu_is_confined() -> None:
    args = child()
    assert {"-nodefaults", "-no-user-config", "-no-reboot"} <= set(args)
    assert "elevateprivileges=deny,spawn=deny" in after(args, "-sandbox")
    assert "elevateprivileges=allow,spawn=allow" in after(child(forkable=True), "-sandbox")
    assert "-net" not in args and "-nic" not in args


def test_the_accelerator_decides_the_cpu_and_the_kernels_mitigations() -> None:
    assert after(parent("kvm"), "-cpu").startswith("host")
    assert "mitigations=off" not in after(parent("kvm"), "-append")
    assert after(parent("tcg"), "-cpu") == "max"
    assert "thread=multi" in after(parent("tcg"), "-accel")
    assert "thread=single" in after(emulated(MachineSpec(256, 1)), "-accel")


def test_the_buffer_for_translated_code_grows_with_the_machine() -> None:
    assert "tb-size=64" in after(emulated(MachineSpec(256, 1)), "-accel")
    assert "tb-size=512" in after(emulated(MachineSpec(4096, 2)), "-accel")


def emulated(machine: MachineSpec) -> list[str]:
    spec = BootSpec(machine, SPEC.kernel, SPEC.initrd, SPEC.root)
    return render_args(["qemu"], "tcg", spec, SEAT, Ram(Path("/m"), shared=True), incoming=False, forkable=False)


def test_a_version_has_the_distributions_revision() -> None:
    assert parse_version("QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\n") == "7.2.22 (Debian 1:7.2+dfsg-7)"
    assert parse_version("QEMU emulator version 9.0.0\nCopyright") == "9.0.0"
    with pytest.raises(HostLacks):
        parse_version("something else")


def test_the_platform_has_the_hosts_cpu_only_under_kvm() -> None:
    cpuinfo = "model name\t: A CPU\nflags\t\t: sse avx\n"
    assert render_platform(Binary("qemu", "9"), "tcg", cpuinfo, "virtio-net")["cpu"] == "emulated"
    under_kvm = render_platform(Binary("qemu", "9"), "kvm", cpuinfo, "virtio-net")["cpu"]
    assert under_kvm == parse_cpu("model name : A CPU\nflags : avx sse\n")  # the order of flags is nothing
    assert under_kvm != parse_cpu("model name : A CPU\nflags : sse\n")


@pytest.mark.parametrize(
    ("status", "console", "reason"),
    [
        (ExitStatus(0, None), "bye", ExitReason.POWERED_OFF),
        (ExitStatus(0, None), "Kernel panic - not syncing: x", ExitReason.PANICKED),
        (ExitStatus(1, None), "", ExitReason.CRASHED),
        (ExitStatus(None, 9), "Kernel panic - not syncing: x", ExitReason.CRASHED),
        (ExitStatus(None, None), "Kernel panic - not syncing: x", ExitReason.PANICKED),
        (ExitStatus(None, None), "[  9.1] reboot: Power down", ExitReason.POWERED_OFF),
        (ExitStatus(None, None), "", ExitReason.UNKNOWN),
    ],
)
def test_why_qemu_ended(status: ExitStatus, console: str, reason: ExitReason) -> None:
    assert parse_exit(status, console) is reason


def test_only_a_vm_that_runs_or_was_paused_can_be_taken_over() -> None:
    assert parse_paused({"status": "running", "running": True}) is False
    assert parse_paused({"status": "paused", "running": False}) is True
    assert parse_paused({"status": "postmigrate", "running": False}) is True
    for other in ({"status": "inmigrate"}, {"status": "internal-error"}, {}, "what", None):
        with pytest.raises(EngineFailed, match="says that the VM is"):
            parse_paused(other)


def test_a_console_cannot_drive_the_readers_terminal(tmp_path: Path) -> None:
    log = tmp_path / "console.log"
    log.write_bytes(b"x" * 10_000 + b"\x1bc\x1b[?7l\x1b[2Jfine\r\n\x07\xff\x1b[31mred\n")
    tail = tail_of(log)
    assert tail.endswith("fine\n?\N{REPLACEMENT CHARACTER}red\n")
    assert len(tail) <= 4096
    assert tail_of(tmp_path / "absent") == ""


def test_the_tap_of_a_vm_is_known_by_its_number() -> None:
    ram = Ram(Path("/m"), shared=True)
    for tap in (None, 14):
        args = render_args(["qemu"], "tcg", SPEC, SEAT, ram, incoming=True, forkable=True, nic=render_nic("tcg", tap))
        assert parse_tap("\0".join([*args, ""]).encode()) == tap
        assert "romfile=," in args[args.index("-netdev") + 3]
    assert parse_tap("\0".join([*child(), ""]).encode()) is None
