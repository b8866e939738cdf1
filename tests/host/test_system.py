"""What processes use, as the kernel tells it, and how many children fit."""

import mmap
import os
import resource
import subprocess
import time
from pathlib import Path

import pytest
from support_processes import sleeping

from forkd.host.cgroup import probe_cgroup
from forkd.host.finding import Status
from forkd.host.system import (
    CgroupLimits,
    available_mib,
    cpu_seconds,
    judge_memory,
    judge_open_files,
    judge_processes,
    memory_use,
    parse_available,
    parse_kib_table,
    probe_limits,
    start_time_ticks,
)

_MIB = 2**20
GIB = 1 << 30


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
    with sleeping() as sleeper:
        time.sleep(0.2)
        assert cpu_seconds(sleeper.pid) < 0.1


def test_the_start_time_stays_and_differs_between_processes() -> None:
    mine = start_time_ticks(os.getpid())
    assert mine is not None and mine == start_time_ticks(os.getpid())
    time.sleep(0.05)
    with sleeping() as child:
        theirs = start_time_ticks(child.pid)
        assert theirs is not None and theirs > mine


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


def test_memory_tells_how_many_children_fit() -> None:
    assert "about 232 children" in judge_memory(8 * GIB, None).found
    assert judge_memory(8 * GIB, None).status is Status.OK
    assert judge_memory(8 * GIB, GIB // 2).status is Status.FAIL
    assert "control group" in judge_memory(8 * GIB, GIB).found
    assert "control group" not in judge_memory(8 * GIB, 64 * GIB).found
    assert judge_memory(900 << 20, None).status is Status.WARN


def test_available_memory_is_read_in_bytes() -> None:
    assert parse_available("MemTotal: 9 kB\nMemAvailable:   2048 kB\n") == 2 << 20
    assert parse_available("") is None


@pytest.mark.parametrize(
    ("soft", "hard", "status", "remedy"),
    [
        (1024, 524288, Status.WARN, "ulimit -n 524288"),
        (1024, 1024, Status.WARN, "Raise the hard limit"),
        (1024, resource.RLIM_INFINITY, Status.WARN, "ulimit -n 65536"),
        (20000, 20000, Status.OK, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Status.OK, None),
    ],
)
def test_open_files_are_counted_in_children(soft: int, hard: int, status: Status, remedy: str | None) -> None:
    finding = judge_open_files(soft, hard)
    assert (finding.status, finding.remedy) == (status, remedy)


def test_the_smallest_process_limit_counts() -> None:
    group = CgroupLimits(pids_max=200)
    assert judge_processes([32768, None], group).status is Status.WARN
    assert judge_processes([32768, None], CgroupLimits()).status is Status.OK
    assert judge_processes([None], CgroupLimits()).status is Status.OK


def test_control_group_limits_of_either_version_are_found(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("4:memory:/a/b\n0::/a\n")
    two, one = tmp_path / "a", tmp_path / "memory/a/b"
    two.mkdir()
    one.mkdir(parents=True)
    (two / "memory.max").write_text("max\n")
    (two / "memory.current").write_text("5\n")
    (two / "pids.max").write_text("77\n")
    (one.parent / "memory.limit_in_bytes").write_text("1000\n")
    (one.parent / "memory.usage_in_bytes").write_text("400\n")
    assert probe_limits(tmp_path, own) == CgroupLimits(600, 77)


def test_a_container_without_control_groups_has_no_limits(tmp_path: Path) -> None:
    assert probe_limits(tmp_path, tmp_path / "none") == CgroupLimits()
    assert probe_cgroup(tmp_path).found == "not mounted"
