"""A program: put this process into a cell, and run a command there that it cannot leave.

It takes one argument, JSON, as `render_plan` in cell_plan.py makes it:

    {"user": ID | null, "files": [...], "copies": [...], "writable": [...], "devices": [...],
     "names": {PATH: NAME}, "empty": [...], "directory": PATH,
     "limits": {NUMBER: [SOFT, HARD]}, "dies_with": PID | null, "argv": [...]}

`user`: as root, the user and group to become; null: what it is, in a user namespace of its own. The command finds under
their own names: `files`, which it may read; `copies`, which it may read though their owner is another; `writable`
files and directories, which must be its own; `devices`. Those in `names` it finds under that name instead. `empty` are
directories with nothing in them. Nothing else. It starts in `directory`. Run by path with `-I -S`, so it imports
nothing of forkd.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shutil
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
# As statvfs shows them, and as mount takes them: nosuid, nodev, noexec, noatime, nodiratime, relatime.
_FLAGS = {0x2: 0x2, 0x4: 0x4, 0x8: 0x8, 0x400: 0x400, 0x800: 0x800, 0x1000: 0x200000}
_MNT_DETACH = 2
_SYS_PIVOT_ROOT, _SYS_CAPSET = 155, 126
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = (
    *(0x00020000, 0x04000000, 0x08000000),
    *(0x10000000, 0x40000000),
)
_NAMESPACES = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWNET
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 1, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64
_EINVAL = 22
_SIGKILL = 9
# Directories and places to mount on take a page each at most.
_ROOT_SLACK_BYTES = 4 * 1024 * 1024
_NAME = "vm"
_NOT_STARTED = 127

_libc = ctypes.CDLL(None, use_errno=True)


def main(plan: Mapping[str, Any]) -> int:
    try:
        if plan["user"] is None:
            _enter_user_namespace()
        _check(_libc.unshare(_NAMESPACES), "new namespaces")
        _check(_libc.sethostname(_NAME.encode(), len(_NAME)), "sethostname")
        _make_root(plan)
        for number, (soft, hard) in plan["limits"].items():
            _lower_limit(int(number), soft, hard)
        _drop_rights(plan["user"])
        if plan["dies_with"] is not None:
            _die_with(plan["dies_with"])
        os.chdir(plan["directory"])
    except OSError as error:
        print(f"Entering the cell failed: {error}", flush=True)
        return _NOT_STARTED
    return _execute(plan["argv"])


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(_CLONE_NEWUSER), "a new user namespace")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")


def _make_root(plan: Mapping[str, Any]) -> None:
    # Nothing that is mounted from here on is seen outside.
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    copied_bytes = sum(Path(path).stat().st_size for path in plan["copies"])
    # Over a directory that every host has and nobody needs here.
    root = "/tmp"
    options = f"mode=755,size={copied_bytes + _ROOT_SLACK_BYTES}"
    copies = {path: os.open(path, os.O_RDONLY) for path in plan["copies"]}
    binds = {path: os.open(path, os.O_PATH) for key in ("writable", "files") for path in plan[key]}
    devices = {path: Path(path).stat() for path in plan["devices"]}
    # A device node works only where devices may be; one that is bound brings its own.
    flags = _MS_NOSUID if plan["user"] is not None and devices else _MS_NOSUID | _MS_NODEV
    bound_devices = {path: os.open(path, os.O_PATH) for path in devices if plan["user"] is None}
    _mount("tmpfs", root, kind="tmpfs", flags=flags, options=options)
    os.chdir(root)
    for path, fd in copies.items():
        _copy(fd, _place(path))
    for path in plan["empty"]:
        _place(path).mkdir()
    # What can be written to first: a file may lie in a directory of those.
    for path, fd in binds.items():
        _bind(fd, plan["names"].get(path, path), writable=path in plan["writable"])
    for path, fd in bound_devices.items():
        _bind(fd, path, writable=True)
    for path in devices.keys() - bound_devices.keys():
        _make_device(devices[path], _place(path), plan["user"])
    _mount("none", ".", flags=_MS_REMOUNT | _MS_BIND | _MS_RDONLY | flags)
    # The old root is stacked on the new one, and taken away from there: no directory is needed for it.
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _place(path: str) -> Path:
    """Where a path of the host is in the new root, with the directories above it."""
    place = Path(path.lstrip("/"))
    place.parent.mkdir(parents=True, exist_ok=True)
    return place


def _bind(fd: int, path: str, *, writable: bool) -> None:
    place = _place(path)
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    _mount(f"/proc/self/fd/{fd}", str(place), flags=_MS_BIND | _MS_REC)
    kept = _mount_flags(str(place)) | _MS_NOSUID | (0 if writable else _MS_RDONLY)
    _mount("none", str(place), flags=_MS_REMOUNT | _MS_BIND | kept)
    os.close(fd)


def _copy(fd: int, place: Path) -> None:
    with open(fd, "rb") as source, place.open("xb") as copy:
        shutil.copyfileobj(source, copy)
    place.chmod(0o444)


def _make_device(seen: os.stat_result, place: Path, user: int) -> None:
    os.mknod(place, stat.S_IFMT(seen.st_mode) | 0o600, seen.st_rdev)
    os.chown(place, user, user)


def _lower_limit(number: int, soft: int, hard: int) -> None:
    """Never above what we have ourselves."""
    _, most = resource.getrlimit(number)

    def bounded(value: int) -> int:
        return value if most == resource.RLIM_INFINITY else most if value < 0 else min(value, most)

    resource.setrlimit(number, (bounded(soft), bounded(hard)))


def _drop_rights(user: int | None) -> None:
    for number in range(_CAPABILITIES):
        if _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            if ctypes.get_errno() == _EINVAL:
                break  # the kernel knows no more
            _check(-1, "dropping capabilities")
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.syscall(_SYS_CAPSET, ctypes.byref(header), ctypes.byref(none)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _die_with(parent: int) -> None:
    """The kernel forgets the death signal of a process that becomes another user."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0), "the death signal")
    # Had the parent died before, the signal would never come.
    if os.getppid() != parent:
        raise OSError(f"process {parent} has ended")


def _execute(argv: list[str]) -> int:
    try:
        os.execv(argv[0], argv)
    except OSError as error:
        print(f"{argv[0]} cannot be run in its cell: {error.strerror}", flush=True)
    return _NOT_STARTED


def _mount(source: str, target: str, *, kind: str = "", flags: int = 0, options: str = "") -> None:
    given = (os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, options.encode() or None)
    _check(_libc.mount(*given), f"mount on {target}")


def _mount_flags(path: str) -> int:
    """Those that a mount has; in a user namespace a remount may not take them away."""
    seen = os.statvfs(path).f_flag
    return sum(flag for bit, flag in _FLAGS.items() if seen & bit)


def _check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
