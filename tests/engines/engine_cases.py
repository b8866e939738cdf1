"""What a contract test is given: an engine with a frozen parent, and ways to fork, greet, leave and end its VMs."""

import asyncio
import pickle
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forkd.engines.base import Engine, Frozen, Machine
from forkd.errors import ChannelClosed
from forkd.guest.agent import Agent
from forkd.guest.identity import become
from forkd.host.cgroup import remove_groups
from forkd.host.marked import Marked, kill_marked
from forkd.model.machine import NO_LIMITS, Limits
from forkd.model.names import Identity, new_identity
from forkd.runtime.child import Child
from forkd.runtime.contract import keep_contract
from forkd.runtime.fork import fork_children, fork_one, kill_all, new_identities
from forkd.wire.agent import padding

_READY_S = 60

# `run` and `frozen` are given; the rest is a test's.
_OWNER = """
import asyncio, os, pickle, signal, sys
from pathlib import Path
sys.path += [sys.argv[2], str(Path(sys.argv[2]).parent)]
from engine_cases import fork_live
from forkd.engines.base import Opening
from forkd.engines.firecracker.engine import FirecrackerEngine
from forkd.engines.qemu.engine import QemuEngine
from forkd.engines.table import get_entry
from forkd.model.names import new_identity
from forkd.runtime.fork import fork_one, new_identities
run, frozen = Path(sys.argv[1]), pickle.loads(sys.stdin.buffer.read())
async def main():
@@WORK@@
asyncio.run(main())
"""
_FORK_AND_WAIT = """
engine = {engine}
if {boot}:
    (run / "memory").mkdir()
    await (await engine.boot(frozen.boot, run / "parent", run / "memory")).running()
    print("parent", flush=True)
    await asyncio.sleep(60)
child = await fork_one(engine, frozen, new_identities(1)[0], run)
if {code!r}:
    await child.agent.eval({code!r})
if {live}:
    child = await fork_live(engine, child.machine, run)
if {pause}:
    await child.machine.pause()
print(child.id, flush=True)
await asyncio.sleep(60)
"""


@dataclass(frozen=True)
class Case:
    """An engine and a parent frozen by it."""

    engine: Engine
    frozen: Frozen


@asynccontextmanager
async def started(case: Case, run: Path, name: str | None = None) -> AsyncIterator[Child]:
    """A child that was started from the snapshot's files; killed at the end."""
    identity = new_identities(1)[0] if name is None else new_identity(name)
    child = await fork_one(case.engine, case.frozen, identity, run)
    try:
        yield child
    finally:
        await child.kill()


@asynccontextmanager
async def started_many(
    case: Case, run: Path, n: int, env: Mapping[str, str] | None = None
) -> AsyncIterator[list[Child]]:
    """Children that were started together."""
    children = (await fork_children(case.engine, case.frozen, new_identities(n, env=env), run)).sandboxes
    try:
        yield children
    finally:
        await kill_all(children)


def forking_live(case: Case) -> Case:
    """The same, where its engine forks live VMs."""
    if why := case.engine.why_no_live_forks():
        pytest.skip(why)
    return case


@contextmanager
def killed_owner(work: str, run: Path, frozen: Frozen, *, after_s: float = 0, dies: bool = False) -> Iterator[str]:
    """The first line said by a process that did `work` and was killed with SIGKILL; all is gone at the end.

    `dies`: it does that itself.
    """
    program = _OWNER.replace("@@WORK@@", textwrap.indent(work, "    "))
    command = [sys.executable, "-c", program, str(run), str(Path(__file__).parent)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert owner.stdin is not None and owner.stdout is not None
        owner.stdin.write(pickle.dumps(frozen))
        owner.stdin.close()
        said = owner.stdout.readline().decode().strip()
        assert said, "the owner failed"
        time.sleep(after_s)
        if dies:
            owner.wait(_READY_S)
        owner.kill()
        owner.wait(_READY_S)
        owner.stdout.close()
        yield said
    finally:
        owner.kill()
        owner.wait(_READY_S)
        kill_marked(run)
        remove_groups(run)
        for left in run.iterdir():
            shutil.rmtree(left)


@contextmanager
def left_behind(
    case: Case,
    run: Path,
    *,
    outlive: bool = True,
    code: str = "",
    pause: bool = False,
    boot: bool = False,
    live: bool = False,
    engine: str | None = None,
) -> Iterator[Path]:
    """The directory of a fork (or a booted parent) whose owner was killed.

    `live`: of the fork of a live VM, which is left behind too. `engine`: how it is opened, where not as usual.
    """
    accelerator = "tcg" if case.engine.isolation.endswith("tcg") else "kvm"
    opened = f"get_entry({case.engine.name!r}).open({accelerator!r}, Opening(outlive={outlive}))"
    work = _FORK_AND_WAIT.format(
        engine=engine or opened,
        code=code,
        pause=pause,
        boot=boot,
        live=live,
    )
    with killed_owner(work, run, case.frozen) as said:
        yield run / said


@asynccontextmanager
async def adopted(engine: Engine, directory: Path, known: Marked | None = None) -> AsyncIterator[tuple[Machine, Agent]]:
    machine = await engine.adopt(directory, known)
    try:
        with closing(await Agent.connect(await machine.connect())) as agent:
            yield machine, agent
    finally:
        await machine.kill()


async def greet(machine: Machine, identity: Identity, *, settled: bool = False) -> Child:
    """A fork that was told who it is, or is gone."""
    try:
        return await _greet(machine, identity, settled=settled)
    except BaseException:
        await machine.kill()
        raise


async def greet_again(machine: Machine, identity: Identity, *, settled: bool = False, network: bool = False) -> Child:
    """The same of one that was started, and may lose its first stream: see `forkd.runtime.fork`."""
    try:
        for _ in range(4):
            try:
                return await _greet(machine, identity, settled=settled, network=network)
            except ChannelClosed:
                await asyncio.wait([machine.death], timeout=0.5)
                if machine.death.done():
                    raise
        return await _greet(machine, identity, settled=settled, network=network)
    except BaseException:
        await machine.kill()
        raise


async def _greet(machine: Machine, identity: Identity, *, settled: bool, network: bool = False) -> Child:
    """One that is not `settled` goes on in the stream of its source, perhaps in the middle of a frame.

    The rest of that will never come: zeros complete it.
    """
    agent = Agent.attach(await machine.connect())
    try:
        if not settled:
            agent.channel.send(padding())
        proof = await become(agent, identity, network)
        await machine.running()
        return Child(identity, machine, agent, proof)
    except BaseException:
        agent.close()
        raise


async def fork_live(
    engine: Engine,
    source: Machine,
    run: Path,
    *,
    settled: bool = False,
    limits: Limits = NO_LIMITS,
    name: str | None = None,
) -> Child:
    identity = new_identities(1)[0] if name is None else new_identity(name)
    machine = await engine.fork_live(source, run / identity.sandbox_id, limits, settled=settled)
    return await greet(machine, identity, settled=settled)


@asynccontextmanager
async def live_forks(
    engine: Engine, source: Machine, run: Path, count: int, *, settled: bool = False
) -> AsyncIterator[list[Child]]:
    forks: list[Child] = []
    try:
        for _ in range(count):
            forks.append(await fork_live(engine, source, run, settled=settled))
        yield forks
    finally:
        await kill_all(forks)


@asynccontextmanager
async def rehearsed(case: Case, run: Path, name: str = "template") -> AsyncIterator[Machine]:
    """A template that has done once what its forks will do, and stands still; killed at the end."""
    machine = await case.engine.template(case.frozen, run / name)
    agent: Agent | None = None
    try:
        agent, _ = await keep_contract(machine, new_identity("rehearsal"))
        await machine.running()
        await agent.eval("past + 1")
        await agent.run(["true"])
        await agent.prepare_freeze()
        await machine.pause()
        yield machine
    finally:
        if agent is not None:
            agent.close()
        await machine.kill()


async def value_of(sandbox: Child, code: str) -> Any:
    """Of an expression, in the guest's warmed interpreter."""
    result = await sandbox.agent.eval(code)
    assert result.ok, result.error
    return result.value


async def values_of(sandboxes: Iterable[Child], code: str) -> list[Any]:
    return [await value_of(sandbox, code) for sandbox in sandboxes]
