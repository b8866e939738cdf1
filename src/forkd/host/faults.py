"""Instants at which a test may have the daemon killed. Without FORKD_FAULT in the environment they do nothing.

FORKD_FAULT is a point, or `point@n` for the n-th time it is reached.
"""

from __future__ import annotations

import os
import signal

POINTS = (
    "spawn.begun",  # admitted, nothing recorded
    "spawn.reserved",  # the rows are there, no VM is
    "network.leased",  # a first network is taken, no VM has it
    "network.recorded",  # the row says what a running sandbox is to have, nothing is done
    "network.plugged",  # its VM has the interface, the guest was not told
    "port.recorded",  # the row has the way in, nobody listens
    "spawn.started",  # a first VM process exists
    "spawn.forked",  # all VMs run, the rows still say starting
    "spawn.committed",  # the rows say running, nobody was told
    "fork.held",  # a live VM stands still, to be forked
    "fork.cloned",  # a child exists that has not been taken over
    "fork.completed",  # it has all its own, and is still held
    "fork.let_go",  # it runs, nobody knows of it
    "hub.uplink",  # rules and forwarding in the daemon's own network, no sandbox has one
    "hub.leased",  # the hub has given a network out, nobody has it
    "hub.changed",  # other rules are in force, nobody was told
    "hub.released",
    "template.started",  # its VMM runs, nobody has talked to it
    "template.rehearsed",
    "template.ready",  # it stands still, nobody knows of it
    "snapshot.recorded",
    "snapshot.booted",
    "snapshot.frozen",
    "snapshot.sealed",
    "snapshot.published",  # under its tag, the record still says writing
    "branch.recorded",  # nothing but the record
    "branch.forked",  # a fork that never runs exists, and is in no record
    "branch.saved",  # its device state is in the staging directory
    "branch.pages",  # and what differs of its memory
    "branch.sealed",
    "branch.published",  # under its tag, the record still says writing
    "rewind.forked",  # another VM has the sandbox's identity, the row names the old one
    "rewind.recorded",  # the row names the new one, the old one still runs
    "promote.moved",  # the sandbox is where its child was; the child and its siblings still run
    "derive.ran",  # in a sandbox that nobody asked for; nothing is saved
    "suspend.written",  # the state is on disk, the workspace does not name it
    "suspend.recorded",  # the workspace names it, the sandbox still runs
    "unpack.staged",  # all of a pack is written and checked, nothing is visible
    "unpack.image",  # its image is there
    "unpack.published",  # one snapshot of its chain is there
    "layer.pages",  # written, their index is not
    "layer.sealed",
    "compact.written",  # whole, and not sealed
    "compact.published",  # nobody was told
    "delete.renamed",  # a snapshot has lost its tag, its files are there
    "delete.marked",
    "delete.killed",  # no process, the row still says stopping
    "delete.removed",
)

_wanted, _, _times = os.environ.get("FORKD_FAULT", "").partition("@")
_left = int(_times or 1)


def fault_point(point: str) -> None:
    global _left
    if _wanted == point:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
