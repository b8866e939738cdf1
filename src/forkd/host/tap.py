"""Network interfaces of VMs: a tap in the network namespace of another process."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forkd.errors import EngineFailed

_TUN = Path("/dev/net/tun")
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_IFREQ = "16sH22x"


def has_tun() -> bool:
    return os.access(_TUN, os.R_OK | os.W_OK)


def make_tap(name: str, pid: int, owner: int) -> None:
    """Up, in the network namespace of `pid`, for one user to open. It ends with the namespace. Raises EngineFailed."""
    # In a thread of its own: a thread cannot leave the namespace again.
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            pool.submit(_make, name, pid, owner).result()
        except OSError as error:
            raise EngineFailed(f"Could not make the network interface {name}: {error.strerror}") from error


def _make(name: str, pid: int, owner: int) -> None:
    _enter_network(pid)
    tun = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack(_IFREQ, name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
        fcntl.ioctl(tun, _TUNSETOWNER, owner)
        fcntl.ioctl(tun, _TUNSETPERSIST, 1)
    finally:
        os.close(tun)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack(_IFREQ, name.encode(), _IFF_UP))


def _enter_network(pid: int) -> None:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        os.close(namespace)
