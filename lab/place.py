"""Whether this host can be the lab itself: KVM that runs Linux, root, and a full cgroup v2."""

from __future__ import annotations

import os
from pathlib import Path

from forkd.host.cgroup import LIMITS
from forkd.host.kvm_probe import probe_kvm

CONTROLLERS = frozenset(LIMITS)
_CGROUP = Path("/sys/fs/cgroup")


def find_lack() -> str | None:
    """What this host lacks, or None when tests for the lab can run here. The cheap looks come first."""
    if os.geteuid() != 0:
        return "this is not root"
    if missing := CONTROLLERS - read_controllers():
        return f"cgroup v2 lacks {', '.join(sorted(missing))}"
    verdict = probe_kvm()
    return None if verdict.usable else f"KVM is not usable: {verdict.explanation}"


def read_controllers(root: Path = _CGROUP) -> frozenset[str]:
    try:
        return frozenset((root / "cgroup.controllers").read_text().split())
    except OSError:
        return frozenset()
