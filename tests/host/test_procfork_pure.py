"""Machine code, run in this process; registers, memory maps, descriptors and blueprints of forks, by value."""

import ctypes
import errno
import mmap
import os
import stat
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from procfork_cases import children, reap_all_but

from forkd.errors import NotForkable
from forkd.host.procfork.blueprint import ForkPlan, choose_actions, render_blueprint
from forkd.host.procfork.descriptors import (
    MAX_SENT,
    Action,
    Close,
    Descriptor,
    Keep,
    Kind,
    Ours,
    Remake,
    Reopen,
    choose_by_kind,
    copies_of_same,
    lowest_free,
    parse_kind,
    parse_received,
    render_receive,
    render_remake,
    same_file_candidates,
    watched_by,
)
from forkd.host.procfork.mappings import advisable_ranges, code_ends, find_shared
from forkd.host.procfork.program import DATA, DETOUR_BYTES, SYSCALL, Call, Detour, Failed, Program, fits_detour
from forkd.host.procfork.registers import (
    POLLS,
    WAITS,
    Registers,
    at_code,
    called_again,
    find_tid_offset,
    making_call,
    needs_help,
    returned,
    waiting_in,
)
from forkd.host.procfork.scheduling import read_scheduling
from forkd.host.procfork.source import Thread

_WRITE, _CLOSE, _GETPID, _FORK, _GETPPID = 1, 3, 39, 57, 110
_POLL, _NANOSLEEP, _FUTEX, _RESTART, _EPOLL_WAIT, _PPOLL = 7, 35, 202, 219, 232, 271
_EPOLL_CTL, _DUP3, _SET_TID_ADDRESS = 233, 292, 218
_NO_CALL = 2**64 - 1
_RETURN = b"\xc3"
_CODE_BYTES = 1 << 16


class Memory:
    """Of our own, for code."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _CODE_BYTES, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def put(self, address: int, code: bytes) -> None:
        self._map[address - self.base : address - self.base + len(code)] = code

    def get(self, address: int, size: int) -> bytes:
        return self._map[address - self.base : address - self.base + size]

    def run(self, entry: int) -> int:
        return int(ctypes.CFUNCTYPE(ctypes.c_int64)(entry)())

    def run_program(self, calls: tuple[Call, ...]) -> tuple[Program, list[int]]:
        """It returns instead of stopping at the breakpoint."""
        program = Program(self.base + 256, calls)
        self.put(program.base, program.render()[:-1] + _RETURN)
        self.run(program.entry)
        return program, program.parse_results(self.get(program.base, program.results_bytes))


@pytest.fixture(scope="module")
def memory() -> Memory:
    return Memory()


# Machine code


def test_arguments_and_data_are_placed_where_the_data_is() -> None:
    call = Call(_WRITE, (5, DATA + 16, -1, 2**64 - 1), b"x" * 20, pointers=((8, 16), (0, 0)))
    assert call.placed_args(0x7000) == (5, 0x7010, -1, 2**64 - 1)
    assert call.placed_data(0x7000) == struct.pack("<QQ4s4x", 0x7000, 0x7010, b"xxxx")
    assert Call(_GETPID).placed_data(0x7000) == b""


@pytest.mark.parametrize(
    "call, value, text",
    [
        (Call(9), 0, None),
        (Call(9), 2**62, None),
        (Call(9), -errno.EBADF, "system call 9: Bad file descriptor"),
        (Call(9, returns=3, what="open it"), 3, None),
        (Call(9, returns=3, what="open it"), 4, "open it: returned 4, not 3"),
        (Call(9, returns=0, what="open it"), -errno.EMFILE, "open it: Too many open files"),
    ],
)
def test_a_call_has_failed_when_it_returned_an_error_or_not_what_it_had_to(
    call: Call, value: int, text: str | None
) -> None:
    failed = call.find_failure(value)
    assert (str(failed) if failed else None) == text
    assert failed in (None, Failed(call, value))


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(0, 2**40).map(lambda number: number * 8))
def test_a_program_is_a_table_then_the_data_of_each_call_then_code(data: list[bytes], base: int) -> None:
    program = Program(base, tuple(Call(_GETPID, (), each) for each in data))
    code = program.render()
    ends = base + program.results_bytes
    assert program.results_bytes == 16 + 64 * len(data)
    for index, each in enumerate(data):
        at = program.data_address(index)
        assert at % 8 == 0
        assert ends <= at < ends + 8
        assert code[at - base : at - base + len(each)] == each
        ends = at + len(each)
    assert program.parse_results(code) == [0] * len(data)
    assert ends <= program.entry < ends + 8
    assert code.endswith(b"\xcc")
    assert code.count(SYSCALL, program.entry - base) == (1 if data else 0)


def test_a_program_makes_its_calls_in_turn_and_keeps_what_they_returned(memory: Memory) -> None:
    read, write = os.pipe()
    try:
        calls = (
            Call(_GETPID),
            Call(_WRITE, (write, DATA + 2, 3), b"a one"),
            Call(20, (write, DATA, 2), struct.pack("<4Q", 0, 2, 0, 3) + b"....12345", pointers=((0, 32), (16, 36))),
            Call(_GETPPID),
        )
        program, results = memory.run_program(calls)
        assert results == [os.getpid(), 3, 5, os.getppid()]
        assert program.find_failure(results) is None
        assert os.read(read, 99) == b"one..123"
    finally:
        os.close(read)
        os.close(write)


@given(good=st.integers(0, 20), more=st.integers(0, 20))
def test_a_program_stops_at_the_first_call_that_fails(memory: Memory, good: int, more: int) -> None:
    bad = Call(_CLOSE, (-1,), what="close nothing")
    calls = (*[Call(_GETPID)] * good, bad, *[Call(_GETPPID)] * more)
    program, results = memory.run_program(calls)
    assert results == [os.getpid()] * good + [-errno.EBADF] + [0] * more
    assert program.find_failure(results) == Failed(bad, -errno.EBADF)


def test_all_six_arguments_reach_the_kernel(memory: Memory, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0" * 4096 + b"1" * 4096 + b"2" * 4096)
    place, read, private_there = 0x5A5A_0000_0000, mmap.PROT_READ, mmap.MAP_PRIVATE | 0x100000
    with open(tmp_path / "file") as file:
        args = (place, 4096, read, private_there, file.fileno(), 8192)
        assert memory.run_program((Call(9, args),))[1] == [place]
    assert ctypes.string_at(place, 4096) == b"2" * 4096
    assert memory.run_program((Call(11, (place, 4096)),))[1] == [0]


_BACK = {"rdi": 1, "rsi": 2 << 8, "rdx": 4 << 16, "r10": 8 << 24, "r8": 16 << 32, "r9": 32 << 40, "rax": 64 << 48}
# add rax, <each of the others>; ret
_SUM = b"\x48\x01\xf8\x48\x01\xf0\x48\x01\xd0\x4c\x01\xd0\x4c\x01\xc0\x4c\x01\xc8" + _RETURN


def run_detour(memory: Memory, number: int, *, forks: bool) -> int:
    """What the registers add up to when it is back."""
    memory.put(memory.base, _SUM)
    detour = Detour(memory.base + 512, {**_BACK, "rip": memory.base})
    memory.put(detour.base, detour.render())
    entry, target = memory.base + 128, detour.fork if forks else detour.call
    code = b"\x48\xb8" + struct.pack("<Q", number)
    memory.put(entry, code + b"\xe9" + struct.pack("<i", target - (entry + len(code) + 5)))
    return memory.run(entry)


def test_a_detour_makes_its_call_and_goes_back_with_the_registers_as_they_were(memory: Memory) -> None:
    assert run_detour(memory, _GETPID, forks=False) == sum(_BACK.values())


def test_a_child_that_nobody_takes_over_ends_at_once_and_its_parent_goes_back(memory: Memory) -> None:
    others = children()
    assert run_detour(memory, _FORK, forks=True) == sum(_BACK.values())
    assert list(reap_all_but(others).values()) == [1 << 8]


def test_a_detour_is_written_over_nothing_or_over_the_last_one() -> None:
    code = Detour(0x1000, {**_BACK, "rip": 5}).render()
    assert len(code) == DETOUR_BYTES
    assert fits_detour(bytes(DETOUR_BYTES))
    assert fits_detour(code)
    assert not fits_detour(bytes(DETOUR_BYTES - 1) + b"\x90")


# Registers


def registers(**values: int) -> Registers:
    return Registers().with_values(**{"orig_rax": -1, **values})


@pytest.mark.parametrize(
    "number, value, waiting",
    [
        (_FUTEX, -512, _FUTEX),
        (_PPOLL, -514, _PPOLL),
        (_POLL, -516, _POLL),
        (_EPOLL_WAIT, -errno.EINTR, _EPOLL_WAIT),
        (56, -513, 56),
        (_FUTEX, 0, None),
        (_FUTEX, -errno.EAGAIN, None),
        (-1, -512, None),
        (-1, 0, None),
        (0x40000000 - 1, -512, 0x40000000 - 1),
    ],
)
def test_a_thread_waits_in_the_call_that_was_broken_off(number: int, value: int, waiting: int | None) -> None:
    assert waiting_in(registers(orig_rax=number, rax=value)) == waiting


@pytest.mark.parametrize(
    "number, value, args, in_source, in_duplicate",
    [
        (_FUTEX, -512, {}, (-2, _FUTEX), (-2, _FUTEX)),
        (_PPOLL, -514, {}, (-2, _PPOLL), (-2, _PPOLL)),
        (_EPOLL_WAIT, -errno.EINTR, {}, (-2, _EPOLL_WAIT), (-2, _EPOLL_WAIT)),
        # What is left of a limit is known to the kernel, for this thread.
        (_NANOSLEEP, -516, {}, (-2, _RESTART), (-2, _NANOSLEEP)),
        (_POLL, -516, {"rdx": 100}, (-2, _RESTART), (-2, _POLL)),
        (_FUTEX, -516, {"rsi": 0x80}, (-2, _RESTART), (-2, _FUTEX)),
        # These have none, or one by the clock.
        (_POLL, -516, {"rdx": -1}, (-2, _POLL), (-2, _POLL)),
        (_POLL, -516, {"rdx": 2**32 - 1}, (-2, _POLL), (-2, _POLL)),
        (_FUTEX, -516, {"rsi": 0x189}, (-2, _FUTEX), (-2, _FUTEX)),
        # What it was nobody knows: it ends as by a signal.
        (_RESTART, -516, {}, (-2, _RESTART), (0, -errno.EINTR)),
    ],
)
def test_a_call_is_made_again(
    number: int, value: int, args: dict[str, int], in_source: tuple[int, int], in_duplicate: tuple[int, int]
) -> None:
    before = registers(orig_rax=number, rax=value, rip=0x5000, rbx=7, **args)
    for expected, duplicate in ((in_source, False), (in_duplicate, True)):
        after = called_again(before, in_duplicate=duplicate)
        moved, rax = expected
        assert bytes(after) == bytes(before.with_values(rip=0x5000 + moved, rax=rax, orig_rax=-1))
    kernel_does_it = value in (-512, -514) or in_source[1] == _RESTART
    assert needs_help(before) is not kernel_does_it


def test_only_a_thread_that_waits_needs_help() -> None:
    assert not needs_help(registers(orig_rax=56, rax=-errno.EINTR))
    assert not needs_help(registers(rax=-errno.EINTR))
    assert POLLS < WAITS
    assert not WAITS & {0, 1, 56, 59}


def test_registers_of_a_call_and_of_code() -> None:
    before = registers(rip=1, rax=2, rbx=3, r9=9, rdi=4, orig_rax=202)
    call = making_call(before, 0x700, 9, (0, -1))
    assert bytes(call) == bytes(before.with_values(rip=0x700, rax=9, rdi=0, rsi=-1, orig_rax=_NO_CALL))
    assert bytes(at_code(before, 0x800)) == bytes(before.with_values(rip=0x800, orig_rax=_NO_CALL))
    assert [returned(registers(rax=value)) for value in (0, 5, -22, 2**63 - 1)] == [0, 5, -22, 2**63 - 1]


@given(
    tids=st.lists(st.integers(1, 2**22), min_size=1, max_size=6, unique=True),
    place=st.integers(0, 250).map(lambda number: number * 4),
    noise=st.binary(min_size=1024, max_size=1024),
)
def test_the_place_of_the_thread_id_is_where_every_thread_has_its_own(
    tids: list[int], place: int, noise: bytes
) -> None:
    descriptors = {tid: noise[:place] + struct.pack("<I", tid) + noise[place + 4 :] for tid in tids}
    found = find_tid_offset(descriptors)
    assert found is not None
    assert found <= place
    for tid, each in descriptors.items():
        assert struct.unpack_from("<I", each, found) == (tid,)


def test_there_is_no_place_of_the_thread_id_that_is_not_everywhere_or_not_aligned() -> None:
    one, other = struct.pack("<I", 70_001), struct.pack("<I", 70_002)
    assert find_tid_offset({}) is None
    assert find_tid_offset({70_001: bytes(8) + one, 70_002: bytes(12) + other}) is None
    assert find_tid_offset({70_001: bytes(3) + one + bytes(1)}) is None
    assert find_tid_offset({70_001: one + bytes(4) + one, 70_002: bytes(8) + other}) == 8


# Memory maps

_MAPS = """\
00400000-00401000 r--p 00000000 fe:00 10                                 /usr/bin/with (odd) name
00401000-00405000 r-xp 00001000 fe:00 10                                 /usr/bin/with (odd) name
00405000-00406000 rw-p 00000000 00:00 0                                  [heap]
7f0000000000-7f0000100000 rw-p 00000000 00:00 0 ~
7f0000100000-7f0000110000 rwxp 00000000 00:00 0 ~
7f0000200000-7f0000204000 r--p 00000000 00:00 0                          [vvar]
7f0000204000-7f0000206000 r--p 00000000 00:00 0                          [vvar_vclock]
7f0000206000-7f0000208000 r-xp 00000000 00:00 0                          [vdso]
7f0000300000-7f0000301000 r--s 00000000 fe:00 11                         /usr/lib/gconv.cache
7f0000400000-7f0000401000 r-xp 00000000 fe:00 12                         /usr/lib/libc.so.6 (deleted)
7ffffff00000-7ffffff20000 rw-p 00000000 00:00 0                          [stack]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
""".replace("~", "")  # the kernel ends lines with a space


def test_code_of_files_has_room_at_its_end() -> None:
    assert list(code_ends(_MAPS)) == [0x405000, 0x7F0000401000]


def test_all_memory_but_the_kernels_own_is_advised() -> None:
    ends = [(0x400000, 0x7F0000110000), (0x7F0000300000, 0x7FFFFFF20000)]
    assert advisable_ranges(_MAPS) == [(start, end - start) for start, end in ends]
    assert advisable_ranges("") == []
    only = "7f0000206000-7f0000208000 r-xp 00000000 00:00 0                          [vdso]\n"
    assert advisable_ranges(only) == []
    assert advisable_ranges(only + "7f0000300000-7f0000301000 rw-p 00000000 00:00 0 \n") == [(0x7F0000300000, 0x1000)]


@pytest.mark.parametrize(
    "line, name",
    [
        ("7f0000600000-7f0000601000 rw-s 00000000 00:01 1024    /dev/zero (deleted)", "/dev/zero (deleted)"),
        ("7f0000600000-7f0000601000 rw-s 00000000 fe:00 1024    /tmp/with spaces  in it", "/tmp/with spaces  in it"),
        ("7f0000600000-7f0000601000 -w-s 00000000 00:0e 1027    anon_inode:[io_uring]", "anon_inode:[io_uring]"),
        ("7f0000600000-7f0000601000 rwxs 00000000 00:00 0 ", "7f0000600000"),
        ("7f0000600000-7f0000601000 r-xs 00000000 fe:00 1024    /tmp/read", None),
        ("7f0000600000-7f0000601000 rw-p 00000000 fe:00 1024    /tmp/a rw-s b", None),
    ],
)
def test_memory_that_a_fork_would_share_is_named(line: str, name: str | None) -> None:
    assert find_shared(_MAPS + line + "\n") == name
    assert find_shared(_MAPS) is None


# Descriptors and blueprints


@pytest.mark.parametrize(
    "link, mode, kind",
    [
        ("socket:[123]", 0, Kind.SOCKET),
        ("anon_inode:[eventfd]", 0, Kind.EVENTFD),
        ("anon_inode:[signalfd]", 0, Kind.SIGNALFD),
        ("anon_inode:[timerfd]", 0, Kind.TIMERFD),
        ("anon_inode:[eventpoll]", 0, Kind.EPOLL),
        ("/etc/passwd", stat.S_IFREG, Kind.FILE),
        ("/etc", stat.S_IFDIR, Kind.FILE),
        ("/tmp/was here (deleted)", stat.S_IFREG, Kind.FILE),
        ("/devices", stat.S_IFREG, Kind.FILE),
        ("/dev/null", stat.S_IFCHR, Kind.FILE),
        ("/dev/urandom", stat.S_IFCHR, Kind.FILE),
        ("/tmp/fifo", stat.S_IFIFO, Kind.OTHER),
        ("/srv/jail/dev/kvm", stat.S_IFCHR, Kind.OTHER),
        ("/srv/disk", stat.S_IFBLK, Kind.OTHER),
        ("/dev/kvm", stat.S_IFCHR, Kind.OTHER),
        ("/dev/pts/3", stat.S_IFCHR, Kind.OTHER),
        ("/dev/shm/x", stat.S_IFREG, Kind.OTHER),
        ("/memfd:x (deleted)", stat.S_IFREG, Kind.OTHER),
        ("/SYSV00000000 (deleted)", stat.S_IFREG, Kind.OTHER),
        ("pipe:[123]", 0, Kind.OTHER),
        ("anon_inode:inotify", 0, Kind.OTHER),
        ("anon_inode:[io_uring]", 0, Kind.OTHER),
        ("net:[4026531840]", 0, Kind.OTHER),
        ("", 0, Kind.OTHER),
    ],
)
def test_the_kind_of_a_file_is_known_by_its_link(link: str, mode: int, kind: Kind) -> None:
    assert parse_kind(link, mode) is kind
    action = choose_by_kind(Descriptor(5, link, mode=mode))
    remade = (Kind.EVENTFD, Kind.SIGNALFD, Kind.TIMERFD, Kind.EPOLL)
    assert action == (Reopen() if kind is Kind.FILE else Remake() if kind in remade else None)


@given(st.sets(st.integers(0, 60)), st.integers(0, 20))
def test_the_lowest_free_numbers_are_what_the_kernel_gives(used: set[int], count: int) -> None:
    free = lowest_free(used, count)
    assert len(free) == count
    assert free == sorted(set(free))
    assert not set(free) & used
    assert set(range(free[-1] if free else 0)) <= used | set(free)


@given(
    before=st.binary(min_size=80, max_size=80),
    length=st.integers(0, 100) | st.integers(0, 2**64 - 1),
    kind=st.sampled_from([(1, 1), (1, 2), (0, 1)]) | st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    after=st.binary(max_size=100),
)
def test_whatever_is_received_is_read_without_harm(
    before: bytes, length: int, kind: tuple[int, int], after: bytes
) -> None:
    received = parse_received(before + struct.pack("<QII", length, *kind) + after)
    assert len(received) <= len(after) // 4
    assert kind == (1, 1) or received == ()


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(0, 20))
def test_the_numbers_of_received_descriptors_are_read(numbers: list[int], lost: int) -> None:
    call = render_receive(9, len(numbers))
    got = numbers[: max(0, len(numbers) - lost)]
    header = struct.pack("<QII", 16 + 4 * len(got), 1, 1) if got else bytes(16)
    data = call.data[:80] + (header + struct.pack(f"<{len(got)}i", *got)).ljust(len(call.data) - 80, b"\0")
    assert parse_received(data) == tuple(got)
    # A name for the sender, or anything else that is no descriptor.
    assert parse_received(data[:80] + struct.pack("<QII", 28, 1, 2) + data[96:]) == ()


def test_descriptors_that_may_be_one_file_are_compared() -> None:
    def eventfd(number: int, id_: int) -> Descriptor:
        return Descriptor(number, "anon_inode:[eventfd]", f"eventfd-id: {id_}\n")

    found = [
        *(Descriptor(number, "/x") for number in (3, 8)),
        *(eventfd(4, 1), eventfd(5, 2), eventfd(6, 1)),
        *(Descriptor(number, "socket:[5]") for number in (10, 11)),
        Descriptor(9, "/y"),
    ]
    assert same_file_candidates(found) == [[3, 8], [4, 6]]


def test_what_an_epoll_set_watches_is_read_from_its_lines() -> None:
    info = (
        "pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t1058\n"
        "tfd:        5 events:       19 data:                5  pos:0 ino:2 sdev:f\n"
        "tfd:       12 events: 8000001f data: ffffffff00000007  pos:0 ino:422 sdev:f\n"
    )
    set_ = Descriptor(7, "anon_inode:[eventpoll]", info)
    assert watched_by(set_) == [(5, 0x19, 5), (12, 0x8000001F, 0xFFFFFFFF00000007)]
    assert (set_.flags, set_.cloexec, set_.find("ino"), set_.find("none")) == (2, 0, "1058", None)


def describe_set(number: int, watched: list[int], alias_of: int | None = None) -> Descriptor:
    lines = [f"tfd: {each} events: 19 data: {each}\n" for each in watched]
    return Descriptor(number, "anon_inode:[eventpoll]", "flags:\t02\n" + "".join(lines), alias_of=alias_of)


@st.composite
def nested_sets(draw: st.DrawFn) -> dict[int, Descriptor]:
    """Sets that watch sets and events, in no order of numbers, some by another number for the same one."""
    numbers = draw(st.permutations(range(3, 15)))
    events, originals, copies = numbers[:2], numbers[2:8], numbers[8:]
    copy_of = {copy: draw(st.sampled_from([*events, *originals])) for copy in copies}
    first = {name: min([name, *(copy for copy in copies if copy_of[copy] == name)]) for name in (*events, *originals)}
    found = {}
    for index, name in enumerate([*events, *originals]):
        below = [other for other in numbers if copy_of.get(other, other) in [*events, *originals][:index]]
        watched = draw(st.lists(st.sampled_from(below), unique=True)) if below and name in originals else []
        for number in (name, *(copy for copy in copies if copy_of[copy] == name)):
            alias = None if number == first[name] else first[name]
            if name in events:
                found[number] = Descriptor(number, "anon_inode:[eventfd]", "flags:\t02\n", alias_of=alias)
            else:
                found[number] = describe_set(number, watched, alias)
    return dict(sorted(found.items()))


@given(nested_sets(), st.sets(st.integers(3, 14), max_size=3))
def test_whatever_a_set_watches_is_made_before_it(descriptors: dict[int, Descriptor], closed: set[int]) -> None:
    free = 20
    actions: dict[int, Action] = {number: Close() if number in closed else Remake() for number in descriptors}
    own: set[int] = set()
    for call in render_remake(descriptors, actions, free):
        if call.number == _EPOLL_CTL:
            assert call.args[2] in own, "it would watch the source's"
        elif call.number == _DUP3:
            own.add(call.args[1])
            assert call.args[0] == free
            assert call.returns == call.args[1]
        elif call.number != _CLOSE:
            assert call.returns == free
        elif call.args[0] != free:
            assert call.args[0] in closed
            own.add(call.args[0])
    assert own == set(descriptors)


def test_a_copy_counts_as_one_only_where_the_same_is_done_with_both() -> None:
    descriptors = {
        number: Descriptor(number, "/x", alias_of=alias) for number, alias in ((0, None), (3, 0), (4, 0), (5, None))
    }
    every: dict[int, Action] = dict.fromkeys(descriptors, Reopen())
    assert [each.number for each in copies_of_same(descriptors, every, Reopen)] == [3, 4]
    assert [each.number for each in copies_of_same(descriptors, {**every, 4: Keep()}, Reopen)] == [3]
    assert copies_of_same(descriptors, {**every, 0: Close()}, Reopen) == []
    assert copies_of_same(descriptors, every, Remake) == []


def thread(tid: int) -> Thread:
    return Thread(tid, b"name", Registers().with_values(rsp=tid), b"", 0, 0, None, 0x9000 + tid, read_scheduling(0))


def test_actions_are_the_callers_or_those_of_the_kind_and_without_either_it_is_refused() -> None:
    known = {3: Descriptor(3, "/etc/passwd"), 4: Descriptor(4, "socket:[7]")}
    assert choose_actions(known, lambda each: Ours("x") if each.number == 4 else None) == {3: Reopen(), 4: Ours("x")}
    assert choose_actions(known, lambda _: Close()) == {3: Close(), 4: Close()}
    with pytest.raises(NotForkable, match=r"Descriptor 4 cannot be duplicated: socket:\[7\]"):
        choose_actions(known, lambda _: None)
    with pytest.raises(NotForkable, match="Descriptor 3 cannot be duplicated: /etc/passwd"):
        choose_actions(known, lambda _: Remake())


def test_a_blueprint_foretells_the_numbers_that_the_kernel_will_give() -> None:
    descriptors = {0: Descriptor(0, "/x"), 2: Descriptor(2, "/x", alias_of=0), 4: Descriptor(4, "socket:[7]")}
    plan = ForkPlan(lambda each: Ours("x") if each.number == 4 else None)
    blueprint = render_blueprint((thread(1), thread(2)), descriptors, {}, plan).placed(0x10000)
    assert blueprint.door_fds == (1, 3)
    assert blueprint.received == (5, 6)
    assert [each.number for each, _ in blueprint.sent] == [0, 4]
    assert blueprint.base == 0x10000
    assert len(blueprint.render()) <= blueprint.size
    moves = [(call.args[0], call.args[1]) for call in blueprint.main.calls if call.number == _DUP3]
    assert moves == [(5, 0), (6, 4), (0, 2)]


def test_more_files_than_a_message_takes_are_refused() -> None:
    files = {number: Descriptor(number, "/x") for number in range(MAX_SENT + 1)}
    with pytest.raises(NotForkable, match=f"has {MAX_SENT + 1} files"):
        render_blueprint((thread(1),), files, {}, ForkPlan())


def test_the_programs_of_a_blueprint_have_the_room_they_need_however_much_it_is() -> None:
    plan = ForkPlan(
        set_up=lambda _: [Call(_GETPID, (), bytes(20_000))] * 8, settle=lambda _: [Call(_GETPID, (), bytes(3_000))]
    )
    blueprint = render_blueprint(tuple(thread(tid) for tid in range(1, 40)), {}, {}, plan).placed(0x10000)
    programs = [blueprint.door, blueprint.main, *blueprint.thread_programs, blueprint.last]
    places = [(program.base, program.base + len(program.render())) for program in programs]
    assert all(one[1] <= other[0] for one, other in pairwise(places))
    assert places[0][0] == 0x10000
    assert places[-1][1] <= 0x10000 + blueprint.size < places[-1][1] + 4096 + 16
    memory = blueprint.render().ljust(blueprint.size, b"\0")
    for program in programs:
        assert memory[program.base - 0x10000 :].startswith(program.render())


@given(st.lists(st.tuples(st.integers(0, 6), st.binary(max_size=50)), max_size=12))
def test_how_long_a_program_is_is_known_before_it_is_rendered(calls: list[tuple[int, bytes]]) -> None:
    program = Program(64, tuple(Call(_GETPID, (1,) * count, data) for count, data in calls))
    assert program.size == len(program.render())


def test_the_set_up_is_told_the_lowest_number_that_is_free_then() -> None:
    told: list[int] = []

    def set_up(free: int) -> list[Call]:
        told.append(free)
        return []

    files = {number: Descriptor(number, "/x") for number in (0, 1, 2, 3, 5)}
    render_blueprint((thread(1),), files, {}, ForkPlan(set_up=set_up))
    render_blueprint((thread(1),), files, {}, ForkPlan(lambda each: Close() if each.number == 1 else None, (), set_up))
    assert told == [4, 1]


def test_threads_have_one_place_that_is_cleared_at_their_end_where_the_library_has_one() -> None:
    blueprint = render_blueprint((thread(1), thread(2)), {}, {}, ForkPlan(clear_tid=0x7770))
    set_address, make = blueprint.main.calls[-2:]
    assert (set_address.number, set_address.args) == (_SET_TID_ADDRESS, (0x7770,))
    assert make.args[2:4] == (0x9002, 0x7770)
    plain = render_blueprint((thread(1), thread(2)), {}, {}, ForkPlan())
    assert plain.main.calls[-1].args[2:4] == (0x9002, 0x9002)
    assert _SET_TID_ADDRESS not in [call.number for call in plain.main.calls]


def test_a_seed_has_no_id_to_be_written_and_the_main_thread_is_made_whole_behind_it() -> None:
    seed = replace(thread(3), tid_address=None, is_seed=True)
    blueprint = render_blueprint((thread(1), thread(2), seed), {}, {}, ForkPlan())
    assert blueprint.by_seed
    assert blueprint.main.calls[-1].args[2:4] == (0, 0)
    assert blueprint.main.calls[-1].args[0] & 0x300000 == 0
    assert [call.number for call in blueprint.last.calls] == [157, 273]
    plain = render_blueprint((thread(1), thread(2)), {}, {}, ForkPlan())
    assert not plain.by_seed
    assert plain.last.calls == ()
