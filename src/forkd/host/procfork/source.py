"""The process that is forked. A thread of it makes calls for us, and goes on by itself whatever becomes of us."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from forkd.errors import NotForkable
from forkd.host.process import SHORTAGES
from forkd.host.procfork import ptrace
from forkd.host.procfork.mappings import advisable_ranges, code_ends, find_shared
from forkd.host.procfork.proc_files import read_whole
from forkd.host.procfork.program import DETOUR_BYTES, SYSCALL, Call, Detour, Program, fits_detour, render_jump
from forkd.host.procfork.ptrace import Gone, Rseq
from forkd.host.procfork.registers import (
    NAMES,
    PPOLL,
    Registers,
    at_code,
    called_again,
    find_tid_offset,
    making_call,
    returned,
    waiting_in,
)
from forkd.host.procfork.rest import Stopped, at_rest
from forkd.host.procfork.scheduling import Scheduling, read_scheduling
from forkd.host.procfork.seed_page import PAGE_BYTES, ROOM_FOR_CODE, ROOM_FOR_DATA, SeedPage, is_seed, page_of

_THREAD_DESCRIPTOR_BYTES = 4096
_MMAP, _MUNMAP, _MADVISE, _GETITIMER, _GETPID, _CLONE = 9, 11, 28, 36, 39, 56
_DOFORK = 11
_READ_WRITE, _READ_WRITE_RUN, _PRIVATE_ANONYMOUS = 3, 7, 0x22
# The child of our source's parent, its thread id written where its C library looks for it.
_FORK_FLAGS = signal.SIGCHLD | 0x8000 | 0x01000000  # CLONE_PARENT, CHILD_SETTID
_CHILD_CLEARTID = 0x00200000
_INTERVAL_TIMERS, _INTERVAL_TIMER_BYTES = (0, 1, 2), 32  # real, virtual, of the profile
# Under the stack of a thread that waits in a call, beyond its red zone, there is nothing that it needs.
_BELOW_STACK_BYTES = 1024
_CALLS_DEADLINE_S = 2.0
_AGAIN_AFTER_SIGNAL = 513  # ERESTARTNOINTR: the kernel has the call made again by itself
_OPTIONS = ptrace.TRACE_FORK | ptrace.TRACE_SECCOMP | ptrace.TELL_CALLS


@dataclass(frozen=True)
class Thread:
    tid: int
    name: bytes
    registers: Registers
    extended: bytes = field(repr=False)
    signal_mask: int
    robust_list: int
    rseq: Rseq | None
    tid_address: int | None  # where its C library keeps its id; None: it does not know of the thread
    scheduling: Scheduling
    is_seed: bool = False


@dataclass(frozen=True)
class Caller:
    """The thread that makes calls for us: the main thread, or a seed (see seed_page.py) if there is one.

    `suspend_filters`: whether no seccomp filter judges what it is made to call.
    """

    seed: int | None = None
    suspend_filters: bool = False


MAIN_THREAD = Caller()


@dataclass(frozen=True)
class Answer:
    """What a call returned, and its data afterwards."""

    value: int
    data: bytes


def _up_to_failure(calls: Sequence[Call], results: Sequence[int], data: Sequence[bytes]) -> list[Answer]:
    """Those of the calls that were made."""
    failed = (at for at, call in enumerate(calls) if call.is_failed(results[at]))
    made = next(failed, len(calls) - 1) + 1
    return [Answer(value, each) for value, each in zip(results[:made], data, strict=False)]


class Source:
    """A process at rest, traced by this thread."""

    def __init__(
        self, stopped: Stopped, caller: Caller, page: SeedPage | None, detour: Detour, memory: int, maps: str
    ) -> None:
        """`page`: of the seed, if there is one. `maps`: the text of /proc/<pid>/maps."""
        self.pid = stopped.pid
        self.seed = caller.seed
        self._page = page
        self.detour = detour
        self._caller = caller.seed or self.pid
        self._stopped = stopped
        self._registers = {tid: ptrace.get_registers(tid) for tid in stopped.tids}
        _set_options(self._caller, suspend_filters=caller.suspend_filters)
        self._memory = memory
        self.maps = maps
        self._tid_offset = self._find_tid_offset()
        self._made: set[int] = set()

    def call(self, number: int, *args: int) -> int:
        """What the call returned; an error is negative."""
        self._make_call(self.detour.call, number, args)
        return returned(ptrace.get_registers(self._caller))

    def make_all(self, calls: Sequence[Call]) -> list[Answer]:
        """Their answers, up to the first that failed. A seed makes them in one go, and finds back by itself."""
        if self._page is None:
            return self._make_in_turn(calls)
        ending = render_jump(self.detour.way_back)
        program = Program(self._page.data, (*calls, Call(_GETPID)), ending, self._page.code)
        if program.memory_bytes > ROOM_FOR_DATA or program.code_bytes > ROOM_FOR_CODE:
            return self._make_in_parts(calls)
        self._run_to_end(program)
        memory = self.read_memory(program.base, program.memory_bytes)
        results = program.parse_results(memory)
        return _up_to_failure(calls, results[: len(calls)], program.parse_data(memory))

    def _make_in_parts(self, calls: Sequence[Call]) -> list[Answer]:
        half = len(calls) // 2
        if half == 0:
            raise NotForkable(f"A seed has room for {ROOM_FOR_DATA} bytes, and a call takes more")
        answers = self.make_all(calls[:half])
        is_failed = len(answers) < half or calls[half - 1].is_failed(answers[-1].value)
        return answers if is_failed else [*answers, *self.make_all(calls[half:])]

    def _run_to_end(self, program: Program) -> None:
        self.write_memory(program.base, program.render_memory())
        self.write_memory(program.entry, program.render_code())
        ptrace.set_registers(self._caller, at_code(self.registers, program.entry))
        ptrace.go_on(self._caller)
        in_time = self._comes_to_end(program)
        ptrace.interrupt(self._caller)
        ptrace.wait(self._caller)
        if not in_time:
            ptrace.set_registers(self._caller, at_code(self.registers, self.detour.way_back))
            raise NotForkable(f"The calls that process {self.pid} makes for us are not over in time")

    def _make_in_turn(self, calls: Sequence[Call]) -> list[Answer]:
        answers: list[Answer] = []
        with self.scratch(max([8, *(len(call.data) for call in calls)])) as place:
            for call in calls:
                self.write_memory(place, call.placed_data(place))
                value = self.call(call.number, *call.placed_args(place))
                answers.append(Answer(value, self.read_memory(place, len(call.data))))
                if call.is_failed(value):
                    break
        return answers

    def _comes_to_end(self, program: Program) -> bool:
        """Looked for: what would tell us also ends a process that nobody traces any more."""
        deadline = time.monotonic() + _CALLS_DEADLINE_S
        while not program.is_over(program.parse_results(self.read_memory(program.base, program.results_bytes))):
            if time.monotonic() > deadline:
                return False
            os.sched_yield()  # it takes microseconds, less than a sleep does
        return True

    def write_memory(self, address: int, data: bytes) -> None:
        if os.pwrite(self._memory, data, address) != len(data):
            raise Gone

    def read_memory(self, address: int, size: int) -> bytes:
        data = os.pread(self._memory, size, address)
        if len(data) != size:
            raise Gone
        return data

    def run(self, entry: int) -> None:
        """Code of ours, until its breakpoint. It does not find back by itself: the next call has to follow."""
        ptrace.set_registers(self._caller, at_code(self.registers, entry))
        ptrace.run(self._caller, self._stopped.hold_signal)

    def run_calls(self, entry: int, count: int) -> list[int]:
        """Code that makes so many calls, and finds back by itself; what they returned."""
        ptrace.set_registers(self._caller, at_code(self.registers, entry))
        values: list[int] = []
        while len(values) < count:
            ptrace.make_call(self._caller, self._stopped.hold_signal)
            value = returned(ptrace.get_registers(self._caller))
            if value != -_AGAIN_AFTER_SIGNAL:
                values.append(value)
        return values

    def map_memory(self, size: int, protection: int = _READ_WRITE) -> int:
        """Memory of its own for data of ours. Raises OSError."""
        return self._checked_call(_MMAP, 0, size, protection, _PRIVATE_ANONYMOUS, -1, 0)

    def unmap_memory(self, address: int, size: int) -> None:
        """Raises OSError."""
        self._checked_call(_MUNMAP, address, size)

    @contextlib.contextmanager
    def scratch(self, size: int, protection: int = _READ_WRITE) -> Iterator[int]:
        """Memory that is gone when the block has ended."""
        address = self.map_memory(size, protection)
        try:
            yield address
        finally:
            with contextlib.suppress(Gone):
                self.unmap_memory(address, size)

    @property
    def registers(self) -> Registers:
        """Of the thread that makes calls for us, as they were before."""
        return self._registers[self._caller]

    def read_threads(self) -> tuple[Thread, ...]:
        """The main thread first; it need not be stopped."""
        return tuple(self._read_thread(tid, each) for tid, each in self._registers.items())

    def read_timers(self) -> Mapping[int, bytes]:
        """The interval timers that are set, as the kernel takes them: a fork inherits none."""
        place = self.registers.get("rsp") - _BELOW_STACK_BYTES
        timers = {}
        for number in _INTERVAL_TIMERS:
            self._checked_call(_GETITIMER, number, place)
            timers[number] = os.pread(self._memory, _INTERVAL_TIMER_BYTES, place)
        return {number: setting for number, setting in timers.items() if any(setting)}

    def prepare(self, replaced: Callable[[str], bool] = lambda _: False) -> None:
        """Refuse what a fork would share or lose; what the program keeps from its own forks is part of this one.

        `replaced`: the names of shared memory in whose place the fork has its own.
        """
        if shared := find_shared(self.maps, replaced):
            raise NotForkable(f"Process {self.pid} has memory that its fork would share: {shared}")
        if read_whole(f"/proc/{self.pid}/timers"):
            raise NotForkable(f"Process {self.pid} has a timer that a fork does not inherit")
        for start, size in advisable_ranges(self.maps):
            value = self.call(_MADVISE, start, size, _DOFORK)
            if value not in (0, -errno.ENOMEM):  # holes are no harm
                raise OSError(-value, os.strerror(-value))

    def fork(self, meanwhile: Callable[[], None], *, clears_tid: bool = True) -> int:
        """The pid of a child that is stopped before its first instruction and traced by this thread.

        `meanwhile` is called while the kernel copies. What it raises is raised afterwards, and there is no child.
        `clears_tid`: whether the kernel clears the id of its main thread where that is kept, when it ends.
        """
        looked = _Attempt(meanwhile)
        pid = self._fork(looked, _FORK_FLAGS | (_CHILD_CLEARTID if clears_tid else 0))
        if looked.error is not None:
            ptrace.end(pid)
            raise looked.error
        self._made.add(pid)
        return pid

    def _fork(self, meanwhile: Callable[[], None], flags: int) -> int:
        args = (flags, 0, 0, self._registers[self.pid].get("fs_base") + self._tid_offset, 0)
        try:
            stop = self._make_call(self.detour.fork, _CLONE, args, meanwhile)
            while not stop.new_task and returned(ptrace.get_registers(self._caller)) == -_AGAIN_AFTER_SIGNAL:
                stop = ptrace.make_call(self._caller, self._stopped.hold_signal)
        except Gone:
            # Killed while it was forked, and there may be a child already.
            if newborn := ptrace.find_newborn({self.pid, *self._made}):
                ptrace.end(newborn)
            raise
        if stop.new_task:
            try:
                # Out of the call: what that returns would spoil the next one.
                ptrace.enter_or_leave_call(self._caller, self._stopped.hold_signal)
            except BaseException:
                ptrace.end(stop.new_task)
                raise
            return stop.new_task
        error = -returned(ptrace.get_registers(self._caller))
        raise NotForkable(f"Process {self.pid} could not be forked: {os.strerror(error)}", hint=_CLONE_HINTS.get(error))

    def _checked_call(self, number: int, *args: int) -> int:
        """Raises OSError."""
        value = self.call(number, *args)
        if value < 0:
            raise OSError(-value, os.strerror(-value))
        return value

    def _make_call(
        self, at: int, number: int, args: tuple[int, ...], meanwhile: Callable[[], None] = lambda: None
    ) -> ptrace.Stop:
        ptrace.set_registers(self._caller, making_call(self.registers, at, number, args))
        return ptrace.make_call(self._caller, self._stopped.hold_signal, meanwhile)

    def _find_tid_offset(self) -> int:
        places = {tid: each.get("fs_base") for tid, each in self._registers.items()}
        offset = find_tid_offset(
            {tid: os.pread(self._memory, _THREAD_DESCRIPTOR_BYTES, place) for tid, place in places.items() if place}
        )
        if offset is None:
            raise NotForkable(f"Where process {self.pid} keeps the ids of its threads is not known")
        return offset

    def _read_thread(self, tid: int, registers: Registers) -> Thread:
        inherited = tid == self._caller  # what its maker had a fork has, and what that makes
        descriptor = registers.get("fs_base")  # a seed has none, whoever is the caller
        return Thread(
            tid=tid,
            name=read_whole(f"/proc/{self.pid}/task/{tid}/comm").rstrip(b"\n"),
            registers=registers,
            extended=b"" if inherited else ptrace.get_extended(tid),
            signal_mask=0 if inherited else ptrace.get_signal_mask(tid),
            robust_list=ptrace.get_robust_list(tid),
            rseq=None if inherited else ptrace.find_rseq(tid),
            tid_address=descriptor + self._tid_offset if descriptor else None,
            scheduling=read_scheduling(tid),
            is_seed=tid == self.seed,
        )


class _Attempt:
    """A call whose error is kept for later."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self.error: Exception | None = None

    def __call__(self) -> None:
        try:
            self._do()
        except Exception as error:
            self.error = error


_CLONE_HINTS = SHORTAGES | dict.fromkeys((errno.EPERM, errno.ENOSYS), "Its seccomp filter forbids it")


def _set_options(tid: int, *, suspend_filters: bool) -> None:
    try:
        ptrace.set_options(tid, _OPTIONS | (ptrace.SUSPEND_FILTERS if suspend_filters else 0))
    except OSError as error:
        if not suspend_filters or error.errno not in (errno.EPERM, errno.EINVAL):
            raise
        raise NotForkable(
            f"The seccomp filter of thread {tid} cannot be suspended",
            hint="It takes root, outside of every seccomp filter, and a kernel with CONFIG_CHECKPOINT_RESTORE",
        ) from error


@contextlib.contextmanager
def held(pid: int, main_rests_in: frozenset[int], caller: Caller = MAIN_THREAD) -> Iterator[Source]:
    """Let go when the block ends, from wherever its caller then is. Raises NotForkable."""
    with at_rest(pid, main_rests_in) as stopped, open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        maps, memory = read_whole(f"/proc/{pid}/maps").decode("utf-8", "replace"), file.fileno()
        page = None
        if caller.seed is None:
            back = called_again(ptrace.get_registers(pid), in_duplicate=False)
            if os.pread(memory, len(SYSCALL), back.get("rip")) != SYSCALL:
                raise NotForkable(f"The main thread of process {pid} waits in no 64-bit system call")
            room = _find_room(pid, maps, memory)
        else:
            back = called_again(_seed_registers(stopped, caller.seed), in_duplicate=False)
            page = _get_seed_page(memory, caller.seed, back.get("rip") + len(SYSCALL))
            room = page.detour
        detour = Detour(room, {name: back.get(name) for name in NAMES})
        os.pwrite(memory, detour.render(), detour.base)
        yield Source(stopped, caller, page, detour, memory, maps)


def _seed_registers(stopped: Stopped, seed: int) -> Registers:
    if seed not in stopped.tids or seed == stopped.pid:
        raise NotForkable(f"Process {stopped.pid} has no seed {seed}")
    registers = ptrace.get_registers(seed)
    if waiting_in(registers) != PPOLL:
        raise NotForkable(f"The seed {seed} does not wait where it was planted")
    return registers


def _get_seed_page(memory: int, seed: int, rests_at: int) -> SeedPage:
    page = page_of(rests_at)
    if page is None or not is_seed(os.pread(memory, PAGE_BYTES, page.base)):
        raise NotForkable(f"Thread {seed} is not a seed")
    return page


def make_calls(pid: int, calls: Sequence[Call], main_rests_in: frozenset[int]) -> None:
    """Have the main thread of a process at rest make system calls. Raises NotForkable."""
    with held(pid, main_rests_in) as source, source.scratch(max(4096, *(len(call.data) for call in calls))) as scratch:
        for call in calls:
            source.write_memory(scratch, call.placed_data(scratch))
            if failed := call.find_failure(source.call(call.number, *call.placed_args(scratch))):
                raise NotForkable(f"Process {pid} could not be set up: {failed}")


def make_many_calls(pid: int, calls: Sequence[Call], main_rests_in: frozenset[int]) -> None:
    """The same, all in one go, which is much quicker. Should we be killed meanwhile, the process ends."""
    size = len(Program(0, tuple(calls)).render())
    with held(pid, main_rests_in) as source, source.scratch(size, _READ_WRITE_RUN) as place:
        program = Program(place, tuple(calls))
        source.write_memory(place, program.render())
        source.run(program.entry)
        results = program.parse_results(source.read_memory(place, program.results_bytes))
    if failed := program.find_failure(results):
        raise NotForkable(f"Process {pid} could not be set up: {failed}")


def _find_room(pid: int, maps: str, memory: int) -> int:
    for end in code_ends(maps):
        base = end - DETOUR_BYTES
        if fits_detour(os.pread(memory, DETOUR_BYTES, base)):
            return base
    raise NotForkable(f"The code of process {pid} has no room for {DETOUR_BYTES} more bytes")
