"""Which connection gives way."""

from forkd.daemon.cap import ConnectionCap, fit_cap


class Held:
    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def test_strangers_give_way_first_then_the_idle_and_the_busy_never() -> None:
    cap = ConnectionCap(3)
    idle, busy, stranger = Held(), Held(), Held()
    for each in (idle, busy, stranger):
        assert cap.make_room()
        cap.enter(each)
    cap.let_in(idle)
    cap.rest(idle)
    cap.let_in(busy)
    for victim in (stranger, idle):
        assert not victim.evicted and cap.make_room()
        assert victim.evicted and len(cap) == 2
        fresh = Held()
        cap.enter(fresh)
        cap.let_in(fresh)
    assert not cap.make_room() and not busy.evicted
    cap.leave(busy)
    assert cap.make_room() and len(cap) == 2


def test_the_oldest_stranger_goes_and_one_that_is_gone_does_not_come_back() -> None:
    cap = ConnectionCap(2)
    first, second = Held(), Held()
    cap.enter(first)
    cap.enter(second)
    assert cap.make_room() and first.evicted and not second.evicted
    cap.let_in(first)  # its request was read just before
    cap.rest(first)
    assert len(cap) == 1
    cap.leave(first)
    assert len(cap) == 1


def test_listeners_leave_half_of_the_files_to_vms() -> None:
    assert fit_cap(1024, 65536) == 1024
    assert fit_cap(1024, 1024) == 256
    assert fit_cap(1024, 2) == 1
