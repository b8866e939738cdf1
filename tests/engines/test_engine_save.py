"""What every engine keeps of a VM that is saved: the same tests run over the fake and over real VMs."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import Case, greet_again, left_behind, started, value_of
from saved_layers import layer_of

from forkd.engines.base import Engine, Frozen, Machine
from forkd.errors import ChannelClosed, EngineFailed, GuestTimeout
from forkd.guest.agent import Agent
from forkd.runtime.child import Child
from forkd.runtime.fork import new_identities

pytestmark = pytest.mark.usefixtures("nothing_left")

_DRAW = "import hashlib, os\nsecret = hashlib.sha256(os.urandom(16)).hexdigest()"


@asynccontextmanager
async def gone_on(engine: Engine, frozen: Frozen, run: Path) -> AsyncIterator[Child]:
    """A VM started from what was saved."""
    identity = new_identities(1)[0]
    child = await greet_again(await engine.fork(frozen, run / identity.sandbox_id), identity, settled=frozen.settled)
    try:
        yield child
    finally:
        await child.kill()


@asynccontextmanager
async def spoken_to(engine: Engine, source: Child) -> AsyncIterator[Child]:
    """Once it goes on after a save: Firecracker has lost its stream then."""
    if engine.name != "firecracker":
        yield source
        return
    with pytest.raises(ChannelClosed):
        await source.agent.ping()
    with closing(await Agent.connect(await source.machine.connect())) as agent:
        yield Child(source.identity, source.machine, agent, source.proof)


async def save(engine: Engine, machine: Machine, base: Frozen, into: Path) -> Frozen:
    """What `machine`, a descendant of `base`, is like now."""
    into.mkdir()
    saved = await engine.save(machine, into)
    memory, runs = layer_of(saved.memory, base, into)
    return Frozen(into, base.boot, saved.platform, memory=memory, runs=runs, settled=False)


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir() if path.is_file()}


async def test_what_was_saved_goes_on_with_all_that_its_source_had_come_to(
    case: Case, run_directory: Path, tmp_path: Path
) -> None:
    before = digests(case.frozen.directory)
    async with started(case, run_directory) as source:
        await source.agent.eval(_DRAW)
        secret = await value_of(source, "secret")
        await source.machine.pause()
        frozen = await save(case.engine, source.machine, case.frozen, tmp_path / "branch")
        case.engine.check(frozen)
        await source.machine.resume()
        async with spoken_to(case.engine, source) as now:
            await now.agent.eval("secret = 'another'")
            assert await value_of(now, "secret") == "another"
        for _ in range(2):
            async with gone_on(case.engine, frozen, run_directory) as child:
                if case.engine.name == "fake":  # its past is done again, and draws anew
                    assert len(await value_of(child, "secret")) == len(secret)
                else:
                    assert await value_of(child, "secret") == secret
                await child.agent.eval("past += 1")
                assert await value_of(child, "past") == 42
    assert digests(case.frozen.directory) == before


async def test_a_saved_machine_stays_paused_goes_on_and_is_saved_again(
    case: Case, run_directory: Path, tmp_path: Path
) -> None:
    async with started(case, run_directory) as source:
        frozen, now = case.frozen, source
        async with AsyncExitStack() as streams:
            for number in range(3):
                await now.agent.eval(f"past = {number} + 1000")
                await source.machine.pause()
                first = await save(case.engine, source.machine, case.frozen, tmp_path / f"first-{number}")
                frozen = await save(case.engine, source.machine, case.frozen, tmp_path / f"second-{number}")
                assert (first.directory / "state").exists() == (case.engine.name != "fake")
                assert source.machine.paused
                with pytest.raises(GuestTimeout):
                    await now.agent.ping(deadline_s=0.5)
                await source.machine.resume()
                now = await streams.enter_async_context(spoken_to(case.engine, now))
                assert await value_of(now, "past") == number + 1000
                assert (await now.agent.run("echo $((6 * 7))")).stdout == b"42\n"
        async with gone_on(case.engine, frozen, run_directory) as child:
            assert await value_of(child, "past") == 1002


async def test_what_goes_on_from_a_save_is_saved_itself(case: Case, run_directory: Path, tmp_path: Path) -> None:
    frozen = case.frozen
    for depth in range(1, 4):
        async with gone_on(case.engine, frozen, run_directory) as child:
            assert await value_of(child, "past") == 40 + depth
            await child.agent.eval(f"past += 1\ndepth_{depth} = list(range(50000))")
            await child.machine.pause()
            frozen = await save(case.engine, child.machine, frozen, tmp_path / f"depth-{depth}")
    async with gone_on(case.engine, frozen, run_directory) as child:
        assert await value_of(child, "[past, sum(depth_1), sum(depth_2), sum(depth_3)]") == [44, *[1249975000] * 3]


async def test_a_machine_that_runs_is_not_saved(case: Case, run_directory: Path, tmp_path: Path) -> None:
    async with started(case, run_directory) as source:
        with pytest.raises(EngineFailed, match="paused"):
            await case.engine.save(source.machine, tmp_path)
        assert list(tmp_path.iterdir()) == []
        assert await value_of(source, "past + 1") == 42


async def test_a_machine_that_was_saved_is_adopted_paused_and_goes_on(
    case: Case, run_directory: Path, tmp_path: Path
) -> None:
    with left_behind(case, run_directory, code="kept = past * 2", pause=True) as directory:
        machine = await case.engine.adopt(directory)
        first = await save(case.engine, machine, case.frozen, tmp_path / "first")
        await machine.release()
        again = await case.engine.adopt(directory)
        assert again.paused
        second = await save(case.engine, again, case.frozen, tmp_path / "second")
        await again.release()
        async with adopted_after_resume(case, directory) as agent:
            assert (await agent.eval("kept")).value == 82
        for frozen in (first, second):
            async with gone_on(case.engine, frozen, run_directory) as child:
                assert await value_of(child, "kept") == 82


async def _connected(machine: Machine) -> Agent:
    """A guest that was saved resets its streams when it goes on, and may take ours for one of them."""
    for _ in range(2):
        with suppress(ChannelClosed):
            return await Agent.connect(await machine.connect())
        await asyncio.sleep(0.1)
    return await Agent.connect(await machine.connect())


@asynccontextmanager
async def adopted_after_resume(case: Case, directory: Path) -> AsyncIterator[Agent]:
    machine = await case.engine.adopt(directory)
    try:
        await machine.resume()
        with closing(await _connected(machine)) as agent:
            yield agent
    finally:
        await machine.kill()


async def test_a_layer_of_a_file_that_is_not_there_starts_nothing(
    case: Case, run_directory: Path, tmp_path: Path
) -> None:
    async with started(case, run_directory) as source:
        await source.machine.pause()
        frozen = await save(case.engine, source.machine, case.frozen, tmp_path / "branch")
    if not frozen.runs:
        pytest.skip("the engine has no memory")
    runs = tuple(replace(run, file=tmp_path / "absent") for run in frozen.runs)
    with pytest.raises(EngineFailed):
        await gone_on(case.engine, replace(frozen, runs=runs), run_directory).__aenter__()
