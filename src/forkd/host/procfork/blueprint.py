"""All that a child does before it runs, as programs in memory it inherits. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forkd.errors import NotForkable
from forkd.host.procfork.descriptors import (
    MAX_SENT,
    Action,
    Choice,
    Close,
    Dead,
    Descriptor,
    Ours,
    Reopen,
    choose_by_kind,
    copies_of_dead,
    copies_of_same,
    is_possible,
    lowest_free,
    parse_received,
    render_copies,
    render_install,
    render_receive,
    render_remake,
)
from forkd.host.procfork.program import DATA, Call, Program
from forkd.host.procfork.registers import WAITS
from forkd.host.procfork.source import MAIN_THREAD, Caller, Source, Thread

_PAGE = 4096
_ALIGNED = 16

_CLOSE, _SETITIMER, _SOCKETPAIR, _CLONE, _PRCTL, _SET_TID_ADDRESS = 3, 38, 53, 56, 157, 218
_SET_ROBUST_LIST, _RSEQ = 273, 334
_PR_SET_NAME = 15
_ROBUST_LIST_BYTES = 24
_UNIX, _STREAM_CLOEXEC = 1, 0o2000001
# As pthread_create: VM FS FILES SIGHAND THREAD SYSVSEM SETTLS; PARENT_SETTID CHILD_CLEARTID
# And PTRACE: it is traced by who traces its maker, which need not be stopped and told.
_THREAD_FLAGS = 0x100 | 0x200 | 0x400 | 0x800 | 0x2000 | 0x10000 | 0x40000 | 0x80000
_TID_FLAGS = 0x100000 | 0x200000


@dataclass(frozen=True)
class ForkPlan:
    """What becomes of the source's descriptors, and the calls that the child makes before it runs.

    `choose` is asked for each descriptor; where it returns None the kind of the file decides. `first` are the calls
    that come before all others; what they need from outside is done right after them (`OnBegun`).

    `look` is called when the source is at rest, before it is forked; once for all forks of one hold. `set_up` is asked
    then for what the child calls once it has its descriptors, and given the lowest number that is free there. In place
    of shared memory whose name is `replaced` it maps the child's own. `settle` is asked for what each thread calls for
    itself before it runs; the main thread does so last, when the others are settled.

    `caller`: who makes the source's calls. `clear_tid`: where the kernel writes 0 when a thread ends, if that is not
    where its id is.
    """

    choose: Choice = lambda _: None
    first: Sequence[Call] = ()
    set_up: Callable[[int], Sequence[Call]] = lambda _: ()
    main_rests_in: frozenset[int] = WAITS
    look: Callable[[Source], None] = lambda _: None
    replaced: Callable[[str], bool] = lambda _: False
    settle: Callable[[Thread], Sequence[Call]] = lambda _: ()
    caller: Caller = MAIN_THREAD
    clear_tid: int | None = None


@dataclass(frozen=True)
class Blueprint:
    """`sent`: the descriptors that take ours, in the order in which these are sent through the door."""

    threads: tuple[Thread, ...]
    sent: tuple[tuple[Descriptor, Ours | Reopen | Dead], ...]
    received: tuple[int, ...]  # the numbers they have at first
    door: Program  # opens a pair of sockets, for our descriptors to come through
    door_fds: tuple[int, int]
    main: Program
    thread_programs: tuple[Program, ...]
    last: Program  # of the main thread, when the others are settled

    @property
    def base(self) -> int:
        return self.door.base

    @property
    def size(self) -> int:
        """Of the memory that the programs take, in whole pages."""
        return -(-(_behind(self.last) - self.base) // _PAGE) * _PAGE

    @property
    def by_seed(self) -> bool:
        """Whether a seed makes the child, whose main thread then has nothing yet of what it had in the source."""
        return any(thread.is_seed for thread in self.threads)

    def placed(self, base: int) -> Blueprint:
        """The same at another address."""
        by = base - self.base
        return replace(
            self,
            door=self.door.moved_by(by),
            main=self.main.moved_by(by),
            thread_programs=tuple(program.moved_by(by) for program in self.thread_programs),
            last=self.last.moved_by(by),
        )

    def render(self) -> bytes:
        memory = bytearray(self.size)
        for program in (self.door, self.main, *self.thread_programs, self.last):
            at = program.base - self.base
            memory[at : at + program.size] = program.render()
        return bytes(memory).rstrip(b"\0")

    def got_descriptors(self, read: Callable[[int, int], bytes]) -> bool:
        """Whether all went by the numbers we foretold; had it been others, nothing would be where it belongs."""
        if not self.sent:
            return True
        data = read(self.main.data_address(0), len(self.main.calls[0].data))
        return parse_received(data) == self.received


def _behind(program: Program) -> int:
    """Where the next one begins."""
    return -(-(program.base + program.size) // _ALIGNED) * _ALIGNED


def render_blueprint(
    threads: tuple[Thread, ...],
    descriptors: dict[int, Descriptor],
    timers: Mapping[int, bytes],
    plan: ForkPlan,
) -> Blueprint:
    """For address 0; see `Blueprint.placed`. Raises NotForkable for a descriptor that nobody knows what to do with."""
    actions = choose_actions(descriptors, plan.choose)
    copies = [*copies_of_same(descriptors, actions, Reopen), *copies_of_dead(descriptors, actions)]
    copied = {each.number for each in copies}
    sent = tuple(
        (descriptors[number], action)
        for number, action in actions.items()
        if isinstance(action, Ours | Reopen | Dead) and number not in copied
    )
    if len(sent) > MAX_SENT:
        raise NotForkable(f"The process has {len(sent)} files to hand on; {MAX_SENT} is the most")
    used = set(descriptors)
    door_fds = tuple(lowest_free(used, 2))
    received = lowest_free(used | set(door_fds), len(sent))
    calls = []
    if sent:
        calls = [render_receive(door_fds[0], len(sent))]
        calls += render_install(received, [each for each, _ in sent], door_fds)
        calls += render_copies(copies)
    elif plan.first:
        calls = [Call(_CLOSE, (number,), what="close its door") for number in door_fds]
    calls += render_remake(descriptors, actions, door_fds[0])
    calls += [Call(_SETITIMER, (number, DATA, 0), each, what="set a timer") for number, each in timers.items()]
    main_thread, *others = threads
    by_seed = any(thread.is_seed for thread in others)
    if not by_seed:
        calls.append(_set_robust_list(main_thread))
    if plan.clear_tid is not None:
        calls.append(Call(_SET_TID_ADDRESS, (plan.clear_tid,), what="set where its end is told"))
    open_then = [number for number, action in actions.items() if not isinstance(action, Close)]
    calls += plan.set_up(lowest_free(set(open_then), 1)[0])
    calls += [_make_thread(thread, plan.clear_tid) for thread in others]
    door = Program(0, (_open_door(door_fds), *plan.first))
    main = Program(_behind(door), tuple(calls))
    thread_programs, at = [], _behind(main)
    for thread in others:
        program = Program(at, (*_settle_thread(thread), *plan.settle(thread)))
        thread_programs.append(program)
        at = _behind(program)
    return Blueprint(
        threads=threads,
        sent=sent,
        received=tuple(received),
        door=door,
        door_fds=(door_fds[0], door_fds[1]),
        main=main,
        thread_programs=tuple(thread_programs),
        last=Program(at, (*(_settle_thread(main_thread) if by_seed else ()), *plan.settle(main_thread))),
    )


def choose_actions(descriptors: dict[int, Descriptor], choose: Choice) -> dict[int, Action]:
    actions: dict[int, Action] = {}
    for number, each in descriptors.items():
        action = choose(each) or choose_by_kind(each)
        if action is None or not is_possible(each, action):
            raise NotForkable(f"Descriptor {number} cannot be duplicated: {each.link}")
        actions[number] = action
    return actions


def _open_door(fds: Sequence[int]) -> Call:
    return Call(_SOCKETPAIR, (_UNIX, _STREAM_CLOEXEC, 0, DATA), bytes(8), returns=0, what="open a pair of sockets")


def parse_door(data: bytes) -> tuple[int, int]:
    one, other = struct.unpack_from("<2i", data)
    return one, other


def _make_thread(thread: Thread, clear_tid: int | None) -> Call:
    place, registers = thread.tid_address, thread.registers
    flags, tid_places = _THREAD_FLAGS, (0, 0)
    if place is not None:
        flags, tid_places = _THREAD_FLAGS | _TID_FLAGS, (place, place if clear_tid is None else clear_tid)
    return Call(_CLONE, (flags, registers.get("rsp"), *tid_places, registers.get("fs_base")), what="make a thread")


def _settle_thread(thread: Thread) -> list[Call]:
    calls = [Call(_PRCTL, (_PR_SET_NAME, DATA), thread.name + b"\0", what="name a thread"), _set_robust_list(thread)]
    if thread.rseq:
        args = (thread.rseq.address, thread.rseq.size, 0, thread.rseq.signature)
        calls.append(Call(_RSEQ, args, what="register rseq"))
    return calls


def _set_robust_list(thread: Thread) -> Call:
    return Call(_SET_ROBUST_LIST, (thread.robust_list, _ROBUST_LIST_BYTES), what="set the robust list")
