"""A seed makes the calls in place of the main thread, with both C libraries, and no library is in its way."""

import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from procfork_cases import (
    Library,
    Subject,
    compiled,
    find_clear_tid,
    forked_from,
    limit,
    planned,
    python_started,
    started,
)
from procfork_workers import assert_sound, check
from support_processes import wait_until

from forkd.errors import NotForkable
from forkd.host.procfork import source as source_module
from forkd.host.procfork.blueprint import ForkPlan
from forkd.host.procfork.child import Holder
from forkd.host.procfork.program import DATA, Call
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.scheduling import read_scheduling
from forkd.host.procfork.seed import find, plant
from forkd.host.procfork.source import Caller, Source, Thread, held

pytestmark = pytest.mark.usefixtures("nothing_left")

_WORKERS = 8
_CLOSE, _MMAP, _PRCTL, _GETTID, _EVENTFD2, _DUP3 = 3, 9, 157, 186, 290, 292


@dataclass(frozen=True)
class Way:
    """How a program is forked: `seeded` by a seed, else by its main thread."""

    library: Library
    seeded: bool

    @contextlib.contextmanager
    def started(self, name: str) -> Iterator[Subject]:
        with started(compiled(name, self.library)) as subject:
            yield subject

    def plan(self, name: str, source: Subject) -> ForkPlan:
        clear_tid = find_clear_tid(compiled(name, self.library))
        assert (clear_tid is not None) == (self.library is Library.MUSL)
        if not self.seeded:
            return planned(clear_tid=clear_tid)
        return planned(clear_tid=clear_tid, caller=Caller(find(source.pid) or plant(source.pid, POLLS)))

    def forked(self, name: str, source: Subject) -> contextlib.AbstractContextManager[Subject]:
        return forked_from(source, self.plan(name, source))


_WAYS = {f"{library.name.lower()}{'-seed' * seeded}": Way(library, seeded) for library in Library for seeded in (0, 1)}
_LIBRARIES = pytest.mark.parametrize("library", Library, ids=lambda library: library.name.lower())


@pytest.fixture(params=_WAYS.values(), ids=_WAYS.keys())
def way(request: pytest.FixtureRequest) -> Way:
    assert isinstance(request.param, Way)
    return request.param


@pytest.fixture
def source(way: Way) -> Iterator[Subject]:
    with way.started("threads") as subject:
        check(subject)  # all of them are there
        yield subject


# Forked by a seed, or with another C library


def test_every_thread_goes_on_as_it_was_and_so_do_forks_of_forks(way: Way, source: Subject) -> None:
    with contextlib.ExitStack() as stack:
        line = [source]
        for _ in range(4):
            line.append(stack.enter_context(way.forked("threads", line[-1])))
        for one in line:
            assert len(assert_sound(one)) == _WORKERS
            assert one.ask("ids") == f"{one.pid} {one.pid} {os.getpid()}"
            for index in range(_WORKERS):
                assert one.ask(f"kill {index}") == f"0 {check(one)[index].tid}"


def test_threads_of_source_and_fork_end_and_are_joined_and_new_ones_are_made(way: Way, source: Subject) -> None:
    with way.forked("threads", source) as child, way.forked("threads", child) as its_child:
        for one in (child, its_child, source):
            assert [one.ask(f"end {index}") for index in range(3)] == [f"0 {2000 + index}" for index in range(3)]
            assert one.ask("end-with-lock 3") == "EOWNERDEAD 0"
            failed, tid = one.ask("new").split()
            assert (failed, int(tid) > 0) == ("0", True)
            assert len(assert_sound(one)) == _WORKERS - 4


def test_the_main_thread_is_whole_in_a_fork(way: Way, source: Subject) -> None:
    """What a seed's copy has to be given: mask, name, scheduling; the rest is looked at by `assert_sound`."""
    os.setpriority(os.PRIO_PROCESS, source.pid, 3)
    with way.forked("threads", source) as child, way.forked("threads", child) as its_child:
        for one in (child, its_child):
            assert read_scheduling(one.pid) == read_scheduling(source.pid)
            assert _of_main(one, "comm") == _of_main(source, "comm")
            assert _signals(one) == _signals(source)
            assert len(assert_sound(one)) == _WORKERS
        assert _signals(source)["SigBlk"] == 0


def _of_main(subject: Subject, name: str) -> str:
    return Path(f"/proc/{subject.pid}/task/{subject.pid}/{name}").read_text()


def _signals(subject: Subject) -> dict[str, int]:
    rows = [line.partition(":") for line in _of_main(subject, "status").splitlines() if line.startswith("Sig")]
    return {name: int(value, 16) for name, _, value in rows if name != "SigQ"}


def test_a_fork_has_the_memory_map_of_its_source_and_as_many_threads(way: Way, source: Subject) -> None:
    plan = way.plan("threads", source)
    before, count = source.maps(), len(source.tids())
    with forked_from(source, plan) as child:
        assert child.maps() == before
        assert source.maps() == before
        assert len(child.tids()) == len(source.tids()) == count


def test_epoll_sets_in_each_other_timers_and_futexes_go_on_in_source_and_fork(way: Way) -> None:
    def ask(subject: Subject, what: str) -> list[int]:
        return [int(number) for number in subject.ask(what).split()]

    with way.started("events") as source:
        wait_until(lambda: ask(source, "look")[0] > 2)
        with way.forked("events", source) as child, way.forked("events", child) as its_child:
            for number, one in enumerate((its_child, child, source)):
                ticks, counted, woken = ask(one, "look")
                assert (counted, woken) == (0, 0), number  # what was done to the others is not seen here
                wait_until(lambda one=one, ticks=ticks: ask(one, "look")[0] > ticks + 2)
                ask(one, "count")
                wait_until(lambda one=one: ask(one, "look")[1] == 3)
                ask(one, "wake")
                wait_until(lambda one=one: ask(one, "look")[2] == 1)
                ask(one, "threads")


def test_thread_local_values_and_rseq_of_the_main_thread_are_its_own_in_a_fork_by_a_seed() -> None:
    with python_started() as source:
        source.ask("import time\nlocal = threading.local()\nlocal.value = 5\ncpu = lambda: libc.sched_getcpu()")
        with forked_from(source, planned(caller=Caller(plant(source.pid, POLLS)))) as child:
            assert child.eval("local.value, threading.get_native_id() == os.getpid()") == (5, True)
            some = min(os.sched_getaffinity(0))
            # The C library reads the processor where the kernel writes it for the thread.
            for cpu in [*sorted(os.sched_getaffinity(0)), some]:
                os.sched_setaffinity(child.pid, {cpu})
                assert child.eval("cpu()") == cpu


# Planted and found


@_LIBRARIES
def test_with_a_seed_a_program_makes_threads_and_processes_and_exits_as_before(library: Library) -> None:
    with started(compiled("events", library)) as source:
        source.ask("look")
        count = len(source.tids())
        assert find(source.pid) is None
        seed = plant(source.pid, POLLS)
        assert find(source.pid) == seed
        assert len(source.tids()) == count + 1
        for _ in range(3):
            source.ask("threads")
            source.ask("fork")
        assert _of_seed(source, seed, "comm") == "forkd-seed\n"
        assert "SigBlk:\tfffffffffffbfeff\n" in _of_seed(source, seed, "status")  # all but SIGKILL and SIGSTOP
        assert "SigBlk:\t0000000000000000\n" in _of_main(source, "status")
        source._control.send(b"exit")
        ended = os.waitid(os.P_PID, source.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 7)


def _of_seed(subject: Subject, seed: int, name: str) -> str:
    return Path(f"/proc/{subject.pid}/task/{seed}/{name}").read_text()


def test_a_signal_to_the_process_or_to_the_seed_does_not_wake_it_for_long() -> None:
    with started(compiled("threads")) as source:
        check(source)
        seed = plant(source.pid, POLLS)
        libc = ctypes.CDLL(None)
        for _ in range(20):
            os.kill(source.pid, signal.SIGUSR1)
            libc.tgkill(source.pid, seed, signal.SIGUSR1)
            os.kill(source.pid, signal.SIGSTOP)
            os.kill(source.pid, signal.SIGCONT)
        assert find(source.pid) == seed
        assert len(assert_sound(source)) == _WORKERS
        with forked_from(source, planned(caller=Caller(seed))) as child:
            assert len(assert_sound(child)) == _WORKERS


def test_a_process_that_has_a_seed_can_still_be_forked_by_its_main_thread() -> None:
    with started(compiled("threads")) as source:
        check(source)
        seed = plant(source.pid, POLLS)
        with forked_from(source) as child:
            its_seed = find(child.pid)
            assert its_seed not in (None, seed)
            assert len(assert_sound(child)) == _WORKERS
            with forked_from(child, planned(caller=Caller(its_seed))) as its_child:
                assert len(assert_sound(its_child)) == _WORKERS


def test_what_only_calls_itself_a_seed_is_not_found_and_not_used() -> None:
    with python_started() as source:
        # By its name, by its name and where it waits, and by its code too, in a page that it can write to.
        page = _page_of_seed()
        source.ask(
            "import mmap\n"
            f"memory = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)\nmemory[:] = {page!r}\n"
            "place = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
            "def wait():\n    libc.prctl(15, b'forkd-seed')\n    libc.ppoll(None, 0, None, None)\n"
            f"def run():\n    ctypes.CFUNCTYPE(None)(place + {8 + 16})()\n"
            "threading.Thread(target=wait, daemon=True).start()\nthreading.Thread(target=run, daemon=True).start()\n"
        )

        def named() -> list[int]:
            return [tid for tid in source.tids() if _of_seed(source, tid, "comm") == "forkd-seed\n"]

        wait_until(lambda: len(named()) == 2)
        assert find(source.pid) is None
        with pytest.raises(NotForkable, match="is not a seed"):
            with forked_from(source, planned(caller=Caller(named()[0]))):
                pass
        seed = plant(source.pid, POLLS)
        assert find(source.pid) == seed
        for wrong, why in ((seed + 12345, "has no seed"), (source.pid, "has no seed")):
            with pytest.raises(NotForkable, match=why), forked_from(source, planned(caller=Caller(wrong))):
                pass
        with forked_from(source, planned(caller=Caller(seed))) as child:
            assert child.eval("6 * 7") == 42
        assert source.is_free()


def _page_of_seed() -> bytes:
    with python_started() as other:
        plant(other.pid, POLLS)
        (line,) = [line for line in other.maps() if " r-xp 00000000 00:00 0 " in line and not line.endswith("]")]
        with open(f"/proc/{other.pid}/mem", "rb") as file:
            return os.pread(file.fileno(), 4096, int(line.partition("-")[0], 16))


def test_where_no_thread_can_be_made_no_seed_is_and_nothing_stays() -> None:
    with python_started() as source:
        assert source.eval("1") == 1
        before = source.maps()
        with pytest.raises(NotForkable, match="never found waiting"):
            plant(source.pid, frozenset({_GETTID}))
        limit(source.pid, resource.RLIMIT_AS, 1 << 20)
        with pytest.raises(NotForkable, match="Cannot allocate memory"):
            plant(source.pid, POLLS)
        limit(source.pid, resource.RLIMIT_AS, resource.RLIM_INFINITY)
        assert find(source.pid) is None
        assert source.maps() == before
        assert find(plant(source.pid, POLLS) and source.pid) is not None


# What a plan can say


def test_what_is_looked_at_in_the_source_is_looked_at_once_in_a_hold_and_before_it_is_forked() -> None:
    looks: list[int] = []
    with python_started() as source:
        assert source.eval("1") == 1
        plan = planned(look=lambda held_source: looks.append(held_source.call(_GETTID)))
        holder = Holder(source.pid, plan)
        try:
            for keep in (True, True, False, False):
                with forked_from(holder, keep=keep) as child:
                    assert child.eval("2") == 2
        finally:
            holder.release()
        assert looks == [source.pid] * 2
        seed = plant(source.pid, POLLS)
        with forked_from(source, planned(look=plan.look, caller=Caller(seed))) as child:
            assert child.eval("3") == 3
        assert looks[2:] == [seed]


def without_heap(maps: list[str]) -> list[str]:
    """What it is asked makes it larger now and then."""
    return [line for line in maps if not line.endswith("[heap]")]


@pytest.mark.parametrize("seeded", [False, True], ids=["main", "seed"])
def test_many_calls_are_made_in_the_source_up_to_the_first_that_fails(seeded: bool) -> None:
    pipe, write, read = Call(293, (DATA, 0), bytes(8), returns=0), 1, 0
    with python_started() as source:
        assert source.eval("1") == 1
        caller = Caller(plant(source.pid, POLLS) if seeded else None)
        before, fds = without_heap(source.maps()), source.descriptors()
        with held(source.pid, POLLS, caller) as at_rest:
            (made,) = at_rest.make_all([pipe])
            ends = struct.unpack("<2i", made.data)
            assert (made.value, list(ends)) == (0, [len(fds), len(fds) + 1])
            answers = at_rest.make_all(
                [
                    Call(write, (ends[1], DATA + 4, 5), b"....12345"),
                    Call(_CLOSE, (999,), may_fail=True),
                    Call(read, (ends[0], DATA, 3), bytes(3)),
                    Call(read, (ends[0], DATA + 8, 9), bytes(20)),
                    Call(_CLOSE, (ends[0],)),
                    Call(_CLOSE, (998,), b"left alone"),
                    Call(_CLOSE, (ends[1],)),
                ]
            )
            assert [each.value for each in answers] == [5, -errno.EBADF, 3, 2, 0, -errno.EBADF]
            assert [each.data for each in answers[2:4]] == [b"123", b"45".rjust(10, b"\0").ljust(20, b"\0")]
            assert [each.value for each in at_rest.make_all([Call(_CLOSE, (ends[1],))])] == [0]
            assert at_rest.call(_GETTID) == (caller.seed or source.pid)
        assert source.descriptors() == fds
        assert source.eval("1") == 1
        assert without_heap(source.maps()) == before


@pytest.mark.parametrize("seeded", [False, True], ids=["main", "seed"])
def test_more_calls_and_data_than_a_seed_has_room_for_are_made_in_parts(seeded: bool) -> None:
    uname, getrandom = 63, 318
    with python_started() as source:
        assert source.eval("1") == 1
        with held(source.pid, POLLS, Caller(plant(source.pid, POLLS) if seeded else None)) as at_rest:
            many = [Call(uname, (DATA,), bytes(390))] * 700
            answers = at_rest.make_all([*many, Call(_CLOSE, (999,)), *many])
            assert [each.value for each in answers] == [0] * 700 + [-errno.EBADF]
            assert {each.data for each in answers[:700]} == {answers[0].data}
            assert answers[0].data.startswith(b"Linux\0")
            large = at_rest.make_all([Call(getrandom, (DATA, 200_000, 0), bytes(200_000), returns=200_000)] * 5)
            assert len({each.data for each in large}) == 5
            assert at_rest.make_all([]) == []
            if seeded:
                with pytest.raises(NotForkable, match="has room for"):
                    at_rest.make_all([Call(uname, (DATA,), bytes(1 << 19))])
        assert source.eval("1") == 1


def test_calls_that_take_too_long_are_given_up_and_the_seed_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_CALLS_DEADLINE_S", 0.05)
    for_a_minute = Call(35, (DATA, 0), struct.pack("<2q", 60, 0))
    with python_started() as source:
        assert source.eval("1") == 1
        seed = plant(source.pid, POLLS)
        before = source.maps()
        plan = planned(caller=Caller(seed), look=lambda at_rest: at_rest.make_all([for_a_minute]))
        with pytest.raises(NotForkable, match="not over in time"), forked_from(source, plan):
            pass
        assert find(source.pid) == seed
        assert source.maps() == before
        with forked_from(source, planned(caller=Caller(seed))) as child:
            assert child.eval("6 * 7") == 42


def test_a_look_that_fails_is_told_and_the_source_runs_on() -> None:
    def fail(_: object) -> None:
        raise NotForkable("Its state cannot be saved")

    with python_started() as source:
        assert source.eval("1") == 1
        with pytest.raises(NotForkable, match="Its state cannot be saved"), forked_from(source, planned(look=fail)):
            pass
        assert source.is_free()
        assert source.eval("1") == 1


def test_the_set_up_can_put_what_it_makes_under_any_number() -> None:
    def set_up(free: int) -> list[Call]:
        return [
            Call(_EVENTFD2, (7, os.O_CLOEXEC), returns=free),
            Call(_DUP3, (free, 40, os.O_CLOEXEC), returns=40),
            Call(_CLOSE, (free,)),
        ]

    with python_started() as source:
        source.ask("events = [os.eventfd(1) for _ in range(4)]\nos.close(events[1])")
        with forked_from(source, planned(set_up=set_up)) as child:
            assert child.eval("os.eventfd_read(40)") == 7
            assert child.descriptors() == [*source.descriptors(), 40]


def test_each_thread_settles_itself_and_the_main_thread_does_so_when_all_others_are_there(way: Way) -> None:
    """No new privileges: what is made afterwards has none either."""
    main = compiled("threads", way.library).name.encode()[:15]

    def settle(thread: Thread) -> list[Call]:
        return [Call(_PRCTL, (38, 1, 0, 0, 0))] if thread.name in (main, b"worker-1") else []

    with way.started("threads") as source:
        check(source)
        with forked_from(source, replace(way.plan("threads", source), settle=settle)) as child:
            settled = {text.split()[1] for text in child.statuses() if "NoNewPrivs:\t1\n" in text}
            assert settled == {main.decode(), "worker-1"}
            assert len(assert_sound(child)) == _WORKERS
        assert not any("NoNewPrivs:\t1\n" in text for text in source.statuses())


def test_a_thread_that_cannot_settle_is_the_end_of_its_fork() -> None:
    with started(compiled("threads"), "2") as source:
        check(source)
        for who in (b"worker-1", compiled("threads").name.encode()[:15]):

            def settle(thread: Thread, who: bytes = who) -> list[Call]:
                return [Call(_CLOSE, (999,), what="close nothing")] if thread.name == who else []

            plan = planned(settle=settle)
            with pytest.raises(NotForkable, match="close nothing: Bad file descriptor"), forked_from(source, plan):
                pass
            assert len(check(source)) == 2


def test_shared_memory_that_the_set_up_replaces_is_no_reason_against_a_fork(tmp_path: Path) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(4096))
    with python_started() as source:
        source.ask(
            f"import mmap\nfile = open({str(path)!r}, 'r+b')\nmemory = mmap.mmap(file.fileno(), 4096)\nfile.close()\n"
            "place = ctypes.addressof(ctypes.c_char.from_buffer(memory))"
        )
        place = source.eval("place")

        def set_up(_: int) -> list[Call]:
            return [Call(_MMAP, (place, 4096, 3, 0x32, -1, 0), returns=place, what="map its own")]

        plan = planned(set_up=set_up, replaced=lambda name: name == str(path))
        with forked_from(source, plan) as child:
            child.ask("memory[:5] = b'child'")
            assert (child.eval("memory[:5]"), source.eval("memory[:5]")) == (b"child", bytes(5))
        source.ask("more = mmap.mmap(-1, 4096)")
        with pytest.raises(NotForkable, match="/dev/zero"), forked_from(source, plan):
            pass


def test_memory_that_a_look_maps_in_the_source_is_in_the_fork() -> None:
    places: list[int] = []

    def look(source: Source) -> None:
        place = source.map_memory(1 << 20)
        source.write_memory(place, b"saved")
        places.append(place)

    with python_started() as source:
        assert source.eval("1") == 1
        with forked_from(source, planned(look=look)) as child:
            assert child.eval(f"ctypes.string_at({places[0]}, 5)") == b"saved"
        with held(source.pid, POLLS) as again:
            again.unmap_memory(places[0], 1 << 20)


def test_a_process_with_many_threads_is_forked() -> None:
    with python_started() as source:
        source.ask(
            "import resource\nthreading.stack_size(65536)\nwait = threading.Event()\n"
            "[threading.Thread(target=wait.wait, daemon=True).start() for _ in range(300)]"
        )
        with forked_from(source) as child:
            assert len(child.tids()) == 301
            child.ask("wait.set()\n[each.join() for each in threading.enumerate()[1:]]")
            assert child.eval("threading.active_count()") == 1
