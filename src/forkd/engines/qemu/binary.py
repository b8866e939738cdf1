"""Which QEMU this host has, and what a frozen VM depends on in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from forkd.errors import HostLacks
from forkd.host.cpu import parse_cpu

_NAME = "qemu-system-x86_64"
_VERSION_DEADLINE_S = 20.0
_VERSION = re.compile(r"version (\S+)(?: \(([^)]*)\))?")


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


def render_platform(binary: Binary, accelerator: str, cpuinfo: str) -> dict[str, str]:
    """What a frozen VM must find again. Emulated CPUs are the same on every host; with KVM the CPU is the host's."""
    cpu = "emulated" if accelerator == "tcg" else parse_cpu(cpuinfo)
    return {"qemu": binary.version, "accelerator": accelerator, "cpu": cpu}
