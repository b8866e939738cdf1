"""Can KVM run a Linux guest at speed here? Found out by running one, in another process, within a deadline.

What tells them apart, measured (a turn of a register loop on the host | in the guest; a round of kernel work; a
trip to user mode and back):

    kvm_amd, nested paging    4.3 ns | 5.2 ns      6 us    0.08 us        (in an emulated machine, 15x slower)
    kvm_amd, shadow paging    5.0 ns | 4.2 ns    350 us    0.07 us        (the same, npt=0)
    kvm_pvm, no vmx or svm    0.3 ns | 1520 ns    25 us    never returns

The last one answers every ioctl and enters long mode, but emulates a stock kernel's instructions one by one, never
returns from the first `sysretq` and refuses SSE instructions. So presence says nothing; rates do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import errno
import json
import os
import platform
import selectors
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DEVICE = Path("/dev/kvm")
_TRIAL_PROGRAM = Path(__file__).with_name("kvm_trial.py")

# From the child's first line on; a good KVM needs some 30 ms. Grows with the host's own loop on slow hosts.
TRIAL_S = 0.8
# Until that line: starting an interpreter, 30 ms when warm.
START_S = 5.0
# Time the child spent waiting for a CPU is given back to it, up to this.
_MOST_GIVEN_BACK_S = 5.0
_REAP_S = 2.0
_ORDINARY_HOST_NS = 1.0
_MOST_STRETCH = 10.0

# QEMU's translator is 14 times slower than the host at this loop, so a KVM far below that is not worth having. Time
# stolen from the host itself has made a good one look 4 times slower.
_SLOWEST_LOOP = 30.0
# In turns of the host's loop. A round takes the translator 17,000, nested paging 1,500, shadow paging 115,000 at worst.
_SLOWEST_ROUND = 300_000.0

_EXIT_NAMES = {
    5: "halted at the wrong place",
    8: "shut down",
    9: "entry refused",
    17: "instruction not emulated",
}


class KvmState(enum.StrEnum):
    USABLE = "usable"
    TOO_SLOW = "too slow"
    NO_LONG_MODE = "cannot enter long mode"
    HANGS = "hangs"
    ABSENT = "absent"
    NO_PERMISSION = "no permission"
    ERROR = "error"


@dataclass(frozen=True)
class KvmHints:
    """They make explanations better and never decide."""

    modules: tuple[str, ...] = ()
    cpu_flag: str | None = None

    def __str__(self) -> str:
        flag = f"CPU flag {self.cpu_flag}" if self.cpu_flag else "no vmx or svm CPU flag"
        return ", ".join([*(f"module {name}" for name in self.modules), flag])


@dataclass(frozen=True)
class Trial:
    """What the child reported before it ended or was killed, in nanoseconds; None: not reached."""

    stage: str = "start"
    hung: bool = False
    host_ns: float | None = None
    exit_ns: float | None = None
    guest_ns: float | None = None
    kernel_ns: float | None = None
    user_ns: float | None = None
    errno: int | None = None
    exit_reason: int | None = None
    noise: str = ""


@dataclass(frozen=True)
class KvmVerdict:
    state: KvmState
    explanation: str
    remedy: str | None = None
    hints: KvmHints = KvmHints()
    trial: Trial | None = None
    elapsed_ms: float = 0.0

    @property
    def usable(self) -> bool:
        return self.state is KvmState.USABLE


def probe_kvm() -> KvmVerdict:
    """Takes well under a second and never raises."""
    began = time.monotonic()
    verdict = _look()
    return dataclasses.replace(verdict, elapsed_ms=round((time.monotonic() - began) * 1000, 1))


def _look() -> KvmVerdict:
    hints = probe_hints()
    if platform.machine() != "x86_64":
        return KvmVerdict(KvmState.ERROR, f"not tried on {platform.machine()}, only on x86_64", None, hints)
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return judge_open_error(error.errno or 0, hints)
    try:
        trial = observe(render_command())
    except OSError as error:
        return KvmVerdict(KvmState.ERROR, f"the trial could not be started: {error}", None, hints)
    return judge_trial(trial, hints)


def probe_hints(sys_module: Path = Path("/sys/module"), cpuinfo: Path = Path("/proc/cpuinfo")) -> KvmHints:
    modules: tuple[str, ...] = ()
    with contextlib.suppress(OSError):
        modules = tuple(sorted(path.name for path in sys_module.glob("kvm_*")))
    words: set[str] = set()
    with contextlib.suppress(OSError):
        words = set(cpuinfo.read_text(errors="replace").split())
    return KvmHints(modules, next((flag for flag in ("vmx", "svm") if flag in words), None))


def render_command(hopeless: float = _SLOWEST_LOOP) -> list[str]:
    return [sys.executable or "python3", "-I", "-S", str(_TRIAL_PROGRAM), str(hopeless)]


def observe(command: Sequence[str], *, start_s: float = START_S, trial_s: float = TRIAL_S) -> Trial:
    """Run the trial program to its end or its deadline, whichever is first, and leave no process behind."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, close_fds=True
    )
    try:
        return _listen(child, start_s, trial_s)
    finally:
        child.kill()
        # A process may be stuck in the kernel for good: do not wait for that.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_REAP_S)
        if child.stdout:
            child.stdout.close()


def _listen(child: subprocess.Popen[bytes], start_s: float, trial_s: float) -> Trial:
    assert child.stdout is not None
    deadline, started = time.monotonic() + start_s, False
    text = b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while True:
            given_back = min(_waited_for_cpu_s(child.pid), _MOST_GIVEN_BACK_S) if started else 0.0
            left = deadline + given_back - time.monotonic()
            if left <= 0:
                return parse_reports(text, hung=True)
            if not selector.select(left):
                continue
            piece = os.read(child.stdout.fileno(), 65536)
            if not piece:
                return parse_reports(text, hung=False)
            text += piece
            host_ns = parse_reports(text, hung=False).host_ns
            if host_ns is not None and not started:
                started = True
                stretch = min(max(host_ns / _ORDINARY_HOST_NS, 1.0), _MOST_STRETCH)
                deadline = time.monotonic() + trial_s * stretch


def _waited_for_cpu_s(pid: int) -> float:
    """How long a process was ready but not running. Zero where the kernel does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def parse_reports(text: bytes, *, hung: bool) -> Trial:
    seen: dict[str, Any] = {}
    stage, noise = "start", ""
    for line in text.decode(errors="replace").splitlines():
        try:
            report = json.loads(line)
            if report["stage"] != "failed":
                stage = str(report["stage"])
            seen.update(report)
        except (ValueError, TypeError, KeyError):
            noise = line.strip() or noise
    known = {name: seen.get(name) for name in ("host_ns", "exit_ns", "guest_ns", "kernel_ns", "user_ns")}
    return Trial(stage, hung, **known, errno=seen.get("errno"), exit_reason=seen.get("exit_reason"), noise=noise)


_NEEDS_HARDWARE = (
    "For speed, use a machine with vmx or svm: switch virtualization on in its firmware, "
    "or nested virtualization in the hypervisor below"
)


def judge_open_error(number: int, hints: KvmHints) -> KvmVerdict:
    if number in (errno.EACCES, errno.EPERM):
        remedy = f"Let this user open {_DEVICE}: add it to the group that owns it (usually kvm) and log in again"
        return KvmVerdict(KvmState.NO_PERMISSION, f"this user may not open {_DEVICE}", remedy, hints)
    if number in (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.ENOTDIR):
        remedy = _NEEDS_HARDWARE
        if hints.cpu_flag:
            module = "kvm_intel" if hints.cpu_flag == "vmx" else "kvm_amd"
            remedy = f"Load the module {module}; in a container, pass {_DEVICE} in"
        return KvmVerdict(KvmState.ABSENT, f"there is no {_DEVICE}", remedy, hints)
    return KvmVerdict(KvmState.ERROR, f"opening {_DEVICE} failed: {os.strerror(number)}", None, hints)


def judge_trial(trial: Trial, hints: KvmHints) -> KvmVerdict:
    """Pure: the same trial gives the same verdict."""

    def verdict(state: KvmState, why: str, remedy: str | None = _NEEDS_HARDWARE) -> KvmVerdict:
        return KvmVerdict(state, why, remedy, hints, trial)

    after = f"after the step '{trial.stage}'"
    if slow := find_slowness(trial):
        return verdict(KvmState.TOO_SLOW, slow)
    if trial.hung and trial.host_ns is None:
        return verdict(KvmState.ERROR, "the trial did not start in time", None)
    if trial.hung:
        return verdict(KvmState.HANGS, f"a tiny guest did not come back {after}")
    trouble = describe_trouble(trial)
    if trouble and trial.stage == "created":
        return verdict(KvmState.NO_LONG_MODE, f"a 64-bit guest does not start: {trouble}")
    if trouble:
        busy = "Stop the other hypervisor that holds the processor's virtualization"
        return verdict(KvmState.ERROR, f"failed {after}: {trouble}", busy if trial.errno == errno.EBUSY else None)
    if trial.stage != "user":
        return verdict(KvmState.ERROR, f"the trial ended {after}" + (trial.noise and f": {trial.noise}"), None)
    return verdict(KvmState.USABLE, "runs a 64-bit guest at the host's speed", None)


def find_slowness(trial: Trial) -> str | None:
    if not trial.host_ns or not trial.guest_ns:
        return None
    ratio = trial.guest_ns / trial.host_ns
    if ratio > _SLOWEST_LOOP:
        return f"guest code runs {ratio:,.0f} times slower than the host's"
    round_ns = max(trial.kernel_ns or 0.0, trial.user_ns or 0.0)
    if round_ns / trial.host_ns > _SLOWEST_ROUND:
        return f"a round of kernel work takes {round_ns / 1000:,.0f} us in the guest"
    return None


def describe_trouble(trial: Trial) -> str | None:
    if trial.exit_reason is not None:
        return f"{_EXIT_NAMES.get(trial.exit_reason, 'unexpected')} (exit {trial.exit_reason})"
    return os.strerror(trial.errno) if trial.errno is not None else None
