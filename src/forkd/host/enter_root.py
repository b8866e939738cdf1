"""A program: make a directory the root of this process, with few rights, and run a command there.

It runs as root of fresh mount and pid namespaces (`run_namespaced`) and takes one argument, JSON:

    {"root": DIR, "run": DIR, "argv": [...], "env": {...}}

`run` becomes the command's /run. The host's files are out of reach, not only out of sight: the old root is unmounted.
Run by path with `-I -S`, so it imports nothing of forkd.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
_MS_BIND, _MS_REC = 0x1000, 0x4000
# As statvfs shows them, and as mount takes them: nosuid, noexec, noatime, nodiratime, relatime.
_FLAGS = {0x2: 0x2, 0x8: 0x8, 0x400: 0x400, 0x800: 0x800, 0x1000: 0x200000}
_MNT_DETACH = 2
_SYS_PIVOT_ROOT, _SYS_CAPSET = 155, 126
_CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWNET = 0x04000000, 0x08000000, 0x40000000
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITY_VERSION = 0x20080522
_CAPABILITIES = 64
_EINVAL = 22

# To install files of any owner: chown, dac_override, fowner, fsetid, kill, setgid, setuid. Not what reaches the host
# past a root directory: devices (mknod), mounts (sys_admin), files by handle (dac_read_search), modules, tracing.
_KEPT = (0, 1, 3, 4, 5, 6, 7)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
_NOT_STARTED = 127

_libc = ctypes.CDLL(None, use_errno=True)


def main(plan: Mapping[str, object]) -> int:
    root, run, argv, env = plan["root"], plan["run"], plan["argv"], plan["env"]
    assert isinstance(root, str) and isinstance(run, str) and isinstance(argv, list) and isinstance(env, dict)
    try:
        # No network: not even an interface that is up.
        _check(_libc.unshare(_CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS), "new namespaces")
        _mount(root, root, flags=_MS_BIND | _MS_REC)
        os.chdir(root)
        _furnish(run)
        _pivot()
        _drop_rights()
    except OSError as error:
        print(f"Entering the image's root failed: {error}", flush=True)
        return _NOT_STARTED
    return _execute(argv, env)


def _furnish(run: str) -> None:
    for name in ("dev", "proc", "run", "tmp"):
        if not Path(name).is_symlink():
            Path(name).mkdir(exist_ok=True)
        # A mount follows links, and this one might lead out.
        if Path(name).is_symlink() or not Path(name).is_dir():
            raise NotADirectoryError(f"/{name} of the image is not a directory")
    _mount(run, "run", flags=_MS_BIND)
    _mount("tmpfs", "dev", kind="tmpfs", flags=_MS_NOSUID, options="mode=755,size=256m")
    for name in _DEVICES:
        Path("dev", name).touch()
        _mount(f"/dev/{name}", f"dev/{name}", flags=_MS_BIND)
        # It can still be written to, but the host's device keeps its mode and owner.
        _mount("none", f"dev/{name}", flags=_MS_REMOUNT | _MS_BIND | _MS_RDONLY | _mount_flags(f"dev/{name}"))
    for name, target in _LINKS.items():
        Path("dev", name).symlink_to(target)
    Path("dev/shm").mkdir()
    Path("dev/shm").chmod(0o1777)
    try:
        # Processes only: the rest of /proc tells of the host, and root may change it.
        _mount("proc", "proc", kind="proc", flags=_MS_NOSUID | _MS_NODEV | _MS_NOEXEC, options="subset=pid")
    except OSError:
        # A container's user may not mount it; most commands need none.
        print("There is no /proc in this step: it cannot be mounted here", flush=True)


def _pivot() -> None:
    # The old root is stacked on the new one, and taken away from there: no directory of the image is needed for it.
    _check(_libc.syscall(_SYS_PIVOT_ROOT, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount of the old root")
    os.chdir("/")


def _drop_rights() -> None:
    for number in range(_CAPABILITIES):
        if number not in _KEPT and _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            if ctypes.get_errno() == _EINVAL:
                break  # the kernel knows no more
            _check(-1, "dropping capabilities")
    kept = sum(1 << number for number in _KEPT)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    # Effective, permitted, inheritable; then the same for the upper half.
    data = (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)
    _check(_libc.syscall(_SYS_CAPSET, ctypes.byref(header), ctypes.byref(data)), "capset")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def _execute(argv: list[str], env: Mapping[str, str]) -> int:
    try:
        os.execve(argv[0], argv, env)
    except OSError as error:
        print(f"{argv[0]} of the image cannot be run: {error.strerror}", flush=True)
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
