"""Firecracker and its jailer on this host: where they are, which version, and what doctor says about them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import HostLacks
from forkd.host.finding import Finding, Status
from forkd.host.tools import find_program, run_tool

FIRECRACKER, FIRECRACKER_SETTING = "firecracker", "FORKD_FIRECRACKER"
JAILER, JAILER_SETTING = "jailer", "FORKD_JAILER"
OLDEST = (1, 7)
# Older ones tell devices on the kernel's command line only, where Debian's kernels do not look for them.
_OLDEST_WITH_ACPI = (1, 8)

_ANSWER_S = 5.0
_VERSION = re.compile(r"^(?:Firecracker|Jailer) v?(\d+(?:\.\d+)+\S*)", re.MULTILINE)
_WHERE = "https://github.com/firecracker-microvm/firecracker/releases"
_INSTALL = f"Install Firecracker {OLDEST[0]}.{OLDEST[1]} or newer and its jailer from {_WHERE}"
_NO_JAIL = "none, and no cell, without root: firecracker must be asked for, and refuses VMs unless cell is best-effort"


@dataclass(frozen=True)
class Binaries:
    """Resolved paths, because a jail is named after the program in it. The jailer is None when we are not root."""

    firecracker: Path
    version: str
    jailer: Path | None


def find_binaries() -> Binaries:
    """Raises HostLacks, with the last lines of a program that does not run."""
    firecracker = _get_firecracker()
    version = ask_version(firecracker)
    check_version(firecracker, version)
    if not _is_root():
        return Binaries(firecracker, version, None)
    jailer = _get_jailer(firecracker)
    ask_version(jailer)
    return Binaries(firecracker, version, jailer)


def ask_version(path: Path) -> str:
    """Raises HostLacks."""
    lines: list[str] = []
    try:
        run_tool(
            [path, "--version"],
            doing=f"{path} --version",
            failure=HostLacks,
            deadline_s=_ANSWER_S,
            on_line=lines.append,
        )
        return parse_version("\n".join(lines))
    except HostLacks as error:
        raise HostLacks(error.message, hint=error.hint or _INSTALL, details=error.details) from error


def parse_version(text: str) -> str:
    """As printed, with its suffix: snapshots are only compatible within one build."""
    found = _VERSION.search(text)
    if found is None:
        raise HostLacks("The program does not print its version", details=text or None)
    return found[1]


def check_version(path: Path, version: str) -> None:
    if parse_numbers(version) < OLDEST:
        raise HostLacks(f"{path} is version {version}, too old", hint=_INSTALL)


def probe_firecracker() -> tuple[Finding, ...]:
    """Firecracker, and its jailer."""
    try:
        path = _find_firecracker()
        if path is None:
            absent = f"not installed; the engine firecracker, for hosts with KVM, needs it: {_WHERE}"
            return Finding(FIRECRACKER, Status.INFO, absent), Finding(JAILER, Status.INFO, "not looked for")
        version = ask_version(path)
        check_version(path, version)
    except HostLacks as error:
        return Finding.lacking(FIRECRACKER, error), Finding(JAILER, Status.INFO, "not looked for")
    return judge_version(path, version), _probe_jailer(path)


def judge_version(path: Path, version: str) -> Finding:
    """OK: it boots the images that forkd builds."""
    found = f"{version} at {path}"
    if parse_numbers(version) < _OLDEST_WITH_ACPI:
        told = f"{found}: has no ACPI, without which Debian's kernels find no disk"
        return Finding(FIRECRACKER, Status.WARN, told, "Install Firecracker 1.8 or newer")
    return Finding(FIRECRACKER, Status.OK, found)


def _probe_jailer(firecracker: Path) -> Finding:
    if not _is_root():
        return Finding(JAILER, Status.WARN, _NO_JAIL, "Run forkd as root: each Firecracker is then in a cell or a jail")
    try:
        path = _get_jailer(firecracker)
        return Finding(JAILER, Status.OK, f"{ask_version(path)} at {path}")
    except HostLacks as error:
        return Finding.lacking(JAILER, error)


def _get_firecracker() -> Path:
    path = _find_firecracker()
    if path is None:
        raise HostLacks("firecracker is not installed", hint=f"{_INSTALL}, or set {FIRECRACKER_SETTING} to its path")
    return path


def _find_firecracker() -> Path | None:
    return _find_set(FIRECRACKER_SETTING) or _resolved(find_program(FIRECRACKER))


def _get_jailer(firecracker: Path) -> Path:
    """Its own setting, else beside Firecracker (`jailer-v1.12.1-x86_64` in a release), else on PATH."""
    if FIRECRACKER not in firecracker.name:
        raise HostLacks(
            f"The jailer only runs a program with {FIRECRACKER} in its name, and {firecracker} has not",
            hint="Rename it",
        )
    beside = firecracker.with_name(firecracker.name.replace(FIRECRACKER, JAILER))
    path = _find_set(JAILER_SETTING) or _first_program([beside, firecracker.with_name(JAILER)])
    path = path or _resolved(find_program(JAILER))
    if path is None:
        raise HostLacks(
            "The jailer of Firecracker is not installed, and as root forkd runs Firecracker in a jail",
            hint=f"Put the jailer of the same release beside {firecracker}, or set {JAILER_SETTING} to its path",
        )
    return path


def _find_set(setting: str) -> Path | None:
    value = os.environ.get(setting)
    if not value:
        return None
    path = _first_program([Path(value)])
    if path is None:
        raise HostLacks(
            f"{setting} is {value}, which is not a program", hint=f"Set it to the path of a program: {_WHERE}"
        )
    return path


def _first_program(paths: Iterable[Path]) -> Path | None:
    return next((path.resolve() for path in paths if path.is_file() and os.access(path, os.X_OK)), None)


def _resolved(path: str | None) -> Path | None:
    return Path(path).resolve() if path is not None else None


def _is_root() -> bool:
    return os.geteuid() == 0


def parse_numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
