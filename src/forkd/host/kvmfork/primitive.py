"""The fork itself, measured: a tiny VM forked from outside, beside a C program that makes the same system calls.

Both fork the same VM, of the same program (primitive.c), on the same two processors. The clock stops for each fork when
its guest was seen to run. It works on any /dev/kvm: the guest has six instructions, and no kernel.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.errors import EngineFailed, HostLacks
from forkd.host.kvmfork.plan import VmPlan
from forkd.host.kvmfork.record import Record
from forkd.host.kvmfork.recorder import Recorder
from forkd.host.procfork.batch import Batch
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Child
from forkd.host.procfork.descriptors import Action, Descriptor, Keep
from forkd.host.procfork.program import Call

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILER = "gcc"
_OPTIONS = ("-O2", "-Wall", "-pthread")
_DEVICE = "/dev/kvm"
_PROCESSORS = 2
_DEADLINE_S = 60.0
_TICK = struct.Struct("<4q")  # process, when it began, when its guest ran, what that counted
_COUNTED = 2  # once in the source, once in the fork
_GO = struct.pack("<I", 1)
_PRCTL, _PR_SET_PDEATHSIG = 157, 1


@dataclass(frozen=True)
class Timing:
    """`all_ms`: until the guests of all, forked as fast as possible, ran. `each_ms`: of forks one after the other."""

    all_ms: float
    each_ms: tuple[float, ...]

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.each_ms)

    @property
    def p99_ms(self) -> float:
        return sorted(self.each_ms)[math.ceil(len(self.each_ms) * 0.99) - 1]


@dataclass(frozen=True)
class Round:
    native: Timing
    forkd: Timing

    @property
    def all_ratio(self) -> float:
        return self.forkd.all_ms / self.native.all_ms

    @property
    def p50_ratio(self) -> float:
        return self.forkd.p50_ms / self.native.p50_ms


@dataclass(frozen=True)
class Primitive:
    """`calls`: that one fork makes its VM with; `call_bytes`: of their arguments."""

    count: int
    calls: int
    call_bytes: int
    rounds: tuple[Round, ...]


def measure_primitive(count: int, rounds: int, on_round: Callable[[int], None] = lambda _: None) -> Primitive:
    """Raises HostLacks, NotForkable, EngineFailed."""
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        raise HostLacks(f"{_DEVICE} cannot be opened", hint="Load KVM's modules, and join the group kvm")
    with tempfile.TemporaryDirectory(prefix="forkd-") as directory, _limited_to(_PROCESSORS):
        program = compile_program(Path(directory))
        with served(program) as vmm:
            done = []
            for number in range(rounds):
                on_round(number)
                # Taking turns at being first, so that neither always finds the machine warmer.
                if number % 2:
                    forkd = vmm.measure(count)
                    native = measure_native(program, count)
                else:
                    native = measure_native(program, count)
                    forkd = vmm.measure(count)
                done.append(Round(native, forkd))
            size = sum(len(call.data) for call in vmm.calls)
            return Primitive(count, len(vmm.calls), size, tuple(done))


def compile_program(directory: Path) -> Path:
    """Raises HostLacks."""
    if shutil.which(_COMPILER) is None:
        raise HostLacks("The fork is measured beside a C program, and there is no C compiler", hint="Install gcc")
    program = directory / "primitive"
    compiled = subprocess.run(
        [_COMPILER, *_OPTIONS, "-o", program, _SOURCE], capture_output=True, text=True, check=False
    )
    if compiled.returncode:
        raise HostLacks(
            "The C program to measure beside was not compiled",
            hint="Install gcc and the headers of the C library and the kernel",
            details=compiled.stderr,
        )
    return program


@contextlib.contextmanager
def _limited_to(processors: int) -> Iterator[None]:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:processors])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def measure_native(program: Path, count: int) -> Timing:
    """The program forks itself. Raises EngineFailed."""
    try:
        ran = subprocess.run(
            [program, "native", str(count)],
            capture_output=True,
            timeout=_DEADLINE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineFailed(f"The C program did not end in {_DEADLINE_S:.0f} s") from error
    if ran.returncode or len(ran.stdout) != 2 * count * _TICK.size:
        raise EngineFailed("The C program could not fork its VM", details=ran.stderr.decode(errors="replace"))
    ticks = list(_TICK.iter_unpack(ran.stdout))
    _check_counts([counted for *_, counted in ticks])
    together, alone = ticks[:count], ticks[count:]
    all_ns = max(ran_ns for _, _, ran_ns, _ in together) - min(began_ns for _, began_ns, _, _ in together)
    return Timing(all_ns / 1e6, tuple((ran_ns - began_ns) / 1e6 for _, began_ns, ran_ns, _ in alone))


def _check_counts(counts: Sequence[int]) -> None:
    if wrong := [each for each in counts if each != _COUNTED]:
        raise EngineFailed(f"The guest of a fork counted {wrong[0]}, not {_COUNTED}")


@contextlib.contextmanager
def served(program: Path) -> Iterator[Vmm]:
    """The program, to be forked from outside. Raises NotForkable, EngineFailed."""
    pipe = subprocess.PIPE
    command = [str(program), "serve"]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as process:
        try:
            assert process.stdin and process.stdout and process.stderr
            ticks = Ticks(process.stdout.fileno())
            recorder = Recorder(process.pid)
            try:
                recorder.start()
                process.stdin.write(b"\0")
                ready = ticks.find_next()
                if ready is None:
                    process.kill()
                    told = process.stderr.read().decode(errors="replace")
                    raise EngineFailed("The program to be forked could not make its VM", details=told)
                record = recorder.finish(_DEADLINE_S)
            finally:
                recorder.close()
            yield Vmm(process.pid, ticks, record, go_address=ready[1])
        finally:
            process.kill()


class Ticks:
    """What the program and its forks write."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def find_next(self) -> tuple[int, int, int, int] | None:
        """None when the program has ended, or nothing comes in time."""
        if not select.select([self._fd], [], [], _DEADLINE_S)[0]:
            return None
        data = os.read(self._fd, _TICK.size)  # they are written whole
        return _TICK.unpack(data) if data else None

    def read_last(self, count: int) -> int:
        """When the last of so many guests ran. Raises EngineFailed."""
        found = [self.find_next() for _ in range(count)]
        ticks = [each for each in found if each is not None]
        if len(ticks) < count:
            raise EngineFailed(f"Of {count} forks the guests of {len(ticks)} ran")
        _check_counts([counted for *_, counted in ticks])
        return max(ran_ns for _, _, ran_ns, _ in ticks)


class Vmm:
    """The program, with its VM, at rest. `calls`: those that made the VM of its last fork."""

    def __init__(self, pid: int, ticks: Ticks, record: Record, go_address: int) -> None:
        self._ticks = ticks
        self._go_address = go_address
        self._vm = VmPlan(record)
        self._batch = Batch(
            pid, ForkPlan(self._choose, set_up=self._set_up, look=self._vm.look, replaced=self._vm.replaced)
        )
        self._pids: list[int] = []
        self.calls: list[Call] = []

    def measure(self, count: int) -> Timing:
        """Raises NotForkable, EngineFailed."""
        with self._ended():
            began_ns = time.monotonic_ns()
            self._batch.fork_each([{}] * count, self._let_run)
            all_ns = self._ticks.read_last(count) - began_ns
        with self._ended():
            each_ms = tuple(self._fork_one() for _ in range(count))
            self._batch.release()
        return Timing(all_ns / 1e6, each_ms)

    def _fork_one(self) -> float:
        """Of a source that is kept at rest, as templates are while one fork follows the other."""
        began_ns = time.monotonic_ns()
        with self._batch.forked(keep=True) as child:
            self._let_run(0, child)
        return (self._ticks.read_last(1) - began_ns) / 1e6

    def _choose(self, descriptor: Descriptor) -> Action:
        """The rest is pipes: its forks write to the same."""
        return self._vm.choose(descriptor) or Keep()

    def _set_up(self, free: int) -> list[Call]:
        self.calls = self._vm.set_up(free)
        return [
            Call(_PRCTL, (_PR_SET_PDEATHSIG, signal.SIGKILL), what="set the death signal"),
            *self.calls,
        ]

    def _let_run(self, _: int, child: Child) -> None:
        child.write_memory(self._go_address, _GO)
        self._pids.append(child.pid)

    @contextlib.contextmanager
    def _ended(self) -> Iterator[None]:
        """All forks, when the block has ended."""
        try:
            yield
        finally:
            for pid in self._pids:
                os.kill(pid, signal.SIGKILL)
            for pid in self._pids:
                os.waitpid(pid, 0)
            self._pids.clear()
