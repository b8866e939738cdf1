"""The cell of a fork: how a duplicate of a process in a cell leaves that one for a cell of its own.

Before it runs, and before it has threads, it makes namespaces. In the new user namespace it has all rights for a
moment; there it becomes a user of its own, whose map we write, and gives up all of them. Its root stays as it was: it
is read-only, and what is in it is what the fork needs, too.

Where we are not root it stays our user, in a user namespace of its own.
"""

from __future__ import annotations

import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import NotForkable
from forkd.host.cell_plan import MAX_THREADS, NO_LIMIT
from forkd.host.id_maps import MapHelper, UserRange, render_id_map, write_maps
from forkd.host.procfork.program import DATA, Call
from forkd.host.user_ids import MAX_LEVELS, find_owners, read_user

_SETRESUID, _SETRESGID, _CAPSET, _PRCTL, _UNSHARE, _PRLIMIT64 = 117, 119, 126, 157, 272, 302
_THREADS_LINE = "Max processes"
_UNLIMITED = 2**64 - 1
_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x40000000
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 4, 24
_CAPABILITY_VERSION = 0x20080522
_LAST_CAPABILITY = Path("/proc/sys/kernel/cap_last_cap")

_LEAVE = Call(_UNSHARE, (_NEWUSER | _NEWNS | _NEWIPC | _NEWUTS | _NEWNET,), what="leave its source's namespaces")

# Nobody but root looks into it.
CLOSE_TO_OTHERS = Call(_PRCTL, (_PR_SET_DUMPABLE, 0), what="close its memory to others")


@dataclass(frozen=True)
class SourceCell:
    """`user`: the source's, where its forks become users of their own.

    `above`: who made the user namespaces that it is in, the outermost first; none: it is in ours.
    `most_threads`: what its limit of them can be raised to.
    """

    users: UserRange
    user: int | None
    above: tuple[int, ...]
    most_threads: int


def find_source_cell(pid: int, users: UserRange) -> SourceCell | None:
    """None: it is in none. Raises NotForkable."""
    try:
        user, owners = read_user(pid), find_owners(pid)
        most_threads = parse_most_threads(Path(f"/proc/{pid}/limits").read_text())
    except OSError as error:
        raise NotForkable(f"Process {pid} cannot be looked at: {error.strerror}") from error
    if user not in users and not owners:
        return None
    if len(owners) >= MAX_LEVELS:
        raise NotForkable(
            f"The VM is the {len(owners)}th of a row of forks, and the kernel nests no more of their user namespaces",
            hint="Fork its snapshot instead",
        )
    return SourceCell(users, user if user in users else None, tuple(reversed(owners)), most_threads)


def parse_most_threads(limits: str) -> int:
    """The hard limit, from /proc/<pid>/limits. Pure."""
    line = next(line for line in limits.splitlines() if line.startswith(_THREADS_LINE))
    hard = line.removeprefix(_THREADS_LINE).split()[1]
    return NO_LIMIT if hard == "unlimited" else int(hard)


def render_limit(number: int, soft: int, hard: int) -> Call:
    """As the process itself sets it: another one needs a capability for that, which root does not always have."""
    setting = struct.pack("<QQ", soft & _UNLIMITED, hard & _UNLIMITED)
    return Call(_PRLIMIT64, (0, number, DATA, 0), setting, what="set a limit")


def render_leave(source: SourceCell) -> list[Call]:
    """What a fork does first. The limit of threads that it leaves with holds for all its source's forks together."""
    return [render_limit(resource.RLIMIT_NPROC, source.most_threads, source.most_threads), _LEAVE]


def render_rights(source: SourceCell) -> list[Call]:
    """What a fork gives up, once it has a map. User 0 of the map is its own."""
    become = [
        Call(_SETRESGID, (0, 0, 0), what="become its own group"),
        Call(_SETRESUID, (0, 0, 0), what="become its own user"),
        CLOSE_TO_OTHERS,
    ]
    bounds = [
        Call(_PRCTL, (_PR_CAPBSET_DROP, number), what="bound its capabilities")
        for number in range(int(_LAST_CAPABILITY.read_text()) + 1)
    ]
    header = struct.pack("<Ii", _CAPABILITY_VERSION, 0)
    none = Call(_CAPSET, (DATA, DATA + len(header)), header + bytes(24), what="give up its capabilities")
    threads = render_limit(resource.RLIMIT_NPROC, MAX_THREADS, source.most_threads)
    return [*(become if source.user is not None else ()), threads, *bounds, none]


def write_user_maps(source: SourceCell, helper: MapHelper, pid: int, user: int) -> None:
    """Of a fork that has left its source's namespaces, and becomes `user`. Raises NotForkable, OSError."""
    if source.above and source.user is not None:
        text = render_id_map(source.users, user, (*source.above, source.user))
        helper.write_maps(pid, text)
    else:
        write_maps(pid, render_id_map(source.users, user))
