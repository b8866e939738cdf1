"""Whoever forks a process may be killed at any moment: the source runs on as it was, and no half-made fork is left."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from procfork_cases import (
    Elsewhere,
    Outcome,
    Subject,
    children,
    compiled,
    elsewhere,
    forked_from,
    put_under_filter,
    reap_all_but,
    started,
    wait_until,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

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
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with its:
                outcome = self.run.run(f"{by}: fork_once({self.source.pid}, fds[0])", its.fileno())
            lives = is_sound(Subject(0, ours))
            # It may be in the middle of a fork, which it finishes by itself.
            assert_untouched(self.source)
            if lives:
                (fork,) = (pid for pid in children() if pid not in others)
                os.kill(fork, signal.SIGKILL)
            assert {*reap_all_but(others).values()} <= {_KILLED, _BY_ITSELF}
        return outcome, lives


@contextlib.contextmanager
def prepared() -> Iterator[Scene]:
    """A source, and what was seen of it at the end is what was there at first."""
    with started(compiled("threads"), str(_WORKERS)) as source, elsewhere() as run:
        assert is_sound(source)
        before = seen(source)
        yield Scene(source, run)
        assert seen(source) == before


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


@pytest.mark.parametrize("filtered", [False, True], ids=["plain", "filtered"])
def test_one_who_is_killed_at_whatever_step_of_a_fork_leaves_the_source_alone_and_no_half_made_fork(
    filtered: bool,
) -> None:
    with prepared() as scene:
        if filtered:
            put_under_filter(scene.source.pid)
        step = 0
        while True:
            step += 1
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


def test_one_who_is_killed_while_the_source_makes_calls_for_him_leaves_it_running() -> None:
    with started(compiled("threads"), str(_WORKERS)) as source, elsewhere() as run:
        assert is_sound(source)
        step = 0
        while True:
            step += 1
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
