"""All that a child does before it runs, as programs in memory it inherits. Pure."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forkd.errors import NotForkable
from forkd.host.procfork.descriptors import (
    MAX_SENT,
    Action,
    Choice,
    Descriptor,
    Ours,
    Reopen,
    choose_by_kind,
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
from forkd.host.procfork.source import Thread

SCRATCH_BYTES = 128 * 1024
_THREAD_BYTES = 1024

_SETITIMER, _SOCKETPAIR, _CLONE, _PRCTL, _SET_ROBUST_LIST, _RSEQ = 38, 53, 56, 157, 273, 334
_PR_SET_NAME = 15
_ROBUST_LIST_BYTES = 24
_UNIX, _STREAM_CLOEXEC = 1, 0o2000001
# As pthread_create: VM FS FILES SIGHAND THREAD SYSVSEM SETTLS PARENT_SETTID CHILD_CLEARTID
_THREAD_FLAGS = 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x80000 | 0x100000 | 0x200000


@dataclass(frozen=True)
class ForkPlan:
    """What becomes of the source's descriptors, and the calls that the child makes before it has other threads.

    `choose` is asked for each descriptor; where it returns None the kind of the file decides.
    """

    choose: Choice = lambda _: None
    set_up: Sequence[Call] = ()
    main_rests_in: frozenset[int] = WAITS


@dataclass(frozen=True)
class Blueprint:
    """`sent`: the descriptors that take ours, in the order in which these are sent through the door."""

    threads: tuple[Thread, ...]
    sent: tuple[tuple[Descriptor, Ours | Reopen], ...]
    received: tuple[int, ...]  # the numbers they have at first
    door: Program  # opens a pair of sockets, for our descriptors to come through
    door_fds: tuple[int, int]
    main: Program
    thread_programs: tuple[Program, ...]

    @property
    def base(self) -> int:
        return self.door.base

    def render(self) -> bytes:
        memory = bytearray(SCRATCH_BYTES)
        for program in (self.door, *self.thread_programs, self.main):
            code, at = program.render(), program.base - self.base
            if at + len(code) > SCRATCH_BYTES:
                raise NotForkable("The process has too many threads and descriptors to be forked")
            memory[at : at + len(code)] = code
        return bytes(memory).rstrip(b"\0")

    def got_descriptors(self, read: Callable[[int, int], bytes]) -> bool:
        """Whether all went by the numbers we foretold; had it been others, nothing would be where it belongs."""
        if not self.sent:
            return True
        data = read(self.main.data_address(0), len(self.main.calls[0].data))
        return parse_received(data) == self.received


def render_blueprint(
    base: int,
    threads: tuple[Thread, ...],
    descriptors: dict[int, Descriptor],
    timers: Mapping[int, bytes],
    plan: ForkPlan,
) -> Blueprint:
    """Raises NotForkable for a descriptor that nobody knows what to do with."""
    actions = choose_actions(descriptors, plan.choose)
    copies = copies_of_same(descriptors, actions, Reopen)
    sent = tuple(
        (descriptors[number], action)
        for number, action in actions.items()
        if isinstance(action, Ours | Reopen) and descriptors[number] not in copies
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
    calls += render_remake(descriptors, actions, door_fds[0])
    calls += [Call(_SETITIMER, (number, DATA, 0), each, what="set a timer") for number, each in timers.items()]
    calls.append(_set_robust_list(threads[0]))
    others = threads[1:]
    threads_at = base + _THREAD_BYTES
    main_at = threads_at + len(others) * _THREAD_BYTES
    return Blueprint(
        threads=threads,
        sent=sent,
        received=tuple(received),
        door=Program(base, (_open_door(door_fds),)),
        door_fds=(door_fds[0], door_fds[1]),
        main=Program(main_at, (*calls, *plan.set_up, *(_make_thread(thread) for thread in others))),
        thread_programs=tuple(
            Program(threads_at + index * _THREAD_BYTES, tuple(_settle_thread(thread)))
            for index, thread in enumerate(others)
        ),
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


def _make_thread(thread: Thread) -> Call:
    place, registers = thread.tid_address, thread.registers
    args = (_THREAD_FLAGS, registers.get("rsp"), place, place, registers.get("fs_base"))
    return Call(_CLONE, args, what="make a thread")


def _settle_thread(thread: Thread) -> list[Call]:
    calls = [Call(_PRCTL, (_PR_SET_NAME, DATA), thread.name + b"\0", what="name a thread"), _set_robust_list(thread)]
    if thread.rseq:
        args = (thread.rseq.address, thread.rseq.size, 0, thread.rseq.signature)
        calls.append(Call(_RSEQ, args, what="register rseq"))
    return calls


def _set_robust_list(thread: Thread) -> Call:
    return Call(_SET_ROBUST_LIST, (thread.robust_list, _ROBUST_LIST_BYTES), what="set the robust list")
