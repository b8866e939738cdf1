"""Forks that cannot be, or whose source, caller or host gives up half-way: a typed error, and nothing left of them."""

import asyncio
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from engine_cases import (
    Case,
    fork_live,
    forking_live,
    greet,
    killed_owner,
    live_forks,
    rehearsed,
    started,
    value_of,
    values_of,
)
from support_sizes import sized
from support_tracing import counted_calls

from forkd.engines.base import Engine, ExitReason, Machine
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.qemu import engine as qemu_engine
from forkd.engines.qemu import monitor
from forkd.engines.qemu.args import Binary
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import EngineFailed, ForkdError, GuestDied, NotForkable, Unsupported
from forkd.guest.agent import Agent
from forkd.host.cell_plan import MAX_FILES
from forkd.host.fork_cell import render_limit
from forkd.host.marked import find_marked
from forkd.host.procfork import ptrace
from forkd.host.procfork.registers import POLLS
from forkd.host.procfork.source import make_calls
from forkd.model.names import new_identity
from forkd.runtime.child import Child

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

# From before the source stands still until after its fork runs.
_INSTANTS_MS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20)
_WAIT_S = 20


# In the lab all takes longer.
_SLOWER = {"qemu": 1, "firecracker": 15}


@pytest.fixture(
    params=[
        pytest.param("frozen_tcg", id="qemu"),
        pytest.param("forkable_firecracker", marks=pytest.mark.lab, id="firecracker"),
    ]
)
def each(request: pytest.FixtureRequest) -> Case:
    return forking_live(request.getfixturevalue(request.param))


def _instants(each: Case, delays_ms: tuple[int, ...]) -> tuple[int, ...]:
    return delays_ms if each.engine.name == "qemu" else delays_ms[::4]


# The source


@pytest.mark.parametrize("settled", [False, True], ids=["a running VM", "a template"])
async def test_a_source_that_is_killed_while_it_is_forked_leaves_a_whole_fork_or_none(
    each: Case, run_directory: Path, settled: bool
) -> None:
    async def kill_and_look(source: Machine, delay_ms: int) -> None:
        forking = asyncio.create_task(each.engine.fork_live(source, run_directory / "fork", settled=settled))
        await asyncio.sleep(delay_ms * _SLOWER[each.engine.name] / 1000)
        os.kill(source.pid, signal.SIGKILL)
        death = await asyncio.wait_for(asyncio.shield(source.death), _WAIT_S)
        assert death.reason is ExitReason.CRASHED and "SIGKILL" in death.status
        try:
            machine = await forking
        except (EngineFailed, GuestDied) as error:
            assert error.message
            return
        fork = await greet(machine, new_identity("fork"), settled=settled)
        try:
            assert await value_of(fork, "past + 1") == 42
        finally:
            await fork.kill()

    async with rehearsed(each, run_directory) as template:
        for number, delay_ms in enumerate(_instants(each, _INSTANTS_MS)):
            source = await each.engine.fork_live(
                template, run_directory / f"source-{number}", settled=True, paused=settled
            )
            await source.running()
            try:
                await kill_and_look(source, delay_ms)
            finally:
                await source.kill()
            assert find_marked(run_directory).keys() == {run_directory / "template"}
            assert [path.name for path in run_directory.iterdir()] == ["template"]


async def test_a_source_that_has_ended_is_not_forked(each: Case, run_directory: Path) -> None:
    async with started(each, run_directory) as source:
        await source.machine.kill()
        with pytest.raises(NotForkable, match="ended"):
            await each.engine.fork_live(source.machine, run_directory / "fork")


async def test_a_source_that_is_ended_while_it_is_forked_is_gone_when_that_returns(
    tcg: Case, run_directory: Path
) -> None:
    async with rehearsed(tcg, run_directory) as template:
        for delay_ms in (0, 3, 6, 10):
            source = await fork_live(tcg.engine, template, run_directory, settled=True)
            forking = asyncio.create_task(tcg.engine.fork_live(source.machine, run_directory / "fork"))
            await asyncio.sleep(delay_ms / 1000)
            await source.kill()
            assert not Path(f"/proc/{source.machine.pid}").exists()
            (outcome,) = await asyncio.gather(forking, return_exceptions=True)
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, ForkdError), repr(outcome)
            else:
                await outcome.kill()
            assert find_marked(run_directory).keys() == {run_directory / "template"}


async def test_a_guest_that_panics_while_it_is_forked_takes_nobody_else_with_it(tcg: Case, run_directory: Path) -> None:
    async with rehearsed(tcg, run_directory) as template:
        for delay_ms in (0, 2, 5, 10, 20, 40):
            async with live_forks(tcg.engine, template, run_directory, 1, settled=True) as (source,):
                await _panic_and_look(tcg, source, run_directory / "fork", delay_ms)
        async with live_forks(tcg.engine, template, run_directory, 1, settled=True) as (fork,):
            assert await value_of(fork, "past + 1") == 42


async def _panic_and_look(tcg: Case, source: Child, directory: Path, delay_ms: int) -> None:
    panic = "open('/proc/sysrq-trigger', 'w').write('c')"
    asking = asyncio.create_task(source.agent.eval(panic))
    await asyncio.sleep(delay_ms / 1000)
    try:
        fork = await tcg.engine.fork_live(source.machine, directory)
    except EngineFailed:
        fork = None
    death = await asyncio.wait_for(asyncio.shield(source.machine.death), _WAIT_S)
    assert death.reason is ExitReason.PANICKED
    await asyncio.gather(asking, return_exceptions=True)
    if fork is not None:
        # Of an instant before: it panics too, or was never told to. What it said before that is its source's.
        await asyncio.wait([fork.death], timeout=2)
        if fork.death.done():
            assert fork.death.result().reason in (ExitReason.PANICKED, ExitReason.POWERED_OFF)
        await fork.kill()


async def test_a_qemu_that_was_stopped_by_a_signal_is_not_forked_and_is_as_it_was_when_it_goes_on(
    tcg: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "COMMAND_DEADLINE_S", 0.5)
    async with started(tcg, run_directory) as source, rehearsed(tcg, run_directory) as template:
        for machine, settled in ((source.machine, False), (template, True)):
            os.kill(machine.pid, signal.SIGSTOP)
            try:
                while _state(machine.pid) != "T":
                    await asyncio.sleep(0.001)
                for _ in range(2):
                    with pytest.raises(EngineFailed):
                        await tcg.engine.fork_live(machine, run_directory / "fork", settled=settled)
                deadline = time.monotonic() + _WAIT_S
                while _state(machine.pid) != "T":  # let go, it stops again by itself
                    assert time.monotonic() < deadline
                    await asyncio.sleep(0.001)
            finally:
                os.kill(machine.pid, signal.SIGCONT)
        monkeypatch.undo()
        assert find_marked(run_directory).keys() == {run_directory / source.id, run_directory / "template"}
        assert await value_of(source, "past + 1") == 42
        assert not source.machine.paused and template.paused
        async with (
            live_forks(tcg.engine, source.machine, run_directory, 1) as one,
            live_forks(tcg.engine, template, run_directory, 1, settled=True) as other,
        ):
            assert await values_of((*one, *other), "past + 1") == [42, 42]


async def test_a_vm_that_another_process_traces_is_not_forked_and_goes_on(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as source:
        with _traced_by_another(source.machine.pid):
            with pytest.raises(NotForkable, match="may not be traced"):
                await tcg.engine.fork_live(source.machine, run_directory / "fork")
            assert await value_of(source, "past + 1") == 42
        async with live_forks(tcg.engine, source.machine, run_directory, 1) as (fork,):
            assert await value_of(fork, "past + 1") == 42


async def test_a_parent_that_boots_is_not_forked_and_goes_on(tcg: Case, run_directory: Path) -> None:
    (run_directory / "memory").mkdir()
    parent = await tcg.engine.boot(tcg.frozen.boot, run_directory / "parent", run_directory / "memory")
    try:
        with pytest.raises(NotForkable):
            await tcg.engine.fork_live(parent, run_directory / "fork")
        await parent.running()
        assert not parent.death.done()
    finally:
        await parent.kill()
    shutil.rmtree(run_directory / "memory")


@pytest.mark.parametrize("settled", [False, True], ids=["a running VM", "a template"])
async def test_a_source_that_is_killed_at_a_step_of_its_fork_leaves_a_whole_fork_or_none(
    each: Case, run_directory: Path, settled: bool
) -> None:
    async with rehearsed(each, run_directory) as template:

        async def fork_and_look(number: int, at: int) -> int:
            source = await each.engine.fork_live(
                template, run_directory / f"source-{number}", settled=True, paused=settled
            )
            await source.running()
            made = None
            with counted_calls(at, lambda: os.kill(source.pid, signal.SIGKILL)) as names:
                with suppress(EngineFailed, GuestDied):
                    made = await each.engine.fork_live(source, run_directory / "fork", settled=settled)
            if 0 < at <= len(names):  # now and then it takes fewer calls
                death = await asyncio.wait_for(asyncio.shield(source.death), _WAIT_S)
                assert death.reason is ExitReason.CRASHED and "SIGKILL" in death.status
            if made is not None:
                fork = await greet(made, new_identity("fork"), settled=settled)
                assert await value_of(fork, "past + 1") == 42
                await fork.kill()
            await source.kill()
            assert find_marked(run_directory).keys() == {run_directory / "template"}
            assert [path.name for path in run_directory.iterdir()] == ["template"]
            return len(names)

        steps = await fork_and_look(0, 0)
        assert steps > 20
        for number, at in enumerate(range(1, steps, max(1, steps // sized(5, 40))), 1):
            await fork_and_look(number, at)


# The caller


@pytest.mark.parametrize("settled", [False, True], ids=["a running VM", "a template"])
async def test_a_fork_that_nobody_waits_for_any_more_leaves_nothing(
    each: Case, run_directory: Path, settled: bool
) -> None:
    chance = random.Random(7)
    async with rehearsed(each, run_directory) as template:
        source = await fork_live(each.engine, template, run_directory, settled=True)
        machine = template if settled else source.machine
        # Once: who writes the maps of a fork's forks is started with the first, and stays with its source.
        await (await each.engine.fork_live(machine, run_directory / "first", settled=settled)).kill()
        there, descriptors = set(run_directory.iterdir()), _list_descriptors()
        for number in range(30):
            forking = asyncio.create_task(
                each.engine.fork_live(machine, run_directory / f"fork-{number}", settled=settled)
            )
            await asyncio.sleep(chance.uniform(0, 0.02))
            forking.cancel()
            (outcome,) = await asyncio.gather(forking, return_exceptions=True)
            if isinstance(outcome, BaseException):
                assert isinstance(outcome, asyncio.CancelledError), repr(outcome)
            else:
                await outcome.kill()  # it was there before the call
            assert set(run_directory.iterdir()) == there
            assert find_marked(run_directory).keys() == there
        assert _list_descriptors() <= descriptors
        assert await value_of(source, "past + 1") == 42
        async with live_forks(each.engine, machine, run_directory, 1, settled=settled) as (fork,):
            assert await value_of(fork, "past + 1") == 42
        await source.kill()


async def test_a_directory_that_is_there_already_is_left_alone(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as source:
        taken = run_directory / "taken"
        taken.mkdir()
        (taken / "file").write_text("mine")
        with pytest.raises(EngineFailed, match="taken"):
            await tcg.engine.fork_live(source.machine, taken)
        with pytest.raises(EngineFailed, match="Could not make the directory"):
            await tcg.engine.fork_live(source.machine, run_directory / "nowhere/fork")
        assert (taken / "file").read_text() == "mine"
        shutil.rmtree(taken)
        assert await value_of(source, "past + 1") == 42
        with pytest.raises(EngineFailed, match=source.id):
            await tcg.engine.fork_live(source.machine, run_directory / source.id)
        async with live_forks(tcg.engine, source.machine, run_directory, 1) as (fork,):
            assert await value_of(fork, "past + 1") == 42


_OPEN = {
    "qemu": 'QemuEngine("tcg", outlive=True)',
    "firecracker": "FirecrackerEngine(outlive=True)",
}
_FORKER = """
engine = {engine}
source = await fork_one(engine, frozen, new_identity("source"), run)
await fork_live(engine, source.machine, run, name="first")
print("forking", flush=True)
while True:
    machine = await engine.fork_live(source.machine, run / "fork")
    await machine.kill()
"""


async def test_an_owner_that_is_killed_while_it_forks_leaves_whole_vms_and_no_others(
    each: Case, run_directory: Path
) -> None:
    chance, name = random.Random(3), each.engine.name
    forker = _FORKER.format(engine=_OPEN[name])
    for _ in range(6 if name == "qemu" else 2):
        with killed_owner(forker, run_directory, each.frozen, after_s=chance.uniform(0, 0.06) * _SLOWER[name]) as said:
            assert said == "forking"
            _wait_until_steady(run_directory)
            await _look_at_what_is_left(each, run_directory)
            # All other VMs have the mark of the one fork under way, or are gone.
            assert find_marked(run_directory).keys() <= {run_directory / "fork"}


_DYING = """
from support_tracing import counted_calls
engine = {engine}
source = await fork_one(engine, frozen, new_identity("source"), run)
print("forking", flush=True)
with counted_calls({step}, lambda: os.kill(os.getpid(), signal.SIGKILL)):
    await engine.fork_live(source.machine, run / "fork")
"""


async def test_an_owner_that_dies_at_a_step_of_a_fork_leaves_its_source_whole_and_no_half_made_fork(
    each: Case, run_directory: Path
) -> None:
    async with started(each, run_directory) as source:
        with counted_calls() as names:
            await (await each.engine.fork_live(source.machine, run_directory / "fork")).kill()
    steps = len(names)
    for step in range(1, steps, max(1, steps // sized(4, 40))):
        work = _DYING.format(engine=_OPEN[each.engine.name], step=step)
        with killed_owner(work, run_directory, each.frozen, dies=True) as said:
            assert said == "forking"
            _wait_until_steady(run_directory)
            await _look_at_what_is_left(each, run_directory, ("source",))
            assert find_marked(run_directory).keys() <= {run_directory / "fork"}


async def _look_at_what_is_left(each: Case, run: Path, whole: tuple[str, ...] = ("source", "first")) -> None:
    lasting: Engine = QemuEngine("tcg", outlive=True)
    if each.engine.name == "firecracker":
        lasting = FirecrackerEngine(outlive=True)
    left = find_marked(run)
    assert {run / name for name in whole} <= left.keys()
    assert left.keys() <= {run / name for name in (*whole, "fork")}
    for name in whole:
        machine = await lasting.adopt(run / name, left[run / name])
        if machine.paused:  # its owner had stopped it for the fork that was under way
            assert name == "source"
            await machine.resume()
        with closing(await Agent.connect(await machine.connect())) as agent:
            assert (await agent.eval("past + 1")).value == 42
            # With us connected, as a daemon is: a guest that is just losing its host throws away what it is sent.
            async with live_forks(lasting, machine, run, 1) as (fork,):
                assert await value_of(fork, "past + 1") == 42
        await machine.kill()


# The host


async def test_descriptors_that_run_out_in_the_middle_are_a_typed_error_each_time(
    tcg: Case, run_directory: Path
) -> None:
    async def try_within(source: Machine, settled: bool, room: int) -> bool:
        try:
            with _few_descriptors(room):
                machine = await tcg.engine.fork_live(source, run_directory / "fork", settled=settled)
        except EngineFailed:
            return False
        await (await greet(machine, new_identity("fork"), settled=settled)).kill()
        return True

    async with (
        rehearsed(tcg, run_directory) as template,
        live_forks(tcg.engine, template, run_directory, 4, settled=True) as forks,
    ):
        there = set(run_directory.iterdir())
        for machine, settled in ((template, True), (forks[0].machine, False)):
            made = 0
            for room in range(30):
                made += await try_within(machine, settled, room)
                # Without a descriptor, what is in a directory cannot be found out, and so not be removed.
                shutil.rmtree(run_directory / "fork", ignore_errors=True)
                assert set(run_directory.iterdir()) == there
                assert find_marked(run_directory).keys() == there
            assert 0 < made < 30
        assert await values_of(forks, "past + 1") == [42] * 4
        async with live_forks(tcg.engine, template, run_directory, 1, settled=True) as (more,):
            assert await value_of(more, "past + 1") == 42


async def test_a_source_that_may_open_no_more_files_is_not_forked_and_goes_on(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as source:
        pid = source.machine.pid
        highest = []
        for _ in range(10):  # one that is closed again does not count
            highest.append(max(map(int, os.listdir(f"/proc/{pid}/fd"))))
            await asyncio.sleep(0.01)
        used = min(highest) + 1
        for room in range(4):
            make_calls(pid, [render_limit(resource.RLIMIT_NOFILE, used + room, MAX_FILES)], POLLS)
            with pytest.raises(NotForkable):
                await tcg.engine.fork_live(source.machine, run_directory / "fork")
            assert await value_of(source, "past + 1") == 42
        make_calls(pid, [render_limit(resource.RLIMIT_NOFILE, MAX_FILES, MAX_FILES)], POLLS)
        async with live_forks(tcg.engine, source.machine, run_directory, 1) as (fork,):
            assert await value_of(fork, "past + 1") == 42


async def test_under_kvm_no_live_vm_is_forked_and_the_reason_is_told(tcg: Case, run_directory: Path) -> None:
    engine = QemuEngine("kvm", binary=Binary("/nonexistent", "9.0.0"))
    why = engine.why_no_live_forks()
    assert why is not None and "KVM" in why
    with pytest.raises(Unsupported, match="KVM"):
        await engine.template(tcg.frozen, run_directory / "template")
    async with started(tcg, run_directory) as source:
        with pytest.raises(Unsupported, match="KVM"):
            await engine.fork_live(source.machine, run_directory / "fork")


async def test_where_tracing_is_not_allowed_vms_are_started_as_before_and_qemu_confines_itself(
    tcg: Case, run_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qemu_engine, "find_tracing_lack", lambda: "made up")
    monkeypatch.setattr(tcg.engine, "_cell_required", False)
    async with started(tcg, run_directory) as child:
        assert await value_of(child, "past + 1") == 42
        assert b"spawn=deny" in Path(f"/proc/{child.machine.pid}/cmdline").read_bytes()
        for refused in (
            tcg.engine.template(tcg.frozen, run_directory / "template"),
            tcg.engine.fork_live(child.machine, run_directory / "fork"),
        ):
            with pytest.raises(Unsupported, match="made up") as caught:
                await refused
            assert caught.value.hint
        # Nor can it be forked where that is allowed again, as after an upgrade: its filter would kill it.
        monkeypatch.undo()
        with pytest.raises(NotForkable, match="started where"):
            await tcg.engine.fork_live(child.machine, run_directory / "fork")
        assert find_marked(run_directory).keys() == {run_directory / child.id}
        assert await value_of(child, "past + 1") == 42


def _list_descriptors() -> set[str]:
    return {os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)}


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@contextmanager
def _few_descriptors(room: int) -> Iterator[None]:
    """So many more than are open now, gaps included."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd") if _is_open(name)}
    limit = next(number for number in range(room, soft) if len(set(range(number)) - used) == room)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def _traced_by_another(pid: int) -> Iterator[None]:
    """By a thread of ours: tracing belongs to one."""
    ready, over = threading.Event(), threading.Event()

    def trace() -> None:
        ptrace.seize(pid, 0)
        ready.set()
        over.wait(_WAIT_S)
        ptrace.interrupt(pid)
        ptrace.wait(pid)
        ptrace.detach(pid)

    thread = threading.Thread(target=trace)
    thread.start()
    try:
        assert ready.wait(_WAIT_S)
        yield
    finally:
        over.set()
        thread.join()


def _wait_until_steady(run: Path) -> None:
    """A child whose maker is gone takes a moment to die."""
    before: object = None
    deadline = time.monotonic() + _WAIT_S
    while (found := find_marked(run)) != before:
        assert time.monotonic() < deadline
        before = found
        time.sleep(0.2)
