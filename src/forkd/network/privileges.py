"""How the hub gives up its rights: root only in a user namespace of its own, which owns all that it makes.

Called by the hub's process before it has threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import sys
from pathlib import Path

from forkd.host.tap import TUN, TUN_DEVICE

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MS_NOSUID, _MS_NOEXEC = 0x1000, 0x4000, 1 << 18, 0x2, 0x8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38

_libc = ctypes.CDLL(None, use_errno=True)


def give_up_rights(directory: Path, uid: int, user_namespace: int | None) -> None:
    """`user_namespace`: one to join, of a hub before.

    As root the hub becomes `uid` outside of its namespace, and gets a node of tun in a file system that only it sees:
    the host's may be for root alone.
    """
    if os.geteuid() == 0:
        _make_private_tun(directory)
        os.setgroups([])
    if user_namespace is None:
        _new_user_namespace(uid)
    else:
        _check(_libc.setns(user_namespace, _CLONE_NEWUSER), "joining the user namespace")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    # The daemon opens what we have in /proc; a change of user had closed that.
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "PR_SET_DUMPABLE")
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def die_with(parent: int) -> None:
    """After every change of user, which takes it back."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        sys.exit("The daemon is gone")


def raise_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _make_private_tun(directory: Path) -> None:
    _check(_libc.unshare(_CLONE_NEWNS), "a mount namespace")
    _check(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "private mounts")
    target = os.fsencode(directory)
    _check(_libc.mount(b"tmpfs", target, b"tmpfs", _MS_NOSUID | _MS_NOEXEC, b"mode=755,size=64k"), "a tmpfs")
    node = directory / "tun"
    os.mknod(node, stat.S_IFCHR | 0o666, TUN_DEVICE)
    node.chmod(0o666)
    # Over the host's, in our own view: pasta looks for it there, and the way to ours may be closed to another user.
    _check(_libc.mount(os.fsencode(node), os.fsencode(TUN), None, _MS_BIND, None), f"a node over {TUN}")


def _new_user_namespace(uid: int) -> None:
    outside, group = (uid, uid) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    privileged = os.geteuid() == 0
    begin, told = os.pipe()
    # Only a process outside may map another user than its own.
    mapper = os.fork()
    if mapper == 0:
        with contextlib.suppress(BaseException):
            os.close(told)
            if os.read(begin, 1):
                _map(os.getppid(), outside, group)
                os._exit(0)
        os._exit(1)
    os.close(begin)
    try:
        _check(_libc.unshare(_CLONE_NEWUSER), "a user namespace")
        if privileged:
            os.write(told, b"\n")
    finally:
        os.close(told)
        _, status = os.waitpid(mapper, 0)
    if not privileged:
        Path("/proc/self/setgroups").write_text("deny")
        _map(os.getpid(), outside, group)
    elif status != 0:
        raise OSError(f"mapping user {uid}: not permitted")


def _map(pid: int, uid: int, gid: int) -> None:
    Path(f"/proc/{pid}/uid_map").write_text(f"0 {uid} 1\n")
    Path(f"/proc/{pid}/gid_map").write_text(f"0 {gid} 1\n")


def _check(result: int, doing: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{doing}: {os.strerror(number)}")
