"""The process that is forked. Its main thread makes calls for us, and goes on by itself whatever becomes of us."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from forkd.errors import NotForkable
from forkd.host.process import SHORTAGES
from forkd.host.procfork import ptrace
from forkd.host.procfork.descriptors import Descriptor, same_file_candidates
from forkd.host.procfork.mappings import advisable_ranges, code_ends, find_shared
from forkd.host.procfork.program import DETOUR_BYTES, SYSCALL, Call, Detour, Program, fits_detour
from forkd.host.procfork.ptrace import Gone, Rseq
from forkd.host.procfork.registers import (
    NAMES,
    Registers,
    at_code,
    called_again,
    find_tid_offset,
    making_call,
    returned,
)
from forkd.host.procfork.rest import Stopped, at_rest
from forkd.host.procfork.scheduling import Scheduling, read_scheduling

_THREAD_DESCRIPTOR_BYTES = 4096
_MMAP, _MUNMAP, _MADVISE, _GETITIMER, _CLONE = 9, 11, 28, 36, 56
_DOFORK = 11
_READ_WRITE, _READ_WRITE_RUN, _PRIVATE_ANONYMOUS = 3, 7, 0x22
# The child of our source's parent, its thread id written where its C library looks for it.
_FORK_FLAGS = signal.SIGCHLD | 0x8000 | 0x01000000 | 0x00200000  # CLONE_PARENT, CHILD_SETTID, CHILD_CLEARTID
_READ_BYTES = 1 << 16
_INTERVAL_TIMERS, _INTERVAL_TIMER_BYTES = (0, 1, 2), 32  # real, virtual, of the profile
# Under the stack of a thread that waits in a call, beyond its red zone, there is nothing that it needs.
_BELOW_STACK_BYTES = 1024
_NEWBORN_DEADLINE_S = 0.1
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
    tid_address: int  # where its C library keeps its id
    scheduling: Scheduling


class Source:
    """A process at rest, traced by this thread."""

    def __init__(self, stopped: Stopped, detour: Detour, memory: int, maps: str) -> None:
        self.pid = stopped.pid
        self.detour = detour
        self._stopped = stopped
        self._registers = {tid: ptrace.get_registers(tid) for tid in stopped.tids}
        ptrace.set_options(self.pid, _OPTIONS)
        self._memory = memory
        self._maps = maps
        self._tid_offset = self._find_tid_offset()

    def call(self, number: int, *args: int) -> int:
        """What the main thread's call returned; an error is negative."""
        self._make_call(self.detour.call, number, args)
        return returned(ptrace.get_registers(self.pid))

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
        ptrace.set_registers(self.pid, at_code(self.registers, entry))
        ptrace.run(self.pid, self._stopped.hold_signal)

    @contextlib.contextmanager
    def scratch(self, size: int, protection: int = _READ_WRITE) -> Iterator[int]:
        """Memory of its own for data of ours."""
        address = self._checked_call(_MMAP, 0, size, protection, _PRIVATE_ANONYMOUS, -1, 0)
        try:
            yield address
        finally:
            with contextlib.suppress(Gone):
                self._checked_call(_MUNMAP, address, size)

    @property
    def registers(self) -> Registers:
        """Of its main thread, as they were before it made calls for us."""
        return self._registers[self.pid]

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

    def prepare(self) -> None:
        """Refuse what a fork would share or lose; what the program keeps from its own forks is part of this one."""
        if shared := find_shared(self._maps):
            raise NotForkable(f"Process {self.pid} has memory that its fork would share: {shared}")
        if _read(f"/proc/{self.pid}/timers"):
            raise NotForkable(f"Process {self.pid} has a timer that a fork does not inherit")
        for start, size in advisable_ranges(self._maps):
            value = self.call(_MADVISE, start, size, _DOFORK)
            if value not in (0, -errno.ENOMEM):  # holes are no harm
                raise OSError(-value, os.strerror(-value))

    def fork(self, meanwhile: Callable[[], None]) -> int:
        """The pid of a child that is stopped before its first instruction and traced by this thread.

        `meanwhile` is called while the kernel copies. What it raises is raised afterwards, and there is no child.
        """
        looked = _Attempt(meanwhile)
        pid = self._fork(looked)
        if looked.error is not None:
            ptrace.end(pid)
            raise looked.error
        return pid

    def _fork(self, meanwhile: Callable[[], None]) -> int:
        args = (_FORK_FLAGS, 0, 0, self._tid_address(self.pid), 0)
        try:
            stop = self._make_call(self.detour.fork, _CLONE, args, meanwhile)
            while not stop.new_task and returned(ptrace.get_registers(self.pid)) == -_AGAIN_AFTER_SIGNAL:
                stop = ptrace.make_call(self.pid, self._stopped.hold_signal)
        except Gone:
            # Killed while it was forked, and there may be a child already.
            if newborn := ptrace.find_newborn(time.monotonic() + _NEWBORN_DEADLINE_S):
                ptrace.end(newborn)
            raise
        if stop.new_task:
            try:
                # Out of the call: what that returns would spoil the next one.
                ptrace.enter_or_leave_call(self.pid, self._stopped.hold_signal)
            except BaseException:
                ptrace.end(stop.new_task)
                raise
            return stop.new_task
        error = -returned(ptrace.get_registers(self.pid))
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
        ptrace.set_registers(self.pid, making_call(self.registers, at, number, args))
        return ptrace.make_call(self.pid, self._stopped.hold_signal, meanwhile)

    def _find_tid_offset(self) -> int:
        places = {tid: each.get("fs_base") for tid, each in self._registers.items()}
        offset = find_tid_offset(
            {tid: os.pread(self._memory, _THREAD_DESCRIPTOR_BYTES, place) for tid, place in places.items()}
        )
        if offset is None:
            raise NotForkable(f"Where process {self.pid} keeps the ids of its threads is not known")
        return offset

    def _tid_address(self, tid: int) -> int:
        return self._registers[tid].get("fs_base") + self._tid_offset

    def _read_thread(self, tid: int, registers: Registers) -> Thread:
        inherited = tid == self.pid  # a fork has what its maker, the main thread, had
        return Thread(
            tid=tid,
            name=_read(f"/proc/{self.pid}/task/{tid}/comm").rstrip(b"\n"),
            registers=registers,
            extended=b"" if inherited else ptrace.get_extended(tid),
            signal_mask=0 if inherited else ptrace.get_signal_mask(tid),
            robust_list=ptrace.get_robust_list(tid),
            rseq=None if inherited else ptrace.find_rseq(tid),
            tid_address=self._tid_address(tid),
            scheduling=read_scheduling(tid),
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


@contextlib.contextmanager
def held(pid: int, main_rests_in: frozenset[int]) -> Iterator[Source]:
    """Let go when the block ends, from wherever its main thread then is. Raises NotForkable."""
    with at_rest(pid, main_rests_in) as stopped, open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        maps, memory = _read(f"/proc/{pid}/maps").decode("utf-8", "replace"), file.fileno()
        back = called_again(ptrace.get_registers(pid), in_duplicate=False)
        if os.pread(memory, len(SYSCALL), back.get("rip")) != SYSCALL:
            raise NotForkable(f"The main thread of process {pid} waits in no 64-bit system call")
        detour = Detour(_find_room(pid, maps, memory), {name: back.get(name) for name in NAMES})
        os.pwrite(memory, detour.render(), detour.base)
        yield Source(stopped, detour, memory, maps)


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


def read_descriptors(pid: int) -> dict[int, Descriptor]:
    descriptors = {}
    for number in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        place = f"/proc/{pid}/fd/{number}"
        link, info = os.readlink(place), _read(f"/proc/{pid}/fdinfo/{number}")
        mode = os.stat(place).st_mode if link.startswith("/") else 0
        descriptors[number] = Descriptor(number, link, info.decode("utf-8", "replace"), mode=mode)
    for numbers in same_file_candidates(descriptors.values()):
        for index, number in enumerate(numbers):
            first = next((one for one in numbers[:index] if ptrace.is_same_file(pid, one, number)), None)
            if first is not None:
                descriptors[number] = replace(descriptors[number], alias_of=first)
    return descriptors


def _read(path: str) -> bytes:
    """All of it; the source stands still meanwhile, and a file object costs as much as the reading."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while chunk := os.read(fd, _READ_BYTES):
            chunks.append(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)
