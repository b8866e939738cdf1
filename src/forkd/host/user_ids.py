"""Which user each VM of this host runs as: an id of a range, and no two living VMs have the same.

A forkd takes blocks of the range in a table that all of them share (`/run/forkd-users`), and gives out the ids of its
blocks by itself. A block is free again when the forkd that took it has ended and no process has anything to do with its
ids: VMs outlive their daemon.

An id that made a user namespace has all rights in it, and in those inside it. So the id of a VM that was forked stays
taken as long as one of its forks lives: see `Lineage`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from forkd.errors import EngineFailed, HostLacks
from forkd.host.id_maps import UserRange
from forkd.host.system import start_time_ticks

# Beyond what systemd gives to people, services and containers.
DEFAULT_USERS = UserRange(0x70000000, 65536)
TABLE = Path("/run/forkd-users")
BLOCK = 256
_NS_GET_PARENT, _NS_GET_OWNER_UID = 0xB702, 0xB704
# How deep the kernel nests user namespaces.
MAX_LEVELS = 32

# The ids that must stay taken as long as a VM lives: its own, and those of what it was forked from.
Lineage = tuple[int, ...]


class UserIds:
    """Thread-safe."""

    def __init__(self, users: UserRange = DEFAULT_USERS, table: Path = TABLE) -> None:
        self.users = users
        self._table = table
        self._lock = threading.Lock()
        self._ours: set[int] = set()  # of our blocks; a VM that was taken over has an id of another's
        self._free: list[int] = []
        self._held: Counter[int] = Counter()

    def claim(self) -> int:
        """An id that no living VM has. Give it back by `release`. Raises EngineFailed."""
        with self._lock:
            while True:
                if not self._free:
                    self._free = self._take_block()
                    self._ours.update(self._free)
                user = self._free.pop(0)
                if not self._held[user]:
                    self._held[user] += 1
                    return user

    def hold(self, lineage: Lineage) -> None:
        """Keep ids that a VM has already; once more when they are kept."""
        with self._lock:
            self._held.update(lineage)

    def release(self, lineage: Lineage) -> None:
        with self._lock:
            for user in lineage:
                self._held[user] -= 1
                if self._held[user] <= 0:
                    del self._held[user]
                    if user in self._ours:
                        self._free.append(user)

    def _take_block(self) -> list[int]:
        me = [os.getpid(), start_time_ticks(os.getpid()) or 0]
        with _locked_table(self._table) as file:
            owners = parse_table(file.read_text())
            used = find_used(self.users)
            for number in range(self.users.count // BLOCK):
                block = range(self.users.first + number * BLOCK, self.users.first + (number + 1) * BLOCK)
                if _is_free(owners.get(str(block.start))) and not used.intersection(block):
                    owners[str(block.start)] = me
                    file.write_text(json.dumps(owners))
                    return list(block)
        raise EngineFailed(
            f"All {self.users.count} user ids for VMs, from {self.users.first} on, are taken",
            hint="End sandboxes, or give forkd a larger range",
        )


@functools.cache
def user_ids(users: UserRange = DEFAULT_USERS) -> UserIds:
    """Of this process: the same for all who ask."""
    return UserIds(users)


@contextlib.contextmanager
def held_users(ids: UserIds, of_source: Lineage, *, claim: bool) -> Iterator[Lineage]:
    """The ids of a VM that is made in the block, given back when it is not; with `claim` the last one is new."""
    ids.hold(of_source)
    lineage = of_source
    try:
        if claim:
            lineage = (*of_source, ids.claim())
        yield lineage
    except BaseException:
        ids.release(lineage)
        raise


def parse_table(text: str) -> dict[str, list[int]]:
    """The first id of each block that is taken, and by whom: a pid and when that started. Pure."""
    try:
        table = json.loads(text or "{}")
    except ValueError:
        return {}  # an earlier forkd was killed half-way; what lives is seen anyway
    if not isinstance(table, dict):
        return {}
    return {
        block: owner
        for block, owner in table.items()
        if isinstance(owner, list) and len(owner) == 2 and all(isinstance(number, int) for number in owner)
    }


def is_of_a_vm(user: int, table: Path = TABLE) -> bool:
    """Whether it is of the usual range, or of a block that a forkd of this host took since it was booted."""
    if user in DEFAULT_USERS:
        return True
    try:
        blocks = parse_table(table.read_text())
    except OSError:
        return False
    return any(block.isdecimal() and user in UserRange(int(block), BLOCK) for block in blocks)


def _is_free(owner: list[int] | None) -> bool:
    return owner is None or start_time_ticks(owner[0]) != owner[1]


@contextlib.contextmanager
def _locked_table(path: Path) -> Iterator[Path]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise HostLacks(
            f"The table of user ids {path} cannot be opened: {error.strerror}", hint="Make its directory writable"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(fd)


def find_used(users: UserRange) -> set[int]:
    """The ids of the range that living processes have, or that made a namespace of one."""
    used: set[int] = set()
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        with contextlib.suppress(OSError):
            if read_user(pid) in users:
                used.update(find_lineage(pid, users))
    return used


def read_user(pid: int) -> int:
    """The real user of a process, as we see it. Raises OSError."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("Uid:"):
            return int(line.split()[1])
    raise ProcessLookupError(pid)


def find_lineage(pid: int, users: UserRange) -> Lineage:
    """Of a VM that runs already. Raises OSError."""
    return tuple(sorted({user for user in (read_user(pid), *find_owners(pid)) if user in users}))


def hold_lineage(ids: UserIds, pid: int) -> Lineage:
    """Of a VM that is taken over; none when it has just ended."""
    try:
        lineage = find_lineage(pid, ids.users)
    except OSError:
        return ()
    ids.hold(lineage)
    return lineage


def find_owners(pid: int) -> list[int]:
    """Who made the user namespace of a process, and those around it, up to ours. Raises OSError."""
    ours = Path("/proc/self/ns/user").stat()
    owners: list[int] = []
    fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    try:
        while not os.path.samestat(os.fstat(fd), ours) and len(owners) <= MAX_LEVELS:
            owner = ctypes.c_uint32()
            fcntl.ioctl(fd, _NS_GET_OWNER_UID, owner)
            owners.append(owner.value)
            parent = fcntl.ioctl(fd, _NS_GET_PARENT)
            os.close(fd)
            fd = parent
    finally:
        os.close(fd)
    return owners
