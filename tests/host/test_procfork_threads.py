"""A process is forked with all its threads: each goes on where it was, in the source and in the fork."""

import contextlib
import errno
import os
import re
import signal
from collections.abc import Iterator

import pytest
from procfork_cases import (
    PLAN,
    Subject,
    children,
    compiled,
    forked_from,
    planned,
    python_started,
    started,
    threads_started,
)
from procfork_workers import assert_sound, check
from support_processes import wait_until
from support_tracing import counted_calls

from forkd.errors import NotForkable
from forkd.host.procfork import ptrace
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.scheduling import read_scheduling
from forkd.host.procfork.seed import plant
from forkd.host.procfork.source import Caller

pytestmark = pytest.mark.usefixtures("nothing_left")

_WORKERS = 8


@pytest.fixture
def source() -> Iterator[Subject]:
    with started(compiled("threads")) as subject:
        check(subject)  # all of them are there
        yield subject


def test_every_thread_goes_on_with_its_registers_name_mask_and_thread_local_values(source: Subject) -> None:
    with forked_from(source) as child:
        assert len(assert_sound(child)) == len(assert_sound(source)) == _WORKERS
        assert not {*child.tids()} & {*source.tids()}
        names = [[(_read(f"/proc/{one.pid}/task/{tid}/comm")) for tid in one.tids()] for one in (child, source)]
        assert sorted(names[0]) == sorted(names[1])


def test_a_fork_knows_its_own_ids_and_is_a_child_of_the_sources_parent(source: Subject) -> None:
    with forked_from(source) as child:
        assert child.ask("ids") == f"{child.pid} {child.pid} {os.getpid()}"
        assert source.ask("ids") == f"{source.pid} {source.pid} {os.getpid()}"


def test_pthread_kill_in_a_fork_reaches_the_forks_thread(source: Subject) -> None:
    with forked_from(source) as child:
        for index in range(_WORKERS):
            assert child.ask(f"kill {index}") == f"0 {check(child)[index].tid}"
        assert (source.ask("signals"), child.ask("signals")) == ("0", str(_WORKERS))
        assert source.ask("kill 3") == f"0 {check(source)[3].tid}"
        assert_sound(child)


def test_threads_of_source_and_fork_end_and_are_joined_and_new_ones_are_made(source: Subject) -> None:
    with forked_from(source) as child:
        for one in (child, source):
            assert [one.ask(f"end {index}") for index in range(3)] == [f"0 {2000 + index}" for index in range(3)]
            failed, tid = one.ask("new").split()
            assert failed == "0"
            assert int(tid) > 0
            assert len(assert_sound(one)) == _WORKERS - 3
            wait_until(lambda one=one: len(one.tids()) == _WORKERS - 3 + 2)


def test_a_robust_mutex_tells_that_its_owner_died(source: Subject) -> None:
    with forked_from(source) as child:
        for one in (child, source):
            assert one.ask("end-with-lock 1") == "EOWNERDEAD 0"
            assert one.ask("end-with-lock 2") == "EOWNERDEAD 0"
            assert_sound(one)


def test_forks_of_forks_are_as_sound_as_their_source(source: Subject) -> None:
    with contextlib.ExitStack() as stack:
        line = [source]
        for _ in range(4):
            line.append(stack.enter_context(forked_from(line[-1])))
            line.append(stack.enter_context(forked_from(source)))
        for one in line:
            assert len(assert_sound(one)) == _WORKERS


def test_a_fork_has_the_memory_map_of_its_source_and_the_source_the_one_it_had(source: Subject) -> None:
    before = source.maps()
    with forked_from(source) as child:
        assert child.maps() == before
        assert source.maps() == before


# What is left of these limits only the kernel knows, once they went on by themselves: in a later fork they end as by a
# signal.
_RELATIVE = {"poll", "nanosleep", "futex", "main"}


def test_each_way_to_wait_goes_on_in_source_and_fork_as_if_nothing_had_been() -> None:
    def read(subject: Subject, interrupted: set[str]) -> dict[str, int]:
        """How often each has ended as it should; none in another way."""
        rows = [line.split() for line in subject.ask("report").splitlines()]
        wrong = {name: (int(bad), int(number)) for name, _, bad, number in rows if bad != "0"}
        assert wrong == {name: (1, errno.EINTR) for name in wrong if name in interrupted}
        return {name: int(good) for name, good, _, _ in rows}

    def assert_goes_on(subject: Subject, interrupted: set[str]) -> None:
        since = read(subject, interrupted)

        def has_moved() -> bool:
            now = read(subject, interrupted)
            return all(now[name] > since[name] + 1 for name in since if not name.endswith("-for-ever"))

        wait_until(has_moved, every_s=0.1)  # longer than the limit of the wait for a question

    with started(compiled("waits")) as source:
        assert_goes_on(source, set())
        for _ in range(6):
            with forked_from(source) as child:
                assert_goes_on(child, _RELATIVE)
                assert_goes_on(source, set())


def test_a_wait_that_only_the_kernel_can_go_on_with_ends_in_a_fork_as_by_a_signal() -> None:
    with python_started() as source:
        source.ask(
            "import struct\nresults = []\ndef sleep():\n"
            "    value = libc.nanosleep(struct.pack('qq', 3, 0), None)\n"
            "    results.append((value, ctypes.get_errno() if value else 0))\n"
            "sleeper = threading.Thread(target=sleep, daemon=True)\nsleeper.start()"
        )
        with forked_from(source):
            pass  # from now on the source's thread is in restart_syscall(2)
        with forked_from(source) as child:
            wait_until(lambda: child.eval("results"))
            assert child.eval("results") == [(-1, errno.EINTR)]
            assert source.eval("results") == []
            wait_until(lambda: source.eval("results") == [(0, 0)], every_s=0.05)


def test_interval_timers_run_on_in_the_fork_and_in_the_source() -> None:
    with python_started() as source:
        source.ask("import signal\nrung = []\nsignal.signal(signal.SIGALRM, lambda *_: rung.append(1))")
        source.ask("for which in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF): signal.setitimer(which, 3000, 7)")
        source.ask("signal.setitimer(signal.ITIMER_REAL, 0.3, 0.02)")
        with forked_from(source) as child:
            for one in (child, source):
                for which in ("VIRTUAL", "PROF"):
                    left, interval = one.eval(f"signal.getitimer(signal.ITIMER_{which})")
                    assert 2900 < left < 3001  # counted in ticks
                    assert interval == 7
                wait_until(lambda one=one: one.eval("len(rung)") > 1)


def test_a_process_without_interval_timers_has_none_in_its_fork() -> None:
    with python_started() as source:
        source.ask("import signal")
        with forked_from(source) as child:
            for which in ("REAL", "VIRTUAL", "PROF"):
                assert child.eval(f"signal.getitimer(signal.ITIMER_{which})") == (0, 0)


def test_each_thread_is_scheduled_as_it_was(source: Subject) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to raise a priority")
    some = min(os.sched_getaffinity(0))
    tids = {index: report.tid for index, report in check(source).items()}
    os.setpriority(os.PRIO_PROCESS, source.pid, 3)
    os.setpriority(os.PRIO_PROCESS, tids[0], 7)
    os.sched_setaffinity(tids[1], {some})
    os.sched_setscheduler(tids[2], os.SCHED_BATCH, os.sched_param(0))
    os.sched_setscheduler(tids[3], os.SCHED_RR, os.sched_param(5))
    with forked_from(source) as child:
        for index, report in check(child).items():
            assert read_scheduling(report.tid) == read_scheduling(tids[index])
        assert read_scheduling(child.pid) == read_scheduling(source.pid)
        assert_sound(child)


@pytest.mark.parametrize("seeded", [False, True], ids=["", "seed"])
@pytest.mark.parametrize("to", ["process", "thread"])
def test_a_signal_at_whatever_step_reaches_the_source_once_and_never_the_fork(to: str, seeded: bool) -> None:
    with threads_started(2) as source:
        plan = planned(caller=Caller(plant(source.pid, POLLS))) if seeded else PLAN
        tid = check(source)[1].tid if to == "thread" else source.pid
        step, forks = 0, 0
        while True:
            step += 1
            before = source.ask("signals")
            with counted_calls(step, lambda: ptrace.send_signal(source.pid, tid, signal.SIGUSR1)) as names:
                with contextlib.suppress(NotForkable), forked_from(source, plan) as child:
                    forks += 1
                    assert int(child.ask("signals")) <= int(before) + 1
                    assert len(check(child)) == 2
            if len(names) < step:
                break
            wait_until(lambda before=before: int(source.ask("signals")) == int(before) + 1)
            assert len(assert_sound(source)) == 2
        assert forks > step // 2


@pytest.mark.parametrize("what", ["threads", "processes"])
def test_a_source_that_makes_threads_or_processes_all_the_time_is_not_harmed(what: str) -> None:
    with started(compiled("churn"), what) as source:
        before = children()
        for number in range(60):
            try:
                with forked_from(source) as child:
                    assert child.ask(f"child {number}") == f"child {number}"
            except NotForkable as error:
                # A thread that ends meanwhile is no reason.
                assert re.search("did not come to rest|just sent a signal", error.message), error.message
            assert source.ask(f"source {number}") == f"source {number}"
            assert children() == before
        wait_until(source.is_free)


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()
