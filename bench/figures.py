"""What is measured. Every figure says where its clock stops and what was there before it started. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_EVAL = "first eval"

_ON_DISK = "image built, its files in the page cache; no snapshot, no process"
_FORKABLE = "snapshot made and verified, its memory file in the page cache; no process started ahead"
_CLEAN = "A clean page of the memory file counts where one child alone maps it"
_CHILD = "a child whose eval was answered before"

# Where each step of a fork or a cold boot is over; the steps are the engine's and the runtime's own marks.
_STEP_ENDS = {
    "process start": "the VMM has answered on its monitor",
    "state load": "the VMM has loaded the device state",
    "resume": "the VMM has confirmed that the guest runs",
    "contract": "the host has checked the child's proof of the fork contract",
    "agent answers": "the agent's answer to the first greeting is on the host",
    "warm-up": "the agent's answer to the warm-up is on the host",
    FIRST_EVAL: "the answer to the child's first evaluation is on the host",
}


@dataclass(frozen=True)
class Figure:
    name: str
    what: str
    unit: str
    stops_at: str
    prepared: str


def cold_boot() -> Figure:
    stop = "the answer to the first evaluation is on the host"
    return Figure("cold_boot.total", "cold boot of one VM, warmed, first eval", "s", stop, _ON_DISK)


def cold_boot_step(step: str) -> Figure:
    return Figure(f"cold_boot.step.{step}", f"cold boot: {step}", "s", _end(step), "all steps before it")


def snapshot_total() -> Figure:
    stop = "the snapshot is synced and stands under its tag"
    return Figure("snapshot.total", "snapshot: created in all", "s", stop, _ON_DISK)


def snapshot_step(step: str) -> Figure:
    stop = "the runtime reports its next step"
    return Figure(f"snapshot.step.{step}", f"snapshot: {step}", "s", stop, "all steps before it")


def fork_wall(n: int) -> Figure:
    stop = f"all {n} children have answered their first evaluation"
    return Figure(f"fork.{n}.wall", f"fork of {n}, all ready", "s", stop, _FORKABLE)


def fork_child(n: int, share: str) -> Figure:
    stop = "the answer to this child's first evaluation is on the host; starts when its process is started"
    return Figure(f"fork.{n}.child.{share}", f"fork of {n}: one child, {share}", "ms", stop, _FORKABLE)


def fork_step(n: int, step: str, share: str) -> Figure:
    what = f"fork of {n}: {step}, {share}"
    return Figure(f"fork.{n}.step.{step}.{share}", what, "ms", _end(step), "all steps of this child before it")


def fork_ok(n: int) -> Figure:
    what = f"fork of {n}: children that answered right"
    return Figure(f"fork.{n}.ok", what, "children", "the fork returned or failed", _FORKABLE)


def fork_cpu(n: int, of: str) -> Figure:
    what = f"fork of {n}: CPU time of {of} per child until ready, mean"
    return Figure(f"fork.{n}.cpu", what, "ms", "the child's first evaluation was answered", _FORKABLE)


def unique_memory(n: int, of: str) -> Figure:
    stop = f"all {n} children have answered their first evaluation"
    prepared = f"private pages of the VMM process. {_CLEAN}"
    return Figure(f"fork.{n}.unique.{of}", f"fork of {n}: unique memory per child, {of}", "MiB", stop, prepared)


def idle_unique_memory(n: int, of: str, settle_s: float) -> Figure:
    what = f"fork of {n}: unique memory per idle child, {of}"
    stop = f"all {n} children have answered their first evaluation, and {settle_s:g} s have passed"
    prepared = f"private pages of all processes of a child. {_CLEAN}"
    return Figure(f"fork.{n}.idle_unique.{of}", what, "MiB", stop, prepared)


def resident_memory() -> Figure:
    stop = "the parent is frozen"
    prepared = "its memory file without the holes, which are pages it never touched"
    return Figure("snapshot.resident", "snapshot: resident memory of the guest", "MiB", stop, prepared)


def unique_share(n: int) -> Figure:
    what = f"fork of {n}: unique memory of the largest idle child, of the guest's resident"
    return Figure(f"fork.{n}.unique_share", what, "%", "both in the same round", "see the two figures")


def idle_cpu(n: int, window_s: float) -> Figure:
    what = f"fork of {n}: idle CPU per child, mean"
    stop = f"{window_s:g} s later, nobody having asked anything"
    return Figure(f"fork.{n}.idle", what, "% of a core", stop, "all children alive, each after its first eval")


def kill(n: int) -> Figure:
    what = f"end of all {n} children"
    stop = "every process is reaped, its sockets and directory are gone"
    return Figure(f"fork.{n}.kill", what, "s", stop, f"{n} idle children")


def trip(kind: str, share: str) -> Figure:
    what = {"eval": "eval round trip on a warm child", "exec": "exec of /bin/true on a warm child"}[kind]
    stop = {"eval": "the value is on the host", "exec": "the exit status is on the host"}[kind]
    prepared = {"eval": f"{_CHILD}, several times", "exec": f"{_CHILD}; the command was run before"}[kind]
    return Figure(f"trip.{kind}.{share}", f"{what}, {share}", "ms", stop, f"{prepared}; the only VM")


def fork_to_cold(n: int) -> Figure:
    what = f"fork of {n} / cold boot of one"
    return Figure(f"ratio.fork_{n}_to_cold_boot", what, "", "both in the same round", "see the two figures")


def step_rank(step: str) -> int:
    """Where among the steps it comes; not every engine has all of them."""
    return list(_STEP_ENDS).index(step) if step in _STEP_ENDS else len(_STEP_ENDS)


def _end(step: str) -> str:
    return _STEP_ENDS.get(step, f"the step '{step}' is over")
