"""What bounds a guest's share of the daemon: frames in time, pieces that wait, output that is kept."""

import gc

from hypothesis import given
from hypothesis import strategies as st

from forkd.guest.budget import SURE_BYTES, Budget, Lease
from forkd.guest.pace import Pace
from forkd.guest.results import Collected
from forkd.guest.unread import MAX_PIECES, Unread
from forkd.wire.agent import MAX_PAYLOAD, STDERR, STDOUT


def test_a_burst_is_free_and_what_comes_beyond_it_waits_for_its_rate() -> None:
    pace = Pace(rate_hz=100, burst=10)
    assert pace.spend(10, 0.0) == 0
    assert pace.spend(10, 0.0) == 0.1
    assert pace.spend(5, 0.1) == 0.05
    assert pace.spend(10, 1000.0) == 0, "a pause of any length saves one burst"
    assert pace.spend(1, 1000.0) == 0.01


@given(st.lists(st.tuples(st.sampled_from("oe"), st.binary(min_size=1, max_size=40))))
def test_each_kind_comes_out_as_it_went_in_and_in_few_pieces(given_pieces: list[tuple[str, bytes]]) -> None:
    unread: Unread[str] = Unread()
    for kind, data in given_pieces:
        unread.add(kind, data)
    assert unread.size_bytes == sum(len(data) for _, data in given_pieces)
    taken = []
    while unread:
        taken.append(unread.take())
    assert len(taken) <= MAX_PIECES + 1 and unread.size_bytes == 0
    for kind in "oe":
        assert b"".join(data for one, data in taken if one == kind) == b"".join(
            data for one, data in given_pieces if one == kind
        )


def test_the_order_between_kinds_is_kept_while_few_pieces_wait() -> None:
    unread: Unread[str] = Unread()
    for kind, data in [("o", b"1"), ("o", b"2"), ("e", b"3"), ("o", b"4")]:
        unread.add(kind, data)
    assert [unread.take() for _ in range(3)] == [("o", b"12"), ("e", b"3"), ("o", b"4")]
    unread.add("o", bytes(MAX_PAYLOAD))
    unread.add("o", b"5")
    assert [len(unread.take()[1]) for _ in range(2)] == [MAX_PAYLOAD, 1]


def test_output_beyond_what_is_sure_is_kept_as_far_as_all_budgets_allow_and_given_back() -> None:
    everybody = Budget(1000)
    guest, other = Budget(600, everybody), Budget(600, everybody)
    output = Collected(10 * SURE_BYTES, guest)
    output.add(STDOUT, bytes(SURE_BYTES))
    assert (guest.free_bytes, output.truncated) == (600, False)
    output.add(STDERR, bytes(700))
    assert (guest.free_bytes, other.free_bytes, output.truncated) == (0, 400, True)
    guest.give_back(0)
    output.add(STDOUT, b"x")
    output.add(STDERR, b"x")
    assert (len(output.stdout), len(output.stderr)) == (SURE_BYTES, 600)
    lease = output.lease
    del output
    gc.collect()
    assert guest.free_bytes == 0, "whoever still sends the answer holds it"
    del lease
    gc.collect()
    assert (guest.free_bytes, everybody.free_bytes) == (600, 1000)


def test_an_end_that_is_cut_stays_cut_when_there_is_room_again() -> None:
    guest = Budget(0)
    output = Collected(10 * SURE_BYTES, guest)
    output.add(STDOUT, b"a" * SURE_BYTES + b"lost")
    guest.give_back(1000)
    output.add(STDOUT, b"later")
    assert output.stdout == b"a" * SURE_BYTES
    output.add(STDERR, b"kept")
    assert output.stderr == b"kept", "the other kind is not cut for it"


def test_one_kind_at_its_limit_leaves_the_other_alone() -> None:
    output = Collected(5, Budget(0))
    output.add(STDOUT, b"1234567")
    output.add(STDERR, b"why")
    assert (output.stdout, output.stderr, output.truncated) == (b"12345", b"why", True)


def test_a_lease_takes_what_is_sure_first() -> None:
    guest = Budget(100)
    first, second = Lease(guest), Lease(guest)
    assert first.take(SURE_BYTES + 100) == SURE_BYTES + 100
    assert second.take(SURE_BYTES + 1) == SURE_BYTES
