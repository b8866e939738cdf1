"""What is measured of forks of live VMs, of a crowd of them, and of many one after the other. Pure."""

from __future__ import annotations

from bench.figures import Figure

_REHEARSED = "snapshot made and verified; a template made, which has rehearsed all that is asked of its children"
_RUNNING = "a running VM, itself a child of a template, whose last evaluation was answered"
_LIVE = {
    "pause": (
        "its source stands still",
        "the source runs again, by the VMM's own time stamp; starts before it is told to stop",
    ),
    "answer": (
        "it answers",
        "it has kept the fork contract and the answer to its first evaluation is on the host; starts with the call",
    ),
}


def live(written_mib: int, name: str, share: str) -> Figure:
    what, stop = _LIVE[name]
    title = f"live fork, {written_mib} MiB just written: {what}, {share}"
    prepared = f"{_RUNNING}, and which wrote to each page of that much memory in it" if written_mib else _RUNNING
    return Figure(f"live.{written_mib}.{name}.{share}", title, "ms", stop, prepared)


def live_ok(written_mib: int) -> Figure:
    what = f"live fork, {written_mib} MiB just written: forks that were right, and so was their source"
    stop = "fork and source have shown that each has its own memory"
    return Figure(f"live.{written_mib}.ok", what, "forks", stop, _RUNNING)


def chain(name: str, which: str) -> Figure:
    what, stop = _LIVE[name]
    return Figure(f"live.chain.{name}.{which}", f"live forks {which} of one VM: {what}, p50", "ms", stop, _RUNNING)


def chain_ratio(name: str, count: int, ends: int) -> Figure:
    what = f"live forks {count - ends + 1} to {count} of one VM / 1 to {ends}: {_LIVE[name][0]}"
    return Figure(f"live.chain.{name}.ratio", what, "", "the last fork has answered", "see the two figures")


_ALIVE = "all alive, each after its first evaluation"
CROWD = {
    "made": ("made, all ready", "s", "all have kept the contract and answered their first evaluation"),
    "ok": ("answered right, and forked from the template", "VMs", "the fork returned"),
    "distinct": ("share nothing with any other", "VMs", "the last has said who it is"),
    "unique.mean": ("unique memory each, mean", "MiB", _ALIVE),
    "unique.largest": ("unique memory each, largest", "MiB", _ALIVE),
    "all_memory": ("memory of the machine for all", "MiB", f"{_ALIVE}; what is available less than before"),
    "idle": ("idle CPU each, mean", "% of a core", "some seconds later, nobody having asked anything"),
    "killed": ("killed and cleaned up", "s", "every process is reaped, its sockets and directory are gone"),
}


def crowd(n: int, name: str) -> Figure:
    what, unit, stop = CROWD[name]
    return Figure(f"crowd.{n}.{name}", f"{n} VMs at once: {what}", unit, stop, _REHEARSED)


_ENDED = "the last is killed"
_ANONYMOUS = "; pages that belong to no file"
_GONE = "all are killed, and what was needed for them is put away"
_CYCLES = {
    "done": ("done", "", _ENDED),
    "errors": ("errors and wrong answers", "", _ENDED),
    "seconds": ("time for all", "s", _ENDED),
    "rate": ("per second", "1/s", _ENDED),
    "p50": ("one cycle, p50", "ms", "its child is gone; starts when it is asked for"),
    "p99": ("one cycle, p99", "ms", "its child is gone; starts when it is asked for"),
    "drift": ("p50 of the last tenth / of the first", "", _ENDED),
    "memory.first": (
        "memory of the template before",
        "MiB",
        f"before the first cycle, after some that do not count{_ANONYMOUS}",
    ),
    "memory.last": ("memory of the template at the end", "MiB", _GONE + _ANONYMOUS),
    "gained": ("memory the template gained", "MiB", _GONE + _ANONYMOUS),
    "own_gained": ("memory this process gained", "MiB", _GONE + _ANONYMOUS),
    "left": ("processes, descriptors, threads, tasks, files left", "", _GONE),
}
_LIVES = {
    "done": ("done", "", _ENDED),
    "errors": ("errors and wrong checksums", "", _ENDED),
    "seconds": ("time for all", "s", _ENDED),
    "pause.p50": (f"{_LIVE['pause'][0]}, p50", "ms", _LIVE["pause"][1]),
    "pause.p99": (f"{_LIVE['pause'][0]}, p99", "ms", _LIVE["pause"][1]),
    "answer.p50": (f"{_LIVE['answer'][0]}, p50", "ms", _LIVE["answer"][1]),
    "answer.p99": (f"{_LIVE['answer'][0]}, p99", "ms", _LIVE["answer"][1]),
    "memory.first": (
        "memory of the source before",
        "MiB",
        f"before the first fork, after some that do not count{_ANONYMOUS}",
    ),
    "memory.last": ("memory of the source at the end", "MiB", _GONE + _ANONYMOUS),
    "gained": ("memory the source gained", "MiB", _GONE + _ANONYMOUS),
    "guest_gained": (
        "of which its guest wrote to",
        "MiB",
        f"{_GONE}; a guest that runs writes to more and more of its memory, forked or not",
    ),
    "left": ("processes, descriptors, threads, tasks, files left", "", _GONE),
}
ENDURANCE = {"cycles": _CYCLES, "live": _LIVES}
TITLES = {"cycles": "fork, eval, kill", "live": "live forks of a busy VM"}
_PREPARED = {
    "cycles": "a template, which all are forked from",
    "live": f"{_RUNNING}; it writes to its memory all the time, and keeps checksums",
}


def endurance(kind: str, name: str) -> Figure:
    what, unit, stop = ENDURANCE[kind][name]
    return Figure(f"endurance.{kind}.{name}", f"{TITLES[kind]}: {what}", unit, stop, _PREPARED[kind])
