"""How a process is put into a cell when it is started: the command that does it, and whether this host can."""

from __future__ import annotations

import functools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forkd.host.finding import Finding, Status
from forkd.host.id_maps import UserRange
from forkd.host.user_ids import DEFAULT_USERS

_PROGRAM = Path(__file__).with_name("enter_cell.py")
_TRIAL = "/forkd-trial"
_TRIAL_DEADLINE_S = 20.0

NO_LIMIT = resource.RLIM_INFINITY
# More than QEMU ever needs: descriptors, and threads, of which it makes 64 for its disk.
MAX_FILES = 1024
MAX_THREADS = 256
# Of a VMM: no dump of guest memory, nothing locked or queued.
_LIMITS = {
    resource.RLIMIT_NOFILE: MAX_FILES,
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 64 * 1024,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_RTPRIO: 0,
    resource.RLIMIT_NICE: 0,
}


@dataclass(frozen=True)
class CellPlan:
    """See enter_cell.py. `user` None: a user namespace of its own, as our own user. `names`: by path."""

    user: int | None
    files: Sequence[str]
    copies: Sequence[str] = ()
    writable: Sequence[str] = ()
    devices: Sequence[str] = ()
    limits: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    empty: Sequence[str] = ()
    directory: str = "/"

    def render_command(self, argv: Sequence[str], dies_with: int | None) -> list[str]:
        limits = {**_LIMITS, **self.limits}
        plan = {
            "user": self.user,
            "files": list(self.files),
            "copies": list(self.copies),
            "writable": list(self.writable),
            "devices": list(self.devices),
            "names": dict(self.names),
            "empty": list(self.empty),
            "directory": self.directory,
            "limits": {str(number): [limit, limit] for number, limit in limits.items()},
            "dies_with": dies_with,
            "argv": list(argv),
        }
        return [sys.executable, "-I", "-S", str(_PROGRAM), json.dumps(plan)]


def covers(id_map: str, users: UserRange) -> bool:
    """Whether a namespace has all ids of a range, by its map. Pure."""
    spans = [tuple(map(int, line.split())) for line in id_map.splitlines()]
    return any(inside <= users.first and users.end <= inside + count for inside, _, count in spans)


@functools.cache
def find_cell_lack(users: UserRange = DEFAULT_USERS) -> str | None:
    """Why processes cannot be put into cells here; None when one was."""
    user = None
    if os.geteuid() == 0:
        user = users.end - 1
        if not covers(Path("/proc/self/uid_map").read_text(), users):
            return f"this user namespace has no users from {users.first} to {users.end - 1}"
    command = CellPlan(user, ()).render_command([_TRIAL], None)
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=_TRIAL_DEADLINE_S).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"its program does not run: {error}"
    # All went well but for the program, which does not exist.
    return None if said.startswith(_TRIAL) else said or "its program ended"


def probe_cell(users: UserRange = DEFAULT_USERS) -> Finding:
    lack = find_cell_lack(users)
    if lack is None:
        who = "a user of its own" if os.geteuid() == 0 else "a user namespace of its own"
        return Finding("cells", Status.OK, f"each VM runs in one, as {who}")
    hint = "Run forkd in the host's user namespace, or give it a range of user ids that it has"
    if os.geteuid() != 0:
        hint = "Allow user namespaces: sysctl kernel.unprivileged_userns_clone=1, or AppArmor's restriction of them"
    return Finding("cells", Status.WARN, f"none: {lack}", hint)
