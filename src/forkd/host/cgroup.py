"""Control groups (version 2) of VMs, one each: made with its limits before the VM starts, removed when it has ended.

    <base>/<digest of where the VM's directory is>/<name of the directory>

The path follows from the directory, so nothing has to be written down to find the group again. <base> is in a group
that was delegated to us, or, as root, at the top.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forkd.errors import EngineFailed, Unsupported
from forkd.host.finding import Finding, Status
from forkd.model.machine import NO_LIMITS, Limits

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# Where forkd itself lives inside a delegated group: one that hands controllers down has no processes of its own.
# The systemd unit names it too.
LEAF = "daemon"
# How systemd marks a group that it delegates.
_DELEGATED = ("trusted.delegate", "user.delegate")
_MIB = 1 << 20
_CPU_PERIOD_US = 100_000
_DIGEST_CHARS = 12
_REMOVE_DEADLINE_S = 10.0
_REMOVE_RETRY_S = 0.005
# Another thread or forkd may remove the directory that we are about to make a group in: how often we try again.
_TRIES = 100
# The errors for a group that was removed before, and for one that is being removed.
_GONE = (errno.ENOENT, errno.ENODEV)

_BLOCK_DEVICES = Path("/sys/dev/block")
# What each controller limits.
LIMITS = {
    "memory": "A memory limit",
    "cpu": "A CPU limit",
    "pids": "A limit of processes",
    "io": "A limit of disk I/O",
}
_FIELDS = {"memory": "memory_mib", "cpu": "cpus", "pids": "pids", "io": "io_mib_s"}
# Absent where the kernel has no swap.
_OPTIONAL = frozenset({"memory.swap.max"})


@dataclass(frozen=True)
class Place:
    """Controllers are handed down from `top`; groups of VMs are below `base`, which is in it."""

    top: Path
    base: Path
    crowded: bool = False  # we live in `top` itself, and have to move before it can hand controllers down


@dataclass(frozen=True)
class Lack:
    """Why something cannot be done here, and what to do about it."""

    reason: str
    hint: str


@dataclass(frozen=True)
class Group:
    path: Path

    def add(self, pid: int) -> None:
        """From now on the limits hold for it and for every process it starts."""
        try:
            (self.path / "cgroup.procs").write_text(str(pid))
        except ProcessLookupError:
            pass  # it has ended; its watcher is told
        except OSError as error:
            raise EngineFailed(f"Could not put process {pid} into {self.path}: {error.strerror}") from error

    def out_of_memory(self) -> bool:
        """Whether the kernel has killed a process for the memory limit."""
        return _read_table(self.path / "memory.events").get("oom_kill", 0) > 0

    def cpu_seconds(self) -> float:
        return _read_table(self.path / "cpu.stat").get("usage_usec", 0) / 1e6

    def remove(self) -> None:
        """Kill its processes and remove it. Safe to repeat."""
        deadline = time.monotonic() + _REMOVE_DEADLINE_S
        while self.path.exists():
            _kill_all(self.path)
            if not _is_populated(self.path) and _remove_tree(self.path):
                break
            if time.monotonic() > deadline:
                raise EngineFailed(f"Processes in {self.path} do not end", hint="Is their memory or disk stuck?")
            time.sleep(_REMOVE_RETRY_S)
        for emptied in self.path.parents[:2]:
            with contextlib.suppress(OSError):
                emptied.rmdir()


def make_group(
    directory: Path, limits: Limits = NO_LIMITS, files: Sequence[Path] = (), *, root: Path = ROOT, own: Path = OWN
) -> Group:
    """The group of a VM that is about to start in `directory` and reads `files`. Raises Unsupported, leaving none."""
    place = find_place(root, own)
    if isinstance(place, Lack):
        raise _unsupported(next(iter(_controllers(limits)), None), place)
    for controller in _controllers(limits):
        if lack := find_lack(place, controller):
            raise _unsupported(controller, lack)
    devices = find_devices(files) if limits.io_mib_s is not None else []
    group = Group(_group_path(place, directory))
    if group.path.exists():
        group.remove()  # an earlier VM left it
    _make(place, group.path, _controllers(limits))
    try:
        for name, value in render_settings(limits, devices):
            _set(group.path / name, value)
    except BaseException:
        group.remove()
        raise
    return group


def enforceable(limits: Limits, *, root: Path = ROOT, own: Path = OWN) -> Limits:
    """The limits that this host has controllers for."""
    place = find_place(root, own)
    lacking = [controller for controller in _controllers(limits) if find_lack(place, controller)]
    return replace(limits, **{_FIELDS[controller]: None for controller in lacking})


def find_group(directory: Path, *, root: Path = ROOT, own: Path = OWN) -> Group | None:
    place = find_place(root, own)
    if isinstance(place, Lack):
        return None
    path = _group_path(place, directory)
    return Group(path) if path.exists() else None


def remove_groups(under: Path, keep: Container[str] = (), *, root: Path = ROOT, own: Path = OWN) -> None:
    """Remove the groups of all VMs whose directory is, or was, in `under`, except the names in `keep`."""
    place = find_place(root, own)
    if isinstance(place, Lack):
        return
    try:
        groups = [path for path in _group_path(place, under / "any").parent.iterdir() if path.is_dir()]
    except FileNotFoundError:
        return
    for path in groups:
        if path.name not in keep:
            Group(path).remove()


def render_settings(limits: Limits, devices: Sequence[str]) -> list[tuple[str, str]]:
    """What to write into which file of a group; `devices` are 'major:minor'."""
    settings = []
    if limits.memory_mib is not None:
        settings += [("memory.max", str(limits.memory_mib * _MIB)), ("memory.swap.max", "0"), ("memory.oom.group", "1")]
    if limits.cpus is not None:
        settings.append(("cpu.max", f"{round(limits.cpus * _CPU_PERIOD_US)} {_CPU_PERIOD_US}"))
    if limits.pids is not None:
        settings.append(("pids.max", str(limits.pids)))
    if limits.io_mib_s is not None:
        bps = limits.io_mib_s * _MIB
        settings += [("io.max", f"{device} rbps={bps} wbps={bps}") for device in devices]
    return settings


def parse_table(text: str) -> dict[str, int]:
    """The 'name number' lines of memory.events, cpu.stat and cgroup.events."""
    words = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in words if len(pair) == 2 and pair[1].isdecimal()}


def find_devices(files: Sequence[Path], block_devices: Path = _BLOCK_DEVICES) -> list[str]:
    """The whole disks the files are on, as 'major:minor'. Raises Unsupported for a file that is on no disk."""
    devices = []
    for file in files:
        number = file.stat().st_dev
        device = block_devices / f"{os.major(number)}:{os.minor(number)}"
        if not device.exists():
            path = os.path.realpath(file)
            reason = f"{path} is not on a block device (tmpfs, overlay, btrfs and network file systems are not)"
            raise _unsupported("io", Lack(reason, "Put FORKD_HOME on a file system such as ext4 or xfs"))
        disk = device.resolve()
        if (disk / "partition").exists():
            disk = disk.parent
        devices.append((disk / "dev").read_text().strip())
    return sorted(set(devices))


def _controllers(limits: Limits) -> list[str]:
    return [controller for controller, field in _FIELDS.items() if getattr(limits, field) is not None]


def _group_path(place: Place, directory: Path) -> Path:
    digest = hashlib.sha256(os.path.realpath(directory.parent).encode()).hexdigest()[:_DIGEST_CHARS]
    return place.base / digest / directory.name


def _make(place: Place, path: Path, controllers: list[str]) -> None:
    if place.crowded and controllers:
        _move_out(place.top)
    for _ in range(_TRIES):
        try:
            for parent in (place.base, path.parent):
                with contextlib.suppress(FileExistsError):  # not exist_ok, which looks again and may find it gone
                    parent.mkdir()
            for controller in controllers:
                _hand_down(place.top, path.parent, controller)
            path.mkdir()
        except OSError as error:
            if error.errno in _GONE:
                continue  # another forkd removed the parent while it was empty
            raise _unsupported(None, Lack(f"{path} cannot be made: {error.strerror}", "Run forkd as root")) from error
        return
    raise EngineFailed(f"Could not make the group {path}: others keep removing its parent")


def _move_out(group: Path) -> None:
    """Move every process in a delegated group itself to a leaf of it; the processes they start are born there."""
    leaf = Group(group / LEAF)
    leaf.path.mkdir(exist_ok=True)
    for _ in range(_TRIES):
        pids = (group / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            leaf.add(int(pid))


def _hand_down(top: Path, bottom: Path, controller: str) -> None:
    for group in [*reversed([path for path in bottom.parents if path.is_relative_to(top)]), bottom]:
        control = group / "cgroup.subtree_control"
        try:
            if controller not in _read_words(control):
                control.write_text(f"+{controller}")
        except OSError as error:
            if error.errno in _GONE:
                raise
            lack = Lack(
                f"{group} does not hand down the {controller} controller: {error.strerror}",
                "It must have no processes of its own: run forkd in a systemd unit with DelegateSubgroup=daemon",
            )
            raise _unsupported(controller, lack) from error


def _set(path: Path, value: str) -> None:
    if path.name in _OPTIONAL and not path.exists():
        return
    try:
        path.write_text(value)
    except OSError as error:
        lack = Lack(f"the kernel refuses {value!r} in {path.name}: {error.strerror}", "See: forkd doctor")
        raise _unsupported(path.name.partition(".")[0], lack) from error


def _unsupported(controller: str | None, lack: Lack) -> Unsupported:
    what = f"{LIMITS[controller]} cannot be enforced" if controller else "A VM cannot have a control group of its own"
    return Unsupported(f"{what} on this host: {lack.reason}", hint=lack.hint)


def _kill_all(group: Path) -> None:
    with contextlib.suppress(OSError):  # it may be removed meanwhile; a process that lives on is noticed
        if (group / "cgroup.kill").exists():
            (group / "cgroup.kill").write_text("1")
            return
        for pid in _read_words(group / "cgroup.procs"):
            _kill_member(group, pid)


def _kill_member(group: Path, pid: str) -> None:
    with contextlib.suppress(ProcessLookupError):
        pidfd = os.pidfd_open(int(pid))
        try:
            # Look once the pidfd is open: from then on it cannot mean another process.
            if pid in _read_words(group / "cgroup.procs"):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def _is_populated(group: Path) -> bool:
    return _read_table(group / "cgroup.events").get("populated", 0) > 0


def _remove_tree(group: Path) -> bool:
    """Including groups that a VMM made in it. False: the kernel still holds one."""
    try:
        group.rmdir()  # as a rule it has none; and to look for them takes a descriptor, of which there may be no more
        return True
    except FileNotFoundError:
        return True  # another forkd removes it too
    except OSError:
        pass
    try:
        for path, _, _ in os.walk(group, topdown=False, onerror=_raise):
            Path(path).rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        return False
    return True


def _raise(error: OSError) -> None:
    raise error


def _read_table(path: Path) -> dict[str, int]:
    try:
        return parse_table(path.read_text())
    except OSError:
        return {}


def _read_words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []


def find_mount(root: Path = ROOT) -> Path | None:
    """Where cgroup v2 is mounted; it may be beside version 1."""
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
    """From /proc/<pid>/cgroup: controller to path; version 2 has the empty name."""
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
    # systemd starts a service in its group itself, and could not restart it while VMs live on in groups below that
    # have controllers; so in a service we use only the subgroup that DelegateSubgroup= gives us.
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


def probe_cgroup(root: Path = ROOT) -> Finding:
    mount = find_mount(root)
    if mount is None:
        return Finding("cgroup v2", Status.INFO, "not mounted")
    controllers = (mount / "cgroup.controllers").read_text().split()
    return Finding("cgroup v2", Status.INFO, " ".join(controllers) or f"no controllers in it, at {mount}")


def probe_enforcement(root: Path = ROOT, own: Path = OWN) -> Finding:
    """Which limits a sandbox can have here. Without any, only sandboxes with limits are refused."""
    place = find_place(root, own)
    lack = find_lack(place, *LIMITS)
    if lack is None:
        return Finding("limits", Status.OK, f"{', '.join(LIMITS)} of each sandbox")
    can = [controller for controller in LIMITS if find_lack(place, controller) is None]
    some = f"only {', '.join(can)}" if can else "none"
    return Finding("limits", Status.WARN, f"{some}: {lack.reason}", lack.hint)
