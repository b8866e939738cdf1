"""The checks of `forkd doctor`, in the order it prints them. A check changes nothing and ends within seconds.

To add one, write a function that returns a Finding (or raises HostLacks, which is a failure) and add a row to CHECKS.
"""

from __future__ import annotations

import os
import platform
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import HostLacks
from forkd.host.cell_plan import probe_cell
from forkd.host.cgroup import probe_cgroup, probe_enforcement
from forkd.host.finding import Finding, Status
from forkd.host.firecracker import probe_firecracker
from forkd.host.kvm import KvmVerdict, probe_kvm
from forkd.host.network_probe import probe_network
from forkd.host.paths import probe_home, probe_runtime
from forkd.host.procfork.trial import probe_live_forks
from forkd.host.system import probe_memory, probe_open_files, probe_processes
from forkd.host.tools import ask, check_namespaces, find_program, find_tool, parse_version

OLDEST_PYTHON = (3, 11)
ARCHITECTURE = "x86_64"
QEMU = "qemu-system-x86_64"
OLDEST_QEMU = (7, 2)
_NAMESPACES_S = 5.0
_PT_INTERP = 3
_CAP_SYS_PTRACE = 1 << 19

Probe = Callable[[], Finding | tuple[Finding, ...]]


@dataclass(frozen=True)
class Check:
    name: str
    probe: Probe
    needed: bool = False  # without it no VM runs, with any engine


def probe_host() -> tuple[Finding, ...]:
    return tuple(finding for check in CHECKS for finding in guarded(check.name, check.probe))


def guarded(name: str, probe: Probe) -> tuple[Finding, ...]:
    """A check that breaks on an odd machine is a finding too, and the others go on."""
    try:
        found = probe()
    except HostLacks as error:
        found = Finding.lacking(name, error)
    except Exception as error:
        found = Finding(name, Status.WARN, f"could not be checked: {type(error).__name__}: {error}")
    return (found,) if isinstance(found, Finding) else found


def probe_system() -> Finding:
    if sys.platform != "linux":
        return Finding("system", Status.FAIL, f"{platform.system()}, and forkd runs on Linux", "Use a Linux machine")
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        release = {}
    name = release.get("PRETTY_NAME") or release.get("ID") or "unnamed distribution"
    return Finding("system", Status.OK, f"{name}, kernel {platform.release()}")


def judge_architecture(machine: str) -> Finding:
    if machine == ARCHITECTURE:
        return Finding("architecture", Status.OK, machine)
    found = f"{machine or 'unknown'}, and forkd runs on {ARCHITECTURE} only"
    return Finding("architecture", Status.FAIL, found, f"Use an {ARCHITECTURE} machine")


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    found = f"{_dotted(version)} at {executable}"
    if version[:2] >= OLDEST_PYTHON:
        return Finding("python", Status.OK, found)
    return Finding("python", Status.FAIL, found, f"Install Python {_dotted(OLDEST_PYTHON)} or newer")


def probe_qemu() -> Finding:
    path = find_tool(QEMU)
    return judge_qemu(str(path), parse_version(ask(path, "-version")))


def judge_qemu(path: str, version: tuple[int, ...] | None) -> Finding:
    oldest = _dotted(OLDEST_QEMU)
    if version is None:
        remedy = f"Reinstall the package qemu-system-x86, {oldest} or newer"
        return Finding("qemu", Status.FAIL, f"{path} does not print its version", remedy)
    if version < OLDEST_QEMU:
        found = f"{path} is version {_dotted(version)}, too old"
        return Finding("qemu", Status.FAIL, found, f"Install QEMU {oldest} or newer")
    return Finding("qemu", Status.OK, f"{_dotted(version)} at {path}")


def probe_acceleration() -> tuple[Finding, ...]:
    path = find_program(QEMU)
    accelerators = parse_accelerators(ask(path, "-accel", "help")) if path else frozenset()
    return judge_tcg(accelerators), judge_qemu_kvm(accelerators), judge_kvm(probe_kvm())


def parse_accelerators(text: str) -> frozenset[str]:
    """Of tcg and kvm, those that QEMU was built with."""
    return frozenset(line.strip() for line in text.splitlines()) & {"tcg", "kvm"}


def judge_tcg(accelerators: frozenset[str]) -> Finding:
    if "tcg" in accelerators:
        return Finding("tcg", Status.OK, "QEMU can emulate the processor")
    remedy = "Install a QEMU built with TCG (the package qemu-system-x86 is)"
    return Finding("tcg", Status.FAIL, "There is no QEMU that can emulate the processor", remedy)


def judge_qemu_kvm(accelerators: frozenset[str]) -> Finding:
    if "kvm" in accelerators:
        return Finding("qemu with kvm", Status.OK, "QEMU can use KVM where it is usable")
    remedy = "Install a QEMU built with KVM (the package qemu-system-x86 is)"
    return Finding("qemu with kvm", Status.WARN, "There is no QEMU that can use KVM", remedy)


def judge_kvm(verdict: KvmVerdict) -> Finding:
    """Never a failure: without KVM guests run slower, though not in Firecracker.

    `found` begins with the state in a word or two and a colon.
    """
    found = f"{verdict.state.value}: {verdict.explanation} ({verdict.hints})"
    return Finding("kvm", Status.OK if verdict.usable else Status.WARN, found, verdict.remedy)


def probe_busybox() -> Finding:
    path = find_tool("busybox")
    try:
        static = is_static(path.read_bytes())
    except OSError as error:
        return Finding("busybox", Status.FAIL, f"{path} cannot be read: {error.strerror}", "Make it readable")
    if not static:
        found = f"{path} is not a static x86_64 program, which the initramfs needs"
        return Finding("busybox", Status.FAIL, found, "Install it: apt install busybox-static")
    return Finding("busybox", Status.OK, f"static, at {path}")


def is_static(elf: bytes) -> bool:
    """An x86_64 ELF program that asks for no dynamic loader."""
    if len(elf) < 64 or elf[:6] != b"\x7fELF\x02\x01" or elf[18:20] != b"\x3e\x00":
        return False
    (table,) = struct.unpack_from("<Q", elf, 32)
    size, count = struct.unpack_from("<HH", elf, 54)
    offsets = [table + index * size for index in range(count)]
    if size < 4 or any(offset + 4 > len(elf) for offset in offsets):
        return False
    return all(struct.unpack_from("<I", elf, offset)[0] != _PT_INTERP for offset in offsets)


def probe_image_building() -> Finding:
    check_namespaces(_NAMESPACES_S)
    where = "as root" if os.geteuid() == 0 else "in a user namespace"
    return Finding("namespaces", Status.OK, f"images are built {where}")


def probe_userfaultfd(
    device: Path = Path("/dev/userfaultfd"),
    switch: Path = Path("/proc/sys/vm/unprivileged_userfaultfd"),
    status: Path = Path("/proc/self/status"),
) -> Finding:
    if os.access(device, os.R_OK | os.W_OK):
        return Finding("userfaultfd", Status.INFO, f"usable through {device}")
    try:
        allowed = switch.read_text().strip() == "1"
    except OSError:
        return Finding("userfaultfd", Status.INFO, "not in this kernel")
    if allowed or _has_ptrace(status):
        return Finding("userfaultfd", Status.INFO, "usable")
    return Finding("userfaultfd", Status.INFO, "user-mode faults only")


def _has_ptrace(status: Path) -> bool:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(masks) and bool(int(masks[0], 16) & _CAP_SYS_PTRACE)


def _program(name: str, option: str = "--version") -> Probe:
    def probe() -> Finding:
        path = find_tool(name)
        version = parse_version(ask(path, option))
        return Finding(name, Status.OK, f"{_dotted(version)} at {path}" if version else f"at {path}")

    return probe


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


CHECKS = (
    Check("system", probe_system, needed=True),
    Check("architecture", lambda: judge_architecture(platform.machine()), needed=True),
    Check("python", lambda: judge_python(sys.version_info[:3], sys.executable), needed=True),
    Check("qemu", probe_qemu),
    Check("kvm", probe_acceleration),  # and: tcg, qemu with kvm
    Check("firecracker", probe_firecracker),  # and: jailer
    Check("setpriv", _program("setpriv"), needed=True),
    Check("live forks", probe_live_forks),
    Check("cells", probe_cell),
    Check("mmdebstrap", _program("mmdebstrap")),
    Check("mkfs.erofs", _program("mkfs.erofs", "-V")),
    Check("busybox", probe_busybox),
    Check("namespaces", probe_image_building),
    Check("memory", probe_memory),
    Check("home", probe_home, needed=True),
    Check("runtime directory", probe_runtime, needed=True),
    Check("open files", probe_open_files),
    Check("processes", probe_processes),
    Check("cgroup v2", probe_cgroup),
    Check("limits", probe_enforcement),
    Check("userfaultfd", probe_userfaultfd),
    Check("network", probe_network),
)
# Without these no VM runs; the others are for building images, for one engine, or for comfort.
NEEDED = tuple(check.name for check in CHECKS if check.needed)
