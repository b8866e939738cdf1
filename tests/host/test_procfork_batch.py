"""Many forks of one process at the same time: each is whole, has its own, and none is left half made."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from procfork_cases import PLAN, Subject, children, forked_from, planned, shared_files, threads_started
from support_tracing import counted_calls

from forkd.errors import NotForkable
from forkd.host.procfork.batch import Batch
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Child
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.seed import plant
from forkd.host.procfork.source import Caller

pytestmark = pytest.mark.usefixtures("nothing_left")

_WORKERS = 4
_GETPPID = 110


@pytest.fixture
def source() -> Iterator[Subject]:
    with threads_started(_WORKERS) as subject:
        yield subject


@contextlib.contextmanager
def all_forked(source: Subject, count: int, plan: ForkPlan = PLAN, **more: Any) -> Iterator[list[Subject]]:
    """Each answers over a socket of its own; gone at the end."""
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        forks: dict[int, Subject] = {}

        def on_made(index: int, child: Child) -> None:
            stack.callback(ended, child.pid)
            forks[index] = Subject(child.pid, stack.enter_context(pairs[index][0]))

        try:
            Batch(source.pid, plan).fork_each([{"control": its.fileno()} for _, its in pairs], on_made, **more)
        finally:
            for index, (ours, its) in enumerate(pairs):
                its.close()
                if index not in forks:
                    ours.close()
        yield [forks[index] for index in range(count)]


def ended(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("most_at_once", [1, 3, 100])
def test_each_is_whole_and_shares_nothing_with_another(source: Subject, most_at_once: int) -> None:
    maps, descriptors = source.maps(), source.descriptors()
    with all_forked(source, 10, most_at_once=most_at_once) as forks:
        assert len({fork.pid for fork in forks}) == 10
        for fork in (*forks, source):
            assert fork.workers() == _WORKERS
            assert fork.is_free()
            assert (fork.maps(), fork.descriptors()) == (maps, descriptors)
        assert shared_files(forks[0].pid, forks[9].pid) == set()
        assert shared_files(forks[0].pid, source.pid) == set()


def test_a_seed_makes_many_too(source: Subject) -> None:
    plan = planned(caller=Caller(plant(source.pid, POLLS)))
    maps = source.maps()
    with all_forked(source, 10, plan) as forks:
        for fork in (*forks, source):
            assert fork.workers() == _WORKERS
            assert fork.maps() == maps


def test_one_of_many_is_forked_in_turn(source: Subject) -> None:
    with all_forked(source, 3) as forks, all_forked(forks[1], 3) as more, forked_from(more[2]) as last:
        assert last.workers() == _WORKERS


def test_one_is_whole_when_it_is_handed_over_and_does_not_run_yet(source: Subject) -> None:
    seen = []

    def look(index: int, child: Child) -> None:
        subject = Subject(child.pid, ours)
        seen.append((index, child.pid, len(subject.tids()), subject.state()))

    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its:
        Batch(source.pid, PLAN).fork_each([{"control": its.fileno()}] * 4, look)
    for _, pid, _, _ in seen:
        ended(pid)
    assert sorted(index for index, *_ in seen) == [0, 1, 2, 3]
    assert {(threads, state) for _, _, threads, state in seen} == {(len(source.tids()), "t")}
    assert source.workers() == _WORKERS


def test_when_one_fails_those_before_are_there_and_no_others(source: Subject) -> None:
    made: list[int] = []

    def fail(index: int, child: Child) -> None:
        if len(made) == 3:
            raise ValueError(index)
        made.append(child.pid)

    before = children()
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, its, pytest.raises(ValueError, match="3"):
        Batch(source.pid, PLAN).fork_each([{"control": its.fileno()}] * 10, fail, most_at_once=4)
    assert sorted(children()) == sorted([*before, *made])
    for pid in made:
        ended(pid)
    assert source.is_free()
    assert source.workers() == _WORKERS


def test_a_call_that_fails_is_named_and_nothing_is_left(source: Subject) -> None:
    plan = planned(set_up=lambda _: [Call(_GETPPID, (), returns=1, what="look for its parent")])
    before = children()
    with pytest.raises(NotForkable, match="look for its parent"), all_forked(source, 5, plan):
        pass
    assert children() == before
    assert source.is_free()
    assert source.workers() == _WORKERS


def test_a_source_that_is_killed_meanwhile_leaves_none_half_made() -> None:
    with threads_started(2) as source, counted_calls() as names, all_forked(source, 3):
        pass
    for step in range(1, len(names), max(1, len(names) // 15)):
        before = children()
        with threads_started(2) as source:
            with contextlib.suppress(NotForkable):
                with counted_calls(step, lambda pid=source.pid: os.kill(pid, signal.SIGKILL)):
                    with all_forked(source, 3) as forks:
                        for fork in forks:
                            assert fork.workers() == 2
            assert len(children()) == len(before) + 1
