"""The filters of a program's threads are read, joined and put on again, each fork's threads under their own."""

import contextlib
import errno
import os
import re
import signal
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from procfork_cases import NOBODY, Subject, compiled, elsewhere, forked_from, planned, started
from support_processes import wait_until

from forkd.errors import NotForkable
from forkd.host.filters import MOST_INSTRUCTIONS, join_filters, read_filters, render_install
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.seed import find, plant
from forkd.host.procfork.source import Caller, Thread
from forkd.host.seccomp import Among, Rule, Verdict, render_filter

pytestmark = pytest.mark.usefixtures("nothing_left")

_GETPID, _GETUID, _GETGID, _GETEUID, _GETTID, _PPOLL = 39, 102, 104, 107, 186, 271
_OWN = {"filtered": _GETUID, "api": _GETGID, "vcpu": _GETEUID}
_SEED = "forkd-seed"
_needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


# Joined


def run_filter(program: bytes, number: int, arguments: Sequence[int] = ()) -> int:
    """What a filter of the instructions that ours have returns."""
    data = struct.pack("<IIQ6Q", number, 0xC000003E, 0, *arguments, *[0] * (6 - len(arguments)))
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x00:
            accumulator = value
        elif code == 0x54:
            accumulator &= value
        elif code == 0x05:
            at += value
        elif code == 0x06:
            return value
        elif code != 0x01:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += if_true if holds else if_false


_NUMBERS = st.integers(0, 20)
_RULES = st.one_of(
    st.sampled_from([Verdict.ALLOW, Verdict.REFUSED, Verdict.KILL]),
    st.builds(Among, st.integers(0, 5), st.dictionaries(st.integers(0, 3), st.just(Verdict.ALLOW))),
)


@given(
    st.lists(st.dictionaries(_NUMBERS, _RULES), min_size=1, max_size=4), st.sets(_NUMBERS), _NUMBERS, st.integers(0, 3)
)
def test_a_joined_filter_allows_what_any_of_them_allows_and_refuses_the_rest(
    rules: list[dict[int, Rule]], more: set[int], number: int, argument: int
) -> None:
    programs = [render_filter(each) for each in rules]
    arguments = [argument] * 6
    allowed = number in more or any(run_filter(each, number, arguments) == Verdict.ALLOW for each in programs)
    joined = join_filters(programs, more)
    assert run_filter(joined, number, arguments) == (Verdict.ALLOW if allowed else Verdict.REFUSED)


def test_what_cannot_be_joined_is_refused() -> None:
    with pytest.raises(NotForkable, match="cannot be joined; 4096 can"):
        join_filters([render_filter(dict.fromkeys(range(700), Verdict.ALLOW))] * 3)
    with pytest.raises(NotForkable, match="computes what it returns"):
        join_filters([struct.pack("<HBBI", 0x16, 0, 0, 0)])
    for wrong in (b"", bytes(12)):
        with pytest.raises(NotForkable, match="is not one"):
            join_filters([wrong])


_INSTALL = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
program = open({path!r}, "rb").read()
buffer = ctypes.create_string_buffer(program)
header = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.syscall(317, 1, 0, header) == 0
for number in {numbers!r}:
    tell(f"{{ctypes.get_errno() if libc.syscall(number) < 0 else 0}} ")
"""


def test_the_kernel_takes_a_joined_filter_and_does_as_it_says(tmp_path: Path) -> None:
    def all_but(*numbers: int) -> bytes:
        return render_filter(dict.fromkeys(set(range(470)) - set(numbers), Verdict.ALLOW))

    tried = (_GETPID, _GETUID, _GETGID, _GETEUID, _GETTID)
    programs = [all_but(_GETPID, _GETUID, _GETGID, _GETTID), all_but(_GETUID, _GETGID, _GETEUID, _GETTID)]
    joined = join_filters(programs, (_GETUID,))
    assert len(joined) // 8 > MOST_INSTRUCTIONS // 4
    (tmp_path / "joined").write_bytes(joined)
    with elsewhere() as run:
        outcome = run.run(_INSTALL.format(path=str(tmp_path / "joined"), numbers=tried))
    assert (outcome.status, outcome.output.split()) == (0, ["0", "0", str(errno.EPERM), "0", str(errno.EPERM)])


# Read


@_needs_root
def test_each_threads_filter_is_read_as_it_was_installed_and_the_program_goes_on() -> None:
    with started(compiled("filtered")) as source:
        assert source.ask("api 104") == "0"
        filters = read_filters(source.pid)
        assert {name: len(program) // 8 for name, program in filters.items()} == dict.fromkeys(_OWN, 4 + 17 * 2 + 1)
        for name, own in _OWN.items():
            assert {other: run_filter(filters[name], other) == Verdict.ALLOW for other in _OWN.values()} == {
                other: other == own for other in _OWN.values()
            }
            assert source.ask(f"{name} {own}") == "0"
        assert source.is_free()


@_needs_root
def test_a_program_without_filters_has_none_to_be_read() -> None:
    with started(compiled("filtered"), "free") as source:
        assert source.ask("api 104") == "0"
        assert read_filters(source.pid) == {}
        assert source.ask("api 104") == "0"


def test_without_root_filters_are_not_read_and_not_suspended_and_it_says_why() -> None:
    with started(compiled("filtered"), "free", user=NOBODY) as source, elsewhere() as run:
        assert source.ask("api 104") == str(NOBODY)
        refusal = run.run(f"from forkd.host.filters import read_filters; read_filters({source.pid})", user=NOBODY)
        assert refusal.refusal.message == "Seccomp filters cannot be read"
        code = (
            "from forkd.host.procfork.source import Caller\n"
            f"with Holder({source.pid}, planned(caller=Caller(suspend_filters=True))).forked(): pass"
        )
        refused = run.run(code, user=NOBODY).refusal
        assert "cannot be suspended" in refused.message
        assert "root" in (refused.hint or "")
        assert source.ask("api 104") == str(NOBODY)
        assert source.is_free()


# Put on again


def plan_for(filters: dict[str, bytes], seed: int, *, filtered: bool) -> ForkPlan:
    """`filtered`: the source is under them already, and its seed under all of them together."""
    joined = join_filters(list(filters.values()))

    def settle(thread: Thread) -> list[Call]:
        if thread.is_seed:
            return [] if filtered else render_install(joined)
        return render_install(filters[thread.name.decode()])

    return planned(settle=settle, caller=Caller(seed, suspend_filters=True))


@pytest.fixture(scope="module")
def filters() -> dict[str, bytes]:
    with started(compiled("filtered")) as source:
        assert source.ask("vcpu 107") == "0"
        return read_filters(source.pid)


@pytest.fixture
def source(filters: dict[str, bytes]) -> Iterator[Subject]:
    """Under its filters, with a seed: forked from one that is not."""
    with started(compiled("filtered"), "free") as template:
        assert template.ask("api 104") == "0"
        with forked_from(template, plan_for(filters, plant(template.pid, POLLS), filtered=False)) as source:
            assert statuses(source) == dict.fromkeys((*_OWN, _SEED), "1 2 1")
            assert statuses(template) == dict.fromkeys((*_OWN, _SEED), "0 0 0")
            yield source


def statuses(subject: Subject) -> dict[str, str]:
    """By the name of the thread: no new privileges, mode, how many filters."""
    lines = re.compile(r"^(?:NoNewPrivs|Seccomp|Seccomp_filters):\t(\d+)", re.MULTILINE)
    return {text.split()[1]: " ".join(lines.findall(text)) for text in subject.statuses()}


@contextlib.contextmanager
def forked_again(source: Subject, filters: dict[str, bytes]) -> Iterator[Subject]:
    seed = find(source.pid)
    assert seed is not None
    with forked_from(source, plan_for(filters, seed, filtered=True)) as child:
        yield child


def assert_each_has_its_own(subject: Subject, filters: dict[str, bytes]) -> None:
    """Its own filter, over that of the seed that its process was made by; the next seed has that one alone."""
    assert statuses(subject) == {**dict.fromkeys(_OWN, "1 2 2"), _SEED: "1 2 1"}
    assert {name: each for name, each in read_filters(subject.pid).items() if name != _SEED} == filters
    for name, own in _OWN.items():
        assert subject.ask(f"{name} {own}") == "0"


@_needs_root
def test_each_thread_of_each_fork_is_under_its_own_filter_however_deep(
    source: Subject, filters: dict[str, bytes]
) -> None:
    with contextlib.ExitStack() as stack:
        line = [source]
        for _ in range(5):
            line.append(stack.enter_context(forked_again(line[-1], filters)))
        for one in line[1:]:
            assert_each_has_its_own(one, filters)
        forks = [stack.enter_context(forked_again(source, filters)) for _ in range(20)]
        for one in forks:
            assert_each_has_its_own(one, filters)
        assert statuses(source) == dict.fromkeys((*_OWN, _SEED), "1 2 1")


@_needs_root
@pytest.mark.parametrize("name", _OWN)
def test_a_call_that_is_forbidden_to_a_thread_ends_its_fork_and_no_other(
    source: Subject, filters: dict[str, bytes], name: str
) -> None:
    # What is allowed to another thread, to the seed alone, and to none.
    for number in (*(own for each, own in _OWN.items() if each != name), _PPOLL, _GETPID):
        with contextlib.ExitStack() as stack:
            child = stack.enter_context(forked_again(source, filters))
            sibling = stack.enter_context(forked_again(source, filters))
            its_child = stack.enter_context(forked_again(child, filters))
            assert ends_of(child, f"{name} {number}") == signal.SIGSYS
            for one in (sibling, its_child, source):
                for each, own in _OWN.items():
                    assert one.ask(f"{each} {own}") == "0"


def ends_of(subject: Subject, question: str) -> int:
    """The signal that it ends by when it is asked."""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        assert subject.ask(question) == ""
    ended = wait_until(lambda: os.waitid(os.P_PID, subject.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG))
    return int(ended.si_status)
