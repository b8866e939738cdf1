"""The engine `firecracker`: when it runs on a host, and how it is opened."""

from __future__ import annotations

import os

from forkd.engines.base import Engine, Entry, Findings, Opening, Verdict
from forkd.host.finding import Status

# Its VMs can be forked while they run: to be asked for as long as it is new.
LIVE_FORKS_SETTING = "FORKD_FIRECRACKER_LIVE_FORKS"

_JAILED = "a virtual machine each, under KVM, in a jail of Firecracker's"
_NOT_JAILED = "a virtual machine each, under KVM, confined by Firecracker's seccomp but by no jail"


def judge(found: Findings, asked: bool) -> Verdict:
    """A Firecracker that is only doubtful runs when it was asked for."""
    doubtful = (Status.OK, Status.WARN)
    enough = {"kvm": (Status.OK,), "firecracker": doubtful if asked else (Status.OK,), "jailer": doubtful}
    for name, statuses in enough.items():
        if found.status(name) not in statuses:
            return Verdict(f"{name}: {found.text(name)}", lack=name)
    isolation = _JAILED if found.status("jailer") is Status.OK else _NOT_JAILED
    return Verdict(", and KVM runs guests at speed", "kvm", isolation)


def _open(accelerator: str | None, opening: Opening) -> Engine:
    from forkd.engines.firecracker.engine import FirecrackerEngine
    from forkd.host.user_ids import DEFAULT_USERS

    live_forks = os.environ.get(LIVE_FORKS_SETTING) == "1"
    return FirecrackerEngine(outlive=opening.outlive, users=opening.users or DEFAULT_USERS, live_forks=live_forks)


ENTRY = Entry("firecracker", ("kvm", "firecracker", "jailer"), judge, _open)
