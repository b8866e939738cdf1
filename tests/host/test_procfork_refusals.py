"""What cannot be forked is refused with the reason, and runs on as it was. Memory is the fork's own."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from procfork_cases import (
    NOBODY,
    Subject,
    children,
    compiled,
    elsewhere,
    forked_from,
    planned,
    python_started,
    refusal_of,
    started,
    threads_started,
)
from support_processes import wait_until

from forkd.errors import NotForkable
from forkd.host.marked import find_mark_place, find_marked, render_environment
from forkd.host.procfork import ptrace, rest
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Child, forked

pytestmark = pytest.mark.usefixtures("nothing_left")

_EPOLL_WAIT = 232


@pytest.fixture
def source() -> Iterator[Subject]:
    with python_started() as subject:
        subject.ask("import mmap, time\nPRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS")
        yield subject


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest, "TRIES", 4)


def count(subject: Subject) -> None:
    """A thread of it begins to count."""
    subject.ask(
        "counted = 0\ndef count():\n    global counted\n    while True:\n"
        "        counted += 1\n        time.sleep(0.001)\n"
        "threading.Thread(target=count, daemon=True).start()"
    )


def assert_counts(subject: Subject) -> None:
    before = subject.eval("counted")
    wait_until(lambda: subject.eval("counted") > before)


def test_private_memory_is_the_same_at_first_and_separate_from_then_on(source: Subject) -> None:
    source.ask("memory = mmap.mmap(-1, 1 << 20, flags=PRIVATE)\nmemory[5000:5006] = b'before'")
    with forked_from(source) as child:
        assert child.eval("memory[5000:5006]") == b"before"
        child.ask("memory[5000:5006] = b'child.'")
        source.ask("memory[9000:9006] = b'source'")
        assert source.eval("memory[5000:5006], memory[9000:9006]") == (b"before", b"source")
        assert child.eval("memory[5000:5006], memory[9000:9006]") == (b"child.", bytes(6))


def test_memory_that_a_program_keeps_from_its_forks_is_in_this_one(source: Subject) -> None:
    source.ask("kept = [mmap.mmap(-1, 1 << 16, flags=PRIVATE) for _ in range(3)]")
    for index in range(3):
        source.ask(f"kept[{index}][:5] = b'kept{index}'\nkept[{index}].madvise(mmap.MADV_DONTFORK)")
    with forked_from(source) as child, forked_from(child) as its_child:
        for one in (child, its_child):
            assert one.eval("[each[:5] for each in kept]") == [b"kept0", b"kept1", b"kept2"]


def test_memory_that_is_only_read_may_be_shared(source: Subject, tmp_path: Path) -> None:
    (tmp_path / "read").write_text("content")
    source.ask(
        f"file = os.open({str(tmp_path / 'read')!r}, os.O_RDONLY)\n"
        "memory = mmap.mmap(file, 7, mmap.MAP_SHARED, mmap.PROT_READ)\nos.close(file)"
    )
    with forked_from(source) as child:
        assert child.eval("memory[:]") == b"content"


@pytest.mark.parametrize("name", ["written", "with spaces in it"])
def test_memory_that_would_be_shared_is_refused_by_its_name(source: Subject, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("content")
    count(source)
    source.ask(f"file = open({str(path)!r}, 'r+b')\nmemory = mmap.mmap(file.fileno(), 7)\nfile.close()")
    assert str(path) in refusal_of(source).message
    assert_counts(source)
    source.ask("memory.close()\nmemory = mmap.mmap(-1, 4096)")
    assert "/dev/zero (deleted)" in refusal_of(source).message
    source.ask("memory.close()")
    with forked_from(source) as child:
        assert_counts(child)
    assert_counts(source)


def test_a_timer_of_the_process_is_refused(source: Subject) -> None:
    source.ask("timer = ctypes.c_void_p()\nassert libc.timer_create(1, None, ctypes.byref(timer)) == 0")
    assert "timer" in refusal_of(source).message
    source.ask("libc.timer_delete(timer)")
    with forked_from(source) as child:
        assert child.eval("1 + 1") == 2


def test_a_process_stopped_by_a_signal_is_refused_and_stays_stopped() -> None:
    with started(compiled("threads")) as source:
        ticks = int(source.ask("ticks"))
        os.kill(source.pid, signal.SIGSTOP)
        wait_until(lambda: source.state() == "T")
        for _ in range(5):
            with pytest.raises(NotForkable, match="stopped by a signal") as caught, forked_from(source):
                pass
            assert caught.value.hint == "Let it go on first"
            assert source.is_free()
            wait_until(lambda: source.state() == "T")
        os.kill(source.pid, signal.SIGCONT)
        wait_until(lambda: int(source.ask("ticks")) > ticks + 2)
        assert source.workers() == 8
        with forked_from(source) as child:
            assert child.workers() == 8


@pytest.mark.usefixtures("few_tries")
def test_a_thread_that_never_rests_is_refused_and_runs_on() -> None:
    with threads_started(2) as source:
        assert source.ask("spin") == "0"
        refusal = refusal_of(source, ping="main", pong="0 999 1")
        assert "in 4 tries" in refusal.message
        assert refusal.hint == "It is busy; try again"
        ticks = int(source.ask("ticks"))
        wait_until(lambda: int(source.ask("ticks")) > ticks)
        assert source.ask("rest") == "0"
        with forked_from(source) as child:
            assert child.workers() == 2


@pytest.mark.usefixtures("few_tries")
def test_a_main_thread_that_waits_for_something_else_is_refused(source: Subject) -> None:
    refusal = refusal_of(source, planned(main_rests_in=frozenset({_EPOLL_WAIT})))
    assert f"its thread {source.pid} was never found waiting" in refusal.message
    with started("cat") as reader:
        wait_until(lambda: reader.state() == "S")
        with pytest.raises(NotForkable, match="did not come to rest"), forked_from(reader):
            pass
        assert reader.is_free()
        wait_until(lambda: reader.state() == "S")


@pytest.mark.usefixtures("few_tries")
def test_a_thread_that_cannot_be_stopped_is_refused_and_goes_on_when_it_can() -> None:
    with started(compiled("churn")) as source:
        assert source.ask("vfork") == "vfork"
        wait_until(lambda: any(_state(tid) == "D" for tid in source.tids()))
        assert "did not come to rest" in refusal_of(source).message
        wait_until(lambda: source.ask("ended?") == "1")
        with forked_from(source) as child:
            assert child.ask("ended?") == "1"


def test_a_thread_that_cannot_be_stopped_any_more_is_refused_and_free_when_our_thread_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fork() -> str:
        with pytest.raises(NotForkable) as caught, forked_from(source):
            pass
        return str(caught.value.message)

    with started(compiled("churn")) as source:
        assert source.ask("vfork") == "vfork"
        (stuck,) = wait_until(lambda: [tid for tid in source.tids() if _state(tid) == "D"])
        # As if it had been looked at just before.
        monkeypatch.setattr(rest, "_find_unstoppable", lambda _: None)
        monkeypatch.setattr(rest, "_STOP_DEADLINE_S", 0.05)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(fork).result() == f"Thread {stuck} cannot be stopped"
            assert source.ask("echo") == "echo"
        wait_until(lambda: source.ask("ended?") == "1")
        assert source.is_free()


def test_another_users_process_is_refused_with_a_hint(source: Subject) -> None:
    count(source)
    with elsewhere() as run, open("/dev/null") as null:
        refusal = run.run(f"fork_once({source.pid}, fds[0])", null.fileno(), user=NOBODY).refusal
    assert refusal.message == f"Process {source.pid} may not be traced"
    assert "its user" in (refusal.hint or "")
    assert source.is_free()
    assert_counts(source)


def test_a_process_that_is_traced_already_is_refused(source: Subject) -> None:
    count(source)
    traced, over = threading.Event(), threading.Event()

    def trace() -> None:
        ptrace.seize(source.pid, 0)
        traced.set()
        over.wait()
        ptrace.interrupt(source.pid)
        ptrace.wait(source.pid)
        ptrace.detach(source.pid)

    with ThreadPoolExecutor(1) as pool:
        tracing = pool.submit(trace)
        try:
            assert traced.wait(10)
            before = children()
            with pytest.raises(NotForkable, match="may not be traced") as caught, forked_from(source):
                pass
            assert "traced already" in (caught.value.hint or "")
            assert children() == before
            assert_counts(source)
        finally:
            over.set()
            tracing.result()
    with forked_from(source) as child:
        assert_counts(child)


def test_what_is_no_process_any_more_or_never_was_one_of_ours_is_refused() -> None:
    with started("true") as ended:
        wait_until(lambda: ended.state() == "Z")
        for pid in (ended.pid, 2**22 - 3, 2, os.getpid()):
            with pytest.raises(NotForkable), forked(pid, ForkPlan()):
                pass


def test_a_fork_can_be_marked_as_another_vms_before_it_runs(tmp_path: Path) -> None:
    with python_started(render_environment(tmp_path / "source", room=True)) as source:

        def mark(child: Child) -> None:
            place = find_mark_place(child.pid)
            assert place is not None
            child.write_memory(place.address, place.render(tmp_path / "its own"))

        assert source.eval("1")
        with forked_from(source, before=mark) as child:
            found = find_marked(tmp_path)
            assert {path: each.pid for path, each in found.items()} == {
                tmp_path / "source": source.pid,
                tmp_path / "its own": child.pid,
            }
            with forked_from(child, before=mark) as its_child:
                assert its_child.eval("2") == 2
        assert [each.pid for each in find_marked(tmp_path).values()] == [source.pid]


def _state(tid: int) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{tid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
