"""The duplicate: it gets its own descriptors, makes its own set-up and its threads, and is let go."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from forkd.errors import NotForkable
from forkd.host.faults import fault_point
from forkd.host.process import SHORTAGES
from forkd.host.procfork import ptrace
from forkd.host.procfork.blueprint import Blueprint, ForkPlan, parse_door, render_blueprint
from forkd.host.procfork.descriptors import Dead, Descriptor, Ours, Reopen
from forkd.host.procfork.proc_files import read_descriptors
from forkd.host.procfork.program import Program
from forkd.host.procfork.ptrace import Gone
from forkd.host.procfork.registers import Registers, at_code, called_again, making_call, returned
from forkd.host.procfork.rest import understood
from forkd.host.procfork.scheduling import set_scheduling
from forkd.host.procfork.source import Source, Thread, held

_MMAP, _MUNMAP = 9, 11
_READ_WRITE_RUN, _PRIVATE_ANONYMOUS, _FIXED_NOREPLACE, _NO_FD = 7, 0x22, 0x100000, -1
_OPTIONS = ptrace.TRACE_SECCOMP | ptrace.TELL_CALLS | ptrace.EXIT_KILL
# Of a child that has made its first calls, and stands still: what these need from outside.
OnBegun = Callable[[int], None]
# What a file must not be opened with once more. O_TMPFILE is two bits: one is O_DIRECTORY, which only asks for one.
_ONCE = os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOFOLLOW | os.O_TMPFILE


@dataclass
class Times:
    """When each step was over, on the monotonic clock."""

    steps: dict[str, float] = field(default_factory=dict)

    def mark(self, step: str) -> None:
        self.steps[step] = time.monotonic()


class Child:
    """A process that has not run yet. All of it happens in the thread that made it."""

    def __init__(self, pid: int, source_pid: int, syscall_at: int, registers: Registers, times: Times) -> None:
        """`registers`: of the thread that made it. `syscall_at`: a syscall instruction in the code of both."""
        self.pid = pid
        self.times = times
        self._source_pid = source_pid
        self._syscall_at = syscall_at
        self._registers = registers
        self._tids = [pid]
        self._held: list[tuple[int, int]] = []
        self._memory = -1
        self.took: frozenset[str] = frozenset()  # the names of our descriptors that it has

    def write_memory(self, address: int, data: bytes) -> None:
        if os.pwrite(self._memory, data, address) != len(data):
            raise Gone

    def read_memory(self, address: int, size: int) -> bytes:
        data = os.pread(self._memory, size, address)
        if len(data) != size:
            raise Gone  # its memory is the first that goes
        return data

    def take_over(self, *, suspend_filters: bool) -> None:
        """From here on it dies with us."""
        ptrace.wait(self.pid)
        ptrace.set_options(self.pid, _OPTIONS | (ptrace.SUSPEND_FILTERS if suspend_filters else 0))
        self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDWR | os.O_CLOEXEC)

    def map_scratch(self, size: int, address: int | None = None) -> int:
        """Memory for what sets it up; at an `address` that another duplicate of the source had it at, if given."""
        fixed = 0 if address is None else _FIXED_NOREPLACE
        return self._call(_MMAP, address or 0, size, _READ_WRITE_RUN, _PRIVATE_ANONYMOUS | fixed, _NO_FD, 0)

    def complete(
        self, blueprint: Blueprint, code: bytes, ours: Mapping[str, int], on_begun: OnBegun | None = None
    ) -> None:
        self.write_memory(blueprint.base, code)
        self._begin(blueprint, on_begun)
        self.took = frozenset(action.name for _, action in blueprint.sent if isinstance(action, Ours))
        with contextlib.ExitStack() as reopened:
            fds = [self._find_fd(each, action, ours, reopened) for each, action in blueprint.sent]
            if fds:
                self._send(blueprint, fds)
            self._run_main(blueprint.main)
        if not blueprint.got_descriptors(self.read_memory):
            raise NotForkable("A fork did not receive its descriptors", hint=SHORTAGES[errno.EMFILE])
        tids = self._find_threads(blueprint)
        self.times.mark("descriptors")
        self._settle_threads(blueprint, tids)
        if blueprint.last.calls:
            self._run_main(blueprint.last)
            self._check(blueprint.last)
        self._call(_MUNMAP, blueprint.base, blueprint.size)
        main = blueprint.threads[0]
        ptrace.set_registers(self.pid, called_again(main.registers, in_duplicate=True))
        if blueprint.by_seed:
            _restore(self.pid, main)
        self.times.mark("threads")

    def let_go(self) -> None:
        for tid in reversed(self._tids):
            ptrace.detach(tid)
        for tid, number in self._held:
            ptrace.send_signal(self.pid, tid, number)

    def kill(self) -> None:
        self.close()  # first: to see its threads takes a descriptor, of which there may be no more
        ptrace.end(self.pid)

    def close(self) -> None:
        """Safe to repeat."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _on_signal(self, tid: int, number: int) -> None:
        self._held.append((tid, number))

    def _call(self, number: int, *args: int) -> int:
        ptrace.set_registers(self.pid, making_call(self._registers, self._syscall_at, number, args))
        ptrace.make_call(self.pid, self._on_signal)
        value = returned(ptrace.get_registers(self.pid))
        if value < 0:
            raise OSError(-value, os.strerror(-value))
        return value

    def _find_fd(
        self, each: Descriptor, action: Ours | Reopen | Dead, ours: Mapping[str, int], opened: contextlib.ExitStack
    ) -> int:
        if isinstance(action, Ours):
            return ours[action.name]
        if isinstance(action, Dead):
            return opened.enter_context(_dead_socket()).fileno()
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{each.number}", (each.flags & ~_ONCE) | os.O_CLOEXEC)
        except OSError as error:
            raise NotForkable(f"{each.link} cannot be opened again: {error.strerror}") from error
        opened.callback(os.close, fd)
        if position := int(each.find("pos") or "0"):
            os.lseek(fd, position, os.SEEK_SET)
        return fd

    def _begin(self, blueprint: Blueprint, then: OnBegun | None) -> None:
        if not blueprint.sent and len(blueprint.door.calls) == 1:
            return
        self._run_main(blueprint.door)
        self._check(blueprint.door)
        if then is not None:
            then(self.pid)
            self.times.mark("namespaces")

    def _send(self, blueprint: Blueprint, fds: list[int]) -> None:
        """Through a pair of sockets of the child's, so that it needs no right to look at us."""
        door = blueprint.door
        if parse_door(self.read_memory(door.data_address(0), 8)) != blueprint.door_fds:
            raise NotForkable("The descriptors of a fork are not as they were seen")
        pidfd = os.pidfd_open(self.pid)
        try:
            with socket.socket(fileno=ptrace.take_descriptor(pidfd, blueprint.door_fds[1])) as sock:
                socket.send_fds(sock, [b"\0"], fds)
        finally:
            os.close(pidfd)

    def _run_main(self, program: Program) -> None:
        ptrace.set_registers(self.pid, at_code(self._registers, program.entry))
        ptrace.run(self.pid, self._on_signal)

    def _find_threads(self, blueprint: Blueprint) -> list[int]:
        """Which the main program has made: its last calls. They are traced from their beginning."""
        results = self._check(blueprint.main)
        tids = results[len(results) - len(blueprint.thread_programs) :]
        self._tids += tids
        return tids

    def _check(self, program: Program) -> list[int]:
        """The results. Raises NotForkable for a call that failed."""
        results = program.parse_results(self.read_memory(program.base, program.results_bytes))
        if failed := program.find_failure(results):
            raise NotForkable(
                f"A fork of process {self._source_pid} could not be set up: {failed}",
                hint=SHORTAGES.get(-failed.value),
            )
        return results

    def _settle_threads(self, blueprint: Blueprint, tids: list[int]) -> None:
        """All at a time: what a filter takes to be installed is longer than the rest together."""
        made = list(zip(tids, blueprint.threads[1:], blueprint.thread_programs, strict=True))
        for tid, thread, program in made:
            ptrace.wait(tid)
            ptrace.set_registers(tid, at_code(thread.registers, program.entry))
            ptrace.go_on(tid)
        for tid, thread, program in made:
            ptrace.wait_run(tid, self._on_signal)
            self._check(program)
            ptrace.set_registers(tid, called_again(thread.registers, in_duplicate=True))
            if not thread.is_seed:
                _restore(tid, thread)


def _dead_socket() -> socket.socket:
    dead, peer = socket.socketpair()
    peer.close()
    dead.setblocking(False)
    return dead


def _restore(tid: int, thread: Thread) -> None:
    ptrace.set_extended(tid, thread.extended)
    ptrace.set_signal_mask(tid, thread.signal_mask)
    set_scheduling(tid, thread.scheduling)


class Holder:
    """A process that is forked, once or many times. Belongs to one thread, as all tracing does."""

    def __init__(self, pid: int, plan: ForkPlan) -> None:
        self._pid = pid
        self._plan = plan
        self._hold: contextlib.ExitStack | None = None
        self._source: Source | None = None
        self._timers: Mapping[int, bytes] = {}
        self._seen: Seen | None = None
        self._drawn: tuple[Blueprint, bytes] | None = None

    @contextlib.contextmanager
    def forked(
        self,
        ours: Mapping[str, int] | None = None,
        *,
        keep: bool = False,
        on_held: Callable[[], None] = lambda: None,
        on_cloned: Callable[[int], None] = lambda _: None,
        on_begun: OnBegun | None = None,
    ) -> Iterator[Child]:
        """A duplicate, set up as planned and not yet running; it runs when the block has ended well.

        `ours`: the descriptors that the plan calls by name. Raises NotForkable; then, and when the block fails, there
        is no child. The source runs on in every case, and from before the child is set up, unless it is to be kept at
        rest for the next fork. `on_held` is called when it is at rest, and does not run before it is forked or refused;
        `on_cloned` before the duplicate makes any call of its own.
        """
        times = Times()
        with contextlib.ExitStack() as child_ends:
            try:
                source = self._take_hold(on_held)
                child = self._clone(source, times, child_ends)
            except BaseException:
                self.release()
                raise
            if not keep:
                self.release()
            times.mark("clone")
            on_cloned(child.pid)
            child.complete(*self._draw(child), ours or {}, on_begun)
            fault_point("fork.completed")
            yield child
            child.let_go()
            fault_point("fork.let_go")

    def release(self) -> None:
        """Let the source go on; safe to repeat."""
        if self._hold is not None:
            hold, self._hold, self._source = self._hold, None, None
            hold.close()

    def _take_hold(self, on_held: Callable[[], None]) -> Source:
        if self._source is None:
            with contextlib.ExitStack() as hold:
                source = hold.enter_context(held(self._pid, self._plan.main_rests_in, self._plan.caller))
                on_held()
                source.prepare(self._plan.replaced)
                self._plan.look(source)
                self._timers = source.read_timers()
                self._hold, self._source, self._seen, self._drawn = hold.pop_all(), source, None, None
        return self._source

    def _clone(self, source: Source, times: Times, child_ends: contextlib.ExitStack) -> Child:
        times.mark("quiescence")
        fault_point("fork.held")
        with understood(self._pid):
            pid = source.fork(lambda: self._look(source), clears_tid=self._plan.clear_tid is None)
        child = Child(pid, self._pid, source.detour.call, source.registers, times)
        fault_point("fork.cloned")
        child_ends.callback(child.close)
        child_ends.enter_context(_killed_on_failure(child))
        child.take_over(suspend_filters=self._plan.caller.suspend_filters)
        return child

    def _look(self, source: Source) -> None:
        """Once in one hold, while the kernel is busy with the first duplicate."""
        if self._seen is None:
            self._seen = Seen(source.read_threads(), read_descriptors(self._pid))

    def _draw(self, child: Child) -> tuple[Blueprint, bytes]:
        """Once for all duplicates that are made in one hold."""
        if self._drawn is not None:
            child.map_scratch(self._drawn[0].size, self._drawn[0].base)
            return self._drawn
        assert self._seen is not None
        blueprint = render_blueprint(self._seen.threads, self._seen.descriptors, self._timers, self._plan)
        blueprint = blueprint.placed(child.map_scratch(blueprint.size))
        self._drawn = blueprint, blueprint.render()
        return self._drawn


@dataclass(frozen=True)
class Seen:
    """What the source has, as it stands still."""

    threads: tuple[Thread, ...]
    descriptors: dict[int, Descriptor]


def forked(pid: int, plan: ForkPlan, ours: Mapping[str, int] | None = None) -> AbstractContextManager[Child]:
    """One fork of process `pid`; see `Holder.forked`."""
    return Holder(pid, plan).forked(ours)


@contextlib.contextmanager
def _killed_on_failure(child: Child) -> Iterator[None]:
    try:
        yield
    except Gone as error:
        child.kill()
        raise NotForkable("A fork was killed while it was set up") from error
    except OSError as error:
        child.kill()
        raise NotForkable(f"A fork could not be set up: {error.strerror}") from error
    except BaseException:
        child.kill()
        raise
