"""What keeps a VM's process in, as the kernel shows it: of VMs that were started, forked, forked again and adopted."""

import os
import resource
from pathlib import Path

import pytest
from engine_cases import Case, live_forks, rehearsed, started

from forkd.engines.base import Machine
from forkd.engines.machine import ProcessMachine
from forkd.errors import HostLacks, NotForkable
from forkd.host import cell_plan
from forkd.host.cell import Cell, find_lacks, parse_status, render_cell
from forkd.host.user_ids import DEFAULT_USERS

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="users of their own are root's to give")
_STATUS = "Uid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapInh:\t0\nCapPrm:\t0\nCapEff:\t0\nCapBnd:\t{bounds}\nCapAmb:\t0\n"
_FILTERED = "NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t{filters}\n"


def check_whole(machine: Machine) -> int:
    """That nothing is missing of a machine's cell; its user."""
    assert isinstance(machine, ProcessMachine)
    cell, pid = machine.cell, machine.pid
    assert cell is not None
    assert cell.lacks == ()
    assert cell.user in DEFAULT_USERS
    status = parse_status(Path(f"/proc/{pid}/status").read_text())
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(cell.user)}
    assert status["Groups"] == ""
    for task in Path(f"/proc/{pid}/task").iterdir():
        assert parse_status((task / "status").read_text())["Seccomp"] == "2"
    root = Path(f"/proc/{pid}/root")
    assert not {"proc", "sys", "dev", "home", "root", "run"} & {entry.name for entry in root.iterdir()}
    assert all(" ro," in line or "decoy" in line for line in Path(f"/proc/{pid}/mounts").read_text().splitlines())
    assert len(Path(f"/proc/{pid}/net/dev").read_text().splitlines()) == 3  # two of headings, and the loopback
    limits = Path(f"/proc/{pid}/limits").read_text()
    for line in (
        "Max core file size        0 ",
        "Max open files            1024 ",
        "Max file size             1048576 ",
    ):
        assert line in limits
    return cell.user


@as_root
@pytest.mark.vm
@pytest.mark.anyio
@pytest.mark.usefixtures("nothing_left")
async def test_every_vm_has_a_whole_cell_and_a_user_of_its_own(tcg: Case, run_directory: Path) -> None:
    async with (
        rehearsed(tcg, run_directory, "template") as template,
        live_forks(tcg.engine, template, run_directory, 2, settled=True) as siblings,
        started(tcg, run_directory) as alone,
        live_forks(tcg.engine, siblings[0].machine, run_directory, 1) as (second,),
        live_forks(tcg.engine, second.machine, run_directory, 1) as (third,),
    ):
        machines = [template, *(child.machine for child in (*siblings, alone, second, third))]
        users = [check_whole(machine) for machine in machines]
        assert len(set(users)) == len(users)
        for child in (*siblings, alone, second, third):
            threads = Path(f"/proc/{child.machine.pid}/limits").read_text()
            assert "Max processes             256 " in threads
            assert (await child.agent.eval("past")).value == 41


@as_root
@pytest.mark.vm
@pytest.mark.anyio
@pytest.mark.usefixtures("nothing_left")
async def test_a_row_of_forks_ends_where_the_kernel_nests_no_more(tcg: Case, run_directory: Path) -> None:
    made: list[Machine] = []
    source: Machine
    async with started(tcg, run_directory) as first:
        source = first.machine
        try:
            with pytest.raises(NotForkable, match="nests no more"):
                for number in range(40):
                    source = await tcg.engine.fork_live(source, run_directory / f"fork-{number}")
                    made.append(source)
                    await source.running()
            assert 30 <= len(made) <= 32
            check_whole(made[-1])
        finally:
            for machine in reversed(made):
                await machine.kill()


@pytest.mark.vm
@pytest.mark.anyio
async def test_where_no_cell_can_be_made_none_is_started_without(
    tcg: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkd.engines.qemu.engine.find_cell_lack", lambda _users: "made up")
    monkeypatch.setattr(tcg.engine, "_cell_required", True)
    with pytest.raises(HostLacks, match="made up"):
        await tcg.engine.fork(tcg.frozen, run_directory / "child")
    assert not (run_directory / "child").exists()


@pytest.mark.vm
@pytest.mark.anyio
@pytest.mark.usefixtures("nothing_left")
async def test_where_a_cell_is_only_wanted_its_lack_is_told(
    tcg: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forkd.engines.qemu.engine.find_cell_lack", lambda _users: "made up")
    monkeypatch.setattr(tcg.engine, "_cell_required", False)
    monkeypatch.setattr(tcg.engine, "_warned", False)
    async with started(tcg, run_directory) as child, live_forks(tcg.engine, child.machine, run_directory, 1) as (fork,):
        for machine in (child.machine, fork.machine):
            assert isinstance(machine, ProcessMachine) and machine.cell is not None
            assert "mnt namespace" in machine.cell.lacks and "user id or user namespace" in machine.cell.lacks
        assert (await fork.agent.eval("past")).value == 41
    assert [record.message for record in caplog.records if "without a cell" in record.message] != []


def render(
    uid: int = 7, bounds: str = "0", filters: int = 2, cgroup: str | None = "/g", memory: str = "read-only"
) -> Cell:
    status = parse_status(_STATUS.format(uid=uid, bounds=bounds) + _FILTERED.format(filters=filters))
    return render_cell(status, ("mnt", "ipc", "uts", "net"), cgroup, memory, our_user=0, filters=2)


def test_a_whole_cell_lacks_nothing_and_another_says_what() -> None:
    assert render().lacks == ()
    assert render(uid=0).lacks == ("user id or user namespace",)
    assert render(bounds="1ff").lacks == ("empty capabilities",)
    assert render(filters=1).lacks == ("seccomp allow-list",)
    assert render(cgroup=None).lacks == ("cgroup",)
    assert render(memory="writable").lacks == ("read-only memory file",)
    bare = Cell(0, False, (), 0, 1, False, None, "none")
    assert len(find_lacks(bare, 2)) == 9


def test_this_host_is_tried_and_the_trial_leaves_nothing(nothing_left: None) -> None:
    cell_plan.find_cell_lack.cache_clear()
    finding = cell_plan.probe_cell()
    assert finding.name == "cells"
    assert (finding.remedy is None) == (cell_plan.find_cell_lack() is None)
    assert resource.getrlimit(resource.RLIMIT_CORE)  # ours are as they were
