"""Many duplicates of one process: while one sets itself up, others are made.

Of one alone, its own calls and those of its tracer take turns, and each waits for the other. Of many there is always
one that can be seen to. What they run is written into the source, once, and inherited.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import partial

from forkd.errors import NotForkable
from forkd.host.process import SHORTAGES
from forkd.host.procfork import ptrace
from forkd.host.procfork.blueprint import Blueprint, render_blueprint
from forkd.host.procfork.child import Child, Holder, OnBegun, Times, _killed_on_failure, _restore
from forkd.host.procfork.descriptors import Ours
from forkd.host.procfork.program import Detour, Program
from forkd.host.procfork.registers import NAMES, Registers, at_code, called_again, making_call
from forkd.host.procfork.rest import understood
from forkd.host.procfork.source import Source, Thread

_MUNMAP = 11
_READ_WRITE_RUN = 7
_CALL_BEFORE = "orig_rax"
# Enough for the processors to have work while the kernel lets some of them wait.
MOST_AT_ONCE = 32

# Of the duplicate with this number, which is ready, and runs when this has returned. It is the caller's then.
OnMade = Callable[[int, Child], None]
# All that is done for one duplicate; it pauses where that would have to be waited for.
Steps = Generator[None, None, None]


class Batch(Holder):
    """Forks a process many times in one hold."""

    def fork_each(
        self,
        ours: Iterable[Mapping[str, int]],
        on_made: OnMade,
        *,
        on_begun: OnBegun | None = None,
        most_at_once: int = MOST_AT_ONCE,
    ) -> None:
        """One duplicate for each of `ours`, the descriptors that the plan calls by name. The source runs on afterwards.

        Raises NotForkable when one cannot be made: there are those that were ready, and no others.
        """
        under_way: deque[Steps] = deque()
        try:
            with self._prepared() as (source, blueprint):
                for index, each in enumerate(ours):
                    under_way.append(self._making(source, blueprint, each, on_begun, partial(on_made, index)))
                    next(under_way[-1])
                    if len(under_way) >= most_at_once:
                        _go_round(under_way)
            while under_way:
                _go_round(under_way)
        finally:
            for steps in under_way:
                steps.close()

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[tuple[Source, Blueprint]]:
        """The source at rest, with all that its duplicates run in its memory."""
        try:
            source = self._take_hold(lambda: None)
            with understood(self._pid):
                self._look(source)
                assert self._seen is not None
                blueprint = render_blueprint(self._seen.threads, self._seen.descriptors, self._timers, self._plan)
                with source.scratch(blueprint.size, _READ_WRITE_RUN) as place:
                    blueprint = blueprint.placed(place)
                    source.write_memory(place, blueprint.render())
                    yield source, blueprint
        finally:
            self.release()

    def _making(
        self,
        source: Source,
        blueprint: Blueprint,
        ours: Mapping[str, int],
        on_begun: OnBegun | None,
        on_made: Callable[[Child], None],
    ) -> Steps:
        times = Times()
        with contextlib.ExitStack() as ends:
            pid = source.fork(lambda: None, clears_tid=self._plan.clear_tid is None)
            child = _Duplicate(pid, self._pid, source.detour.call, source.registers, times)
            ends.callback(child.close)
            ends.enter_context(_killed_on_failure(child))
            child.take_over(suspend_filters=self._plan.caller.suspend_filters)
            times.mark("clone")
            yield from child.completing(blueprint, ours, on_begun, source.detour)
            on_made(child)
            child.let_go()


class _Duplicate(Child):
    """It has inherited what it runs."""

    def completing(
        self, blueprint: Blueprint, ours: Mapping[str, int], on_begun: OnBegun | None, detour: Detour
    ) -> Steps:
        self._begin(blueprint, on_begun)
        self.took = frozenset(action.name for _, action in blueprint.sent if isinstance(action, Ours))
        with contextlib.ExitStack() as reopened:
            fds = [self._find_fd(each, action, ours, reopened) for each, action in blueprint.sent]
            if fds:
                self._send(blueprint, fds)
        self._start(self.pid, self._registers, blueprint.main)
        yield
        ptrace.wait_run(self.pid, self._on_signal)
        if not blueprint.got_descriptors(self.read_memory):
            raise NotForkable("A fork did not receive its descriptors", hint=SHORTAGES[errno.EMFILE])
        tids = self._find_threads(blueprint)
        self.times.mark("descriptors")
        made = list(zip(tids, blueprint.threads[1:], blueprint.thread_programs, strict=True))
        for tid, thread, program in made:
            ptrace.wait(tid)
            self._start(tid, thread.registers, program)
        yield
        for tid, thread, program in made:
            self._settle(tid, thread, program)
        if blueprint.last.calls:
            self._run_main(blueprint.last)
            self._check(blueprint.last)
        self._leave(blueprint, detour)
        self.times.mark("threads")

    def _start(self, tid: int, registers: Registers, program: Program) -> None:
        ptrace.set_registers(tid, at_code(registers, program.entry))
        ptrace.go_on(tid)

    def _settle(self, tid: int, thread: Thread, program: Program) -> None:
        ptrace.wait_run(tid, self._on_signal)
        self._check(program)
        ptrace.set_registers(tid, called_again(thread.registers, in_duplicate=True))
        if not thread.is_seed:
            _restore(tid, thread)

    def _leave(self, blueprint: Blueprint, detour: Detour) -> None:
        """Back to where the main thread was, the memory given back."""
        main = blueprint.threads[0]
        back = called_again(main.registers, in_duplicate=True)
        if not blueprint.by_seed and _leads_to(detour, back):  # it does both by itself, when it is let go
            unmap = making_call(self._registers, detour.call, _MUNMAP, (blueprint.base, blueprint.size))
            ptrace.set_registers(self.pid, unmap)
            return
        self._call(_MUNMAP, blueprint.base, blueprint.size)
        ptrace.set_registers(self.pid, back)
        if blueprint.by_seed:
            _restore(self.pid, main)


def _leads_to(detour: Detour, registers: Registers) -> bool:
    return all(detour.back[name] == registers.get(name) for name in NAMES if name != _CALL_BEFORE)


def _go_round(under_way: deque[Steps]) -> None:
    """One step of each; those that are ready leave."""
    for _ in range(len(under_way)):
        steps = under_way.popleft()
        with contextlib.suppress(StopIteration):
            next(steps)
            under_way.append(steps)
