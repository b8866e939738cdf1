"""Network interfaces of VMs: taps, in the namespace of the calling thread or of another process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from forkd.errors import EngineFailed
from forkd.host import netns
from forkd.host.procfork.ptrace import take_descriptor

TUN = Path("/dev/net/tun")
# What mknod needs to make another node of it.
TUN_DEVICE = os.makedev(10, 200)
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER, _TUNGETIFF = 0x400454CA, 0x400454CB, 0x400454CC, 0x800454D2
_TUNGETDEVNETNS, _TUNSETVNETHDRSZ = 0x54E3, 0x400454D8
_VNET_HDR_BYTES = 12  # of virtio 1.0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_IFREQ = "16sH22x"


def has_tun() -> bool:
    return os.access(TUN, os.R_OK | os.W_OK)


def make_tap(name: str, pid: int, owner: int) -> None:
    """Up, in the network namespace of `pid`, for one user to open. It ends with the namespace. Raises EngineFailed."""
    # In a thread of its own: it need not come back.
    with ThreadPoolExecutor(max_workers=1) as pool:
        try:
            pool.submit(_make_elsewhere, name, pid, owner).result()
        except OSError as error:
            raise EngineFailed(f"Could not make the network interface {name}: {error.strerror}") from error


def open_tap(name: str, *, vnet_hdr: bool = False, owner: int | None = None) -> int:
    """A tap, down, in the calling thread's namespace: it stays when its descriptor is closed, and ends with that.

    One descriptor can be attached to it at a time; its duplicates are one.
    """
    tun = os.open(TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | (_IFF_VNET_HDR if vnet_hdr else 0)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack(_IFREQ, name.encode(), flags))
        if owner is not None:
            fcntl.ioctl(tun, _TUNSETOWNER, owner)
        fcntl.ioctl(tun, _TUNSETPERSIST, 1)
    except OSError:
        os.close(tun)
        raise
    return tun


def attach_tap(namespace: str, name: str) -> int:
    """To a tap with a header before each packet, that nobody has open, in a network namespace: as Firecracker does it.

    Its offloads stay off: what a guest accepts of them was agreed with another tap. Raises OSError.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:  # its thread need not come back
        return pool.submit(_attach, namespace, name).result()


def _attach(namespace: str, name: str) -> int:
    place = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        netns.enter(place)
    finally:
        os.close(place)
    tun = os.open(TUN, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack(_IFREQ, name.encode(), flags))
        fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("=i", _VNET_HDR_BYTES))
    except OSError:
        os.close(tun)
        raise
    return tun


def get_tap_name(tap: int) -> str:
    """Raises OSError when the descriptor is not one of an attached tap."""
    found = fcntl.ioctl(tap, _TUNGETIFF, bytes(40))
    name: bytes = struct.unpack_from("16s", found)[0]
    return name.rstrip(b"\0").decode(errors="replace")


def open_namespace(tap: int) -> int:
    """A descriptor of the network namespace that a tap is in."""
    return fcntl.ioctl(tap, _TUNGETDEVNETNS)


def take_if_tap(pid: int, number: int) -> int | None:
    """A descriptor of our own for one of another process, if it is a tap. Raises OSError."""
    if not _is_tap(Path(f"/proc/{pid}/fd/{number}").stat()):
        return None
    pidfd = os.pidfd_open(pid)
    try:
        return take_descriptor(pidfd, number)
    finally:
        os.close(pidfd)


def take_tap(pid: int) -> int | None:
    """The same for the first tap that a process has, if any."""
    number = find_tap_number(pid)
    return None if number is None else take_if_tap(pid, number)


def find_tap_number(pid: int) -> int | None:
    """Of the first tap that a process has open. Raises OSError."""
    for number in sorted(int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            if _is_tap(Path(f"/proc/{pid}/fd/{number}").stat()):
                return number
    return None


def _is_tap(seen: os.stat_result) -> bool:
    # Not by its name: the node may be one of another mount namespace.
    return stat.S_ISCHR(seen.st_mode) and seen.st_rdev == TUN_DEVICE


def _make_elsewhere(name: str, pid: int, owner: int) -> None:
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        netns.enter(namespace)
    finally:
        os.close(namespace)
    os.close(open_tap(name, vnet_hdr=True, owner=owner))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack(_IFREQ, name.encode(), _IFF_UP))
