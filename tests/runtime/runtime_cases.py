"""What the tests of the runtime share: one with a snapshot, the fake engine with live forks, looks at processes."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from forkd.engines.base import Engine, Frozen, Machine, Nic, Way
from forkd.engines.fake import FakeEngine, FakeMachine
from forkd.host.marked import find_marked
from forkd.host.paths import Home
from forkd.model.machine import NO_LIMITS, Limits, MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime.freeze import Warmup
from forkd.runtime.origin import TemplateView
from forkd.runtime.runtime import Runtime, RuntimeOptions
from forkd.runtime.snapshots import SnapshotRequest
from forkd.runtime.templates import PREFIX

# Others use the machine too; what hangs is found all the same.
DEADLINE_S = 280.0
WARM = Warmup("x = 41")


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

    async def template(self, frozen: Frozen, directory: Path, *, run: bool = True) -> Machine:
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
        nic: Nic | None = None,
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
        machine = await super().fork(self._sources[source.pid], directory, limits, nic)
        assert isinstance(machine, FakeMachine)
        machine.phases.way = Way.FORK
        if self.broken:
            await machine.kill()
        return machine


def request(tag: str, warmup: Warmup = WARM, **fields: object) -> SnapshotRequest:
    return SnapshotRequest(parse_tag(tag), "python", MachineSpec(256), warmup, **fields)  # type: ignore[arg-type]


async def make(
    runtime: Runtime, tag: str, code: str = "x = 41", rehearsal: str | None = None, **fields: object
) -> None:
    await runtime.snapshots.create(request(tag, Warmup(code, rehearsal=rehearsal), **fields))
    await runtime.snapshots.wait(tag)


@asynccontextmanager
async def opened(
    home: Home, engine: Engine | None = None, *, make_warm: bool = True, **options: Any
) -> AsyncIterator[Runtime]:
    """A runtime with the snapshot `warm`. What is left in it is killed, and nothing stays."""
    kill = RuntimeOptions(on_stop="kill", **options)
    async with asyncio.timeout(DEADLINE_S), Runtime.opened(home, engine or FakeEngine(outlive=True), kill) as runtime:
        if make_warm:
            await make(runtime, "warm")
        yield runtime
    # Those of the test runner aside.
    assert [task for task in asyncio.all_tasks() if "anyio" not in task.get_coro().cr_code.co_filename] == []
    assert find_marked(home.runtime) == {} and list(home.vms.iterdir()) == []


async def evaluate(runtime: Runtime, sandbox_id: str, code: str) -> Any:
    async with runtime.sandboxes.use(sandbox_id) as live:
        result = await live.agent.eval(code)
        assert result.error is None, result.error
        return result.value


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


async def until_ready(runtime: Runtime, tag: str) -> TemplateView:
    await until(lambda: tag in tags(runtime), f"the template of {tag}")
    [view] = [view for view in runtime.templates.views() if view.tag == tag]
    return view


def tags(runtime: Runtime) -> list[str]:
    return [view.tag for view in runtime.templates.views()]


def template_places(home: Home) -> list[str]:
    """Directories and processes of templates."""
    on_disk = {path.name for path in home.vms.iterdir()}
    running = {path.name for path in find_marked(home.vms)}
    return sorted(name for name in on_disk | running if name.startswith(PREFIX))
