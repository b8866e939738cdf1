"""The QEMU command line of a VM. Pure: what is rendered here is all that QEMU is told at start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import BootSpec

AGENT_PORT = "org.forkd.agent"

_KERNEL_ARGS = "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic no_timer_check tsc=reliable random.trust_cpu=on"
# What wakes an idle guest for its own sake: watchdogs (which also take a slow host for a hung one), statistics of
# every second, compaction of every half second, pressure accounting.
_QUIET_KERNEL_ARGS = "nowatchdog psi=0 sysctl.vm.stat_interval=600 sysctl.vm.compaction_proactiveness=0"
# An emulated CPU does not speculate.
_TCG_KERNEL_ARGS = "mitigations=off"
# Enough translated code for a busy guest; untouched parts of the buffer cost nothing.
_TCG_BUFFER_MIB = 64


@dataclass(frozen=True)
class Seat:
    """What belongs to one VM process: its name, its console file, its two listening sockets."""

    name: str
    console: Path
    agent_fd: int
    qmp_fd: int


@dataclass(frozen=True)
class Ram:
    """The memory file; a parent writes through to it, a child maps it privately."""

    path: Path
    shared: bool


def render_args(qemu: str, accelerator: str, spec: BootSpec, seat: Seat, ram: Ram, *, incoming: bool) -> list[str]:
    args = [
        qemu,
        *("-name", f"forkd-{seat.name}"),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        *("-machine", "pc,usb=off,vmport=off,smbus=off,hpet=off,graphics=off,memory-backend=ram"),
        *_accelerator_args(accelerator, spec.machine.vcpus),
        *("-smp", str(spec.machine.vcpus)),
        *("-m", f"{spec.machine.memory_mib}M"),
        *("-object", _memory_object(ram, spec.machine.memory_mib)),
        *("-chardev", f"file,id=console,path={_quoted(seat.console)},append=on"),
        *("-serial", "chardev:console"),
        *("-chardev", f"socket,id=qmp,fd={seat.qmp_fd},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        # wait=on: we connected before QEMU started, so it accepts at once and the guest never sees a disconnect.
        *("-chardev", f"socket,id=agent,fd={seat.agent_fd},server=on,wait=on"),
        *("-device", "virtio-serial-pci,max_ports=2"),
        *("-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
        *("-drive", f"file={_quoted(spec.root)},if=none,id=root,format=raw,readonly=on,file.locking=off"),
        *("-device", "virtio-blk-pci,drive=root"),
    ]
    if incoming:
        # A child is past its boot; reading kernel and initramfs again would cost it a third of its start.
        return [*args, "-incoming", "defer"]
    return [
        *args,
        *("-kernel", str(spec.kernel)),
        *("-initrd", str(spec.initrd)),
        *("-append", _kernel_args(accelerator)),
    ]


def _kernel_args(accelerator: str) -> str:
    args = f"{_KERNEL_ARGS} {_QUIET_KERNEL_ARGS}"
    return f"{args} {_TCG_KERNEL_ARGS}" if accelerator == "tcg" else args


def _accelerator_args(accelerator: str, vcpus: int) -> list[str]:
    if accelerator == "kvm":
        return ["-accel", "kvm", "-cpu", "host,migratable=on"]
    # One vCPU needs no translation that is safe among threads.
    thread = "single" if vcpus == 1 else "multi"
    return ["-accel", f"tcg,thread={thread},tb-size={_TCG_BUFFER_MIB}", "-cpu", "max"]


def _memory_object(ram: Ram, size_mib: int) -> str:
    share = "on" if ram.shared else "off"
    return f"memory-backend-file,id=ram,size={size_mib}M,mem-path={_quoted(ram.path)},share={share},merge=off"


def _quoted(path: Path) -> str:
    """QEMU's option syntax ends a value at a comma; a doubled comma is one."""
    return str(path).replace(",", ",,")
