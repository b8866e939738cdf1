"""A QEMU's network interface: the tap it was started with, by number, and what takes that number's place later."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Nic
from forkd.errors import EngineFailed, Unsupported
from forkd.host.dead_end import find_dead_tap, open_nothing
from forkd.host.procfork.program import Call
from forkd.host.tap import take_if_tap
from forkd.model.network import GUEST_MAC

# What a snapshot's platform has under "nic"; one without it runs without an interface.
KIND = "virtio-net"
TAP = "tap"
_TUNGETIFF, _IFREQ, _IFF_VNET_HDR = 0x800454D2, struct.Struct("=16sH22x"), 0x4000
_CLOSE, _DUP3 = 3, 292
_NETDEV = re.compile(rb"\0-netdev\0(?:hubport|tap,id=net0,fd=(\d{1,9}))[,\0]")


@dataclass(frozen=True)
class Interface:
    """What a QEMU is told of its interface, what it inherits for it, and calls it makes before it loads anything."""

    args: Sequence[str] = ()
    fds: Sequence[int] = ()
    calls: Sequence[Call] = ()


@contextlib.contextmanager
def opened_interface(accelerator: str, nic: Nic | None, *, changeable: bool) -> Iterator[Interface]:
    """Its descriptors are closed when the block has ended. `changeable`: QEMU can be made to do calls of ours.

    QEMU takes nothing but a tap for a tap, when it starts; so where there is to be none it starts with one that leads
    nowhere, and then has nothing in its place.
    """
    dead = find_dead_tap() if nic is None and changeable else None
    with contextlib.ExitStack() as opened:
        if nic is not None:
            tap = _opened(opened, duplicate_tap(nic))
            yield Interface(render_nic(accelerator, tap), [tap])
        elif dead is not None:
            tap, nothing = _opened(opened, os.dup(dead)), _opened(opened, open_nothing())
            yield Interface(render_nic(accelerator, tap), [tap, nothing], render_move(nothing, tap))
        else:
            yield Interface(render_nic(accelerator, None))


def _opened(closed_by: contextlib.ExitStack, fd: int) -> int:
    closed_by.callback(os.close, fd)
    return fd


def open_end(nic: Nic | None) -> int:
    """What takes the place of a tap in a fork."""
    return open_nothing() if nic is None else duplicate_tap(nic)


def duplicate_tap(nic: Nic) -> int:
    """As QEMU wants it. Raises EngineFailed for a tap of another kind than its guest's device was made for."""
    try:
        flags = _IFREQ.unpack(fcntl.ioctl(nic.tap, _TUNGETIFF, bytes(_IFREQ.size)))[1]
    except OSError as error:
        raise EngineFailed(f"{nic.tap_name} is not a tap: {error.strerror}") from error
    if flags & _IFF_VNET_HDR:
        raise EngineFailed(f"The tap {nic.tap_name} has packets with headers, which QEMU's guests do not expect")
    os.set_blocking(nic.tap, False)
    return os.dup(nic.tap)


def render_nic(accelerator: str, tap: int | None) -> list[str]:
    """Without an option ROM: nothing boots from it. An emulated CPU tells its device by itself, without an eventfd."""
    backend = "hubport,id=net0,hubid=0" if tap is None else f"tap,id=net0,fd={tap}"
    # Who loads a state would tell its network, five times in half a second, that it has moved: nobody has to know. With
    # no rounds a device that announces has no timer, and QEMU 7 ends when its guest resets such a device.
    device = f"virtio-net-pci,netdev=net0,mac={GUEST_MAC},romfile=,guest_announce=off"
    quiet = ["-global", "migration.announce-rounds=0"]
    return [*quiet, "-netdev", backend, "-device", device + (",ioeventfd=off" if accelerator == "tcg" else "")]


def render_move(number: int, to: int) -> list[Call]:
    """Its loop waits for descriptors by number, so it goes on with what is there."""
    return [
        Call(_DUP3, (number, to, os.O_CLOEXEC), returns=to, what="put a network interface in place"),
        Call(_CLOSE, (number,), what="close a descriptor"),
    ]


def parse_tap(arguments: bytes) -> int | None:
    """The number of its tap, from a command line. Pure."""
    found = _NETDEV.search(arguments)
    return None if found is None or found[1] is None else int(found[1])


def has_nic(pid: int) -> bool:
    return _NETDEV.search(_read_arguments(pid)) is not None


def find_tap_number(pid: int) -> int | None:
    """None: it was started without one, and cannot get one."""
    return parse_tap(_read_arguments(pid))


def require_tap_number(pid: int) -> int:
    number = find_tap_number(pid)
    if number is None:
        raise Unsupported(
            "The VM has no network interface that can be changed while it runs",
            hint="Make its snapshot again where /dev/net/tun is usable, and fork it with a network",
        )
    return number


def take_tap(pid: int) -> int | None:
    """A duplicate of the tap that it has now, if any. Raises OSError."""
    number = find_tap_number(pid)
    return None if number is None else take_if_tap(pid, number)


def refuse_without_nic() -> Unsupported:
    return Unsupported(
        "The snapshot was made without a network interface",
        hint="Make it again: forkd snapshot create",
    )


def _read_arguments(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError as error:
        raise EngineFailed(f"Process {pid} cannot be looked at: {error.strerror}") from error
