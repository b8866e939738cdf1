"""Limits of the kernel, over every engine: a guest is really stopped by each, and its sibling is not.

The sibling has a control group too, with a limit it never meets.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine_cases import Case

from forkd.engines.base import ExitReason
from forkd.engines.fake import FakeEngine
from forkd.errors import ChannelClosed, EngineFailed, ForkdError, GuestDied, GuestTimeout, Unsupported
from forkd.host.cgroup import Group, find_group, make_group
from forkd.host.cgroup_place import Place, find_place
from forkd.host.paths import Home
from forkd.model.limits import Limits
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime.fleet import Fleet, FleetOptions
from forkd.runtime.sandbox import Sandbox
from forkd.runtime.snapshots import SnapshotRequest
from forkd.runtime.spawn import fork_one, new_identities
from forkd.runtime.warmup import Warmup

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("no_group_left")]

_TEST_S = 400
_FREE = Limits(pids=4000)
_MIB = 1 << 20
# Of the whole VM: about twice what an idle child needs.
_MEMORY_MIB = {"fake": 64, "qemu": 120, "firecracker": 80}
_HOG = "hog = bytearray(130 << 20)\nlen(hog)"
_BURN = "import threading\ndef burn():\n    while True: pass\nthreading.Thread(target=burn, daemon=True).start()"
_READ = """
import os, time
def read(begin_mib, mib):
    fd = os.open("/dev/vda", os.O_RDONLY)
    os.posix_fadvise(fd, begin_mib << 20, mib << 20, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    got = sum(len(os.pread(fd, 1 << 20, (begin_mib + i) << 20)) for i in range(mib))
    os.close(fd)
    return got, time.monotonic() - began
"""


@dataclass(frozen=True)
class Pair:
    bound: Sandbox
    free: Sandbox


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    place = find_place()
    assert isinstance(place, Place)
    assert not place.base.exists(), [str(path) for path in place.base.rglob("*") if path.is_dir()]


@pytest.fixture(params=["fake", "qemu", "firecracker"])
def engine(request: pytest.FixtureRequest) -> Case:
    found = request.getfixturevalue(f"frozen_{request.param}")
    assert isinstance(found, Case)
    return found


@pytest.fixture(params=["qemu", "firecracker"])
def vmm(request: pytest.FixtureRequest) -> Case:
    found = request.getfixturevalue(f"frozen_{request.param}")
    assert isinstance(found, Case)
    return found


def run_pair(case: Case, run: Path, limits: Limits, work: Callable[[Pair], Awaitable[None]]) -> None:
    """`work` over two children; the free one still answers afterwards."""

    async def body() -> None:
        async with asyncio.timeout(_TEST_S):
            free = await fork(case, run, _FREE)
            try:
                bound = await fork(case, run, limits)
                try:
                    await work(Pair(bound, free))
                finally:
                    await bound.kill()
                assert (await free.agent.eval("past + 1")).value == 42
            finally:
                await free.kill()

    asyncio.run(body())


def run_refused(case: Case, run: Path, limits: Limits) -> ForkdError:
    """Why a child with these limits does not start; its sibling lives."""

    async def body() -> ForkdError:
        async with asyncio.timeout(_TEST_S):
            free = await fork(case, run, _FREE)
            try:
                with pytest.raises((EngineFailed, GuestDied, GuestTimeout)) as refused:
                    await (await fork(case, run, limits)).kill()
                assert (await free.agent.eval("past + 1")).value == 42
                return refused.value
            finally:
                await free.kill()

    return asyncio.run(body())


async def fork(case: Case, run: Path, limits: Limits) -> Sandbox:
    return await fork_one(case.engine, case.frozen, new_identities(1)[0], run, limits)


def group_of(sandbox: Sandbox, run: Path) -> Group:
    group = find_group(run / sandbox.id)
    assert group is not None
    return group


# --- memory ---


def test_a_guest_that_fills_its_memory_dies_of_it_and_its_sibling_does_not(engine: Case, run_directory: Path) -> None:
    async def work(pair: Pair) -> None:
        with pytest.raises(ChannelClosed):
            await pair.bound.agent.eval(_HOG)
        async with asyncio.timeout(30):
            death = await asyncio.shield(pair.bound.machine.death)
        assert death.reason is ExitReason.OUT_OF_MEMORY, death

    run_pair(engine, run_directory, Limits(memory_mib=_MEMORY_MIB[engine.engine.name]), work)


def test_a_memory_limit_below_what_a_guest_needs_is_named(engine: Case, run_directory: Path) -> None:
    error = run_refused(engine, run_directory, Limits(memory_mib=4))
    assert ExitReason.OUT_OF_MEMORY.value in error.message
    assert "4 MiB of memory" in (error.hint or "")


# --- CPU ---


def test_a_busy_guest_is_held_at_its_share_and_its_sibling_is_not(engine: Case, run_directory: Path) -> None:
    share, watched_s = 0.4, 4.0

    async def work(pair: Pair) -> None:
        for sandbox in (pair.bound, pair.free):
            await sandbox.agent.eval(_BURN)
        groups = [group_of(pair.bound, run_directory), group_of(pair.free, run_directory)]
        before, began = [group.cpu_seconds() for group in groups], time.monotonic()
        await asyncio.sleep(watched_s)
        took = time.monotonic() - began
        bound, free = ((group.cpu_seconds() - was) / took for group, was in zip(groups, before, strict=True))
        assert 0 < bound < share * 1.2, (bound, free)
        assert free > share * 1.5, (bound, free)

    run_pair(engine, run_directory, Limits(cpus=share), work)


# --- processes ---


def test_a_guest_of_the_fake_engine_cannot_start_more_processes_than_it_may(
    frozen_fake: Case, run_directory: Path
) -> None:
    start = "import subprocess\nfor _ in range(40): subprocess.Popen(['sleep', '60'])"

    async def work(pair: Pair) -> None:
        refused = (await pair.bound.agent.eval(start)).error
        assert refused is not None
        assert refused.type == "BlockingIOError"
        assert (await pair.free.agent.eval(start)).error is None

    run_pair(frozen_fake, run_directory, Limits(pids=20), work)


def test_a_vmm_that_may_not_have_its_threads_is_an_error_that_names_the_limit(vmm: Case, run_directory: Path) -> None:
    error = run_refused(vmm, run_directory, Limits(pids=2))
    assert "2 processes" in (error.hint or "")


# --- disk ---


@contextmanager
def ext4(directory: Path) -> Iterator[Path]:
    """A file system on a block device of its own."""
    disk, mounted = directory / "disk", directory / "mounted"
    with disk.open("xb") as file:
        file.truncate(1200 * _MIB)
    mounted.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, mounted], check=True)
    try:
        yield mounted
    finally:
        subprocess.run(["umount", mounted], check=True)


def make_cold(file: Path) -> None:
    """The host remembers nothing of it."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_cold_reads_of_the_root_are_held_at_the_limit_and_a_siblings_are_not(
    vmm: Case, run_directory: Path, tmp_path: Path
) -> None:
    limit_mib_s, mib = 1, 10

    async def work(pair: Pair) -> None:
        took = {}
        for begin_mib, sandbox in ((40, pair.free), (90, pair.bound)):
            await sandbox.agent.eval(_READ)
            make_cold(root)
            got, took[sandbox.id] = (await sandbox.agent.eval(f"read({begin_mib}, {mib})", timeout_s=120)).value
            assert got == mib * _MIB
        assert took[pair.bound.id] > 0.8 * mib / limit_mib_s, took
        assert took[pair.free.id] < took[pair.bound.id] / 2, took

    with ext4(tmp_path) as disk:
        root = disk / "root.erofs"
        subprocess.run(["cp", "-r", "--sparse=always", vmm.frozen.directory, disk / "frozen"], check=True)
        shutil.copyfile(vmm.frozen.boot.root, root)
        boot = replace(vmm.frozen.boot, root=root)
        moved = Case(vmm.engine, replace(vmm.frozen, directory=disk / "frozen", boot=boot))
        run_pair(moved, run_directory, Limits(io_mib_s=limit_mib_s), work)


def test_writes_to_a_disk_are_held_at_the_limit(run_directory: Path, tmp_path: Path) -> None:
    limit_mib_s, mib = 4, 16
    with ext4(tmp_path) as disk:
        group = make_group(run_directory / "sb-0", Limits(io_mib_s=limit_mib_s), [disk])
        write = f"echo $$ > {group.path}/cgroup.procs && dd if=/dev/zero of={disk}/file bs=1M count={mib} oflag=direct"
        began = time.monotonic()
        subprocess.run(["sh", "-c", write], check=True, capture_output=True)
        took = time.monotonic() - began
        group.remove()
    assert took > 0.8 * mib / limit_mib_s


def test_a_snapshot_on_no_disk_cannot_have_its_disk_limited(vmm: Case, run_directory: Path) -> None:
    async def body() -> None:
        with pytest.raises(Unsupported, match="is on no block device"):
            await fork(vmm, run_directory, Limits(io_mib_s=4))

    asyncio.run(body())


# --- daemons ---


def test_limits_outlive_the_daemon_that_set_them(fake_home: Home) -> None:
    tag = parse_tag("warm")
    engine = FakeEngine(outlive=True)

    async def first() -> str:
        async with asyncio.timeout(_TEST_S), Fleet.opened(fake_home, engine) as fleet:
            await fleet.snapshots.create(SnapshotRequest(tag, "python", MachineSpec(128), Warmup("past = 41")))
            await fleet.snapshots.wait(tag)
            spec = SandboxSpec(tag, n=2, limits=Limits(memory_mib=64, cpus=1.5, pids=100))
            return (await fleet.spawn(spec)).records[0].id

    async def second(sandbox_id: str) -> None:
        options = FleetOptions(on_stop="kill")
        async with asyncio.timeout(_TEST_S), Fleet.opened(fake_home, engine, options) as fleet:
            assert fleet.get(sandbox_id).limits == Limits(memory_mib=64, cpus=1.5, pids=100)
            assert find_group(fake_home.vms / sandbox_id) is not None
            with pytest.raises(GuestDied):
                async with fleet.use(sandbox_id) as live:
                    await live.agent.eval(_HOG)
            record = fleet.get(sandbox_id)
            assert record.state is State.DEAD
            assert (record.cause or "").startswith("used more memory than its limit of 64 MiB")
            assert fleet.counts()[State.RUNNING] == 1

    asyncio.run(second(asyncio.run(first())))
