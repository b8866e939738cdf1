"""Templates: for a snapshot, a stopped VM that has rehearsed what every child does, and is forked into them.

A template is only ever a quicker way: without one, or when it cannot be forked, a child is started from the snapshot's
files. It dies with the process that made it; what a killed daemon left is swept by the next one like any stray.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkd.engines.base import Engine, Frozen, Machine
from forkd.errors import Conflict, EngineFailed, ForkdError, GuestDied, NoCapacity, NotForkable, NotFound, Unsupported
from forkd.guest.agent import Agent
from forkd.host.faults import fault_point
from forkd.host.system import available_mib, memory_use
from forkd.host.threads import in_thread
from forkd.model.machine import NO_LIMITS, Limits
from forkd.runtime.admission import RESERVE_MIB
from forkd.runtime.freeze import rehearsed

_log = logging.getLogger(__name__)

# What one is expected to take before it is there to be measured.
EXPECTED_MIB = 128
# After one could not be made, none is tried for so long.
RETRY_S = 60.0
# So many forks in a row that fail are the template's fault.
MAX_FAILURES = 3
PREFIX = "template-"
# Written once, when the snapshot is made: the directory itself changes whenever its files are verified.
_WRITTEN_ONCE = "manifest.json"
_MIB = 2**20


@dataclass(frozen=True)
class TemplatePolicy:
    """How many there may be, and how much memory they may hold in all. None at all: count 0."""

    count: int = 4
    memory_mib: int = 1024


DEFAULT_POLICY = TemplatePolicy()


@dataclass(frozen=True)
class TemplateView:
    tag: str
    pid: int
    memory_bytes: int
    made_in_s: float
    created_at_unix: float
    forks: int


@dataclass(frozen=True)
class Key:
    """One snapshot for good: under the same tag there may be another one tomorrow."""

    directory: Path
    inode: int
    changed_ns: int


def find_key(directory: Path) -> Key | None:
    """None: the snapshot is gone."""
    try:
        stat = (directory / _WRITTEN_ONCE).stat()
    except OSError:
        return None
    return Key(directory, stat.st_ino, stat.st_mtime_ns)


@dataclass
class Template:
    """Forked by any number of spawns. Once it is to end no fork begins, and it ends when none is under way."""

    key: Key
    tag: str
    machine: Machine
    agent: Agent
    memory_bytes: int
    made_in_s: float
    created_at_unix: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)
    forks: int = 0
    _failures: int = 0
    _spawns: int = 0
    _under_way: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _ending: bool = False

    @property
    def busy(self) -> bool:
        return self._spawns > 0 or self._under_way > 0

    @property
    def usable(self) -> bool:
        return not self._ending and self._failures < MAX_FAILURES and not self.machine.death.done()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a spawn uses it, it is not ended to make room."""
        self._spawns += 1
        try:
            yield
        finally:
            self._spawns -= 1
            self.used_at = time.monotonic()

    @contextmanager
    def judged(self, limits: Limits) -> Iterator[None]:
        """While a fork proves itself."""
        try:
            yield
        except ForkdError:
            self._blame(limits)
            raise
        self._failures = 0

    def _blame(self, limits: Limits) -> None:
        """What a limited fork fails of may be its limits."""
        if limits == NO_LIMITS:
            self._failures += 1

    async def fork(self, engine: Engine, directory: Path, limits: Limits) -> Machine:
        if not self.usable:
            raise NotForkable("The template can no longer be forked")
        self._under_way += 1
        self._idle.clear()
        self.used_at = time.monotonic()
        try:
            machine = await engine.fork_live(self.machine, directory, limits, settled=True)
            self.forks += 1
            return machine
        except (EngineFailed, OSError):
            self._blame(limits)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def end(self) -> None:
        """Safe to repeat."""
        self._ending = True
        while self._under_way:
            await self._idle.wait()
        self.agent.close()
        await self.machine.kill()

    def view(self) -> TemplateView:
        return TemplateView(
            self.tag, self.machine.pid, self.memory_bytes, self.made_in_s, self.created_at_unix, self.forks
        )


def fits(templates: Iterable[Template], policy: TemplatePolicy, need_mib: float) -> bool:
    """Whether one more may be there beside them. Pure."""
    kept = list(templates)
    held_mib = sum(each.memory_bytes for each in kept) / _MIB
    return len(kept) < policy.count and held_mib + need_mib <= policy.memory_mib


def choose_to_end(
    templates: Iterable[Template], policy: TemplatePolicy, need_mib: float = EXPECTED_MIB
) -> list[Template]:
    """The templates to end so that one more fits: least recently used first, never one in use. Pure.

    None at all where that would not be enough.
    """
    kept = sorted(templates, key=lambda template: template.used_at)
    ended: list[Template] = []
    for template in [each for each in kept if not each.busy]:
        if fits(kept, policy, need_mib):
            break
        kept.remove(template)
        ended.append(template)
    return ended if fits(kept, policy, need_mib) else []


@dataclass
class _Making:
    task: asyncio.Task[Template]
    waiting: int = 0  # who will be told by an exception


class Templates:
    def __init__(self, engine: Engine, directory: Path, policy: TemplatePolicy = DEFAULT_POLICY) -> None:
        """They live in `directory`, beside the sandboxes."""
        self.policy = policy
        self.made = 0
        self.failed = 0
        self._engine = engine
        self._directory = directory
        self._ready: dict[Key, Template] = {}
        self._making: dict[Key, _Making] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._failed_at: dict[Key, float] = {}
        self._turn = asyncio.Lock()
        self._closed = False

    def views(self) -> list[TemplateView]:
        """By tag."""
        return sorted((template.view() for template in self._ready.values()), key=lambda view: view.tag)

    def why_none(self) -> str | None:
        """Why all forks go the slower way on this host."""
        if not self.policy.count:
            return "none are wanted (templates = 0)"
        if self.policy.memory_mib < EXPECTED_MIB:
            return f"one needs about {EXPECTED_MIB} MiB (template_memory_mib = {self.policy.memory_mib})"
        return self._engine.why_no_live_forks()

    def find(self, frozen: Frozen) -> Template | None:
        key = find_key(frozen.directory)
        template = None if key is None else self._ready.get(key)
        if template is None or template.usable:
            return template
        if not template.machine.death.done():  # that has been told
            _log.warning("The template of snapshot %s is ended: its forks failed", template.tag)
            self._note_failure(template.key)
            self._end_soon(template)
        return None

    def want(self, frozen: Frozen, tag: str) -> None:
        """Have one made in the background, where it may be and is not already. Raises nothing."""
        key = find_key(frozen.directory)
        if key is None or self._closed or key in self._ready or key in self._making or self.why_none() is not None:
            return
        if time.monotonic() - self._failed_at.get(key, -RETRY_S) >= RETRY_S:
            self._begin(key, frozen, tag)

    async def warm(self, frozen: Frozen, tag: str) -> TemplateView:
        """Have one now; raises its error. A caller that is cancelled does not undo it."""
        if (why := self.why_none()) is not None:
            raise Unsupported(f"Templates are not available: {why}", hint="Forks work without; see: forkd doctor")
        if self._closed:
            raise NoCapacity("No more templates are made: forkd is stopping", hint="Ask again when it is back")
        if (template := self.find(frozen)) is not None:
            return template.view()
        key = find_key(frozen.directory)
        if key is None:
            raise NotFound(f"There is no snapshot {tag}", hint="List them with: forkd snapshot ls")
        return (await self._made(self._making.get(key) or self._begin(key, frozen, tag), tag)).view()

    async def drop(self, directory: Path) -> None:
        """End those of a snapshot that was removed or replaced; that of the one which is there now stays."""
        current = find_key(directory)
        for key in {*self._making, *self._ready, *self._failed_at}:
            if key.directory == directory and key != current:
                self._failed_at.pop(key, None)
                if (making := self._making.get(key)) is not None:
                    await _stopped(making.task)
                if (template := self._ready.get(key)) is not None:
                    await self._end(template)

    def drop_soon(self, directory: Path) -> None:
        self._own(self.drop(directory))

    async def close(self) -> None:
        """None is made any more, and those there are end."""
        self._closed = True
        for making in list(self._making.values()):
            await _stopped(making.task)
        for template in list(self._ready.values()):
            await self._end(template)
        await asyncio.gather(*self._ending, return_exceptions=True)

    # Making

    def _begin(self, key: Key, frozen: Frozen, tag: str) -> _Making:
        task = asyncio.create_task(self._make(key, frozen, tag), name=f"template {tag}")
        making = self._making[key] = _Making(task)
        task.add_done_callback(lambda _: self._note(key, tag, making))
        return making

    async def _made(self, making: _Making, tag: str) -> Template:
        making.waiting += 1
        try:
            return await asyncio.shield(making.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if making.task.cancelled() and not (caller and caller.cancelling()):
                raise Conflict(f"The template of snapshot {tag} was given up", hint="Ask again") from None
            raise
        finally:
            making.waiting -= 1

    def _note(self, key: Key, tag: str, making: _Making) -> None:
        del self._making[key]
        if making.task.cancelled():
            return
        error = making.task.exception()
        if error is None:
            self.made += 1
            self._failed_at.pop(key, None)
            return
        self._note_failure(key)
        if making.waiting:
            return
        if isinstance(error, ForkdError):
            _log.warning("No template for snapshot %s: %s", tag, error.message)
        else:
            _log.error("Making a template for snapshot %s failed", tag, exc_info=error)

    def _note_failure(self, key: Key) -> None:
        self.failed += 1
        self._failed_at[key] = time.monotonic()

    async def _make(self, key: Key, frozen: Frozen, tag: str) -> Template:
        # One at a time: each takes a core, and room that the next one counts.
        async with self._turn:
            for outdated in [each for each in self._ready.values() if each.key.directory == key.directory]:
                await self._end(outdated)
            await self._make_room(EXPECTED_MIB)
            if available_mib() < RESERVE_MIB + EXPECTED_MIB:
                raise NoCapacity(f"A template needs about {EXPECTED_MIB} MiB", hint="Free some memory")
            begun = time.monotonic()
            directory = self._directory / f"{PREFIX}{secrets.token_hex(6)}"
            async with rehearsed(self._engine, frozen, directory) as (machine, agent):
                held_bytes = await in_thread(lambda: _measure(machine))
                await self._make_room(held_bytes / _MIB)
                template = Template(key, tag, machine, agent, held_bytes, time.monotonic() - begun)
                fault_point("template.ready")
            self._ready[key] = template
            machine.death.add_done_callback(lambda _: self._on_death(template))
            return template

    async def _make_room(self, need_mib: float) -> None:
        for template in choose_to_end(self._ready.values(), self.policy, need_mib):
            await self._end(template)
        if not fits(self._ready.values(), self.policy, need_mib):
            raise NoCapacity(
                f"There is no room for a template of {need_mib:.0f} MiB: {len(self._ready)} are in use, "
                f"of at most {self.policy.count} with {self.policy.memory_mib} MiB in all",
                hint="Raise the settings templates and template_memory_mib",
            )

    # Ending

    async def _end(self, template: Template) -> None:
        self._forget(template)
        await template.end()

    def _end_soon(self, template: Template) -> None:
        self._forget(template)
        self._own(template.end())

    def _forget(self, template: Template) -> None:
        if self._ready.get(template.key) is template:
            del self._ready[template.key]

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._ending.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("Ending a template failed", exc_info=error)

    def _on_death(self, template: Template) -> None:
        if self._ready.get(template.key) is template:
            _log.warning("The template of snapshot %s ended: %s", template.tag, template.machine.death.result().status)
            self._end_soon(template)


async def fork_machine(
    engine: Engine, frozen: Frozen, directory: Path, limits: Limits, template: Template | None
) -> Machine:
    """A child by way of the template where there is one, else from the snapshot's files."""
    if template is not None and template.usable:
        try:
            return await template.fork(engine, directory, limits)
        except (EngineFailed, OSError) as error:
            _log.warning("%s is started the slower way: %s", directory.name, error)
    return await engine.fork(frozen, directory, limits)


def _measure(machine: Machine) -> int:
    try:
        return memory_use(machine.pid).anonymous_bytes
    except (OSError, KeyError):  # it has ended, and may be there as a zombie
        raise GuestDied("The template ended while it was made") from None


async def _stopped(task: asyncio.Task[Template]) -> None:
    task.cancel()
    await asyncio.wait([task])
