"""A run in forks of the lab machine: the tree in each, a command whose output is passed on, its results brought back.

The machine is made first if there is no snapshot of this design.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from forkd.cli.interrupts import run_async
from forkd.cli.progress import Shown
from forkd.engines.base import Engine, Frozen
from forkd.engines.machine import CONSOLE
from forkd.errors import ForkdError, GuestDied, GuestTimeout
from forkd.guest.agent import Agent
from forkd.guest.process import Process
from forkd.guest.results import CommandResult
from forkd.host.files import locked
from forkd.host.system import available_mib
from forkd.image import Progress
from forkd.runtime.child import raise_explained
from forkd.runtime.fork import fork_one, new_identities
from forkd.runtime.runtime import session
from lab.emulator import find_emulator
from lab.host import Workshop, find_workshop
from lab.inside import (
    OUT,
    TREE,
    bring_back,
    check_run,
    mount_tree,
    place_of,
    render_command,
    render_environment,
    render_unmount,
)
from lab.machine import MACHINE, LabMachine, make_design
from lab.packs import packed_tree
from lab.selection import MARKER, Asked, collect, select

TIMED_OUT = 124
_TESTS_DEADLINE_S = 1800.0
_COMMAND_DEADLINE_S = 4 * 3600.0
# Of one test. The suite's own limit is meant for a machine that is fifteen times faster.
_TEST_DEADLINE_S = 600
_ASK_EVERY_S = 30.0
_ANSWER_DEADLINE_S = 60.0

# Of our environment, what tests in the machine ask for too.
_PASSED_ON = ("FORKD_TEST_SIZE",)
_PYTEST = ("python3", "-m", "pytest", "-p", "no:cacheprovider")
# QEMU's emulated processors lose an interrupt now and then, or get one that nobody sent (docs/explanation/lab.md). A VM
# that ends or hangs there is tried again, a few times in a run, and all of its ends are shown.
RERUNS = ("--reruns=2", "--max-suite-reruns=6", r"--only-rerun=^Guest(Died|Timeout): ", "--rerun-show-tracebacks")


@dataclass(frozen=True)
class Source:
    """What a run is forked from, where its files lie on this host, and the tree that it gets."""

    engine: Engine
    frozen: Frozen
    directory: Path
    tree: Path


@dataclass(frozen=True)
class Job:
    command: tuple[str, ...]
    deadline_s: float
    env: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False


class Output:
    """Of one job: passed on at once when it is its turn, held until then."""

    def __init__(self) -> None:
        self._held: list[tuple[str, bytes]] = []
        self._is_open = False

    def open(self) -> None:
        self._is_open = True
        self._flush()

    def write(self, kind: str, data: bytes) -> None:
        self._held.append((kind, data))
        if self._is_open:
            self._flush()

    def _flush(self) -> None:
        outputs: dict[str, BinaryIO] = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
        for kind, data in self._held:
            outputs[kind].write(data)
            outputs[kind].flush()
        self._held.clear()


def run_in_machine(asked: Asked, command: str | None) -> int:
    shop = find_workshop()
    shop.kept.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with Shown(quiet=False) as shown:
            jobs = make_jobs(shop, asked, command, shown)
            directory = held.enter_context(session(shop.home.runtime))
            tree = held.enter_context(packed_tree(shop.tree, directory))
            shown.stage("opening the lab machine")
            # Only one at a time makes machines and removes others; ours is held before the next one may.
            with locked(shop.kept / ".making"):
                machine = open_machine(shop, directory, tree, shown)
                frozen = held.enter_context(machine.held())
        return run_jobs(Source(machine.engine, frozen, directory, tree), jobs, shop.clear_results())


def make_jobs(shop: Workshop, asked: Asked, command: str | None, progress: Progress) -> list[Job]:
    if command is not None:
        return [render_shell(command)]
    progress.stage("collecting the tests for the lab")
    parts = count_parts(len(os.sched_getaffinity(0)), available_mib())
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return [render_pytest(part, columns=columns, environ=os.environ) for part in select(shop.tree, asked, parts)]


def count_parts(processors: int, memory_mib: int) -> int:
    """How many lab machines may run at the same time here."""
    return max(1, min(processors, memory_mib // MACHINE.memory_mib))


def render_pytest(asked: Asked, *, columns: int | None, environ: Mapping[str, str]) -> Job:
    """`columns` of the terminal that the output goes to, None if it goes elsewhere."""
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
        {
            **({} if columns is None else {"COLUMNS": str(columns)}),
            **{name: environ[name] for name in _PASSED_ON if name in environ},
        },
        repeatable=True,
    )


def render_shell(command: str) -> Job:
    return Job(("/bin/sh", "-c", command), _COMMAND_DEADLINE_S)


def open_machine(shop: Workshop, directory: Path, tree: Path, progress: Progress) -> LabMachine:
    """The machine of this tree, frozen."""
    design = make_design(shop.home, shop.tree / "pyproject.toml", progress)
    machine = LabMachine.open(design, shop.home, shop.snapshots, find_emulator(shop.kept, progress))
    if not machine.is_frozen(progress):
        # All of them: later runs ask for other tests than this one.
        _, files, _ = collect(shop.tree, Asked())

        async def warm(agent: Agent) -> None:
            await warm_up(agent, tree, list(files))

        run_async(machine.freeze(directory, shop.packs, warm, progress))
    return machine


async def warm_up(agent: Agent, tree: Path, files: Sequence[str]) -> None:
    """Import all that the tests in `files` import: it is then compiled, and in memory, in every fork."""
    if not files:
        return
    await mount_tree(agent, tree)
    # What cannot be imported is said by the run that asks for it.
    collect = f"cd {place_of(TREE)} && {shlex.join([*_PYTEST, '--collect-only', '-qq', *files])} || true"
    await check_run(agent, collect, "Collecting the tests in the lab machine")
    await check_run(agent, render_unmount(TREE), "Unmounting the working tree in the lab machine")


def run_jobs(source: Source, jobs: Sequence[Job], results: Path) -> int:
    """The exit status for our caller: the first that is not 0."""
    begun = time.monotonic()
    statuses = run_async(run_together(source, jobs, results))
    if TIMED_OUT in statuses:
        print(f"lab: stopped after {jobs[0].deadline_s:g} s, not done", file=sys.stderr)
    status = next(filter(None, statuses), 0)
    took = time.monotonic() - begun
    brought = " ".join(sorted(str(path.relative_to(results)) for path in results.rglob("*") if path.is_file()))
    print(f"lab: exit status {status} after {took:.1f} s; {results} has {brought}", file=sys.stderr)
    return status


async def run_together(source: Source, jobs: Sequence[Job], results: Path) -> list[int]:
    """Each job in a fork of its own. Outputs follow each other; several jobs have a directory for results each."""
    outputs = [Output() for _ in jobs]
    places = [results] if len(jobs) == 1 else [results / f"part-{number}" for number, _ in enumerate(jobs, 1)]
    running = [asyncio.create_task(run_again(source, *job)) for job in zip(jobs, outputs, places, strict=True)]
    try:
        statuses = []
        for task, output in zip(running, outputs, strict=True):
            output.open()
            statuses.append(await task)
        return statuses
    finally:
        await end_tasks(running)


async def run_again(source: Source, job: Job, output: Output, results: Path) -> int:
    try:
        return await run_forked(source, job, output, results)
    except (GuestDied, GuestTimeout) as error:
        if not job.repeatable:
            raise
        # What ends or stops a VM in the lab (see RERUNS) does so to the lab, too.
        print(f"lab: {error.message}; running its tests again", file=sys.stderr)
        return await run_forked(source, job, output, results)


async def run_forked(source: Source, job: Job, output: Output, results: Path) -> int:
    """The exit status. `results` gets what the run left to be brought back, and the console."""
    sandbox = await fork_one(source.engine, source.frozen, new_identities(1)[0], source.directory)
    try:
        try:
            await mount_tree(sandbox.agent, source.tree)
            result = await run_job(sandbox.agent, job, output)
            await bring_back(sandbox.agent, make_results(results))
        except ForkdError as error:
            await raise_explained(error, sandbox.machine, "it was the lab")
    finally:
        shutil.copy(source.directory / sandbox.id / CONSOLE, make_results(results))
        await sandbox.kill()
    return exit_status(result)


def make_results(results: Path) -> Path:
    """It was there when the run began; another run of the same tree may have cleared it since."""
    results.mkdir(parents=True, exist_ok=True)
    return results


async def run_job(agent: Agent, job: Job, output: Output) -> CommandResult:
    process = await agent.start(
        render_command(job.command),
        cwd=place_of(TREE),
        env={**render_environment(), **job.env},
        stdin=False,
        timeout_s=job.deadline_s,
    )
    async with process:
        await while_answering(agent, pass_on(process, output))
        return await process.wait()


async def while_answering(agent: Agent, work: Coroutine[Any, Any, None]) -> None:
    """Raises GuestTimeout when the machine hangs: what runs in it says nothing then, and no deadline of its passes."""
    working, asking = asyncio.create_task(work), asyncio.create_task(keep_asking(agent))
    try:
        done, _ = await asyncio.wait((working, asking), return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_tasks((working, asking))


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


async def pass_on(process: Process, output: Output) -> None:
    async for kind, data in process:
        output.write(kind, data)


def exit_status(result: CommandResult) -> int:
    """As a shell would say it."""
    if result.timed_out:
        return TIMED_OUT
    return result.returncode if result.signal is None else 128 + result.signal
