"""Probes of kernel facilities that nothing depends on today; later engines and networking may."""

from __future__ import annotations

import os
from pathlib import Path

from forkd.host.finding import Finding, Status

_CAP_SYS_PTRACE = 1 << 19


def probe_tun(device: Path = Path("/dev/net/tun")) -> Finding:
    if not device.exists():
        return Finding("tun", Status.INFO, f"no {device}")
    usable = os.access(device, os.R_OK | os.W_OK)
    return Finding("tun", Status.INFO, f"{device} is {'usable' if usable else 'not open to this user'}")


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
