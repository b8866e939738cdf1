"""What the tests of templates share: the fake engine with live forks, and looks at processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from forkd.engines.base import Frozen, Machine, Way
from forkd.engines.fake import FakeEngine, FakeMachine
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.model.limits import NO_LIMITS, Limits
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime.fleet import Fleet
from forkd.runtime.snapshots import SnapshotRequest
from forkd.runtime.templates import PREFIX, TemplateView
from forkd.runtime.warmup import Warmup

# Others use the machine too; what hangs is found all the same.
DEADLINE_S = 280.0


class LiveFakeEngine(FakeEngine):
    """Forks of a template are replayed as those of a snapshot are. What is to go wrong, and when, a test decides."""

    def __init__(self) -> None:
        super().__init__(outlive=True)
        self.template_errors: list[BaseException] = []  # one for each, as long as there are any
        self.fork_errors: list[BaseException] = []
        self.broken = False  # forks of templates end before they prove themselves
        self.may_make = asyncio.Event()
        self.may_make.set()
        self.may_fork = asyncio.Event()
        self.may_fork.set()
        self.making = 0
        self.most_at_once = 0
        self.forking = 0
        self._sources: dict[int, Frozen] = {}

    def why_no_live_forks(self) -> str | None:
        return None

    async def template(self, frozen: Frozen, directory: Path) -> Machine:
        self.making += 1
        self.most_at_once = max(self.most_at_once, self.making)
        try:
            await self.may_make.wait()
            if self.template_errors:
                raise self.template_errors.pop(0)
            machine = FakeEngine(outlive=False).fork(frozen, directory)
            made = await machine
        finally:
            self.making -= 1
        self._sources[made.pid] = frozen
        return made

    async def fork_live(
        self,
        source: Machine,
        directory: Path,
        limits: Limits = NO_LIMITS,
        *,
        settled: bool = False,
        paused: bool = False,
    ) -> Machine:
        assert source.paused and settled and not paused
        self.forking += 1
        try:
            await self.may_fork.wait()
        finally:
            self.forking -= 1
        if self.fork_errors:
            raise self.fork_errors.pop(0)
        assert not source.death.done(), "a template was forked after its end"
        machine = await super().fork(self._sources[source.pid], directory, limits)
        assert isinstance(machine, FakeMachine)
        machine.phases.way = Way.FORK
        if self.broken:
            await machine.kill()
        return machine


def request(tag: str, warmup: Warmup, **fields: object) -> SnapshotRequest:
    return SnapshotRequest(parse_tag(tag), "python", MachineSpec(256), warmup, **fields)  # type: ignore[arg-type]


async def make(fleet: Fleet, tag: str, code: str = "x = 41", rehearsal: str | None = None, **fields: object) -> None:
    await fleet.snapshots.create(request(tag, Warmup(code, rehearsal=rehearsal), **fields))
    await fleet.snapshots.wait(tag)


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


async def until_ready(fleet: Fleet, tag: str) -> TemplateView:
    await until(lambda: tag in tags(fleet), f"the template of {tag}")
    [view] = [view for view in fleet.templates.views() if view.tag == tag]
    return view


def tags(fleet: Fleet) -> list[str]:
    return [view.tag for view in fleet.templates.views()]


def template_places(home: Home) -> list[str]:
    """Directories and processes of templates."""
    on_disk = {path.name for path in home.vms.iterdir()}
    running = {path.name for path in find_marked(home.vms)}
    return sorted(name for name in on_disk | running if name.startswith(PREFIX))
