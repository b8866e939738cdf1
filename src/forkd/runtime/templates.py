"""Templates: for a snapshot, a stopped VM that has rehearsed what every child does, and is forked into them.

A template is only ever a quicker way: without one, or when it cannot be forked, a child is started from the snapshot's
files. It dies with the process that made it; what a killed daemon left is swept by the next one like any stray.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkd.engines.base import Engine, Frozen, Machine, Nic
from forkd.errors import Conflict, EngineFailed, ForkdError, GuestDied, NoCapacity, NotForkable, NotFound, Unsupported
from forkd.host.faults import fault_point
from forkd.host.system import available_mib, memory_use
from forkd.host.threads import in_thread
from forkd.model.machine import Limits
from forkd.runtime.admission import RESERVE_MIB
from forkd.runtime.freeze import loaded, rehearsed
from forkd.runtime.origin import (
    DEFAULT_POLICY,
    EXPECTED_MIB,
    Key,
    Template,
    TemplatePolicy,
    TemplateView,
    choose_to_end,
    find_key,
    fits,
)
from forkd.wire.agent import MAX_FRAME

_log = logging.getLogger(__name__)

# After one could not be made, none is tried for so long.
RETRY_S = 60.0
PREFIX = "template-"
_MIB = 2**20


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
            assert key is not None
            self._note_failure(key)
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
            for outdated in [each for at, each in self._ready.items() if at.directory == key.directory]:
                await self._end(outdated)
            await self._make_room(EXPECTED_MIB)
            if available_mib() < RESERVE_MIB + EXPECTED_MIB:
                raise NoCapacity(f"A template needs about {EXPECTED_MIB} MiB", hint="Free some memory")
            begun = time.monotonic()
            directory = self._directory / f"{PREFIX}{secrets.token_hex(6)}"
            make = rehearsed if frozen.settled else loaded
            async with make(self._engine, frozen, directory) as (machine, agent):
                held_bytes = await in_thread(lambda: _measure(machine))
                await self._make_room(held_bytes / _MIB)
                made_in_s = time.monotonic() - begun
                half_sent = 0 if frozen.settled else MAX_FRAME
                template = Template(key, tag, machine, agent, held_bytes, made_in_s, frozen.settled, half_sent)
                fault_point("template.ready")
            self._keep(key, template)
            return template

    def _keep(self, key: Key, template: Template) -> None:
        self._ready[key] = template
        template.machine.death.add_done_callback(lambda _: self._on_death(template))

    async def adopt(self, directory: Path, template: Template) -> None:
        """A branch whose snapshot is in `directory` now. Ended where there is no room for it."""
        key = find_key(directory)
        if key is None or self._closed or template.machine.death.done():
            await template.end()
            return
        try:
            template.memory_bytes = await in_thread(lambda: _measure(template.machine))
            await self._make_room(template.memory_bytes / _MIB)
        except (GuestDied, NoCapacity):
            await template.unused()  # a spawn that has begun has no other way
            await template.end()
            return
        template.key = key
        self._keep(key, template)

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
        if template.key is not None and self._ready.get(template.key) is template:
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
        if template.key is not None and self._ready.get(template.key) is template:
            _log.warning("The template of snapshot %s ended: %s", template.tag, template.machine.death.result().status)
            self._end_soon(template)


async def fork_machine(
    engine: Engine,
    frozen: Frozen | None,
    directory: Path,
    limits: Limits,
    template: Template | None,
    nic: Nic | None = None,
) -> Machine:
    """A child by way of the template where there is one, else from the snapshot's files, where there are any."""
    if template is not None and template.usable:
        try:
            return await template.fork(engine, directory, limits, nic)
        except (EngineFailed, OSError) as error:
            if frozen is None:
                raise
            _log.warning("%s is started the slower way: %s", directory.name, error)
    if frozen is None:
        raise NotForkable("The branch has ended, and is not on disk", hint="Branch the sandbox again")
    return await engine.fork(frozen, directory, limits, nic)


def _measure(machine: Machine) -> int:
    try:
        return memory_use(machine.pid).anonymous_bytes
    except (OSError, KeyError):  # it has ended, and may be there as a zombie
        raise GuestDied("The template ended while it was made") from None


async def _stopped(task: asyncio.Task[Template]) -> None:
    task.cancel()
    await asyncio.wait([task])
