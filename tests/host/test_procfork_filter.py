"""Under the filter a process makes threads and nothing else; whoever traces it can still fork it."""

import contextlib
import errno
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from procfork_cases import (
    NOBODY,
    Subject,
    children,
    elsewhere,
    forked_from,
    planned,
    put_under_filter,
    python_started,
    threads_started,
)

from forkd.host import spawn_filter

pytestmark = pytest.mark.usefixtures("nothing_left")

# What is tried is tried in a thread that was there before, too.
_TOOLS = """
import queue, signal, sys
tasks, results = queue.SimpleQueue(), queue.SimpleQueue()
def work():
    while True:
        results.put(tasks.get()())
threading.Thread(target=work, daemon=True).start()
def in_thread(task):
    tasks.put(task)
    return results.get()
def call(*arguments):
    main = os.getpid()
    value = libc.syscall(*arguments)
    if os.getpid() != main:
        os._exit(3)
    return ctypes.get_errno() if value == -1 else 0
def make_thread():
    made = []
    thread = threading.Thread(target=made.append, args=(7,))
    thread.start()
    thread.join()
    return made
path, none = ctypes.c_char_p(b"/bin/true"), ctypes.c_void_p()
clone3 = ctypes.create_string_buffer((17).to_bytes(8, "little").rjust(40, b"\\0").ljust(64, b"\\0"))
"""
_SIGCHLD = int(signal.SIGCHLD)
_TRIES = {
    "fork": ("57", errno.EPERM),
    "vfork": ("58", errno.EPERM),
    "execve": ("59, path, none, none", errno.EPERM),
    "execveat": ("322, -100, path, none, none, 0", errno.EPERM),
    "clone": (f"56, {_SIGCHLD}, 0, 0, 0, 0", errno.ENOSYS),
    "clone, with much above": (f"56, ctypes.c_ulong({_SIGCHLD} | 0x10000 << 32), 0, 0, 0, 0", errno.ENOSYS),
    "clone3": ("435, clone3, 64", errno.ENOSYS),
    "fork of x32": ("0x40000000 + 57", errno.EPERM),
    "ptrace": ("101, 0x4206, os.getppid(), 0, 0", errno.EPERM),
    "process_vm_readv": ("310, os.getppid(), none, 0, none, 0, 0", errno.EPERM),
    "process_vm_writev": ("311, os.getppid(), none, 0, none, 0, 0", errno.EPERM),
    "pidfd_getfd": ("438, 0, 0, 0", errno.EPERM),
}


@pytest.fixture
def source() -> Iterator[Subject]:
    with python_started() as subject:
        subject.ask(_TOOLS)
        assert subject.eval("in_thread(lambda: 5)") == 5
        yield subject


def filters(subject: Subject) -> set[str]:
    """What is set for its threads: (no new privileges, mode, how many filters)."""
    lines = re.compile(r"^(?:NoNewPrivs|Seccomp|Seccomp_filters):\t(\d+)", re.MULTILINE)
    return {" ".join(lines.findall(text)) for text in subject.statuses()}


def assert_makes_threads_only(subject: Subject) -> None:
    for name, (arguments, error) in _TRIES.items():
        assert subject.eval(f"call({arguments})") == error, name
        assert subject.eval(f"in_thread(lambda: call({arguments}))") == error, name
    assert subject.eval("make_thread()") == [7]
    assert subject.eval("in_thread(make_thread)") == [7]
    assert subject.ask("__import__('subprocess').run(['/bin/true'])").startswith("!OSError(38")
    assert filters(subject) == {"1 2 1"}


def test_a_running_process_is_put_under_the_filter_with_every_thread(source: Subject) -> None:
    assert filters(source) == {"0 0 0"}
    before = source.maps()
    put_under_filter(source.pid)
    assert source.maps() == before
    assert_makes_threads_only(source)
    assert Path(f"/proc/{source.pid}/task/{source.pid}/children").read_text() == ""


def test_a_process_under_the_filter_is_forked_again_and_again_and_its_forks_are_under_it(source: Subject) -> None:
    put_under_filter(source.pid)
    with forked_from(source) as child, forked_from(child) as its_child:
        for one in (its_child, child, source):
            assert_makes_threads_only(one)


def test_a_fork_puts_itself_under_the_filter_and_the_source_stays_free(source: Subject) -> None:
    plan = planned(set_up=lambda _: spawn_filter.render_calls())
    with forked_from(source, plan) as child:
        assert_makes_threads_only(child)
        assert filters(source) == {"0 0 0"}
        assert source.eval("os.waitpid(os.fork() or os._exit(4), 0)[1]") == 4 << 8
        with forked_from(child) as its_child:
            assert_makes_threads_only(its_child)


def test_without_privileges_a_process_is_put_under_the_filter_and_forked() -> None:
    with threads_started(3, user=NOBODY) as source, elsewhere() as run:
        assert run.run(f"put_under_filter({source.pid})", user=NOBODY).status == 0
        assert filters(source) == {"1 2 1"}
        others = children()
        with run.forked(source.pid, user=NOBODY) as (outcome, child), contextlib.ExitStack() as stack:
            assert outcome.status == 0, outcome
            (pid,) = (each for each in children() if each not in others)
            stack.callback(os.waitpid, pid, 0)
            stack.callback(os.kill, pid, signal.SIGKILL)
            child.pid = pid
            assert filters(child) == {"1 2 1"}
            for one in (child, source):
                assert one.workers() == 3
                assert one.ask("new").startswith("0 ")
            assert os.stat(f"/proc/{pid}").st_uid == NOBODY
