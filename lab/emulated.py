"""A run in the lab machine, which is made first where there is none of this design."""

from __future__ import annotations

import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from forkd.cli.progress import Shown
from forkd.cli.running import run_async
from forkd.engines.base import Frozen
from forkd.errors import GuestDied, GuestTimeout
from forkd.guest.calls import Agent
from forkd.host.files import locked
from forkd.image import Progress
from forkd.runtime.freeze import frozen_of
from forkd.runtime.session import session
from lab.design import make_design
from lab.emulator import find_emulator
from lab.machine import LabMachine
from lab.run import TIMED_OUT, Job, render_pytest, render_shell, run_forked, warm_up
from lab.selection import Asked, collect, select
from lab.tree import packed_tree
from lab.workshop import Workshop, find_workshop


def run_in_machine(asked: Asked, command: str | None) -> int:
    shop = find_workshop()
    shop.kept.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with Shown(quiet=False) as shown:
            job = make_job(shop, asked, command, shown)
            directory = held.enter_context(session(shop.home.runtime))
            tree = held.enter_context(packed_tree(shop.tree, directory))
            shown.stage("opening the lab machine")
            # Only one at a time makes machines and removes others; ours is held before the next one may.
            with locked(shop.kept / ".making"):
                machine = open_machine(shop, directory, tree, shown)
                snapshot = held.enter_context(machine.store.held(machine.tag))
        return run_job(machine, frozen_of(snapshot, machine.design.image), directory, tree, job, shop.clear_results())


def make_job(shop: Workshop, asked: Asked, command: str | None, progress: Progress) -> Job:
    if command is not None:
        return render_shell(command)
    progress.stage("collecting the tests for the lab")
    return render_pytest(select(shop.tree, asked), columns=find_columns())


def find_columns() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def open_machine(shop: Workshop, directory: Path, tree: Path, progress: Progress) -> LabMachine:
    """The machine of this tree, frozen."""
    design = make_design(shop.home, shop.packs, shop.tree / "pyproject.toml", progress)
    machine = LabMachine.open(design, shop.snapshots, find_emulator(shop.kept, progress))
    if not machine.is_frozen(progress):
        # Whatever is asked for now, later runs ask for others.
        _, files, _ = collect(shop.tree, Asked())

        async def warm(agent: Agent) -> None:
            await warm_up(agent, tree, files)

        run_async(machine.freeze(directory, warm, progress))
        machine.remove_others(shop.packs)
    return machine


def run_job(machine: LabMachine, frozen: Frozen, directory: Path, tree: Path, job: Job, results: Path) -> int:
    begun = time.monotonic()

    def run() -> int:
        return run_async(run_forked(machine.engine, frozen, directory, tree, job, results))

    try:
        status = run()
    except (GuestDied, GuestTimeout) as error:
        if not job.repeatable:
            raise
        # What ends or stops a VM in the lab (see lab/run.py) does so to the lab, too.
        print(f"lab: {error.message}; once more, from the beginning", file=sys.stderr)
        status = run()
    took = time.monotonic() - begun
    if status == TIMED_OUT:
        print(f"lab: not done within {job.deadline_s:g} s, ended", file=sys.stderr)
    brought = " ".join(sorted(path.name for path in results.iterdir()))
    print(f"lab: exit status {status} after {took:.1f} s; {results} has {brought}", file=sys.stderr)
    return status
