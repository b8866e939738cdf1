"""Where control groups of VMs can be made: in a group that was delegated to us, or, as root, at the top."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Where forkd itself lives inside a delegated group: one that hands controllers down has no processes of its own.
# The systemd unit names it too.
LEAF = "daemon"
# How systemd marks what it leaves to us.
_DELEGATED = ("trusted.delegate", "user.delegate")


@dataclass(frozen=True)
class Place:
    """Controllers are handed down from `top`; groups of VMs are below `base`, which is in it."""

    top: Path
    base: Path
    crowded: bool = False  # we still live in `top` itself, and have to move before it can hand anything down


@dataclass(frozen=True)
class Lack:
    """Why something cannot be done here, and what to do about it."""

    reason: str
    hint: str


def find_mount(root: Path = ROOT) -> Path | None:
    """Of cgroup v2, which may be beside version 1."""
    return next((path for path in (root, root / "unified") if (path / "cgroup.controllers").exists()), None)


def find_place(root: Path = ROOT, own: Path = OWN) -> Place | Lack:
    mount = find_mount(root)
    if mount is None:
        return Lack("cgroup v2 is not mounted", "Boot with systemd.unified_cgroup_hierarchy=1")
    place = _delegated_place(mount, own)
    if place is None and _is_writable(mount):
        place = Place(mount, mount / "forkd")
    if place is None:
        return Lack(
            f"this user may not make groups in {mount}",
            "Run forkd as root, or in a systemd unit or scope with Delegate=yes and DelegateSubgroup=daemon",
        )
    if not _is_writable(place.top):
        return Lack(f"{place.top} is read-only", "A systemd unit needs ProtectControlGroups=no")
    return place


def find_lack(place: Place | Lack, *controllers: str) -> Lack | None:
    """Why groups cannot have all of the controllers."""
    if isinstance(place, Lack):
        return place
    found = (place.top / "cgroup.controllers").read_text().split()
    missing = [controller for controller in controllers if controller not in found]
    if not missing:
        return None
    return Lack(
        f"{place.top} has no controller for {', '.join(missing)}",
        "cgroup v1 has it, the kernel was booted without it, or it is not handed down to this group",
    )


def parse_groups(text: str) -> dict[str, str]:
    """Of /proc/<pid>/cgroup: controller to path; version 2 is the controller with the empty name."""
    groups: dict[str, str] = {}
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            groups.update(dict.fromkeys(controllers.split(","), path))
    return groups


def _delegated_place(mount: Path, own: Path) -> Place | None:
    try:
        group = parse_groups(own.read_text()).get("")
    except OSError:
        return None
    if group is None:
        return None
    ours = mount / group.lstrip("/")
    if ours.name == LEAF and _is_delegated(ours.parent):
        return Place(ours.parent, ours.parent / "vms")
    # systemd starts a service in its group itself. It could not do so again while VMs live on in groups below that
    # have controllers; so of a service we take no more than the subgroup which DelegateSubgroup= gives us.
    if _is_delegated(ours) and not ours.name.endswith(".service"):
        return Place(ours, ours / "vms", crowded=True)
    return None


def _is_delegated(group: Path) -> bool:
    for name in _DELEGATED:
        with contextlib.suppress(OSError):
            if os.getxattr(group, name) == b"1":
                return True
    return False


def _is_writable(group: Path) -> bool:
    return os.access(group, os.W_OK, effective_ids=True)
