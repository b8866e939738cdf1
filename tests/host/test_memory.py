"""What processes use, as the kernel tells it."""

from __future__ import annotations

import mmap
import os
import subprocess
import time
from pathlib import Path

from forkd.host.memory import available_mib, cpu_seconds, memory_use, parse_kib_table, start_time_ticks

_MIB = 2**20


def test_only_lines_in_kib_are_taken() -> None:
    text = "MemTotal:       16 kB\nHugePages_Total:       7\nRss: 1 kB\n00400000-0b0 ---p 0000 [rollup]\nOdd: x kB\n\n"
    assert parse_kib_table(text) == {"MemTotal": 16 * 1024, "Rss": 1024}


def test_what_is_available_is_part_of_what_there_is() -> None:
    total = parse_kib_table(Path("/proc/meminfo").read_text())["MemTotal"] // _MIB
    assert 0 < available_mib() <= total


def test_memory_that_is_touched_is_counted_as_ours() -> None:
    before = memory_use(os.getpid())
    with mmap.mmap(-1, 32 * _MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        for at in range(0, len(area), mmap.PAGESIZE):
            area[at] = 1
        after = memory_use(os.getpid())
    assert 30 * _MIB < after.unique_bytes - before.unique_bytes < 40 * _MIB
    assert after.resident_bytes >= after.unique_bytes > 0


def test_cpu_time_grows_with_work_and_not_with_sleep() -> None:
    begun = cpu_seconds(os.getpid())
    until = time.process_time() + 0.15
    while time.process_time() < until:
        pass
    worked = cpu_seconds(os.getpid()) - begun
    assert 0.1 <= worked < 1
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        time.sleep(0.2)
        assert cpu_seconds(sleeper.pid) < 0.1
    finally:
        sleeper.kill()
        sleeper.wait()


def test_the_start_time_stays_and_differs_between_processes() -> None:
    mine = start_time_ticks(os.getpid())
    assert mine is not None and mine == start_time_ticks(os.getpid())
    time.sleep(0.05)
    child = subprocess.Popen(["sleep", "60"])
    try:
        theirs = start_time_ticks(child.pid)
        assert theirs is not None and theirs > mine
    finally:
        child.kill()
        child.wait()


def test_the_start_time_survives_a_name_made_to_confuse() -> None:
    child = subprocess.Popen(["/bin/sh", "-c", "printf 'a) Z (b' > /proc/$$/comm; echo; read _"], stdin=-1, stdout=-1)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert "a) Z (b" in Path(f"/proc/{child.pid}/stat").read_text()
        assert (start_time_ticks(child.pid) or 0) > 0
    finally:
        child.communicate()


def test_a_process_that_is_over_has_no_start_time() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists()  # a zombie
    assert start_time_ticks(child.pid) is None
    child.wait()
    assert start_time_ticks(child.pid) is None
    assert start_time_ticks(10**9) is None
