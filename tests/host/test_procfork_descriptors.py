"""What a fork has open: its own of everything, like the source's, and nothing shared but what the plan says."""

import contextlib
import os
import re
import select
import signal
import socket
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
from procfork_cases import PLAN, Subject, forked_from, planned, python_started, refusal_of, shared_files
from support_processes import wait_until

from forkd.host.procfork.child import Holder
from forkd.host.procfork.descriptors import Action, Close, Dead, Descriptor, Keep, Ours, Remake

pytestmark = pytest.mark.usefixtures("nothing_left")

_TOOLS = """
import fcntl, signal, struct, time
def timer(value_s, interval_s=0, flags=0):
    fd = libc.timerfd_create(1, flags)
    times = [part for each in (interval_s, value_s) for part in (int(each), int(each % 1 * 1e9))]
    assert libc.timerfd_settime(fd, 0, struct.pack("4q", *times), None) == 0
    return fd
def signals(*numbers, flags=0):
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    return libc.signalfd(-1, struct.pack("Q", sum(1 << number - 1 for number in numbers)), flags)
def is_ready(fd):
    return select.select([fd], [], [], 0)[0] != []
def read_number(fd):
    return struct.unpack("Q", os.read(fd, 8))[0] if is_ready(fd) else 0
def epoll(*watched):
    made = libc.epoll_create1(0)
    for fd in watched:
        watch(made, fd)
    return made
def watch(made, fd):
    assert libc.epoll_ctl(made, 1, fd, struct.pack("=IQ", 1, 1000 + fd)) == 0
def look(made):
    buffer = ctypes.create_string_buffer(12 * 16)
    count = libc.epoll_wait(made, buffer, 16, 0)
    return sorted(struct.unpack_from("=IQ", buffer, 12 * i)[1] - 1000 for i in range(count))
def flags(fd):
    return fcntl.fcntl(fd, fcntl.F_GETFL), fcntl.fcntl(fd, fcntl.F_GETFD)
def at(fd):
    return os.lseek(fd, 0, 1)
"""


@pytest.fixture
def source() -> Iterator[Subject]:
    with python_started() as subject:
        subject.ask(_TOOLS)
        yield subject


def only(numbers: set[int], action: Action) -> Callable[[Descriptor], Action | None]:
    return lambda each: action if each.number in numbers else None


def aliases(subject: Subject) -> set[tuple[int, int]]:
    """Which of its descriptors are one open file."""
    return {(a, b) for a, b in shared_files(subject.pid, subject.pid) if a < b}


def info(subject: Subject, fd: int) -> str:
    """Without the number of the one file, and flags that only say how it was opened."""
    text = re.sub(r"eventfd-id.*", "", Path(f"/proc/{subject.pid}/fdinfo/{fd}").read_text())
    return re.sub(r"(?<=flags:\t)\d+", lambda found: oct(int(found[0], 8) & ~(os.O_NOFOLLOW | os.O_TMPFILE)), text)


@pytest.mark.parametrize("count", [0, 1, 2**32 - 1, 2**32, 2**64 - 2])
@pytest.mark.parametrize(
    "flags", [0, os.EFD_SEMAPHORE, os.EFD_NONBLOCK, os.EFD_NONBLOCK | os.EFD_SEMAPHORE | os.EFD_CLOEXEC]
)
def test_an_eventfd_has_its_count_and_flags_in_the_fork_and_is_another_one(
    source: Subject, count: int, flags: int
) -> None:
    fd = source.eval(f"libc.eventfd(0, {flags})")
    if count:
        source.ask(f"os.eventfd_write({fd}, {count})")
    with forked_from(source) as child:
        assert info(child, fd) == info(source, fd)
        assert child.eval(f"flags({fd})") == source.eval(f"flags({fd})")
        read = 1 if count and flags & os.EFD_SEMAPHORE else count
        assert child.eval(f"read_number({fd})") == read
        assert source.eval(f"is_ready({fd})") == (count > 0)
        assert source.eval(f"read_number({fd})") == read
        source.ask(f"os.eventfd_write({fd}, 1)")
        assert child.eval(f"is_ready({fd})") == (count > 1 and bool(flags & os.EFD_SEMAPHORE))


@pytest.mark.parametrize("unread", [False, True], ids=["read", "unread"])
@pytest.mark.parametrize("interval_s", [0, 0.02])
def test_a_timer_goes_on_in_source_and_fork_with_the_ticks_nobody_read(
    source: Subject, interval_s: float, unread: bool
) -> None:
    fd = source.eval(f"timer(0.001 if {unread} else 0.05, {interval_s})")
    if unread:
        wait_until(lambda: source.eval(f"is_ready({fd})"))
    with forked_from(source) as child:
        assert child.eval(f"flags({fd})") == source.eval(f"flags({fd})")
        for one in (child, source):
            assert one.eval(f"is_ready({fd})") or not unread
            assert wait_until(lambda one=one: one.eval(f"read_number({fd})")) >= 1
            if interval_s:
                assert wait_until(lambda one=one: one.eval(f"read_number({fd})")) >= 1
            else:
                assert one.eval(f"(time.sleep(0.05), is_ready({fd}))[1]") is False


def test_ticks_are_counted_on_and_a_timer_that_is_not_set_stays_so(source: Subject) -> None:
    ticked, unset = source.eval("timer(0.001)"), source.eval("timer(0, 0.001, flags=os.O_NONBLOCK)")
    wait_until(lambda: source.eval(f"is_ready({ticked})"))
    with forked_from(source) as child:
        assert child.eval(f"read_number({ticked})") == 1
        assert source.eval(f"read_number({ticked})") == 1
        assert "it_value: (0, 0)" in info(child, unset)
        assert child.eval(f"flags({unset})") == source.eval(f"flags({unset})")


def test_a_signal_is_read_from_the_signalfd_of_the_process_it_was_sent_to(source: Subject) -> None:
    fd = source.eval("signals(signal.SIGUSR1, signal.SIGRTMIN + 3, flags=os.O_NONBLOCK)")
    set_ = source.eval(f"epoll({fd})")
    with forked_from(source) as child:
        assert info(child, fd) == info(source, fd)
        for one, other, number in ((child, source, signal.SIGUSR1), (source, child, signal.SIGRTMIN + 3)):
            os.kill(one.pid, number)
            wait_until(lambda one=one: one.eval(f"is_ready({fd})"))
            assert (one.eval(f"look({set_})"), other.eval(f"look({set_})")) == ([fd], [])
            assert not other.eval(f"is_ready({fd})")
            assert one.eval(f"struct.unpack_from('I', os.read({fd}, 128))[0]") == number


def test_nested_epoll_sets_watch_the_forks_own_files(source: Subject, tmp_path: Path) -> None:
    source.ask("import socket\nleft, right = socket.socketpair()")
    numbers = source.eval("[os.eventfd(0), timer(3600), left.fileno(), right.fileno(), os.eventfd(0, os.O_NONBLOCK)]")
    event, timer, left, right, other = numbers
    # The outer set has a lower number than the sets in it, and watches one of them by a copy of its descriptor.
    outer = source.eval("epoll()")
    inner = source.eval(f"epoll({event}, {timer}, {left})")
    middle = source.eval(f"epoll({inner})")
    copy = source.eval(f"os.dup({middle})")
    source.ask(f"watch({outer}, {copy}); watch({outer}, {other})")
    mine, its = socket.socketpair()
    with mine, its, open("/dev/null") as null:
        plan = planned(lambda each: {left: Ours("left"), right: Close()}.get(each.number))
        with forked_from(source, plan, ours={"left": its.fileno()}) as child:
            assert shared_files(source.pid, child.pid) == set()
            assert not null.closed
            for one, its_sibling in ((child, source), (source, child)):
                one.ask(f"os.eventfd_write({event}, 1)")
                assert one.eval(f"look({outer}), look({middle}), look({inner})") == ([copy], [inner], [event])
                assert its_sibling.eval(f"look({outer}), look({middle}), look({inner})") == ([], [], [])
                one.ask(f"os.eventfd_read({event}); os.eventfd_write({other}, 1)")
                assert one.eval(f"look({outer}), look({inner})") == ([other], [])
                one.ask(f"os.eventfd_read({other})")
            mine.send(b"x")
            assert child.eval(f"look({outer}), look({inner})") == ([copy], [left])
            assert source.eval(f"look({outer}), look({inner})") == ([], [])
            source.ask("right.send(b'x')")
            assert source.eval(f"look({inner})") == [left]


def test_copies_of_a_descriptor_are_one_open_file_in_the_fork_too(source: Subject, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("0123456789")
    made = source.eval(
        f"[os.open({str(path)!r}, os.O_RDWR), os.open({str(path)!r}, os.O_RDWR), os.eventfd(3)]"
        " + [timer(3600), timer(3600), signals(signal.SIGUSR1), signals(signal.SIGUSR1)]"
        " + [epoll(), epoll(), os.open('/dev/null', 0)]"
    )
    copies = {fd: source.eval(f"[os.dup({fd}), os.dup2({fd}, {fd + 40}, inheritable=True)]") for fd in made}
    file, same = made[0], copies[made[0]]
    assert len(aliases(source)) > 3 * len(made) - 1
    with forked_from(source) as child:
        assert aliases(child) == aliases(source)
        assert shared_files(source.pid, child.pid) == set()
        assert child.descriptors() == source.descriptors()
        for fd in child.descriptors():
            assert child.eval(f"flags({fd})") == source.eval(f"flags({fd})"), fd
        child.ask(f"os.write({file}, b'abc')")
        assert child.eval(f"[at(fd) for fd in ({file}, *{same}, {made[1]})]") == [3, 3, 3, 0]
        assert source.eval(f"at({file})") == 0


def test_a_copy_is_the_forks_own_whatever_becomes_of_what_it_is_a_copy_of(source: Subject, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    event, file = source.eval(f"[os.eventfd(3), os.open({str(tmp_path / 'file')!r}, os.O_RDWR)]")
    of_event, of_file = source.eval(f"[os.dup({event}), os.dup({file})]")
    with forked_from(source, planned(only({event, file}, Close()))) as child:
        assert shared_files(source.pid, child.pid) == set()
        assert child.eval(f"read_number({of_event})") == 3
        assert child.eval(f"os.read({of_file}, 9)") == b"x"
    with forked_from(source, planned(only({event, file}, Keep()))) as child:
        assert shared_files(source.pid, child.pid) == {(fd, fd) for fd in (event, file)} | {
            (of_event, event),
            (of_file, file),
        }


def test_files_are_open_as_they_were_and_at_the_same_place(source: Subject, tmp_path: Path) -> None:
    for name in ("plain", "appended", "unlinked", "guarded", "only looked at"):
        (tmp_path / name).write_text("0123456789")
    (tmp_path / "with (deleted)").write_text("0123456789")
    source.ask(f"os.chdir({str(tmp_path)!r})")
    opened = {
        "plain": "os.O_RDONLY",
        "appended": "os.O_WRONLY | os.O_APPEND | os.O_CREAT",
        "unlinked": "os.O_RDWR | os.O_CREAT",
        "guarded": "os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK",
        "only looked at": "os.O_PATH",
        "with (deleted)": "os.O_RDONLY",
        ".": "os.O_RDONLY | os.O_DIRECTORY",
        str(tmp_path): "os.O_RDWR | os.O_TMPFILE",
        "/dev/null": "os.O_RDWR",
        "/dev/urandom": "os.O_RDONLY",
        "/proc/self/status": "os.O_RDONLY",
    }
    fds = [source.eval(f"os.open({name!r}, {flags})") for name, flags in opened.items()]
    plain, appended, unlinked, temporary = fds[0], fds[1], fds[2], fds[7]
    source.ask(f"os.unlink('unlinked'); os.write({temporary}, b'temporary'); os.lseek({plain}, 4, 0)")
    source.ask(f"os.read({unlinked}, 2); os.set_inheritable({appended}, True)")
    with forked_from(source) as child:
        assert shared_files(source.pid, child.pid) == set()
        for fd in fds:
            assert info(child, fd) == info(source, fd)
        assert child.eval(f"os.read({plain}, 3)") == b"456"
        assert child.eval(f"os.read({unlinked}, 3)") == b"234"
        assert child.eval(f"at({temporary}), os.pread({temporary}, 99, 0)") == (9, b"temporary")
        child.ask(f"os.write({appended}, b'child')")
        source.ask(f"os.write({appended}, b'source')")
        assert (tmp_path / "appended").read_text() == "0123456789childsource"
        assert source.eval(f"at({plain}), at({unlinked})") == (4, 2)


def test_descriptors_are_ours_kept_or_closed_as_the_plan_says(source: Subject) -> None:
    source.ask("import socket\npairs = [socket.socketpair() for _ in range(3)]\nkept = os.pipe()")
    (a, b, c, d, e, f), kept = source.eval("[each.fileno() for pair in pairs for each in pair], list(kept)")
    choices = {a: Ours("mine"), d: Ours("mine"), **dict.fromkeys((b, c, e, f), Close()), **dict.fromkeys(kept, Keep())}
    mine, its = socket.socketpair()
    with mine, its:
        with forked_from(source, planned(lambda each: choices.get(each.number)), ours={"mine": its.fileno()}) as child:
            assert child.descriptors() == [fd for fd in source.descriptors() if fd not in (b, c, e, f)]
            assert shared_files(source.pid, child.pid) == {(fd, fd) for fd in kept}
            assert aliases(child) == aliases(source) | {(a, d)}
            child.ask(f"os.write({a}, b'hello')")
            assert mine.recv(9) == b"hello"
            child.ask(f"os.write({kept[1]}, b'to the source')")
            assert source.eval(f"os.read({kept[0]}, 99)") == b"to the source"
            source.ask("pairs[0][0].send(b'within')")
            assert source.eval("pairs[0][1].recv(9)") == b"within"


def test_a_dead_socket_takes_the_place_of_each_that_is_to_be_dead(source: Subject) -> None:
    source.ask(
        "import socket, select\npairs = [socket.socketpair() for _ in range(4)]\nset = select.epoll()\n"
        "[set.register(each.fileno()) for pair in pairs for each in pair]\n"
        "os.set_inheritable(pairs[1][0].fileno(), True)"
    )
    numbers = source.eval("[each.fileno() for pair in pairs for each in pair]")
    before = source.descriptors()
    with forked_from(source, planned(only(set(numbers), Dead()))) as child:
        assert child.descriptors() == source.descriptors() == before
        assert shared_files(source.pid, child.pid) == set()
        ready = child.eval("set.poll(0)")
        assert sorted(number for number, _ in ready) == numbers
        assert all(event & select.EPOLLHUP for _, event in ready)
        for index in range(4):
            assert child.eval(f"pairs[{index}][0].recv(9)") == b""
            assert "BrokenPipe" in child.ask(f"pairs[{index}][1].send(b'x', socket.MSG_NOSIGNAL)")
        assert child.eval("[os.get_inheritable(each.fileno()) for pair in pairs for each in pair]") == [
            number == numbers[2] for number in numbers
        ]
        source.ask("pairs[3][0].send(b'lives')")
        assert source.eval("pairs[3][1].recv(9)") == b"lives"
        with forked_from(child, planned(only(set(numbers), Dead()))) as its_child:
            assert its_child.eval("pairs[0][0].recv(9)") == b""


def test_no_open_file_is_shared_by_source_fork_and_siblings(source: Subject, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    source.ask(
        f"fds = [os.open({str(tmp_path / 'file')!r}, os.O_RDWR), os.eventfd(1), timer(3600, 1)]\n"
        "fds.append(signals(signal.SIGUSR1))\nouter = epoll(*fds[1:])\ncopies = [os.dup(fd) for fd in fds]"
    )
    holder = Holder(source.pid, PLAN)
    with contextlib.ExitStack() as stack:
        stack.callback(holder.release)
        forks = [stack.enter_context(forked_from(holder, keep=number % 2 == 0)) for number in range(4)]
        forks.append(stack.enter_context(forked_from(forks[0])))
        for one, other in combinations([source, *forks], 2):
            assert shared_files(one.pid, other.pid) == set()
            assert one.descriptors() == other.descriptors()
            assert aliases(one) == aliases(other)


@pytest.mark.parametrize(
    "opening, link",
    [
        ("os.pipe()[0]", "pipe:["),
        ("os.memfd_create('mine')", "/memfd:mine"),
        ("libc.inotify_init1(0)", "anon_inode:inotify"),
        ("os.pidfd_open(os.getpid())", "pidfd"),
        ("libc.syscall(323, 0)", "anon_inode:[userfaultfd]"),
        ("libc.syscall(425, 4, ctypes.create_string_buffer(120))", "anon_inode:[io_uring]"),
        ("os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY)", "/dev/p"),
        ("os.open('/proc/self/ns/net', os.O_RDONLY)", "net:["),
        ("os.mkfifo('fifo') or os.open('fifo', os.O_RDWR)", "fifo"),
        ("os.mknod('zero', 0o20600, os.makedev(1, 5)) or os.open('zero', os.O_RDWR)", "zero"),
        ("__import__('socket').socket().detach()", "socket:["),
    ],
)
def test_a_file_of_a_kind_that_nobody_chose_for_is_refused_by_its_name(
    source: Subject, tmp_path: Path, opening: str, link: str
) -> None:
    source.ask(f"os.chdir({str(tmp_path)!r})")
    try:
        fd = source.eval(opening)
    except AssertionError as error:
        pytest.skip(f"not to be had here: {error}")
    if fd < 0:
        pytest.skip("not to be had here")
    refusal = refusal_of(source)
    assert str(fd) in refusal.message
    assert link in refusal.message
    with forked_from(source, planned(only(set(source.descriptors()), Close()))) as child:
        assert child.descriptors() == [0]
    assert source.eval(f"os.fstat({fd}) and 7") == 7


def test_what_cannot_be_made_anew_is_not_even_when_asked_for(source: Subject) -> None:
    fd = source.eval("os.pipe()[0]")
    assert "pipe" in refusal_of(source, planned(only({fd, fd + 1}, Remake()))).message
