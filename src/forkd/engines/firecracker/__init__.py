"""The engine `firecracker`: when it runs on a host, and how it is opened."""

from __future__ import annotations

from forkd.engines.base import Engine, Entry, Findings, Opening, Verdict
from forkd.host.finding import Status

_JAILED = "a virtual machine each, under KVM, in a jail"
_NOT_JAILED = "a virtual machine each, under KVM, confined by Firecracker's seccomp but by no jail"


def judge(found: Findings, asked: bool) -> Verdict:
    """A Firecracker that is only doubtful, or has no jail, runs when it was asked for."""
    enough_to_run = (Status.OK, Status.WARN) if asked else (Status.OK,)
    enough = {"kvm": (Status.OK,), "firecracker": enough_to_run, "jailer": enough_to_run}
    for name, statuses in enough.items():
        if found.status(name) not in statuses:
            return Verdict(f"{name}: {found.text(name)}", lack=name)
    isolation = _JAILED if found.status("jailer") is Status.OK else _NOT_JAILED
    return Verdict(", and KVM runs guests at speed", "kvm", isolation)


def _open(accelerator: str | None, opening: Opening) -> Engine:
    from forkd.engines.firecracker.engine import FirecrackerEngine
    from forkd.host.user_ids import DEFAULT_USERS

    users = opening.users or DEFAULT_USERS
    return FirecrackerEngine(outlive=opening.outlive, cell=opening.cell, users=users)


ENTRY = Entry("firecracker", ("kvm", "firecracker", "jailer"), judge, _open)
