"""Many forks, one after the other and at once: nothing grows, neither in the source nor here."""

import contextlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from procfork_cases import PLAN, Subject, children, forked_from, python_started, shared_files, threads_started

from forkd.errors import NotForkable
from forkd.host.procfork.child import Holder

pytestmark = pytest.mark.usefixtures("nothing_left")

_FORKS, _ALIVE_AT_ONCE = 200, 20


def here() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def seen(source: Subject) -> tuple[list[str], list[int], list[int]]:
    return source.maps(), source.descriptors(), source.tids()


def written_code_kib(pid: int) -> int:
    """How much of the code of a process is its own copy."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    parts = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)
    code = [part for part in parts if " r-xp " in part.partition("\n")[0]]
    return sum(int(re.findall(r"^Anonymous: +(\d+) kB", part, re.MULTILINE)[0]) for part in code)


@pytest.mark.parametrize("keep", [True, False], ids=["held", "released in between"])
def test_a_source_that_is_forked_many_times_is_as_it_was(keep: bool) -> None:
    with threads_started(4) as source:
        holder = Holder(source.pid, PLAN)
        before, ours, others = seen(source), here(), children()
        for _ in range(_FORKS // _ALIVE_AT_ONCE):
            with contextlib.ExitStack() as stack:
                stack.callback(holder.release)
                forks = [stack.enter_context(forked_from(holder, keep=keep)) for _ in range(_ALIVE_AT_ONCE)]
                for fork in forks:
                    assert fork.workers() == 4
                assert seen(forks[-1])[:2] == before[:2]
                assert shared_files(forks[0].pid, forks[-1].pid) == set()
        assert (seen(source), here(), children()) == (before, ours, others)
        assert written_code_kib(source.pid) <= os.sysconf("SC_PAGE_SIZE") // 1024
        assert source.workers() == 4
        assert source.is_free()


def test_forks_in_a_line_do_not_grow() -> None:
    """Each is forked from the one before, which then ends."""
    with threads_started(2) as source, contextlib.ExitStack() as stack:
        first, last = seen(source), source
        for _ in range(30):
            fork = contextlib.ExitStack()
            last = fork.enter_context(forked_from(last))
            assert last.workers() == 2
            stack.close()
            stack.push(fork.pop_all())
        assert seen(last)[:2] == first[:2]
        assert written_code_kib(last.pid) <= os.sysconf("SC_PAGE_SIZE") // 1024


def test_several_sources_are_forked_at_once_from_several_threads() -> None:
    def fork_often(source: Subject) -> None:
        holder = Holder(source.pid, PLAN)
        with contextlib.ExitStack() as stack:
            stack.callback(holder.release)
            for number in range(15):
                with forked_from(holder, keep=number % 3 != 2) as child:
                    assert child.eval("value") == source.pid
                    child.ask(f"value = {number}")
                    assert child.eval("value") == number

    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(python_started()) for _ in range(4)]
        for source in sources:
            source.ask("value = os.getpid()\nwait = threading.Event()")
            source.ask("[threading.Thread(target=wait.wait, daemon=True).start() for _ in range(2)]")
        before = [seen(source) for source in sources]
        with ThreadPoolExecutor(len(sources)) as pool:
            for done in [pool.submit(fork_often, source) for source in sources]:
                done.result()
        assert [seen(source) for source in sources] == before
        assert [source.eval("value") for source in sources] == [source.pid for source in sources]


def test_one_source_that_several_threads_want_to_fork_is_forked_by_one_at_a_time() -> None:
    def fork_often(source: Subject) -> int:
        made = tries = 0
        # The others may be in the way each time: until it was not refused at least once.
        while tries < 15 or made == 0:
            tries += 1
            with contextlib.suppress(NotForkable), forked_from(source) as child:
                assert child.workers() == 2
                made += 1
        return made

    with threads_started(2) as source:
        before = seen(source)
        with ThreadPoolExecutor(3) as pool:
            assert sum(pool.map(fork_often, [source] * 3)) >= 3
        assert seen(source) == before
        assert source.is_free()
        assert source.workers() == 2
