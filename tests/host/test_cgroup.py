"""Control groups of VMs: what is written where, over a made-up tree; and real ones, where this host has some."""

import asyncio
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from forkd.errors import EngineFailed, Unsupported
from forkd.host.cgroup import (
    Group,
    Lack,
    Place,
    enforceable,
    find_devices,
    find_group,
    find_lack,
    find_place,
    make_group,
    parse_table,
    probe_enforcement,
    remove_groups,
    render_settings,
)
from forkd.host.finding import Status
from forkd.host.process import ExitStatus, spawn
from forkd.model.machine import NO_LIMITS, Limits

_NOBODY = 65534

needs_groups = pytest.mark.skipif(isinstance(find_place(), Lack), reason="this user may not make control groups")


class Tree:
    """A made-up hierarchy. The kernel would make the files of a group; here they appear when they are written."""

    def __init__(self, root: Path) -> None:
        self.root = root / "cgroup"
        self.own = root / "own"
        self.root.mkdir()
        self.live_in("/")

    def live_in(self, group: str) -> None:
        self.own.write_text(f"4:memory:/elsewhere\n0::{group}\n")

    def group(self, path: str, controllers: str = "cpu io memory pids", *, delegated: bool = False) -> Path:
        group = self.root / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.controllers").write_text(controllers + "\n")
        (group / "cgroup.procs").write_text("")
        if delegated:
            os.setxattr(group, "user.delegate", b"1")
        return group

    def make(self, directory: Path, limits: Limits = NO_LIMITS, files: tuple[Path, ...] = ()) -> Group:
        return make_group(directory, limits, files, root=self.root, own=self.own)

    def find(self) -> Place | Lack:
        return find_place(self.root, self.own)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def read(path: Path) -> str:
    return path.read_text().strip()


# --- what is written ---


def test_every_limit_becomes_the_words_of_the_kernel() -> None:
    limits = Limits(memory_mib=256, cpus=0.25, pids=40, io_mib_s=8)
    assert render_settings(limits, ["8:0", "7:3"]) == [
        ("memory.max", "268435456"),
        ("memory.swap.max", "0"),
        ("memory.oom.group", "1"),
        ("cpu.max", "25000 100000"),
        ("pids.max", "40"),
        ("io.max", "8:0 rbps=8388608 wbps=8388608"),
        ("io.max", "7:3 rbps=8388608 wbps=8388608"),
    ]
    assert render_settings(NO_LIMITS, ["8:0"]) == []
    assert render_settings(Limits(cpus=0.01), []) == [("cpu.max", "1000 100000")]


def test_tables_of_the_kernel_are_read_and_odd_lines_are_not() -> None:
    assert parse_table("low 0\noom_kill 2\nsome avg10=0.00 total=3\nodd x\n") == {"low": 0, "oom_kill": 2}


def test_a_group_is_made_with_its_limits_and_what_they_need_is_handed_down_to_it(tree: Tree, tmp_path: Path) -> None:
    top = tree.group(".")
    group = tree.make(tmp_path / "vms/sb-1", Limits(memory_mib=64, pids=5))
    assert group.path.name == "sb-1"
    assert group.path.parent.parent == top / "forkd"
    assert (read(group.path / "memory.max"), read(group.path / "pids.max")) == (str(64 << 20), "5")
    assert read(group.path / "memory.oom.group") == "1"
    assert not (group.path / "cpu.max").exists()
    for handed_on in (top, top / "forkd", group.path.parent):
        assert read(handed_on / "cgroup.subtree_control") == "+pids"  # the last that was asked for
    assert not (group.path / "cgroup.subtree_control").exists()


def test_what_is_handed_down_already_is_not_asked_for_again(tree: Tree, tmp_path: Path) -> None:
    top = tree.group(".")
    (top / "cgroup.subtree_control").write_text("cpu memory\n")
    tree.make(tmp_path / "vms/sb-1", Limits(memory_mib=64))
    assert read(top / "cgroup.subtree_control") == "cpu memory"
    assert read(top / "forkd/cgroup.subtree_control") == "+memory"


def test_whoever_knows_the_directory_finds_the_group(tree: Tree, tmp_path: Path) -> None:
    tree.group(".")
    real, link = tmp_path / "vms", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    made = tree.make(real / "sb-1")
    assert find_group(link / "sb-1", root=tree.root, own=tree.own) == made
    assert find_group(real / "sb-2", root=tree.root, own=tree.own) is None
    assert find_group(tmp_path / "other/sb-1", root=tree.root, own=tree.own) is None
    assert find_group(real / "sb-1", root=tmp_path / "nothing", own=tree.own) is None


def test_what_a_group_tells_is_read_from_it(tmp_path: Path) -> None:
    group = Group(tmp_path)
    assert (group.out_of_memory(), group.cpu_seconds()) == (False, 0.0)
    (tmp_path / "memory.events").write_text("low 0\nmax 70\noom 3\noom_kill 0\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\n")
    assert (group.out_of_memory(), group.cpu_seconds()) == (False, 1.5)
    (tmp_path / "memory.events").write_text("low 0\nmax 70\noom 3\noom_kill 1\n")
    assert group.out_of_memory()


# --- where ---


def test_beside_version_1_the_unified_mount_is_used(tree: Tree) -> None:
    unified = tree.group("unified")
    assert tree.find() == Place(unified, unified / "forkd")


def test_the_subgroup_that_a_service_gives_us_is_left_for_groups_beside_it(tree: Tree) -> None:
    tree.group(".")
    service = tree.group("system.slice/forkd.service", delegated=True)
    tree.group("system.slice/forkd.service/daemon")
    tree.live_in("/system.slice/forkd.service/daemon")
    assert tree.find() == Place(service, service / "vms")


def test_a_service_is_not_crowded_out_of_its_own_group(tree: Tree) -> None:
    """systemd could not start it there again."""
    top = tree.group(".")
    tree.group("system.slice/forkd.service", delegated=True)
    tree.live_in("/system.slice/forkd.service")
    assert tree.find() == Place(top, top / "forkd")


def test_in_a_scope_of_ours_we_move_aside_first(tree: Tree, tmp_path: Path) -> None:
    tree.group(".")
    scope = tree.group("user.slice/run-1.scope", delegated=True)
    tree.live_in("/user.slice/run-1.scope")
    assert tree.find() == Place(scope, scope / "vms", crowded=True)
    group = tree.make(tmp_path / "vms/sb-1", Limits(pids=5))
    assert group.path.parent.parent == scope / "vms"
    assert (scope / "daemon").is_dir()
    assert not (tree.root / "cgroup.subtree_control").exists()  # above us nothing is touched


def test_a_user_who_may_not_is_told_how_to_be_one_who_may() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        tree = Tree(Path(made))
        tree.group(".")
        tree.group("a.scope", delegated=True)
        with as_nobody():
            lack = tree.find()
            assert isinstance(lack, Lack)
            assert "may not make groups" in lack.reason
            assert "Delegate=yes" in lack.hint
        tree.live_in("/a.scope")
        with as_nobody():
            lack = tree.find()
            assert isinstance(lack, Lack)
            assert "ProtectControlGroups" in lack.hint


# --- what cannot be ---


def test_without_cgroup_v2_every_limit_is_refused_and_named(tree: Tree, tmp_path: Path) -> None:
    with pytest.raises(
        Unsupported, match="A CPU limit cannot be enforced on this host: cgroup v2 is not mounted"
    ) as no:
        tree.make(tmp_path / "vms/sb-1", Limits(cpus=1))
    assert no.value.hint
    with pytest.raises(Unsupported, match="A VM cannot have a control group"):
        tree.make(tmp_path / "vms/sb-1")
    remove_groups(tmp_path / "vms", root=tree.root, own=tree.own)


@pytest.mark.parametrize(
    ("limits", "controller", "noun"),
    [
        (Limits(memory_mib=64), "memory", "memory limit"),
        (Limits(cpus=1), "cpu", "CPU limit"),
        (Limits(pids=9), "pids", "limit of processes"),
        (Limits(io_mib_s=1), "io", "limit of disk I/O"),
    ],
)
def test_a_missing_controller_refuses_its_limit_and_nothing_is_made(
    tree: Tree, tmp_path: Path, limits: Limits, controller: str, noun: str
) -> None:
    others = {"memory", "cpu", "pids", "io"} - {controller}
    top = tree.group(".", " ".join(others))
    with pytest.raises(
        Unsupported, match=f"A {noun} cannot be enforced on this host: .* no controller for {controller}"
    ):
        tree.make(tmp_path / "vms/sb-1", limits)
    assert not (top / "forkd").exists()


def test_files_on_no_block_device_cannot_be_limited() -> None:
    with pytest.raises(Unsupported, match=r"A limit of disk I/O .* is not on a block device") as no:
        find_devices([Path("/proc/self/status")])
    assert "FORKD_HOME" in (no.value.hint or "")


def test_the_disk_of_a_partition_is_limited_and_each_disk_once(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    if not os.major(number):
        pytest.skip("temporary files are on no block device here")
    disk = tmp_path / "devices/sda"
    part = disk / "sda1"
    part.mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (part / "dev").write_text("8:1\n")
    (part / "partition").write_text("1\n")
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(part)
    assert find_devices([tmp_path, tmp_path / "devices"], tmp_path / "block") == ["8:0"]
    (part / "partition").unlink()
    assert find_devices([tmp_path], tmp_path / "block") == ["8:1"]


def test_what_can_be_enforced_is_told_from_what_cannot(tree: Tree) -> None:
    asked = Limits(memory_mib=64, cpus=0.5, pids=40, io_mib_s=8)
    assert enforceable(asked, root=tree.root, own=tree.own) == NO_LIMITS
    tree.group(".", "cpu pids")
    assert enforceable(asked, root=tree.root, own=tree.own) == Limits(cpus=0.5, pids=40)
    tree.group(".")
    assert enforceable(asked, root=tree.root, own=tree.own) == asked


# --- doctor ---


def test_doctor_says_which_limits_there_are_and_why_not_others(tree: Tree) -> None:
    finding = probe_enforcement(tree.root, tree.own)
    assert (finding.status, finding.found) == (Status.WARN, "none: cgroup v2 is not mounted")
    tree.group(".", "cpu pids")
    finding = probe_enforcement(tree.root, tree.own)
    assert finding.found == f"only cpu, pids: {tree.root} has no controller for memory, io"
    assert finding.remedy
    tree.group(".")
    assert probe_enforcement(tree.root, tree.own).status is Status.OK
    assert find_lack(tree.find(), "memory", "io") is None


# --- real ones ---


@pytest.fixture
def vms(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    remove_groups(tmp_path)


@needs_groups
async def test_a_process_is_in_its_group_before_its_first_instruction_and_ends_with_it(vms: Path) -> None:
    group = make_group(vms / "sb-1")
    process = spawn(["sh", "-c", "cat /proc/self/cgroup; sleep 60 & wait"], output=vms / "log", group=group)
    while len((vms / "log").read_text().splitlines()) < 1:
        await asyncio.sleep(0.01)
    group.remove()
    assert await process.exited == ExitStatus(None, signal.SIGKILL)
    assert f"{group.path.parent.name}/sb-1" in (vms / "log").read_text()
    assert not group.path.exists()
    assert not group.path.parent.exists()
    group.remove()


@needs_groups
async def test_a_process_that_cannot_be_put_into_its_group_does_not_run(vms: Path) -> None:
    with pytest.raises(EngineFailed, match="Could not put process"):
        spawn(["touch", str(vms / "ran")], output=vms / "log", group=Group(vms / "no/group"))
    assert not (vms / "ran").exists()


@needs_groups
def test_a_process_that_is_over_is_no_error(vms: Path) -> None:
    group = make_group(vms / "sb-1")
    over = subprocess.Popen(["true"])
    over.wait()
    group.add(over.pid)


@needs_groups
def test_groups_of_a_directory_are_removed_except_those_to_keep(vms: Path) -> None:
    groups = [make_group(vms / name) for name in ("sb-1", "sb-2", "sb-3")]
    other = make_group(vms / "deeper/sb-1")
    child = subprocess.Popen(["sleep", "60"])
    groups[0].add(child.pid)
    (groups[1].path / "inner").mkdir()
    remove_groups(vms, keep={"sb-3"})
    assert child.wait() == -signal.SIGKILL
    assert [group.path.exists() for group in groups] == [False, False, True]
    assert other.path.exists()
    remove_groups(vms)
    remove_groups(vms)
    remove_groups(vms / "deeper")
    assert not groups[2].path.parent.exists()
    assert not other.path.exists()


@needs_groups
def test_a_group_left_by_a_vm_of_the_same_directory_is_made_anew(vms: Path) -> None:
    group = make_group(vms / "sb-1")
    child = subprocess.Popen(["sleep", "60"])
    group.add(child.pid)
    assert make_group(vms / "sb-1") == group
    assert child.wait() == -signal.SIGKILL


@needs_groups
def test_a_kernel_without_cgroup_kill_is_helped(vms: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(vms / "sb-1")
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    for child in children:
        group.add(child.pid)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.name != "cgroup.kill" and exists(path))
    group.remove()
    assert [child.wait() for child in children] == [-signal.SIGKILL] * 3
    assert not group.path.is_dir()


@needs_groups
def test_groups_come_and_go_at_once_without_disturbing_each_other(vms: Path) -> None:
    """Each removes the directory they share when it looks empty."""
    together = threading.Barrier(8)

    def come_and_go(name: str) -> None:
        together.wait()
        for _ in range(50):
            group = make_group(vms / name)
            assert group.path.exists()
            group.remove()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(come_and_go, [f"sb-{n}" for n in range(8)]))
