"""When and where a thread runs: policy, niceness, processors. A new thread has those of the one that made it."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Scheduling:
    policy: int
    priority: int
    niceness: int
    processors: frozenset[int]


def read_scheduling(tid: int) -> Scheduling:
    return Scheduling(
        os.sched_getscheduler(tid),
        os.sched_getparam(tid).sched_priority,
        os.getpriority(os.PRIO_PROCESS, tid),
        frozenset(os.sched_getaffinity(tid)),
    )


def set_scheduling(tid: int, wanted: Scheduling) -> None:
    """What it has already is not set: that may take a privilege, and most threads have what they were made with."""
    found = read_scheduling(tid)
    if (found.policy, found.priority) != (wanted.policy, wanted.priority):
        os.sched_setscheduler(tid, wanted.policy, os.sched_param(wanted.priority))
    if found.niceness != wanted.niceness:
        os.setpriority(os.PRIO_PROCESS, tid, wanted.niceness)
    if found.processors != wanted.processors:
        os.sched_setaffinity(tid, wanted.processors)
