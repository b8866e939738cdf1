"""Templates and what is forked of them, and of running VMs: over this host's QEMU, and over a newer one."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest
from engine_cases import Case, fork_live, forking_live, live_forks, rehearsed, started, value_of, values_of

from forkd.engines.base import Machine, Way
from forkd.engines.fork_thread import LINGER_S
from forkd.errors import GuestTimeout
from forkd.guest.agent import Agent
from forkd.host.marked import find_marked
from forkd.runtime.fork import kill_all

pytestmark = [pytest.mark.vm, pytest.mark.usefixtures("nothing_left")]

_MANY = 12


@pytest.fixture(
    params=[
        pytest.param("frozen_tcg", id="host"),
        pytest.param("frozen_newer", marks=pytest.mark.build, id="newer"),
        pytest.param("forkable_firecracker", marks=pytest.mark.lab, id="firecracker"),
    ]
)
def tcg(request: pytest.FixtureRequest) -> Case:
    return forking_live(request.getfixturevalue(request.param))


async def test_forks_of_a_template_go_on_where_it_stood_and_are_each_their_own(tcg: Case, run_directory: Path) -> None:
    async with rehearsed(tcg, run_directory) as template:
        async with live_forks(tcg.engine, template, run_directory, _MANY, settled=True) as forks:
            assert {fork.machine.phases.way for fork in forks} == {Way.FORK}
            assert await values_of(forks, "past + 1") == [42] * _MANY
            for drawn in (
                "random.getrandbits(64)",
                "__import__('os').urandom(16).hex()",
                "numpy.random.bytes(16).hex()",
                "open('/etc/machine-id').read()",
                "__import__('socket').gethostname()",
            ):
                assert len(set(await values_of(forks, drawn))) == _MANY, drawn
            proofs = [fork.proof for fork in forks]
            for kind in ("urandom", "random", "numpy", "machine_id", "hostname"):
                assert len({getattr(proof, kind) for proof in proofs}) == _MANY, kind
            for number, fork in enumerate(forks):
                await fork.agent.eval(f"past = {number}")
                await fork.agent.write_file("/root/mine", f"{number}".encode())
            assert await values_of(forks, "past") == list(range(_MANY))
            assert [await fork.agent.read_file("/root/mine") for fork in forks] == [
                f"{number}".encode() for number in range(_MANY)
            ]
            assert template.paused and not template.death.done()


async def test_forks_of_a_template_that_are_asked_for_at_once_are_all_there(tcg: Case, run_directory: Path) -> None:
    async with rehearsed(tcg, run_directory) as template:
        asked = [fork_live(tcg.engine, template, run_directory, settled=True) for _ in range(_MANY)]
        forks = await asyncio.gather(*asked)
        try:
            assert await values_of(forks, "past + 1") == [42] * _MANY
            assert len({fork.machine.pid for fork in forks}) == _MANY
            assert find_marked(run_directory).keys() == {
                run_directory / "template",
                *(run_directory / fork.id for fork in forks),
            }
        finally:
            await kill_all(forks)


async def test_a_template_that_rested_is_forked_again_and_its_forks_survive_it(tcg: Case, run_directory: Path) -> None:
    forks = []
    try:
        async with rehearsed(tcg, run_directory) as template:
            forks.append(await fork_live(tcg.engine, template, run_directory, settled=True))
            await asyncio.sleep(LINGER_S + 0.3)  # it is let go by now
            forks.append(await fork_live(tcg.engine, template, run_directory, settled=True))
        assert template.death.done()
        assert await values_of(forks, "past + 1") == [42, 42]
        # What came of a template is as good a source as any other.
        forks.append(await fork_live(tcg.engine, forks[0].machine, run_directory))
        assert await value_of(forks[-1], "past + 1") == 42
    finally:
        await kill_all(forks)


async def test_a_template_can_be_made_to_wait_in_its_forks(tcg: Case, run_directory: Path) -> None:
    async with rehearsed(tcg, run_directory) as template:
        machine = await tcg.engine.fork_live(template, run_directory / "fork", settled=True, paused=True)
        try:
            if not tcg.engine.streams_go_on:  # it takes a stream when it runs
                await _fork_what_waits(tcg, machine, run_directory)
                return
            with closing(Agent.attach(await machine.connect())) as agent:
                with pytest.raises(GuestTimeout):
                    await agent.ping(deadline_s=0.5)
                await _fork_what_waits(tcg, machine, run_directory)
                await machine.resume()
                assert (await agent.eval("past + 1")).value == 42
        finally:
            await machine.kill()


async def _fork_what_waits(case: Case, machine: Machine, run: Path) -> None:
    """Not run yet, and forked itself: what waits in it is a template as well."""
    async with live_forks(case.engine, machine, run, 2) as forks:
        assert await values_of(forks, "past + 1") == [42, 42]
    assert machine.paused


async def test_a_running_vm_is_forked_and_both_go_on(tcg: Case, run_directory: Path) -> None:
    async with started(tcg, run_directory) as source:
        await source.agent.eval("kept = past * 2")
        async with live_forks(tcg.engine, source.machine, run_directory, 3) as forks:
            await source.agent.eval("kept = 0")
            assert await values_of(forks, "kept") == [82] * 3
            commands = [await each.agent.run("echo $((6 * 7)); hostname") for each in (source, *forks)]
            assert [command.stdout.split() for command in commands] == [
                [b"42", each.identity.hostname.encode()] for each in (source, *forks)
            ]
            assert await value_of(source, "kept") == 0
