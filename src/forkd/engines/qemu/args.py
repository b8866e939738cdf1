"""Which QEMU this host has, and the command line of a VM, which is all that QEMU is told at start."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import KERNEL_ARGS, BootSpec
from forkd.errors import HostLacks
from forkd.host.system import parse_cpu
from forkd.model.machine import MachineSpec

AGENT_PORT = "org.forkd.agent"
_NAME = "qemu-system-x86_64"
_VERSION_DEADLINE_S = 20.0
_VERSION = re.compile(r"version (\S+)(?: \(([^)]*)\))?")

# An emulated CPU does not speculate.
_TCG_KERNEL_ARGS = "mitigations=off"
# Enough translated code for a busy guest; untouched parts of the buffer cost nothing. One that is full is emptied:
# a large guest that runs guests of its own, as in the lab, did with 64 MiB every few seconds.
_TCG_BUFFER_MIB = 64
_TCG_BUFFER_SHARE = 8
# QEMU opens files that it inherited by the numbers of sets.
_CONSOLE_SET, _ROOT_SET = 1, 2


@dataclass(frozen=True)
class Slot:
    """What belongs to one VM process: its name, and what it inherits open: console, root, two listening sockets."""

    name: str
    console_fd: int
    root_fd: int
    agent_fd: int
    qmp_fd: int


@dataclass(frozen=True)
class Ram:
    """The file that QEMU maps as memory. One that is to be written through to is shared."""

    path: Path
    shared: bool


def render_args(
    qemu: Sequence[str],
    accelerator: str,
    spec: BootSpec,
    slot: Slot,
    ram: Ram,
    *,
    incoming: bool,
    forkable: bool,
    nic: Sequence[str] = (),
) -> list[str]:
    """`forkable`: QEMU's own filter lets it make a process and change its user; forkd's lets only its tracer.

    `nic`: what it is told of its network interface.
    """
    fork = "allow" if forkable else "deny"
    args = [
        *qemu,
        *("-name", f"forkd-{slot.name}"),
        *("-nodefaults", "-no-user-config", "-no-reboot"),
        *("-display", "none"),
        *("-sandbox", f"on,obsolete=deny,elevateprivileges={fork},spawn={fork},resourcecontrol=deny"),
        *("-machine", "pc,usb=off,vmport=off,smbus=off,hpet=off,graphics=off,memory-backend=ram"),
        *_accelerator_args(accelerator, spec.machine),
        *("-smp", str(spec.machine.vcpus)),
        *("-m", f"{spec.machine.memory_mib}M"),
        *("-object", _memory_object(ram, spec.machine.memory_mib)),
        *("-add-fd", f"fd={slot.console_fd},set={_CONSOLE_SET}", "-add-fd", f"fd={slot.root_fd},set={_ROOT_SET}"),
        *("-chardev", f"file,id=console,path=/dev/fdset/{_CONSOLE_SET},append=on"),
        *("-serial", "chardev:console"),
        *("-chardev", f"socket,id=qmp,fd={slot.qmp_fd},server=on,wait=off"),
        *("-mon", "chardev=qmp,mode=control"),
        # wait=on: we connected before QEMU started, so it accepts at once and the guest never sees a disconnect.
        *("-chardev", f"socket,id=agent,fd={slot.agent_fd},server=on,wait=on"),
        *("-device", "virtio-serial-pci,max_ports=2"),
        *("-device", f"virtserialport,chardev=agent,name={AGENT_PORT}"),
        *("-drive", f"file=/dev/fdset/{_ROOT_SET},if=none,id=root,format=raw,readonly=on,file.locking=off"),
        *("-device", "virtio-blk-pci,drive=root"),
        *nic,
    ]
    if incoming:
        # A child is past its boot; reading kernel and initramfs again would cost it a third of its start.
        return [*args, "-incoming", "defer"]
    return [
        *args,
        "-S",  # until its system calls are filtered
        *("-kernel", str(spec.kernel)),
        *("-initrd", str(spec.initrd)),
        *("-append", _kernel_args(accelerator)),
    ]


def _kernel_args(accelerator: str) -> str:
    return f"{KERNEL_ARGS} {_TCG_KERNEL_ARGS}" if accelerator == "tcg" else KERNEL_ARGS


def _accelerator_args(accelerator: str, machine: MachineSpec) -> list[str]:
    if accelerator == "kvm":
        return ["-accel", "kvm", "-cpu", "host,migratable=on"]
    # One vCPU needs no translation that is safe among threads.
    thread = "single" if machine.vcpus == 1 else "multi"
    buffer_mib = max(_TCG_BUFFER_MIB, machine.memory_mib // _TCG_BUFFER_SHARE)
    return ["-accel", f"tcg,thread={thread},tb-size={buffer_mib}", "-cpu", "max"]


def _memory_object(ram: Ram, size_mib: int) -> str:
    share = "on" if ram.shared else "off"
    return f"memory-backend-file,id=ram,size={size_mib}M,mem-path={_quoted(ram.path)},share={share},merge=off"


def _quoted(path: Path) -> str:
    """QEMU's option syntax ends a value at a comma; a doubled comma is one."""
    return str(path).replace(",", ",,")


@dataclass(frozen=True)
class Binary:
    path: str
    version: str


def find_binary() -> Binary:
    path = shutil.which(_NAME)
    if path is None:
        raise HostLacks(f"{_NAME} is not installed", hint="Install the package qemu-system-x86")
    return ask_binary(path)


def ask_binary(path: str) -> Binary:
    try:
        result = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_DEADLINE_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise HostLacks(f"{path} does not run", hint="Reinstall the package qemu-system-x86") from error
    return Binary(path, parse_version(result.stdout))


def parse_version(text: str) -> str:
    """The version with the distribution's revision: device state is only promised within one build."""
    found = _VERSION.search(text)
    if found is None:
        raise HostLacks("QEMU did not say its version", hint="Reinstall the package qemu-system-x86")
    return f"{found[1]} ({found[2]})" if found[2] else found[1]


def render_platform(binary: Binary, accelerator: str, cpuinfo: str, nic: str) -> dict[str, str]:
    """What a frozen VM must find again. Emulated CPUs are the same on every host; with KVM the CPU is the host's."""
    cpu = "emulated" if accelerator == "tcg" else parse_cpu(cpuinfo)
    return {"qemu": binary.version, "accelerator": accelerator, "cpu": cpu, "nic": nic}
