"""What a process has open, and what its fork does before it runs, by value."""

from __future__ import annotations

import stat
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forkd.errors import NotForkable
from forkd.host.procfork.blueprint import SCRATCH_BYTES, ForkPlan, choose_actions, render_blueprint
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
from forkd.host.procfork.program import Call
from forkd.host.procfork.registers import Registers
from forkd.host.procfork.scheduling import read_scheduling
from forkd.host.procfork.source import Thread

_CLOSE, _GETPID, _EPOLL_CTL, _DUP3 = 3, 39, 233, 292


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
    blueprint = render_blueprint(0x10000, (thread(1), thread(2)), descriptors, {}, plan)
    assert blueprint.door_fds == (1, 3)
    assert blueprint.received == (5, 6)
    assert [each.number for each, _ in blueprint.sent] == [0, 4]
    assert blueprint.base == 0x10000
    assert len(blueprint.render()) <= SCRATCH_BYTES
    moves = [(call.args[0], call.args[1]) for call in blueprint.main.calls if call.number == _DUP3]
    assert moves == [(5, 0), (6, 4), (0, 2)]


def test_what_is_too_much_for_one_blueprint_is_refused() -> None:
    files = {number: Descriptor(number, "/x") for number in range(MAX_SENT + 1)}
    with pytest.raises(NotForkable, match=f"has {MAX_SENT + 1} files"):
        render_blueprint(0, (thread(1),), files, {}, ForkPlan())
    with pytest.raises(NotForkable, match="too many threads"):
        render_blueprint(0, tuple(thread(tid) for tid in range(SCRATCH_BYTES // 1024)), {}, {}, ForkPlan()).render()
    plan = ForkPlan(set_up=[Call(_GETPID, (), bytes(64))] * (SCRATCH_BYTES // 64))
    with pytest.raises(NotForkable, match="too many"):
        render_blueprint(0, (thread(1),), {}, {}, plan).render()
