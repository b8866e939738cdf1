"""What is measured. Every figure says where its clock stops and what was there before it started. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from forkd.engines.base import Way

FIRST_EVAL = "first eval"

_ON_DISK = "image built, its files in the page cache; no snapshot, no process"
_FORKABLE = "snapshot made and verified, its memory file in the page cache; no process started ahead"
_TEMPLATED = f"{_FORKABLE} but its template, made before and kept for all forks"
_CLEAN = "A clean page of the memory file counts where one child alone maps it"
_CHILD = "a child whose eval was answered before"

# How children come to be, where that is measured in more than one way. The others are started, as in the lab.
START, FORK = Way.START.value, Way.FORK.value
WAYS = {FORK: "from a template", START: "by start"}

# Where each step of a fork or a cold boot is over; the steps are the engine's and the runtime's own marks.
_STEP_ENDS = {
    "process start": "the VMM has answered on its monitor",
    "state load": "the VMM has loaded the device state",
    "confine": "the VMM has the filter under which it starts no process",
    "quiescence": "every thread of the template rests where it can be forked, the forks before this one being done",
    "clone": "the template's process has been duplicated",
    "descriptors": "the child has sockets, logs and files of its own",
    "threads": "the child has threads of its own, all at rest",
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


def fork_wall(n: int, way: str = "") -> Figure:
    stop = f"all {n} children have answered their first evaluation"
    return Figure(f"{_place(n, way)}.wall", f"{_title(n, way)}, all ready", "s", stop, _prepared(way))


def fork_child(n: int, share: str, way: str = "") -> Figure:
    begin = "the engine is asked for it, before it waits for its turn" if way == FORK else "its process is started"
    stop = f"the answer to this child's first evaluation is on the host; starts when {begin}"
    return Figure(
        f"{_place(n, way)}.child.{share}", f"{_title(n, way)}: one child, {share}", "ms", stop, _prepared(way)
    )


def fork_step(n: int, step: str, share: str, way: str = "") -> Figure:
    what = f"{_title(n, way)}: {step}, {share}"
    return Figure(f"{_place(n, way)}.step.{step}.{share}", what, "ms", _end(step), "all steps of this child before it")


def fork_ok(n: int, way: str = "") -> Figure:
    what = f"{_title(n, way)}: children that answered right"
    return Figure(f"{_place(n, way)}.ok", what, "children", "the fork returned or failed", _prepared(way))


def fork_cpu(n: int, of: str, way: str = "") -> Figure:
    what = f"{_title(n, way)}: CPU time of {of} per child until ready, mean"
    return Figure(f"{_place(n, way)}.cpu", what, "ms", "the child's first evaluation was answered", _prepared(way))


def fork_host_cpu(n: int, way: str) -> Figure:
    what = f"{_title(n, way)}: CPU time of this process and the template per child, mean"
    stop = f"all {n} children have answered their first evaluation"
    return Figure(f"{_place(n, way)}.host_cpu", what, "ms", stop, _prepared(way))


def unique_memory(n: int, of: str, way: str = "") -> Figure:
    stop = f"all {n} children have answered their first evaluation"
    prepared = f"private pages of the VMM process. {_CLEAN}"
    what = f"{_title(n, way)}: unique memory per child, {of}"
    return Figure(f"{_place(n, way)}.unique.{of}", what, "MiB", stop, prepared)


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


def idle_cpu(n: int, window_s: float, way: str = "") -> Figure:
    what = f"{_title(n, way)}: idle CPU per child, mean"
    stop = f"{window_s:g} s later, nobody having asked anything"
    prepared = "all children alive, each after its first eval"
    return Figure(f"{_place(n, way)}.idle", what, "% of a core", stop, prepared)


def kill(n: int, way: str = "") -> Figure:
    what = f"end of all {n} children" + (f" made {WAYS[way]}" if way else "")
    stop = "every process is reaped, its sockets and directory are gone"
    return Figure(f"{_place(n, way)}.kill", what, "s", stop, f"{n} idle children")


def template_made() -> Figure:
    stop = "it has rehearsed what every child does, and stands still"
    return Figure("template.made", "template: made in all", "s", stop, _FORKABLE)


def template_memory() -> Figure:
    prepared = "pages of its VMM process that belong to no file; shared with its children until one of them writes"
    return Figure("template.memory", "template: memory of its own", "MiB", "it stands still", prepared)


def trip(kind: str, share: str) -> Figure:
    what = {"eval": "eval round trip on a warm child", "exec": "exec of /bin/true on a warm child"}[kind]
    stop = {"eval": "the value is on the host", "exec": "the exit status is on the host"}[kind]
    prepared = {"eval": f"{_CHILD}, several times", "exec": f"{_CHILD}; the command was run before"}[kind]
    return Figure(f"trip.{kind}.{share}", f"{what}, {share}", "ms", stop, f"{prepared}; the only VM")


def fork_to_cold(n: int, way: str = "") -> Figure:
    what = f"{_title(n, way)} / cold boot of one"
    name = f"ratio.fork_{n}{way and f'_{way}'}_to_cold_boot"
    return Figure(name, what, "", "both in the same round", "see the two figures")


def versus_start(n: int, figure: Figure) -> Figure:
    """Of one about forks from a template: how it compares with the same one about children that are started."""
    name = figure.name.replace(_place(n, FORK), f"ratio.fork.{n}.fork_to_start", 1)
    what = f"{figure.what.replace(_title(n, FORK), f'fork of {n}')}, {WAYS[FORK]} / {WAYS[START]}"
    return Figure(name, what, "", "both in the same round", "see the two figures")


def step_rank(step: str) -> int:
    """Where among the steps it comes; not every engine has all of them."""
    return list(_STEP_ENDS).index(step) if step in _STEP_ENDS else len(_STEP_ENDS)


def _end(step: str) -> str:
    return _STEP_ENDS.get(step, f"the step '{step}' is over")


def _place(n: int, way: str) -> str:
    return f"fork.{n}.{way}" if way else f"fork.{n}"


def _title(n: int, way: str) -> str:
    return f"fork of {n} {WAYS[way]}" if way else f"fork of {n}"


def _prepared(way: str) -> str:
    return _TEMPLATED if way == FORK else _FORKABLE
