"""What a process has open, and the system calls with which its duplicate gets its own of each. Pure."""

from __future__ import annotations

import enum
import functools
import os
import re
import stat
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from forkd.host.procfork.program import DATA, Call

_CLOSE, _IOCTL, _RECVMSG, _EPOLL_CTL, _TIMERFD_CREATE, _TIMERFD_SETTIME = 3, 16, 47, 233, 283, 286
_SIGNALFD4, _EVENTFD2, _EPOLL_CREATE1, _DUP3 = 289, 290, 291, 292
_TFD_SET_TICKS = 0x40085400
_EPOLL_ADD = 1
_EFD_SEMAPHORE = 1
_NEW = 2**64 - 1  # -1, as a descriptor
# SCM_RIGHTS takes 253.
MAX_SENT = 250

# Character devices that have no state of an opener.
_STATELESS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Kind(enum.Enum):
    FILE = "file"
    SOCKET = "socket"
    EVENTFD = "eventfd"
    SIGNALFD = "signalfd"
    TIMERFD = "timerfd"
    EPOLL = "epoll set"
    OTHER = "other"


@dataclass(frozen=True)
class Descriptor:
    """`info`: the lines of /proc/<pid>/fdinfo. `alias_of`: the lowest number for the same open file."""

    number: int
    link: str
    info: str = field(repr=False, default="")
    alias_of: int | None = None
    mode: int = stat.S_IFREG

    @functools.cached_property
    def kind(self) -> Kind:
        return parse_kind(self.link, self.mode)

    @functools.cached_property
    def flags(self) -> int:
        return int(self.find("flags") or "0", 8)

    @property
    def cloexec(self) -> int:
        return self.flags & os.O_CLOEXEC

    def find(self, key: str) -> str | None:
        return self._fields.get(key)

    @functools.cached_property
    def _fields(self) -> dict[str, str]:
        parted = (line.partition(":") for line in self.info.splitlines())
        return {key: value.strip() for key, _, value in parted}


def parse_kind(link: str, mode: int = stat.S_IFREG) -> Kind:
    if link.startswith("socket:"):
        return Kind.SOCKET
    anonymous = {
        "anon_inode:[eventfd]": Kind.EVENTFD,
        "anon_inode:[signalfd]": Kind.SIGNALFD,
        "anon_inode:[timerfd]": Kind.TIMERFD,
        "anon_inode:[eventpoll]": Kind.EPOLL,
    }
    if link in anonymous:
        return anonymous[link]
    on_disk = link.startswith("/") and not link.startswith(("/memfd:", "/dev/", "/SYSV", "/dmabuf"))
    # A pipe and a device may have a name anywhere.
    has_content = stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    return Kind.FILE if (on_disk and has_content) or link in _STATELESS else Kind.OTHER


@dataclass(frozen=True)
class Keep:
    """Open in both, as the same open file: the caller must know that this is safe."""


@dataclass(frozen=True)
class Close:
    pass


@dataclass(frozen=True)
class Ours:
    """A descriptor of our own process takes its place; which one is said for each fork, by name."""

    name: str


@dataclass(frozen=True)
class Remake:
    """An eventfd, signalfd, timerfd or epoll set like it."""


@dataclass(frozen=True)
class Reopen:
    """The same file, opened once more."""


@dataclass(frozen=True)
class Dead:
    """A socket whose peer is gone takes its place, the same one for all of these."""


Action = Keep | Close | Ours | Remake | Reopen | Dead
Choice = Callable[[Descriptor], Action | None]

_BY_KIND: Mapping[Kind, Action] = {
    Kind.FILE: Reopen(),
    Kind.EVENTFD: Remake(),
    Kind.SIGNALFD: Remake(),
    Kind.TIMERFD: Remake(),
    Kind.EPOLL: Remake(),
}


def choose_by_kind(descriptor: Descriptor) -> Action | None:
    """None: only the caller, who knows what it is for, can choose."""
    return _BY_KIND.get(descriptor.kind)


def is_possible(descriptor: Descriptor, action: Action | None) -> bool:
    return action is not None and (not isinstance(action, Remake) or descriptor.kind in _RENDER)


def same_file_candidates(descriptors: Iterable[Descriptor]) -> list[list[int]]:
    """Numbers that may be one open file, by what can be seen of them; the kernel knows."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for each in descriptors:
        if each.kind is not Kind.SOCKET:
            groups.setdefault((each.link, each.find("eventfd-id")), []).append(each.number)
    return [numbers for numbers in groups.values() if len(numbers) > 1]


def lowest_free(used: Collection[int], count: int) -> list[int]:
    """The numbers that the kernel gives to the next `count` files."""
    free: list[int] = []
    number = 0
    while len(free) < count:
        if number not in used:
            free.append(number)
        number += 1
    return free


def render_receive(door: int, count: int) -> Call:
    """Takes `count` descriptors from a message; see `parse_received`."""
    control_bytes = 16 + 4 * count
    iov, byte, control = 56, 72, 80
    header = struct.pack("<QIIQQQQI", 0, 0, 0, 0, 1, 0, control_bytes, 0).ljust(iov, b"\0")
    vector = struct.pack("<QQ", 0, 1)
    data = header + vector + bytes(8) + bytes(control_bytes + 8)
    return Call(
        _RECVMSG,
        (door, DATA, 0),
        data,
        pointers=((16, iov), (32, control), (iov, byte)),
        returns=1,
        what="receive descriptors",
    )


def parse_received(memory: bytes) -> tuple[int, ...]:
    """The numbers the descriptors got, from the data of the call after its run."""
    length, level, kind = struct.unpack_from("<QII", memory, 80)
    if (level, kind) != (1, 1) or not 16 <= length <= len(memory) - 80:  # SOL_SOCKET, SCM_RIGHTS
        return ()
    return struct.unpack_from(f"<{(length - 16) // 4}i", memory, 96)


def render_install(received: list[int], targets: Iterable[Descriptor], door: Collection[int]) -> list[Call]:
    """Puts what was received under its number, and closes what brought it."""
    calls = [_moved(number, target) for number, target in zip(received, targets, strict=True)]
    return calls + [_closed(number) for number in (*received, *door)]


def render_copies(copies: Iterable[Descriptor]) -> list[Call]:
    """Of descriptors that are in place."""
    return [_moved(each.alias_of, each) for each in copies if each.alias_of is not None]


def render_remake(descriptors: Mapping[int, Descriptor], actions: Mapping[int, Action], free: int) -> list[Call]:
    """`free`: the lowest number that is not in use, and will not be after each of these."""
    calls: list[Call] = []
    remade = [each for each in descriptors.values() if isinstance(actions[each.number], Remake)]
    copies = copies_of_same(descriptors, actions, Remake)
    for each in _inner_first([each for each in remade if each not in copies], copies):
        calls += _RENDER[each.kind](each, free, descriptors, actions)
        calls.append(_moved(free, each))
        calls += [_moved(free, other) for other in copies if other.alias_of == each.number]
        calls.append(_closed(free))
    return calls + [_closed(number) for number, action in actions.items() if isinstance(action, Close)]


def copies_of_same(
    descriptors: Mapping[int, Descriptor], actions: Mapping[int, Action], action: type[Action]
) -> list[Descriptor]:
    """Those that become copies of a descriptor for which the same `action` is chosen."""
    return [
        each
        for each in descriptors.values()
        if each.alias_of is not None and {type(actions[each.number]), type(actions[each.alias_of])} == {action}
    ]


def copies_of_dead(descriptors: Mapping[int, Descriptor], actions: Mapping[int, Action]) -> list[Descriptor]:
    """Those that become copies of the first that becomes a dead socket."""
    dead = [number for number, action in actions.items() if isinstance(action, Dead)]
    return [replace(descriptors[number], alias_of=dead[0]) for number in dead[1:]]


def _moved(number: int, target: Descriptor) -> Call:
    what = f"put descriptor {target.number} in place"
    return Call(_DUP3, (number, target.number, target.cloexec), returns=target.number, what=what)


def _closed(number: int) -> Call:
    return Call(_CLOSE, (number,), what=f"close descriptor {number}")


_All = Mapping[int, Descriptor]
_Chosen = Mapping[int, Action]


def _eventfd(each: Descriptor, free: int, _all: _All, _chosen: _Chosen) -> list[Call]:
    count = int(each.find("eventfd-count") or "0", 16)
    flags = each.flags & os.O_NONBLOCK | (_EFD_SEMAPHORE if each.find("eventfd-semaphore") == "1" else 0)
    # The call takes 32 bits; more has to be added by a write.
    if count < 2**32:
        return [Call(_EVENTFD2, (count, flags), returns=free, what="make an eventfd")]
    more = Call(1, (free, DATA, 8), struct.pack("<Q", count), returns=8, what="count up an eventfd")
    return [Call(_EVENTFD2, (0, flags), returns=free, what="make an eventfd"), more]


def _signalfd(each: Descriptor, free: int, _all: _All, _chosen: _Chosen) -> list[Call]:
    mask = struct.pack("<Q", int(each.find("sigmask") or "0", 16))
    return [
        Call(_SIGNALFD4, (_NEW, DATA, 8, each.flags & os.O_NONBLOCK), mask, returns=free, what="make a signalfd"),
    ]


def _timerfd(each: Descriptor, free: int, _all: _All, _chosen: _Chosen) -> list[Call]:
    clock = int(each.find("clockid") or "0")
    ticks = int(each.find("ticks") or "0")
    calls = [Call(_TIMERFD_CREATE, (clock, each.flags & os.O_NONBLOCK), returns=free, what="make a timer")]
    interval, value = _parse_time(each.find("it_interval")), _parse_time(each.find("it_value"))
    if ticks and not any(value):  # a periodic timer has run out, and stands still until its ticks are read
        value = interval
    setting = struct.pack("<4q", *interval, *value)
    if any(setting):
        calls.append(Call(_TIMERFD_SETTIME, (free, 0, DATA, 0), setting, what="set a timer"))
    if ticks:
        calls.append(Call(_IOCTL, (free, _TFD_SET_TICKS, DATA), struct.pack("<Q", ticks), what="set a timer's ticks"))
    return calls


def _parse_time(text: str | None) -> tuple[int, int]:
    seconds, nanoseconds = (int(number) for number in re.findall(r"\d+", text or "0 0"))
    return seconds, nanoseconds


def _epoll(each: Descriptor, free: int, all_: _All, chosen: _Chosen) -> list[Call]:
    calls = [Call(_EPOLL_CREATE1, (0,), returns=free, what="make an epoll set")]
    for watched, events, data in watched_by(each):
        if watched in all_ and not isinstance(chosen[watched], Close):
            event = struct.pack("<IQ", events, data)
            args = (free, _EPOLL_ADD, watched, DATA)
            calls.append(Call(_EPOLL_CTL, args, event, what=f"watch descriptor {watched}"))
    return calls


def watched_by(epoll: Descriptor) -> list[tuple[int, int, int]]:
    """Descriptor, events and data of each member."""
    found = re.findall(r"^tfd:\s*(\d+)\s+events:\s*([0-9a-f]+)\s+data:\s*([0-9a-f]+)", epoll.info, re.MULTILINE)
    return [(int(number), int(events, 16), int(data, 16)) for number, events, data in found]


def _inner_first(remade: list[Descriptor], copies: list[Descriptor]) -> list[Descriptor]:
    """A set watches files, not numbers: what it watches is made before it. A set is never inside itself."""
    done: list[Descriptor] = [each for each in remade if each.kind is not Kind.EPOLL]
    sets = {each.number: each for each in remade if each.kind is Kind.EPOLL}
    by_number = sets | {each.number: sets[each.alias_of] for each in copies if each.alias_of in sets}

    def add(each: Descriptor) -> None:
        if each not in done:
            for watched, _, _ in watched_by(each):
                if watched in by_number:
                    add(by_number[watched])
            done.append(each)

    for each in sets.values():
        add(each)
    return done


_RENDER: Mapping[Kind, Callable[[Descriptor, int, _All, _Chosen], list[Call]]] = {
    Kind.EVENTFD: _eventfd,
    Kind.SIGNALFD: _signalfd,
    Kind.TIMERFD: _timerfd,
    Kind.EPOLL: _epoll,
}
