"""Limits of the kernel, over every engine: a guest is really stopped by each, and its sibling is not.

The sibling has a control group too, with a limit it never meets.
"""

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from engine_cases import Case
from support_sizes import sized

from forkd.engines.base import ExitReason
from forkd.engines.fake import FakeEngine
from forkd.errors import ChannelClosed, EngineFailed, ForkdError, GuestDied, GuestTimeout, Unsupported
from forkd.host.cgroup import Group, Place, find_group, find_place, make_group
from forkd.host.paths import Home
from forkd.model.machine import Limits, MachineSpec
from forkd.model.names import parse_tag
from forkd.model.sandbox import SandboxSpec, State
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_one, new_identities
from forkd.runtime.freeze import Warmup
from forkd.runtime.runtime import Runtime, RuntimeOptions
from forkd.runtime.snapshots import SnapshotRequest

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
    bound: Child
    free: Child


@pytest.fixture
def no_group_left() -> Iterator[None]:
    yield
    place = find_place()
    assert isinstance(place, Place)
    assert not place.base.exists(), [str(path) for path in place.base.rglob("*") if path.is_dir()]


_FORKED = pytest.param("forkable_firecracker", id="firecracker, forked")
_STARTED = [pytest.param(f"frozen_{name}", id=name) for name in ("qemu", "firecracker")]


@pytest.fixture(params=[pytest.param("frozen_fake", id="fake"), *_STARTED, _FORKED])
def engine(request: pytest.FixtureRequest) -> Case:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Case)
    return found


@pytest.fixture(params=[*_STARTED, _FORKED])
def vmm(request: pytest.FixtureRequest) -> Case:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Case)
    return found


@asynccontextmanager
async def sibling(case: Case, run: Path) -> AsyncIterator[Child]:
    """A child without limits to meet, which still answers at the end."""
    async with asyncio.timeout(_TEST_S):
        free = await fork(case, run, _FREE)
        try:
            yield free
            assert (await free.agent.eval("past + 1")).value == 42
        finally:
            await free.kill()


@asynccontextmanager
async def paired(case: Case, run: Path, limits: Limits) -> AsyncIterator[Pair]:
    async with sibling(case, run) as free:
        bound = await fork(case, run, limits)
        try:
            yield Pair(bound, free)
        finally:
            await bound.kill()


async def refuse(case: Case, run: Path, limits: Limits) -> ForkdError:
    """Why a child with these limits does not start; its sibling lives."""
    async with sibling(case, run):
        with pytest.raises((EngineFailed, GuestDied, GuestTimeout)) as refused:
            await (await fork(case, run, limits)).kill()
    return refused.value


async def fork(case: Case, run: Path, limits: Limits) -> Child:
    return await fork_one(case.engine, case.frozen, new_identities(1)[0], run, limits)


def group_of(sandbox: Child, run: Path) -> Group:
    group = find_group(run / sandbox.id)
    assert group is not None
    return group


# --- memory ---


async def test_a_guest_that_fills_its_memory_dies_of_it_and_its_sibling_does_not(
    engine: Case, run_directory: Path
) -> None:
    limits = Limits(memory_mib=_MEMORY_MIB[engine.engine.name])
    async with paired(engine, run_directory, limits) as pair:
        with pytest.raises(ChannelClosed):
            await pair.bound.agent.eval(_HOG)
        async with asyncio.timeout(30):
            death = await asyncio.shield(pair.bound.machine.death)
        assert death.reason is ExitReason.OUT_OF_MEMORY, death


async def test_a_memory_limit_below_what_a_guest_needs_is_named(engine: Case, run_directory: Path) -> None:
    error = await refuse(engine, run_directory, Limits(memory_mib=4))
    assert ExitReason.OUT_OF_MEMORY.value in error.message
    assert "4 MiB of memory" in (error.hint or "")


# --- CPU ---


async def test_a_busy_guest_is_held_at_its_share_and_its_sibling_is_not(engine: Case, run_directory: Path) -> None:
    share, watched_s = 0.4, sized(2, 4)
    async with paired(engine, run_directory, Limits(cpus=share)) as pair:
        for sandbox in (pair.bound, pair.free):
            await sandbox.agent.eval(_BURN)
        groups = [group_of(pair.bound, run_directory), group_of(pair.free, run_directory)]
        before, began = [group.cpu_seconds() for group in groups], time.monotonic()
        await asyncio.sleep(watched_s)
        took = time.monotonic() - began
        bound, free = ((group.cpu_seconds() - was) / took for group, was in zip(groups, before, strict=True))
        assert 0 < bound < share * 1.2, (bound, free)
        assert free > share * 1.5, (bound, free)


# --- processes ---


async def test_a_guest_of_the_fake_engine_cannot_start_more_processes_than_it_may(
    frozen_fake: Case, run_directory: Path
) -> None:
    start = "import subprocess\nfor _ in range(40): subprocess.Popen(['sleep', '60'])"
    async with paired(frozen_fake, run_directory, Limits(pids=20)) as pair:
        refused = (await pair.bound.agent.eval(start)).error
        assert refused is not None
        assert refused.type == "BlockingIOError"
        assert (await pair.free.agent.eval(start)).error is None


async def test_a_vmm_that_may_not_have_its_threads_is_an_error_that_names_the_limit(
    vmm: Case, run_directory: Path
) -> None:
    error = await refuse(vmm, run_directory, Limits(pids=2))
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


async def test_cold_reads_of_the_root_are_held_at_the_limit_and_a_siblings_are_not(
    vmm: Case, run_directory: Path, tmp_path: Path
) -> None:
    limit_mib_s, mib = 1, sized(5, 10)
    with ext4(tmp_path) as disk:
        root = disk / "root.erofs"
        subprocess.run(["cp", "-r", "--sparse=always", vmm.frozen.directory, disk / "frozen"], check=True)
        shutil.copyfile(vmm.frozen.boot.root, root)
        boot = replace(vmm.frozen.boot, root=root)
        moved = Case(vmm.engine, replace(vmm.frozen, directory=disk / "frozen", boot=boot))
        async with paired(moved, run_directory, Limits(io_mib_s=limit_mib_s)) as pair:
            took = {}
            for begin_mib, sandbox in ((40, pair.free), (90, pair.bound)):
                await sandbox.agent.eval(_READ)
                make_cold(root)
                got, took[sandbox.id] = (await sandbox.agent.eval(f"read({begin_mib}, {mib})", timeout_s=120)).value
                assert got == mib * _MIB
            assert took[pair.bound.id] > 0.8 * mib / limit_mib_s, took
            assert took[pair.free.id] < took[pair.bound.id] / 2, took


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


async def test_a_snapshot_on_no_disk_cannot_have_its_disk_limited(vmm: Case, run_directory: Path) -> None:
    with pytest.raises(Unsupported, match="is not on a block device"):
        await fork(vmm, run_directory, Limits(io_mib_s=4))


# --- daemons ---


async def test_limits_outlive_the_daemon_that_set_them(fake_home: Home) -> None:
    tag = parse_tag("warm")
    engine = FakeEngine(outlive=True)
    limits = Limits(memory_mib=64, cpus=1.5, pids=100)
    async with asyncio.timeout(_TEST_S), Runtime.opened(fake_home, engine) as runtime:
        await runtime.snapshots.create(SnapshotRequest(tag, "python", MachineSpec(128), Warmup("past = 41")))
        await runtime.snapshots.wait(tag)
        sandbox_id = (await runtime.spawn(SandboxSpec(tag, n=2, limits=limits))).records[0].id
    async with (
        asyncio.timeout(_TEST_S),
        Runtime.opened(fake_home, engine, RuntimeOptions(on_stop="kill")) as runtime,
    ):
        assert runtime.sandboxes.get(sandbox_id).limits == limits
        assert find_group(fake_home.vms / sandbox_id) is not None
        with pytest.raises(GuestDied):
            async with runtime.sandboxes.use(sandbox_id) as live:
                await live.agent.eval(_HOG)
        record = runtime.sandboxes.get(sandbox_id)
        assert record.state is State.DEAD
        assert (record.cause or "").startswith("used more memory than its limit of 64 MiB")
        assert runtime.sandboxes.counts()[State.RUNNING] == 1
