"""What takes the place of a network interface where there is to be none: nothing comes out, what goes in is gone."""

from __future__ import annotations

import array
import ctypes
import functools
import os
import socket
import subprocess
import sys

from forkd.host.tap import has_tun

_DEADLINE_S = 20.0
_SIGNAL_SET_BYTES = 128
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000

# In a process of its own: a process with threads, as ours, cannot enter a user namespace. The interface is never up.
_MAKE = """\
import array, ctypes, fcntl, os, socket, struct, sys
door, flags = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(flags):
    sys.exit(os.strerror(ctypes.get_errno()))
tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
fcntl.ioctl(tun, 0x400454CA, struct.pack("16sH22x", b"nowhere", 0x1002))
socket.socket(fileno=door).sendmsg([b"1"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [tun]))])
"""


@functools.cache
def find_dead_tap() -> int | None:
    """A tap that is never up, in a network namespace with nothing else; None where this host has none for us.

    It stays open. Any number of VMs may have it at a time: no packet gets in, so none comes out. A VMM that was told
    of a tap at its start can be given another one later.
    """
    if not has_tun():
        return None
    ours, theirs = socket.socketpair()
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    command = [sys.executable, "-I", "-S", "-c", _MAKE, str(theirs.fileno()), str(flags)]
    with ours, theirs:
        try:
            subprocess.run(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, timeout=_DEADLINE_S, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return _receive(ours)


def _receive(sock: socket.socket) -> int | None:
    fds = array.array("i")
    for _, _, data in sock.recvmsg(1, socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC)[1]:
        fds.frombytes(data[: fds.itemsize])
    return fds[0] if fds else None


def open_nothing() -> int:
    """A descriptor that is never ready and takes nothing, and is no way to another process: a signalfd of no signal."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.signalfd(-1, bytes(_SIGNAL_SET_BYTES), os.O_CLOEXEC | os.O_NONBLOCK)
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return fd
