"""A fork that fails, or whose maker is killed, leaves nothing: no half-made process, no thread that stands still."""

import contextlib
import errno
import itertools
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import pytest
from procfork_cases import (
    PLAN,
    Elsewhere,
    Outcome,
    Subject,
    children,
    compiled,
    elsewhere,
    forked_from,
    limit,
    planned,
    put_under_filter,
    python_started,
    reap_all_but,
    refusal_of,
    started,
    threads_started,
)
from support_processes import wait_until
from support_tracing import counted_calls

from forkd.errors import NotForkable
from forkd.host import filters, seccomp
from forkd.host.procfork import child as child_module
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Child, Holder
from forkd.host.procfork.descriptors import Keep
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.seed import find, plant
from forkd.host.procfork.source import Caller, Thread

pytestmark = pytest.mark.usefixtures("nothing_left")

# Of this test run alone, so that only what is started here counts.
_USER = 60_000 + os.getpid() % 5000
_GETPPID = 110


@pytest.fixture
def source() -> Iterator[Subject]:
    with python_started() as subject:
        assert subject.eval("1") == 1
        assert subject.descriptors() == [0, 1, 2]
        yield subject


def test_what_cannot_be_looked_at_while_the_kernel_copies_is_refused(
    source: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_pid: int) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(child_module, "read_descriptors", fail)
        assert "Too many open files" in refusal_of(source).message
    with forked_from(source) as child:
        assert child.eval("2") == 2


@pytest.mark.parametrize("free", range(4))
def test_a_fork_that_may_not_open_enough_is_refused_with_a_hint(source: Subject, free: int) -> None:
    """Two for what the others come through, and these: the control, and the one file that both outputs are."""
    used = source.eval("os.eventfd(5)") + 1
    limit(source.pid, resource.RLIMIT_NOFILE, used + free)
    refusal = refusal_of(source)
    assert refusal.hint == "Raise ulimit -n"
    limit(source.pid, resource.RLIMIT_NOFILE, used + 4)
    with forked_from(source) as child:
        assert child.eval("os.eventfd_read(3)") == 5


def test_a_fork_without_ours_needs_room_for_one_descriptor(source: Subject) -> None:
    source.ask("os.eventfd(5)")
    plan = ForkPlan(lambda each: Keep() if each.number < 3 else None)
    limit(source.pid, resource.RLIMIT_NOFILE, 4)
    assert refusal_of(source, plan).hint == "Raise ulimit -n"


def test_a_fork_beyond_the_number_of_processes_of_its_user_is_refused_with_a_hint() -> None:
    def allow(most: int) -> None:
        assert run.run(f"limit({source.pid}, {resource.RLIMIT_NPROC}, {most})", user=_USER).status == 0

    with threads_started(3, user=_USER) as source, elsewhere() as run:
        tasks = len(source.tids())
        # None at all; its process and no thread; all threads but one.
        for most in (1, tasks + 1, 2 * tasks - 1):
            allow(most)
            refusal = refusal_of(source, ping="main", pong="0 999 1")
            assert "ulimit -u" in (refusal.hint or ""), refusal.message
        allow(2 * tasks)
        with forked_from(source) as child:
            assert child.workers() == 3


def test_one_who_forks_and_can_open_no_more_is_refused_and_the_source_runs_on(source: Subject) -> None:
    source.ask("[threading.Thread(target=threading.Event().wait, daemon=True).start() for _ in range(2)]")
    with elsewhere() as run:
        others, refusals = children(), 0
        for most in range(3, 40):
            code = (
                "soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]\n"
                f"limit(os.getpid(), resource.RLIMIT_NOFILE, {most})\n"
                "try: {fork}\n"
                "finally:\n"
                "    limit(os.getpid(), resource.RLIMIT_NOFILE, soft)\n"
                f"    assert Subject({source.pid}, socket.socket()).is_free()"
            )
            with run.forked(source.pid, code) as (outcome, fork):
                if outcome.status == 0:
                    assert fork.eval("6 * 7") == 42
                    break
            assert "Too many open files" in outcome.refusal.message
            refusals += 1
            # A child is ours, as the source is, and we are told how it ended.
            assert {*reap_all_but(others).values()} <= {signal.SIGKILL}
            assert source.eval("6 * 7") == 42
        assert refusals > 3
        reap_all_but(others)  # the one fork, which has nobody to talk to


def test_a_call_of_the_set_up_that_fails_is_named(source: Subject) -> None:
    plan = planned(set_up=lambda _: [Call(_GETPPID, (), returns=1, what="look for its parent")])
    assert f"look for its parent: returned {os.getpid()}, not 1" in refusal_of(source, plan).message
    plan = planned(set_up=lambda _: [Call(3, (999,), what="close what is not open")])
    assert "close what is not open: Bad file descriptor" in refusal_of(source, plan).message


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), OSError(5, "mine")])
def test_a_block_that_fails_leaves_no_child(source: Subject, error: BaseException, keep: bool) -> None:
    def fail(child: Child) -> None:
        assert child.pid in children()
        raise error

    before = children()
    holder = Holder(source.pid, PLAN)
    try:
        with pytest.raises((type(error), NotForkable)), forked_from(holder, keep=keep, before=fail):
            pass
        assert children() == before
    finally:
        holder.release()
    assert source.is_free()
    assert source.eval("6 * 7") == 42
    with forked_from(source) as child:
        assert child.eval("6 * 7") == 42


def test_ours_must_be_given(source: Subject) -> None:
    before = children()
    with pytest.raises(KeyError), Holder(source.pid, PLAN).forked({}):
        pass
    assert children() == before
    assert source.is_free()
    assert source.eval("6 * 7") == 42


@contextlib.contextmanager
def killed_source() -> Iterator[Subject]:
    with threads_started(2) as source:
        assert source.ask("main") == "0 999 1"
        yield source
        # Its parent is still told how it ended.
        ended = os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert (ended.si_code, ended.si_status) == (os.CLD_KILLED, signal.SIGKILL)


def kill(pid: int) -> None:
    """And wait until it is over, but for its threads that we trace."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        with open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] in "ZX":
                return


@pytest.mark.parametrize("seeded", [False, True], ids=["", "seed"])
def test_a_source_that_is_killed_at_whatever_step_is_refused_or_was_forked(seeded: bool) -> None:
    refused = 0
    for step in itertools.count(1):
        before = children()
        with killed_source() as source, contextlib.ExitStack() as stack:
            plan = planned(caller=Caller(plant(source.pid, POLLS))) if seeded else PLAN
            with counted_calls(step, lambda source=source: kill(source.pid)) as names:
                try:
                    child = stack.enter_context(forked_from(source, plan))
                except NotForkable:
                    refused += 1
                    assert children() == sorted([*before, source.pid]), names[-3:]
                else:
                    assert child.workers() == 2
            os.kill(source.pid, signal.SIGKILL)
        if len(names) < step:
            break
    assert 40 < refused < step


@pytest.mark.parametrize("seeded", [False, True], ids=["", "seed"])
def test_a_fork_that_is_killed_at_whatever_step_is_refused_and_the_source_runs_on(seeded: bool) -> None:
    with threads_started(2) as source:
        assert source.ask("main") == "0 999 1"
        before = children()
        plan = planned(caller=Caller(plant(source.pid, POLLS))) if seeded else PLAN

        def kill_fork() -> None:
            for pid in children():
                if pid not in before:
                    kill(pid)

        refused = 0
        for step in itertools.count(1):
            with counted_calls(step, kill_fork) as names:
                try:
                    with forked_from(source, plan):
                        pass
                except NotForkable:
                    refused += 1
            assert children() == before, names[-3:]
            assert source.is_free()
            assert source.workers() == 2
            if len(names) < step:
                break
        assert 40 < refused < step


@pytest.mark.parametrize("when", ["held", "released"])
def test_a_killed_source_that_was_started_by_another_is_over_for_its_parent_at_once(when: str) -> None:
    code = (
        "import subprocess, sys\n"
        "process = subprocess.Popen(sys.argv[1:], stdin=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        "print(process.pid, flush=True)\n"
        "print(process.wait(), flush=True)\n"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(compiled("threads")), "3"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        plan = ForkPlan(lambda each: Keep() if each.number < 3 else None)
        holder = Holder(pid, plan)
        try:
            wait_until(lambda: len(os.listdir(f"/proc/{pid}/task")) == 5)
            with pytest.raises(ValueError), holder.forked(keep=True):
                raise ValueError
            kill(pid)
            if when == "held":
                with pytest.raises(NotForkable), holder.forked(keep=True):
                    pass
            else:
                with contextlib.suppress(NotForkable):
                    holder.release()
            assert parent.stdout.readline() == "-9\n"
        finally:
            parent.kill()


def test_a_killed_source_can_be_released_as_often_as_one_likes(source: Subject) -> None:
    holder = Holder(source.pid, PLAN)
    with forked_from(holder, keep=True) as child:
        kill(source.pid)
        holder.release()
        holder.release()
        assert source.state() == "Z"
        assert child.eval("6 * 7") == 42


_WORKERS = 3
_KILLED, _BY_ITSELF = signal.SIGKILL, 1 << 8
# The last that is done to a fork: from then on it is complete.
_LET_GO = "detach _request _checked"


@dataclass(frozen=True)
class Scene:
    source: Subject
    run: Elsewhere

    def fork_killed(self, by: str) -> tuple[Outcome, bool]:
        """How the one who forks ended, and whether there is a fork: then it is complete, and is ended here.

        The source runs on.
        """
        others = children()
        with self.run.forked(self.source.pid, f"{by}: {{fork}}") as (outcome, made):
            lives = is_sound(made)
            # It may be in the middle of a fork, which it finishes by itself.
            assert_untouched(self.source)
            if lives:
                (fork,) = (pid for pid in children() if pid not in others)
                os.kill(fork, signal.SIGKILL)
            assert {*reap_all_but(others).values()} <= {_KILLED, _BY_ITSELF}
        return outcome, lives


@contextlib.contextmanager
def prepared(how: str = "plain") -> Iterator[Scene]:
    """A source, and what was seen of it at the end is what was there at first."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(started(compiled("threads"), str(_WORKERS)))
        assert is_sound(source)
        if how == "filtered":
            put_under_filter(source.pid)
        if how == "confined":
            source = stack.enter_context(forked_from(source, confining(plant(source.pid, POLLS))))
        run = stack.enter_context(elsewhere())
        assert is_sound(source)
        before = seen(source)
        yield Scene(source, run)
        assert seen(source) == before


def confining(seed: int) -> ForkPlan:
    """Each thread of the fork may only do what it does; its seed no more than all of them, and not fork itself."""
    workers = seccomp.render_filter(
        dict.fromkeys((14, 15, 35, 39, 157, 186, 202, 219, 230, 231), seccomp.Verdict.ALLOW)
    )
    main = seccomp.render_filter(dict.fromkeys((7, 15, 44, 45, 202, 219, 231), seccomp.Verdict.ALLOW))
    joined = filters.join_filters([workers, main])

    def settle(thread: Thread) -> list[Call]:
        return filters.render_install(joined if thread.is_seed else main if thread.tid in mains else workers)

    mains: list[int] = []
    return planned(
        look=lambda source: mains.append(source.pid), settle=settle, caller=Caller(seed, suspend_filters=True)
    )


def seen(source: Subject) -> object:
    return source.tids(), source.descriptors(), source.maps(), source.ask("signals")


def is_sound(subject: Subject) -> bool:
    """False: it is gone."""
    try:
        lines = subject.ask("check").splitlines()
    except (BrokenPipeError, ConnectionResetError):
        return False
    assert len(lines) in (0, _WORKERS)
    return len(lines) == _WORKERS


def assert_untouched(source: Subject) -> None:
    wait_until(source.is_free)
    assert is_sound(source)
    assert source.ask("main") == "0 999 1"
    ticks = int(source.ask("ticks"))
    wait_until(lambda: int(source.ask("ticks")) > ticks)


@pytest.mark.parametrize("how", ["plain", "filtered", "confined"])
def test_one_who_is_killed_at_whatever_step_of_a_fork_leaves_the_source_alone_and_no_half_made_fork(how: str) -> None:
    if how == "confined" and os.geteuid() != 0:
        pytest.skip("needs root")
    with prepared(how) as scene:
        for step in itertools.count(1):
            die = "(tell(' '.join(names[-3:])), os.kill(os.getpid(), 9))"
            outcome, lives = scene.fork_killed(f"with counted_calls({step}, lambda: {die}) as names")
            if outcome.status == 0:
                assert lives
                break
            assert (outcome.status, lives and outcome.output != _LET_GO) == (_KILLED, False), outcome
        assert step > 150


def test_one_who_is_killed_at_whatever_moment_of_a_fork_leaves_the_source_alone_and_no_half_made_fork() -> None:
    ends = []
    with prepared() as scene:
        for moment in range(200):
            alarm = f"signal.setitimer(signal.ITIMER_REAL, {1 + moment * 60} / 1e6)"
            outcome, lives = scene.fork_killed(f"{alarm}\nwith contextlib.nullcontext()")
            assert outcome.status in (0, signal.SIGALRM), outcome
            ends.append((outcome.status, lives))
    assert (signal.SIGALRM, False) in ends


def test_one_who_is_killed_while_he_plants_a_seed_leaves_the_source_running() -> None:
    with elsewhere() as run:
        planted = 0
        for step in itertools.count(1):
            with started(compiled("threads"), str(_WORKERS)) as source:
                assert is_sound(source)
                outcome = run.run(
                    "from forkd.host.procfork.seed import plant\n"
                    f"with counted_calls({step}, lambda: os.kill(os.getpid(), 9)): plant({source.pid}, POLLS)"
                )
                assert_untouched(source)
                wait_until(lambda source=source: len(source.tids()) in (_WORKERS + 2, _WORKERS + 3))
                with forked_from(source) as child:
                    assert is_sound(child)
                planted += find(source.pid) is not None
            if outcome.status == 0:
                break
            assert outcome.status == _KILLED, outcome
        assert 1 < planted < step
        assert step > 50


def test_one_who_is_killed_while_the_source_makes_calls_for_him_leaves_it_running() -> None:
    with started(compiled("threads"), str(_WORKERS)) as source, elsewhere() as run:
        assert is_sound(source)
        for step in itertools.count(1):
            outcome = run.run(
                f"with counted_calls({step}, lambda: os.kill(os.getpid(), 9)): put_under_filter({source.pid})"
            )
            assert_untouched(source)
            if outcome.status == 0:
                break
            assert outcome.status == _KILLED, outcome
        assert step > 50
        with forked_from(source) as child:
            assert is_sound(child)
