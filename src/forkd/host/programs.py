"""Probes of the programs forkd runs: present, new enough, of the right kind. Each is asked for its version at most."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path

from forkd.host.finding import Finding, Status

QEMU = "qemu-system-x86_64"
OLDEST_QEMU = (7, 2)
_ANSWER_S = 5.0
# A user's PATH often lacks these, where some of the programs live.
_SBIN = "/usr/local/sbin:/usr/sbin:/sbin"
_PT_INTERP = 3


def find_program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SBIN}")


def ask(*argv: str) -> str:
    """What a program prints, whatever its exit status; nothing when it cannot be run or does not end."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_ANSWER_S,
            check=False,
            env={"PATH": f"{os.defpath}:{_SBIN}", "LC_ALL": "C.UTF-8"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def parse_version(text: str) -> tuple[int, ...] | None:
    match = re.search(r"\b(\d+(?:\.\d+)+)", text)
    return tuple(map(int, match[1].split("."))) if match else None


def probe_qemu() -> Finding:
    path = find_program(QEMU)
    if path is None:
        return _missing("qemu", QEMU, "qemu-system-x86")
    return judge_qemu(path, parse_version(ask(path, "-version")))


def judge_qemu(path: str, version: tuple[int, ...] | None) -> Finding:
    oldest = _dotted(OLDEST_QEMU)
    if version is None:
        remedy = f"Reinstall the package qemu-system-x86, {oldest} or newer"
        return Finding("qemu", Status.FAIL, f"{path} does not tell its version", remedy)
    if version < OLDEST_QEMU:
        found = f"{path} is version {_dotted(version)}, too old"
        return Finding("qemu", Status.FAIL, found, f"Install QEMU {oldest} or newer")
    return Finding("qemu", Status.OK, f"{_dotted(version)} at {path}")


def probe_accelerators() -> frozenset[str]:
    """What QEMU was built with, of tcg and kvm; empty without QEMU."""
    path = find_program(QEMU)
    return parse_accelerators(ask(path, "-accel", "help")) if path else frozenset()


def parse_accelerators(text: str) -> frozenset[str]:
    return frozenset(line.strip() for line in text.splitlines()) & {"tcg", "kvm"}


def judge_tcg(accelerators: frozenset[str]) -> Finding:
    if "tcg" in accelerators:
        return Finding("tcg", Status.OK, "QEMU can emulate the processor")
    remedy = "Install a QEMU built with TCG (the package qemu-system-x86 is)"
    return Finding("tcg", Status.FAIL, "No QEMU here that can emulate the processor", remedy)


def judge_qemu_kvm(accelerators: frozenset[str]) -> Finding:
    if "kvm" in accelerators:
        return Finding("qemu with kvm", Status.OK, "QEMU can use KVM where it is usable")
    remedy = "Install a QEMU built with KVM (the package qemu-system-x86 is)"
    return Finding("qemu with kvm", Status.WARN, "No QEMU here that can use KVM", remedy)


def probe_mmdebstrap() -> Finding:
    return _probe_versioned("mmdebstrap", "mmdebstrap")


def probe_erofs() -> Finding:
    return _probe_versioned("mkfs.erofs", "erofs-utils", "-V")


def probe_setpriv() -> Finding:
    return _probe_versioned("setpriv", "util-linux")


def probe_busybox() -> Finding:
    path = find_program("busybox")
    if path is None:
        return _missing("busybox", "busybox", "busybox-static")
    try:
        static = is_static(Path(path).read_bytes())
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


def probe_optional(name: str, purpose: str) -> Finding:
    """A program nothing depends on today."""
    path = find_program(name)
    return Finding(name, Status.INFO, f"at {path}" if path else f"not installed ({purpose})")


def _probe_versioned(name: str, package: str, option: str = "--version") -> Finding:
    path = find_program(name)
    if path is None:
        return _missing(name, name, package)
    version = parse_version(ask(path, option))
    return Finding(name, Status.OK, f"{_dotted(version)} at {path}" if version else f"at {path}")


def _missing(name: str, program: str, package: str) -> Finding:
    return Finding(name, Status.FAIL, f"{program} is not installed", f"Install it: apt install {package}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
