"""Live forks of Firecracker: each thread under the filter that Firecracker has for it, and nothing in common."""

import asyncio
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from engine_cases import Case, forking_live, live_forks, rehearsed, started, value_of, values_of
from live_fork_looks import family, find_common_inodes, find_shared_files, find_shared_memory
from network_cases import PORT, REACH, SERVE, Lan, made_lans, networked

from forkd.engines.base import ExitReason
from forkd.engines.firecracker import engine as firecracker
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.firecracker.machine import FirecrackerMachine
from forkd.errors import EngineFailed, NotForkable, Unsupported
from forkd.host.filters import read_filters
from forkd.host.pages import find_alone, find_memory
from forkd.host.procfork import ptrace
from forkd.host.procfork.program import SYSCALL
from forkd.host.procfork.registers import making_call
from forkd.runtime.freeze import rehearsed as templated

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("nothing_left")]

_PTRACE = 101  # nothing that Firecracker does


@pytest.fixture
def forkable(forkable_firecracker: Case) -> Case:
    return forking_live(forkable_firecracker)


@pytest.fixture
def lans() -> Iterator[list[Lan]]:
    with made_lans(2, by_name=True) as made:
        yield made


def have_it_call(pid: int, number: int) -> None:
    """As it would by itself: nobody traces it when it makes the call."""
    ptrace.seize(pid, 0)
    ptrace.interrupt(pid)
    ptrace.wait(pid)
    registers = ptrace.get_registers(pid)
    ptrace.set_registers(pid, making_call(registers, registers.get("rip") - len(SYSCALL), number, (0, 0, 0, 0)))
    ptrace.detach(pid)


async def test_no_two_vms_have_an_open_file_or_memory_in_common(forkable: Case, run_directory: Path) -> None:
    async with family(forkable, run_directory) as vms:
        await asyncio.sleep(0.5)  # no process is traced any more
        pids = [machine.pid for machine in vms.all]
        assert len(set(pids)) == 7
        assert find_shared_files([os.getpid(), *pids]) == []
        # What they only read, seen from outside their mount namespaces.
        assert len(find_common_inodes(pids)) <= 3
        memory = [{line.split()[4] for line in find_shared_memory(pid) if "memfd" in line} for pid in pids]
        assert memory[0]
        for number, inodes in enumerate(memory):
            assert all(not inodes & others for others in memory[number + 1 :])


async def test_each_thread_of_a_fork_is_under_firecrackers_own_filter(forkable: Case, run_directory: Path) -> None:
    async with family(forkable, run_directory) as vms:
        engine = forkable.engine
        assert isinstance(engine, FirecrackerEngine) and engine._filters is not None
        for machine in vms.all:
            if machine.fork_thread is not None:
                await machine.fork_thread.let_go()  # it may be kept at rest for its next fork
            found = await asyncio.to_thread(lambda pid=machine.pid: read_filters(pid))
            assert found.pop("forkd-seed") == engine._filters.seed
            assert found.pop("fc_api") == engine._filters.api
            assert found.pop("firecracker") == engine._filters.vmm
            assert set(found) == {"fc_vcpu 0"} and found["fc_vcpu 0"] == engine._filters.vcpu
            for task in Path(f"/proc/{machine.pid}/task").iterdir():
                status = (task / "status").read_text()
                assert "\nSeccomp:\t2\n" in status and "\nNoNewPrivs:\t1\n" in status
            cell = machine.cell
            assert cell is not None and cell.own_user and not cell.capabilities
            assert {"user", "mnt", "ipc", "uts", "net"} <= set(cell.namespaces) and cell.cgroup is not None
        assert len({machine.cell.user for machine in vms.all}) == len(vms.all)


async def test_a_forbidden_call_ends_the_fork_that_makes_it_and_no_other(forkable: Case, run_directory: Path) -> None:
    async with (
        rehearsed(forkable, run_directory) as template,
        live_forks(forkable.engine, template, run_directory, 2, settled=True) as (fork, sibling),
    ):
        await asyncio.to_thread(lambda: have_it_call(fork.machine.pid, _PTRACE))
        death = await asyncio.wait_for(asyncio.shield(fork.machine.death), 30)
        assert death.reason is ExitReason.CRASHED
        assert await value_of(sibling, "past + 1") == 42
        assert not template.death.done()


async def test_forks_draw_random_numbers_of_their_own_from_their_device(forkable: Case, run_directory: Path) -> None:
    """Firecracker's own generator, which serves it, is duplicated with all of its memory; and what the guest has drawn
    ahead is."""
    draw = "open('/dev/hwrng', 'rb', buffering=0).read(16).hex()"
    async with (
        rehearsed(forkable, run_directory) as template,
        live_forks(forkable.engine, template, run_directory, 1, settled=True) as (source,),
    ):
        drawn = [await value_of(source, draw)]  # of a buffer of 64
        async with live_forks(forkable.engine, source.machine, run_directory, 3) as forks:
            drawn += await values_of((source, *forks), draw)
        assert len(set(drawn)) == 5


async def test_forks_of_a_template_have_a_tap_or_none(forkable: Case, run_directory: Path, lans: list[Lan]) -> None:
    async with rehearsed(forkable, run_directory) as template:
        assert template.find_tap() is None
        for lan, name in zip(lans, ("one", "two"), strict=True):
            machine = await forkable.engine.fork_live(template, run_directory / name, nic=lan.nic, settled=True)
            child = await networked(machine, name, True, settled=True)
            try:
                await child.agent.eval(SERVE)
                assert await lan.ask(PORT) == name.encode()
            finally:
                await child.kill()
        async with live_forks(forkable.engine, template, run_directory, 1, settled=True) as (off,):
            await off.agent.eval("import socket\n" + REACH)
            assert await value_of(off, "reach()") == "OSError 101"


_ARM = """
import threading, time
fired = []
def fire(at):
    fired.append(time.monotonic() - at)
for delay in (0.5, 2.0):
    threading.Timer(delay, fire, (time.monotonic() + delay,)).start()
"""
_NOW = "__import__('time').monotonic()"


@pytest.fixture(params=["forkable_firecracker", "frozen_firecracker_4"], ids=["1 vcpu", "4 vcpus"])
def case_of_some_vcpus(request: pytest.FixtureRequest) -> Case:
    return forking_live(request.getfixturevalue(request.param))


async def test_timers_that_ran_before_a_fork_end_in_it_too_and_no_clock_jumps(
    case_of_some_vcpus: Case, run_directory: Path
) -> None:
    case = case_of_some_vcpus
    async with (
        rehearsed(case, run_directory) as template,
        live_forks(case.engine, template, run_directory, 1, settled=True) as (source,),
    ):
        await source.agent.eval(_ARM)
        begun = await value_of(source, _NOW)
        async with live_forks(case.engine, source.machine, run_directory, 2) as forks:
            await asyncio.sleep(2.5)
            for vm in (source, *forks):
                early, late = await value_of(vm, "fired")
                assert 0 <= early < 5 and 0 <= late < 5
                assert begun < await value_of(vm, _NOW) < begun + 30


async def test_a_guest_does_not_see_how_long_its_template_stood_still(forkable: Case, run_directory: Path) -> None:
    async with rehearsed(forkable, run_directory) as template:
        times = []
        for stood_s in (0, 6):
            await asyncio.sleep(stood_s)
            async with live_forks(forkable.engine, template, run_directory, 1, settled=True) as (fork,):
                times.append(await value_of(fork, _NOW))
        assert abs(times[1] - times[0]) < 4


async def test_a_template_copies_ahead_what_its_first_fork_wrote(forkable: Case, run_directory: Path) -> None:
    async with templated(forkable.engine, forkable.frozen, run_directory / "template") as (template, agent):
        paused = None
        try:
            assert isinstance(template, FirecrackerMachine) and agent is not None
            spans = template.first_written
            assert 0 < sum(end - begin for begin, end in spans) < 16 * 2**20
            paused = await forkable.engine.fork_live(template, run_directory / "paused", settled=True, paused=True)
            # It never ran, and has these pages for itself.
            own = find_alone(find_memory(paused.pid, forkable.frozen.memory_file))
            assert _pages(own) >= _pages(spans)
        finally:
            if paused is not None:
                await paused.kill()
            if agent is not None:
                agent.close()
            await template.kill()


def _pages(spans: Iterable[tuple[int, int]]) -> set[int]:
    return {page for begin, end in spans for page in range(begin, end, 4096)}


def test_live_vms_are_forked_in_the_lab() -> None:
    """Elsewhere tests of it are skipped where it cannot be."""
    assert FirecrackerEngine().why_no_live_forks() is None


async def test_a_record_that_was_tampered_with_is_a_reason_not_to_fork(forkable: Case, run_directory: Path) -> None:
    async with (
        rehearsed(forkable, run_directory) as template,
        live_forks(forkable.engine, template, run_directory, 1, settled=True) as (source,),
    ):
        (run_directory / source.id / "kvm.json").write_text('{"kvm_fd": "x"}')
        with pytest.raises(NotForkable):
            await forkable.engine.fork_live(source.machine, run_directory / "fork")
        assert await value_of(source, "past + 1") == 42


async def test_where_no_base_can_be_made_a_vm_is_started_in_a_jail(
    forkable: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise EngineFailed("made up")

    monkeypatch.setattr(firecracker, "start_base", fail)
    async with started(forkable, run_directory) as child:
        assert await value_of(child, "past + 1") == 42
        with pytest.raises(NotForkable, match="started where it cannot be forked"):
            await forkable.engine.fork_live(child.machine, run_directory / "fork")


async def test_a_vm_that_was_made_without_live_forks_says_so(forkable: Case, run_directory: Path) -> None:
    engine = FirecrackerEngine(live_forks=False)
    with pytest.raises(Unsupported, match="without them"):
        await engine.template(forkable.frozen, run_directory / "template")
    machine = await engine.fork(forkable.frozen, run_directory / "alone")
    try:
        await machine.running()
        with pytest.raises(NotForkable, match="cannot be forked"):
            await forkable.engine.fork_live(machine, run_directory / "fork")
    finally:
        await machine.kill()
