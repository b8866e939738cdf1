"""Forks of live VMs share only read-only files with others, and are confined like every other."""

import asyncio
import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case, fork_live, live_forks, started
from live_fork_looks import (
    check_confined,
    check_names,
    family,
    find_common_inodes,
    find_locks,
    find_shared_files,
    find_shared_memory,
    is_same_file,
    list_code,
    read_code_flags,
    read_death_signal,
    read_mark,
    read_name,
)
from support_limits import cannot_limit_memory

from forkd.engines.base import Frozen
from forkd.engines.qemu import live_fork
from forkd.engines.qemu.engine import QemuEngine
from forkd.engines.qemu.live_fork import check_may_fork, render_small_pages
from forkd.errors import EngineFailed, NotForkable, Unsupported
from forkd.host.marked import find_marked
from forkd.model.machine import Limits

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

_NOBODY = 65534


async def test_no_two_vms_have_an_open_file_a_socket_or_an_eventfd_in_common(tcg: Case, run_directory: Path) -> None:
    async with family(tcg, run_directory) as vms:
        await asyncio.sleep(0.3)  # no process is traced any more
        pids = [machine.pid for machine in vms.all]
        assert len(set(pids)) == 7
        # Nor have we one with them.
        assert find_shared_files([os.getpid(), *pids]) == []
        read_only = {str(tcg.frozen.boot.root), str(tcg.frozen.directory / "memory"), "/dev/null"}
        assert find_common_inodes(pids) <= read_only
        assert [find_shared_memory(pid) for pid in pids] == [[]] * 7


async def test_new_code_of_a_fork_takes_it_no_huge_page(tcg: Case, run_directory: Path) -> None:
    async with family(tcg, run_directory) as vms:
        assert [read_code_flags(each.pid) for each in vms.forks] == [[{"nh"}]] * 5
        assert [read_code_flags(each.pid) for each in vms.all if each not in vms.forks] == [[{"hg"}]] * 2


def test_buffers_for_code_are_found_among_all_mappings() -> None:
    maps = (
        "7f0a6c000000-7f0a6fffe000 rwxp 00000000 00:00 0 \n"
        "7f0a70000000-7f0a70001000 rw-p 00000000 00:00 0 \n"
        "7f0a71000000-7f0a71002000 rwxp 00000000 08:01 7 /lib/odd\n"
        "7f0a72000000-7f0a72003000 r-xp 00000000 00:00 0 \n"
    )
    (call,) = render_small_pages(maps)
    assert (call.number, call.args) == (28, (0x7F0A6C000000, 0x3FFE000, 15))
    assert render_small_pages("") == []


def test_what_is_compared_is_found_when_it_is_the_same() -> None:
    one = os.open("/dev/null", os.O_RDONLY)
    two, other = os.dup(one), os.open("/dev/null", os.O_RDONLY)
    here = os.getpid()
    try:
        assert is_same_file((here, one), (here, two))
        assert not is_same_file((here, one), (here, other))
    finally:
        for fd in (one, two, other):
            os.close(fd)
    child = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
    try:
        assert child.stdin is not None
        assert find_shared_files([here, child.pid])  # its output is ours
        assert find_common_inodes([here, child.pid])
    finally:
        child.kill()
        child.communicate()


async def test_each_vm_is_found_and_named_as_what_it_is(tcg: Case, run_directory: Path) -> None:
    async with family(tcg, run_directory) as vms:
        directories = {Path(read_mark(machine.pid)): machine for machine in vms.all}
        assert len(directories) == 7
        assert {path.name for path in run_directory.iterdir()} == {path.name for path in directories}
        check_names({run_directory / path.name: machine for path, machine in directories.items()}, run_directory)


async def test_a_name_that_has_no_room_is_cut_and_the_mark_is_not(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory, "sb-1") as source:
        fork = await fork_live(tcg.engine, source.machine, run_directory, name="sb-of-a-long-name")
        try:
            assert read_name(fork.machine.pid) == "forkd-sb-o"
            assert find_marked(run_directory).keys() == {run_directory / "sb-1", run_directory / fork.id}
        finally:
            await fork.kill()


async def test_a_fork_whose_directory_has_too_long_a_path_is_refused(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as source:
        deep = run_directory / ("d" * 200)
        deep.mkdir()
        with pytest.raises(EngineFailed):
            await tcg.engine.fork_live(source.machine, deep / "sb-deep")
        assert list(deep.iterdir()) == []
        deep.rmdir()
        assert (await source.agent.eval("past + 1")).value == 42


async def test_forks_of_a_template_and_of_a_running_vm_are_confined_in_every_thread(
    tcg: Case, run_directory: Path
) -> None:
    async with family(tcg, run_directory) as vms:
        for machine in vms.confined:
            await machine.pause()
            check_confined(machine, root=os.geteuid() == 0, death_signal=9)
            await machine.resume()


async def test_forks_have_no_lock_no_timer_and_nothing_of_what_set_them_up(tcg: Case, run_directory: Path) -> None:
    async with family(tcg, run_directory) as vms:
        await asyncio.sleep(0.3)
        assert find_locks(machine.pid for machine in vms.all) == []
        for machine in vms.all:
            assert Path(f"/proc/{machine.pid}/timers").read_bytes() == b""
        for source, forks in ((vms.template, vms.siblings), (vms.source, vms.live)):
            for fork in forks:
                assert list_code(fork.pid) == list_code(source.pid)
                assert _thread_names(fork.pid) == _thread_names(source.pid)


async def test_of_forks_that_may_outlive_us_only_those_that_never_ran_have_a_death_signal(
    tcg: Case, run_directory: Path
) -> None:
    lasting = Case(QemuEngine("tcg", outlive=True), tcg.frozen)
    async with family(lasting, run_directory) as vms:
        never_ran = [machine.paused for machine in vms.confined]
        assert any(never_ran) and not all(never_ran)
        for machine in vms.all:
            if not machine.paused:
                await machine.pause()
            if machine.fork_thread is not None:
                await machine.fork_thread.let_go()  # it may be kept at rest for its next fork
        assert [read_death_signal(machine.pid) for machine in vms.confined] == [9 if each else 0 for each in never_ran]
        assert read_death_signal(vms.template.pid) == 9


_AS_NOBODY = """
import asyncio, os, pickle, sys
from pathlib import Path
from engine_cases import Case, started
from engine_cases import values_of
from live_fork_looks import check_confined, check_names, family, find_common_inodes, find_shared_files, read_mark
from forkd.engines.qemu.engine import QemuEngine
run, frozen = Path(sys.argv[1]), pickle.loads(sys.stdin.buffer.read())
async def main():
    assert os.getresuid() == (65534,) * 3
    engine = QemuEngine("tcg")
    assert engine.why_no_live_forks() is None, engine.why_no_live_forks()
    async with family(Case(engine, frozen), run) as vms:
        await asyncio.sleep(0.3)
        pids = [machine.pid for machine in vms.all]
        assert find_shared_files(pids) == []
        assert find_common_inodes(pids) <= {str(frozen.boot.root), str(frozen.directory / "memory"), "/dev/null"}
        check_names({run / Path(read_mark(machine.pid)).name: machine for machine in vms.all}, run)
        for machine in vms.confined:
            await machine.pause()
            check_confined(machine, root=False, death_signal=9)
            await machine.resume()
asyncio.run(main())
print("all is well")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user; we are an ordinary user already")
def test_an_ordinary_users_forks_are_as_separate_and_as_confined(tcg: Case) -> None:
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="fkd-", dir="/tmp") as path:
        place = Path(path)
        place.chmod(0o711)
        frozen = _of_nobody(tcg.frozen, place / "frozen")
        run = place / "run"
        run.mkdir(mode=0o700)
        os.chown(run, _NOBODY, _NOBODY)
        done = subprocess.run(
            [*_as_nobody(), "-c", _AS_NOBODY, str(run)],
            env={"PATH": "/usr/bin:/bin", "HOME": str(run), "PYTHONPATH": f"{here}:{':'.join(filter(None, sys.path))}"},
            input=pickle.dumps(frozen),
            capture_output=True,
            cwd="/",
            timeout=120,
            check=False,
        )
        assert (done.stdout, done.returncode) == (b"all is well\n", 0), done.stderr.decode()
        assert list(run.iterdir()) == []


class _Group:
    """Of a machine without control groups: who was put into it, and whether a tracer still had it."""

    def __init__(self) -> None:
        self.added: list[tuple[int, bool]] = []

    def add(self, pid: int) -> None:
        traced = "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text()
        self.added.append((pid, traced))

    def out_of_memory(self) -> bool:
        return False

    def remove(self) -> None: ...


async def test_a_live_fork_is_in_its_own_group_before_it_runs(
    tcg: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: dict[str, _Group] = {}

    @contextlib.contextmanager
    def grouped(directory: Path, *_: object, **__: object) -> Iterator[_Group]:
        yield groups.setdefault(directory.name, _Group())

    async with started(tcg, run_directory) as source:
        monkeypatch.setattr(live_fork, "grouped", grouped)
        async with live_forks(tcg.engine, source.machine, run_directory, 2) as forks:
            assert {name: group.added for name, group in groups.items()} == {
                fork.id: [(fork.machine.pid, True)] for fork in forks
            }


@cannot_limit_memory
async def test_a_limit_that_cannot_be_is_refused_and_the_source_goes_on(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as source:
        with pytest.raises(Unsupported):
            await tcg.engine.fork_live(source.machine, run_directory / "sb-bound", Limits(memory_mib=200))
        assert find_marked(run_directory).keys() == {run_directory / source.id}
        assert (await source.agent.eval("past + 1")).value == 42


def _thread_names(pid: int) -> list[str]:
    return sorted(Path(f"/proc/{pid}/task/{tid}/comm").read_text() for tid in os.listdir(f"/proc/{pid}/task"))


def _of_nobody(frozen: Frozen, into: Path) -> Frozen:
    """The same snapshot and image, an ordinary user's own."""
    into.mkdir(mode=0o755)
    root = into / "root"
    for source, target in ((frozen.boot.root, root), *((frozen.directory / n, into / n) for n in ("memory", "state"))):
        shutil.copyfile(source, target)
        os.chown(target, _NOBODY, _NOBODY)
    return replace(frozen, directory=into, boot=replace(frozen.boot, root=root))


def _as_nobody() -> list[str]:
    """A Python that an ordinary user may run: ours may be in a private home."""
    command = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--bounding-set=-all", "--"]
    for python in _pythons():
        probe = [*command, python, "-c", f"import sys; assert sys.version_info[:2] == {sys.version_info[:2]}"]
        if subprocess.run(probe, stderr=subprocess.DEVNULL, cwd="/", check=False).returncode == 0:
            return [*command, python]
    pytest.skip("there is no Python of this version that an ordinary user may run")


def _pythons() -> Iterator[str]:
    yield sys.executable
    yield from ("/usr/bin/python3", "/usr/local/bin/python3")


def test_a_process_that_is_gone_cannot_be_forked() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(NotForkable, match=f"Process {gone.pid} cannot be looked at"):
        check_may_fork(gone.pid)
