"""Network namespaces. One belongs to a thread: only the calling thread moves."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_NS_GET_USERNS = 0xB701
_CURRENT = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)


def open_current() -> int:
    """A descriptor of the calling thread's namespace, which keeps it alive."""
    return os.open(_CURRENT, os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace: int) -> None:
    _check(_libc.setns(namespace, _CLONE_NEWNET))


def enter_new() -> None:
    """It has a loopback interface that is down, and nothing else."""
    _check(_libc.unshare(_CLONE_NEWNET))


@contextlib.contextmanager
def inside(namespace: int) -> Iterator[None]:
    """The calling thread is in there for a while."""
    before = open_current()
    try:
        enter(namespace)
        try:
            yield
        finally:
            enter(before)
    finally:
        os.close(before)


def new_namespace() -> int:
    """A descriptor of it; the calling thread stays where it is. The namespace ends with what holds it."""
    before = open_current()
    try:
        enter_new()
        try:
            return open_current()
        finally:
            enter(before)
    finally:
        os.close(before)


def socket_inside(namespace: int, kind: int, family: int = socket.AF_INET, protocol: int = 0) -> socket.socket:
    """A socket stays in the namespace it was made in, whoever uses it."""
    with inside(namespace):
        return socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol)


def open_owner(namespace: int) -> int:
    """A descriptor of the user namespace that a namespace belongs to."""
    return fcntl.ioctl(namespace, _NS_GET_USERNS)


def is_same(one: int, other: int) -> bool:
    """Two descriptors of the same namespace."""
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
