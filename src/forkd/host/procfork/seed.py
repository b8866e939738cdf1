"""A seed: one thread more in a process, that waits and makes calls for us, so that the main thread need not.

A thread under a seccomp filter can be given no other one, nor can what it makes. A process whose threads are to have
different filters is forked by a seed, which may do what any of them may. The C library of the process knows nothing of
it. One that becomes another user later must not have one: a C library changes the user of the threads that it knows.
"""

from __future__ import annotations

import contextlib
import os
import re
import time

from forkd.errors import NotForkable
from forkd.host.process import SHORTAGES
from forkd.host.procfork import ptrace
from forkd.host.procfork.registers import PPOLL
from forkd.host.procfork.rest import understood
from forkd.host.procfork.seed_page import (
    ALL_BYTES,
    BIRTH_CALLS,
    CLONE_IS,
    CODE_BYTES,
    NAME,
    PAGE_BYTES,
    SeedPage,
    is_seed,
    page_of,
)
from forkd.host.procfork.source import held

_MPROTECT, _READ_RUN = 10, 5
_RUNNING = b"running\n"
_AT_REST_DEADLINE_S = 2.0
_POLL_S = 0.0005


def plant(pid: int, main_rests_in: frozenset[int]) -> int:
    """Its thread id. The process must not be under a filter yet that forbids to make threads. Raises NotForkable."""
    with understood(pid), held(pid, main_rests_in) as source:
        page = SeedPage(source.map_memory(ALL_BYTES))
        tid = source.call(_MPROTECT, page.base, CODE_BYTES, _READ_RUN)
        if tid == 0:
            source.write_memory(page.base, page.render(source.detour.way_back))
            tid = source.run_calls(page.birth, BIRTH_CALLS)[CLONE_IS]
        if tid < 0:
            source.unmap_memory(page.base, ALL_BYTES)
            raise NotForkable(
                f"Process {pid} could not make a seed: {os.strerror(-tid)}",
                hint=SHORTAGES.get(-tid, "Does a seccomp filter forbid it?"),
            )
    if not _comes_to_rest(pid, tid):
        raise NotForkable(f"The seed of process {pid} does not wait where it was planted")
    return tid


def find(pid: int) -> int | None:
    """By its name, by where it waits, and by what is there. Raises NotForkable."""
    with understood(pid):
        named = [tid for tid in ptrace.list_threads(pid) if _read(pid, tid, "comm") == NAME + b"\n"]
        return next((tid for tid in named if _comes_to_rest(pid, tid)), None)


def _comes_to_rest(pid: int, tid: int) -> bool:
    """One that was just made, or let go, is on its way there."""
    deadline = time.monotonic() + _AT_REST_DEADLINE_S
    while (call := _read(pid, tid, "syscall")) == _RUNNING and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return _rests(pid, call)


def _rests(pid: int, call: bytes) -> bool:
    """`call`: number, arguments, stack and place of what a thread waits in, from /proc."""
    fields = call.split()
    if len(fields) != 9 or int(fields[0]) != PPOLL:
        return False
    page = page_of(int(fields[-1], 16))
    return page is not None and _is_only_run(pid, page) and is_seed(_read_page(pid, page))


def _is_only_run(pid: int, page: SeedPage) -> bool:
    """Whether the process itself cannot have changed it, since it was mapped."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
        line = re.search(rf"^{page.base:x}-{page.base + CODE_BYTES:x} (\S+) \S+ 00:00 0 *$", file.read(), re.MULTILINE)
    return line is not None and line[1] == "r-xp"


def _read_page(pid: int, page: SeedPage) -> bytes:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        return os.pread(file.fileno(), PAGE_BYTES, page.base)


def _read(pid: int, tid: int, name: str) -> bytes:
    """Nothing, of a thread that has ended."""
    with (
        contextlib.suppress(FileNotFoundError, ProcessLookupError),
        open(f"/proc/{pid}/task/{tid}/{name}", "rb") as file,
    ):
        return file.read()
    return b""
