"""Probes of what the host is: operating system, processor, Python."""

from __future__ import annotations

import platform
import sys

from forkd.host.finding import Finding, Status

OLDEST_PYTHON = (3, 11)
ARCHITECTURE = "x86_64"


def probe_system() -> Finding:
    if sys.platform != "linux":
        return Finding("system", Status.FAIL, f"{platform.system()}, and forkd runs on Linux", "Use a Linux machine")
    return Finding("system", Status.OK, f"{_distribution()}, kernel {platform.release()}")


def _distribution() -> str:
    try:
        release = platform.freedesktop_os_release()
    except OSError:
        return "unnamed distribution"
    return release.get("PRETTY_NAME") or release.get("ID") or "unnamed distribution"


def probe_architecture() -> Finding:
    return judge_architecture(platform.machine())


def judge_architecture(machine: str) -> Finding:
    if machine == ARCHITECTURE:
        return Finding("architecture", Status.OK, machine)
    found = f"{machine or 'unknown'}, and forkd runs on {ARCHITECTURE} only"
    return Finding("architecture", Status.FAIL, found, f"Use an {ARCHITECTURE} machine")


def probe_python() -> Finding:
    return judge_python(sys.version_info[:3], sys.executable)


def judge_python(version: tuple[int, ...], executable: str) -> Finding:
    found = ".".join(map(str, version)) + f" at {executable}"
    if version[:2] >= OLDEST_PYTHON:
        return Finding("python", Status.OK, found)
    return Finding("python", Status.FAIL, found, f"Install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer")
