"""Cold starts of the same image and code with runc, gVisor's runsc and bubblewrap, to compare forks with."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.engine import begin_run
from bench.figures import EACH, Family, Round, Row, Run, Values, joined, render_failure
from bench.ground import describe_machine
from forkd.errors import EngineFailed, ForkdError, HostLacks
from forkd.host.tools import ask, find_program, find_tool, run_tool, tool_environment
from forkd.image import Progress
from forkd.runtime import demo

PART = "containers"
# By the name of the program, the Debian package that has it.
RUNTIMES = {"runc": "runc", "runsc": "runsc", "bwrap": "bubblewrap"}
COMMAND = ("/usr/bin/python3", "-c", f"import numpy; print({demo.CODE})")
ANSWER = f"{demo.EXPECTED}\n".encode()

_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}
# How runsc intercepts system calls: the newer way first, which not every version has.
_FLAGS = {"runsc": [("-ignore-cgroups", "-network=none", f"-platform={name}") for name in ("systrap", "ptrace")]}
CONTAINERS = Family(
    "containers.{runtime}.{n}",
    "{runtime}, {n} cold starts: ",
    "root file system mounted or unpacked, read before; config.json written; no process started ahead",
    {
        "wall": Row("all of them", "s", "all have printed the right answer and their runtimes have exited"),
        EACH: Row(
            "one start",
            "ms",
            "it has printed the right answer and its runtime has exited; starts when its runtime is started",
        ),
        "ok": Row("answered right", "starts", "all have ended"),
    },
)
_CGROUPS = Path("/sys/fs/cgroup")
_TOOL_DEADLINE_S = 300.0
_START_DEADLINE_S = 60.0
_END_DEADLINE_S = 10.0
_DELETE_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Way:
    """A way to start containers that may work here. In `scratch` are `root`, bundles, and the state of the runtime."""

    runtime: str
    scratch: Path
    at_once: int
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{' '.join((self.runtime, *self.flags))}, {self.at_once} at once"


@dataclass(frozen=True)
class Start:
    """How long it took; `complaint` is empty when the answer was right."""

    took_ms: float
    complaint: str


def list_ways(runtime: str, scratch: Path, cores: int) -> list[Way]:
    """Those to try, the best first."""
    return [Way(runtime, scratch, *each) for each in itertools.product((2 * cores, 1), _FLAGS.get(runtime, [()]))]


def render_config(root: Path, name: str) -> dict[str, Any]:
    """The config.json of an OCI bundle: nearly what `runc spec` writes, with our command and without a terminal."""
    mounts = {"/proc": "proc", "/dev": "tmpfs", "/sys": "sysfs", "/tmp": "tmpfs"}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0},
            "args": list(COMMAND),
            "env": [f"{key}={value}" for key, value in _ENVIRONMENT.items()],
            "cwd": "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": str(root), "readonly": True},
        "hostname": "bench",
        "mounts": [{"destination": path, "type": kind, "source": kind} for path, kind in mounts.items()],
        "linux": {
            # Not below our own: what a killed runtime leaves of it is found.
            "cgroupsPath": f"/{name}",
            "resources": {"devices": [{"allow": False, "access": "rwm"}]},
            "namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")],
            "maskedPaths": ["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"],
            "readonlyPaths": ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"],
        },
    }


def render_start(way: Way, name: str) -> list[str]:
    if way.runtime != "bwrap":
        return _render_oci(way, "run", f"--bundle={way.scratch / name}", name)
    environment = [word for key, value in _ENVIRONMENT.items() for word in ("--setenv", key, value)]
    mounts = ["--ro-bind", str(way.scratch / "root"), "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    apart = ["--unshare-all", "--hostname", "bench", "--die-with-parent", "--new-session", "--clearenv"]
    return ["bwrap", *apart, *environment, *mounts, "--chdir", "/", "--", *COMMAND]


def render_delete(way: Way, name: str) -> list[str]:
    """Nothing for bwrap: its processes end with it, and it keeps no state."""
    return [] if way.runtime == "bwrap" else _render_oci(way, "delete", "--force", name)


def _render_oci(way: Way, *words: str) -> list[str]:
    return [way.runtime, f"--root={way.scratch / 'state'}", *way.flags, *words]


def find_complaint(out: bytes, err: bytes, status: int | None) -> str:
    if status == 0 and out == ANSWER:
        return ""
    last = (err + out).decode(errors="replace").splitlines()[-1:]
    return f"exit status {status}: {last[0] if last else 'nothing printed'}"


def compose_round(runtime: str, starts: Sequence[Start], wall_s: float) -> Round:
    """Percentiles are of the starts that answered right; there is a time of all only where all did."""
    n, took = len(starts), [start.took_ms for start in starts if not start.complaint]
    wrong = [start.complaint for start in starts if start.complaint]
    values: Values = {"ok": len(took), EACH: took, **({} if wrong else {"wall": wall_s})}
    failures = (f"{PART}, {runtime}: {len(wrong)} of {n} starts failed: {wrong[0]}",) if wrong else ()
    return Round(CONTAINERS.read(values, runtime=runtime, n=n), failures)


async def measure_containers(
    image_root: Path, scratch: Path, n: int, progress: Progress, runtimes: Sequence[str] = tuple(RUNTIMES)
) -> Run:
    """A runtime that cannot be had or used is a failure, and has no figures."""
    notes: list[str] = []
    used: dict[str, Any] = {}
    done: list[Round] = []
    with mounted_root(image_root, scratch) as how:
        run = begin_run(describe_machine(), {"n": n, "root": how, "runtimes": used, "notes": notes})
        for runtime in runtimes:
            progress.stage(f"containers: preparing {runtime}")
            try:
                install(runtime, RUNTIMES[runtime])
                way = await find_way(runtime, scratch, notes)
            except ForkdError as error:
                done.append(Round.failed(f"{PART}, {runtime}", error))
                continue
            used[runtime] = {
                "version": ask(str(find_tool(runtime)), "--version").partition("\n")[0],
                "at_once": way.at_once,
                "start": shlex.join(render_start(replace(way, scratch=Path("SCRATCH")), "NAME")),
            }
            progress.stage(f"containers: {n} cold starts, {way}")
            done.append(compose_round(runtime, *await run_starts(way, n)))
    run.rounds.append(joined(done))
    return run


@contextmanager
def mounted_root(image_root: Path, scratch: Path) -> Iterator[str]:
    """The root file system as the directory `root` in `scratch`, which is removed by its owner; yields how."""
    root, how = scratch / "root", "mounted"
    root.mkdir()
    try:
        _run("Mounting the image", "mount", "-t", "erofs", "-o", "loop,ro", image_root, root)
    except HostLacks as error:
        how = render_failure("unpacked", error)
        _run("Unpacking the image", "fsck.erofs", f"--extract={root}", image_root)
    try:
        yield how
    finally:
        if how == "mounted":
            # Lazily: what a runtime may have left running must not keep it.
            _run("Unmounting the image", "umount", "--lazy", root)


def install(program: str, package: str) -> None:
    if find_program(program) is not None:
        return
    if os.geteuid() != 0:
        raise HostLacks(f"{program} is not installed, and only root can do that: apt install {package}")
    with suppress(HostLacks):  # the lists that are there may do
        _run("Updating the lists of packages", "apt-get", "update")
    _run(f"Installing {package}", "apt-get", "install", "--yes", "--no-install-recommends", package)
    find_tool(program)


def _run(doing: str, program: str, *words: str | Path) -> None:
    environment = tool_environment(DEBIAN_FRONTEND="noninteractive")
    argv = [find_tool(program), *words]
    run_tool(argv, doing=doing, failure=HostLacks, deadline_s=_TOOL_DEADLINE_S, env=environment)


async def find_way(runtime: str, scratch: Path, notes: list[str]) -> Way:
    """The first in which as many starts as there are at once answer right; with them all that is needed is read."""
    for way in list_ways(runtime, scratch, len(os.sched_getaffinity(0))):
        starts, _ = await run_starts(way, way.at_once)
        wrong = [start.complaint for start in starts if start.complaint]
        if not wrong:
            return way
        notes.append(f"{way}: {wrong[0]}")
    raise EngineFailed(f"{runtime} cannot start this image here", details=notes[-1])


async def run_starts(way: Way, n: int) -> tuple[list[Start], float]:
    """Each start, and the seconds that all of them took."""
    names = [f"forkd-bench-{secrets.token_hex(6)}" for _ in range(n)]
    for name in names:
        (way.scratch / name).mkdir()
        (way.scratch / name / "config.json").write_text(json.dumps(render_config(way.scratch / "root", name)))
    turns, begun = asyncio.Semaphore(way.at_once), time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_start(way, name, turns)) for name in names]
    return [task.result() for task in tasks], time.monotonic() - begun


async def _start(way: Way, name: str, turns: asyncio.Semaphore) -> Start:
    async with turns:
        begun, process, complaint = time.monotonic(), None, f"no end within {_START_DEADLINE_S:g} s"
        try:
            async with asyncio.timeout(_START_DEADLINE_S):
                process = await asyncio.create_subprocess_exec(
                    *render_start(way, name),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=tool_environment(),
                    start_new_session=True,
                )
                complaint = find_complaint(*await process.communicate(), process.returncode)
        except TimeoutError:
            pass
        finally:
            took_ms = (time.monotonic() - begun) * 1000
            if complaint:
                await _put_away(process, way, name)
        return Start(took_ms, complaint)


async def _put_away(process: asyncio.subprocess.Process | None, way: Way, name: str) -> None:
    """It may end by itself first: a runtime that is killed leaves its container and its control groups."""
    if process is not None and not await _has_ended(process):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    _delete(render_delete(way, name), name)
    if process is not None:
        await _has_ended(process)


async def _has_ended(process: asyncio.subprocess.Process) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(_END_DEADLINE_S):
            await process.wait()
    return process.returncode is not None


def _delete(argv: Sequence[str], name: str) -> None:
    if argv:
        with suppress(ForkdError):
            run_tool(argv, doing=f"Deleting {name}", failure=EngineFailed, deadline_s=_DELETE_DEADLINE_S)
    for group in (_CGROUPS / name, *_CGROUPS.glob(f"*/{name}")):
        with suppress(OSError):
            group.rmdir()
