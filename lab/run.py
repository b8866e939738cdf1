"""One run: a fork of the lab machine, the tree in it, a command whose output is passed on, its results brought back."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from forkd.engines.base import Engine, Frozen
from forkd.engines.machine import CONSOLE
from forkd.errors import ForkdError, GuestTimeout
from forkd.guest.calls import Agent
from forkd.guest.process import Process
from forkd.guest.results import CommandResult
from forkd.runtime.sandbox import raise_explained
from forkd.runtime.spawn import fork_one, new_identities
from lab.inside import OUT, TREE, place_of, render_command, render_environment, render_unmount
from lab.selection import MARKER, Asked
from lab.transfer import bring_back, check_run, mount_tree

TIMED_OUT = 124
_TESTS_DEADLINE_S = 1800.0
_COMMAND_DEADLINE_S = 4 * 3600.0
# Of one test. The suite's own limit is meant for a machine that is fifteen times faster.
_TEST_DEADLINE_S = 600
_ASK_EVERY_S = 30.0
_ANSWER_DEADLINE_S = 60.0

_PYTEST = ("python3", "-m", "pytest", "-p", "no:cacheprovider")
# QEMU's emulated processors lose an interrupt now and then, or get one that nobody sent (docs/contribute/lab.md). A VM
# that ends or hangs there is tried again, a few times in a run, and all of its ends are shown.
RERUNS = ("--reruns=2", "--max-suite-reruns=6", r"--only-rerun=^Guest(Died|Timeout): ", "--rerun-show-tracebacks")


@dataclass(frozen=True)
class Job:
    command: tuple[str, ...]
    deadline_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False


def render_pytest(asked: Asked, *, columns: int | None) -> Job:
    """`columns` of the terminal that the output goes to, None where it is no terminal."""
    return Job(
        (
            *(*_PYTEST, "-m", MARKER),
            *("-o", f"timeout={_TEST_DEADLINE_S}"),
            *RERUNS,
            f"--junitxml={OUT}/junit.xml",
            f"--color={'no' if columns is None else 'yes'}",
            *asked.tests,
            *asked.options,
        ),
        _TESTS_DEADLINE_S,
        {} if columns is None else {"COLUMNS": str(columns)},
        repeatable=True,
    )


def render_shell(command: str) -> Job:
    return Job(("/bin/sh", "-c", command), _COMMAND_DEADLINE_S)


async def warm_up(agent: Agent, tree: Path, files: Sequence[str]) -> None:
    """Import all that the tests in `files` import: it is then compiled, and in memory, in every fork."""
    if not files:
        return
    await mount_tree(agent, tree)
    # What cannot be imported is said by the run that asks for it.
    collect = f"cd {place_of(TREE)} && {shlex.join([*_PYTEST, '--collect-only', '-qq', *files])} || true"
    await check_run(agent, collect, "Collecting the tests in the lab machine")
    await check_run(agent, render_unmount(TREE), "Unmounting the working tree in the lab machine")


async def run_forked(engine: Engine, frozen: Frozen, directory: Path, tree: Path, job: Job, results: Path) -> int:
    """The exit status for our caller. `results` gets what the run left to be brought back, and the console."""
    sandbox = await fork_one(engine, frozen, new_identities(1)[0], directory)
    try:
        try:
            await mount_tree(sandbox.agent, tree)
            result = await run_job(sandbox.agent, job)
            await bring_back(sandbox.agent, make_results(results))
        except ForkdError as error:
            await raise_explained(error, sandbox.machine, "it was the lab")
    finally:
        shutil.copy(directory / sandbox.id / CONSOLE, make_results(results))
        await sandbox.kill()
    return exit_status(result)


def make_results(results: Path) -> Path:
    """It was there when the run began; another run of the same tree may have cleared it since."""
    results.mkdir(parents=True, exist_ok=True)
    return results


async def run_job(agent: Agent, job: Job) -> CommandResult:
    process = await agent.start(
        render_command(job.command),
        cwd=place_of(TREE),
        env={**render_environment(), **job.env},
        stdin=False,
        timeout_s=job.deadline_s,
    )
    async with process:
        await while_answering(agent, pass_on(process))
        return await process.wait()


async def while_answering(agent: Agent, work: Coroutine[Any, Any, None]) -> None:
    """Raises GuestTimeout when the machine hangs: what runs in it says nothing then, and no deadline of its passes."""
    working, asking = asyncio.create_task(work), asyncio.create_task(keep_asking(agent))
    try:
        done, _ = await asyncio.wait((working, asking), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (working, asking):
            task.cancel()
        await asyncio.gather(working, asking, return_exceptions=True)


async def keep_asking(agent: Agent) -> None:
    while True:
        await asyncio.sleep(_ASK_EVERY_S)
        try:
            await ask(agent)
        except GuestTimeout:
            # Once more: a pager may have held up our output, and us.
            await ask(agent)


async def ask(agent: Agent) -> None:
    """Whether programs run where ours does; the agent, on a processor of its own, may answer when none does."""
    result = await agent.run(render_command(["true"]), timeout_s=_ANSWER_DEADLINE_S)
    if result.timed_out:
        raise GuestTimeout(f"The lab machine did not run a program within {_ANSWER_DEADLINE_S:g} s")


async def pass_on(process: Process) -> None:
    outputs: dict[str, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    async for kind, data in process:
        outputs[kind].write(data)
        outputs[kind].flush()


def exit_status(result: CommandResult) -> int:
    """As a shell would say it."""
    if result.timed_out:
        return TIMED_OUT
    return result.returncode if result.signal is None else 128 + result.signal
