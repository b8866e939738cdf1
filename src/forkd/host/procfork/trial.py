"""Can processes be forked from outside here? Tried for real, on a small program that ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from forkd.errors import NotForkable
from forkd.host.finding import Finding, Status
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import forked
from forkd.host.procfork.descriptors import Keep
from forkd.host.procfork.source import Caller

# Long enough for the trial, and over soon should we be killed meanwhile.
_PROGRAM = ("sleep", "4")
_ASLEEP_DEADLINE_S = 2.0


def find_lack(*, suspending: bool = False) -> str | None:
    """Why not; None when a program was forked. `suspending`: its seccomp filters too, as root may."""
    try:
        process = subprocess.Popen(_PROGRAM, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    except OSError as error:
        return f"{_PROGRAM[0]} does not start: {error.strerror}"
    try:
        _wait_asleep(process.pid)
        # Whatever we were started with, it has too; here it may be shared.
        with forked(process.pid, ForkPlan(choose=lambda _: Keep(), caller=Caller(suspend_filters=suspending))) as child:
            pass
        os.kill(child.pid, signal.SIGKILL)
        os.waitpid(child.pid, 0)
    except NotForkable as error:
        return f"{error.message}. {error.hint}" if error.hint else error.message
    finally:
        process.kill()
        process.wait()
    return None


def probe_live_forks() -> Finding:
    lack = find_lack()
    if lack is None:
        found = "a running process was forked: templates and forks of running VMs work"
        if filtered := find_lack(suspending=True):
            found += f"; not with Firecracker: {filtered}"
        return Finding("live forks", Status.OK, found)
    return Finding(
        "live forks",
        Status.WARN,
        f"{lack}: every fork starts a VMM, about ten times slower, and no running VM can be forked",
        "Allow ptrace: sysctl kernel.yama.ptrace_scope=1 or lower, no seccomp filter against it",
    )


def _wait_asleep(pid: int) -> None:
    """Until it is the program and sleeps: before, it is a copy of us."""
    deadline = time.monotonic() + _ASLEEP_DEADLINE_S
    while time.monotonic() < deadline:
        # 230: clock_nanosleep. Not to be seen where tracing is forbidden, and then the trial tells.
        try:
            if Path(f"/proc/{pid}/syscall").read_text().startswith("230 "):
                return
        except OSError:
            return
        time.sleep(0.001)
