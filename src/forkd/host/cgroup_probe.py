"""What control groups allow us and our VMs. Reading only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forkd.host.cgroup import LIMITS
from forkd.host.cgroup_place import OWN, ROOT, find_lack, find_mount, find_place, parse_groups
from forkd.host.finding import Finding, Status

# Version 1 writes 'no limit' as a huge number.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class CgroupLimits:
    """Of the groups we are in, version 2 or 1. None where there is no limit, or none that can be seen."""

    memory_left_bytes: int | None = None
    pids_max: int | None = None


def probe_cgroup(root: Path = ROOT) -> Finding:
    mount = find_mount(root)
    if mount is None:
        return Finding("cgroup v2", Status.INFO, "not mounted")
    controllers = (mount / "cgroup.controllers").read_text().split()
    return Finding("cgroup v2", Status.INFO, " ".join(controllers) or f"no controllers in it, at {mount}")


def probe_enforcement(root: Path = ROOT, own: Path = OWN) -> Finding:
    """Which limits a sandbox can have here; without any, those that ask for none run all the same."""
    place = find_place(root, own)
    lack = find_lack(place, *LIMITS)
    if lack is None:
        return Finding("limits", Status.OK, f"{', '.join(LIMITS)} of each sandbox")
    can = [controller for controller in LIMITS if find_lack(place, controller) is None]
    return Finding(
        "limits", Status.WARN, f"only {', '.join(can)}: {lack.reason}" if can else f"none: {lack.reason}", lack.hint
    )


def probe_limits(root: Path = ROOT, own: Path = OWN) -> CgroupLimits:
    try:
        groups = parse_groups(own.read_text())
    except OSError:
        return CgroupLimits()
    memory = [_left(path, limit, used) for path, limit, used in _memory_files(root, groups)]
    pids = [_read_number(path / "pids.max") for path in _places(root, groups, "pids")]
    return CgroupLimits(_smallest(memory), _smallest(pids))


def _memory_files(root: Path, groups: dict[str, str]) -> list[tuple[Path, str, str]]:
    found = []
    for path in _places(root, groups, "memory"):
        found.append((path, "memory.max", "memory.current"))
        found.append((path, "memory.limit_in_bytes", "memory.usage_in_bytes"))
    return found


def _places(root: Path, groups: dict[str, str], controller: str) -> list[Path]:
    """Our group and those above it, in either version; in a container the path may not exist, the root does."""
    places: list[Path] = []
    for base, path in ((root, groups.get("")), (root / controller, groups.get(controller))):
        if path is not None:
            leaf = base / path.lstrip("/")
            places += [leaf, *(parent for parent in leaf.parents if parent.is_relative_to(base))]
    return places


def _left(path: Path, limit: str, used: str) -> int | None:
    most, now = _read_number(path / limit), _read_number(path / used)
    return None if most is None or now is None else max(0, most - now)


def _read_number(path: Path) -> int | None:
    try:
        number = int(path.read_text())
    except (OSError, ValueError):
        return None
    return number if number < _NO_LIMIT else None


def _smallest(numbers: list[int | None]) -> int | None:
    return min((number for number in numbers if number is not None), default=None)
