"""What children are forked from: a snapshot's files, or a template: a stopped VM that is only there to be forked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forkd.engines.base import Engine, Frozen, Machine, Nic
from forkd.errors import EngineFailed, ForkdError, NotForkable
from forkd.guest.agent import Agent
from forkd.model.machine import NO_LIMITS, Limits
from forkd.model.names import SnapshotTag
from forkd.model.network import NO_NETWORK, Network

# What one is expected to take before it is there to be measured.
EXPECTED_MIB = 128
# So many forks in a row that fail are the template's fault.
MAX_FAILURES = 3
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
    """Forked by any number of spawns. Once it is to end no fork begins, and it ends when none is under way.

    Of a snapshot it has `key`, once that is on disk. One that is `settled` has rehearsed, and prepared for a freeze;
    a branch of a running sandbox stands still just where it was.
    """

    key: Key | None
    tag: str
    machine: Machine
    agent: Agent | None
    memory_bytes: int
    made_in_s: float
    settled: bool = True
    half_sent_bytes: int = 0  # what its agent may still wait for; 0 where it is settled
    created_at_unix: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.monotonic)
    forks: int = 0
    _failures: int = 0
    _spawns: int = 0
    _under_way: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _unused: asyncio.Event = field(default_factory=asyncio.Event)
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
        self._unused.clear()
        try:
            yield
        finally:
            self._spawns -= 1
            self.used_at = time.monotonic()
            if not self._spawns:
                self._unused.set()

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

    async def fork(self, engine: Engine, directory: Path, limits: Limits, nic: Nic | None = None) -> Machine:
        if not self.usable:
            raise NotForkable("The template can no longer be forked")
        self._under_way += 1
        self._idle.clear()
        self.used_at = time.monotonic()
        try:
            machine = await engine.fork_live(self.machine, directory, limits, nic=nic, settled=self.settled)
            self.forks += 1
            return machine
        except (EngineFailed, OSError):
            self._blame(limits)
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def unused(self) -> None:
        """Until no spawn uses it."""
        while self._spawns:
            await self._unused.wait()

    async def end(self) -> None:
        """Safe to repeat."""
        self._ending = True
        while self._under_way:
            await self._idle.wait()
        if self.agent is not None:
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
    """The templates to end so that one more fits: branches before those that rehearsed, which take longer to make, and
    of each the least recently used first; never one in use. Pure.

    None at all where that would not be enough.
    """
    kept = sorted(templates, key=lambda template: (template.settled, template.used_at))
    ended: list[Template] = []
    for template in [each for each in kept if not each.busy]:
        if fits(kept, policy, need_mib):
            break
        kept.remove(template)
        ended.append(template)
    return ended if fits(kept, policy, need_mib) else []


@dataclass(frozen=True)
class Ancestry:
    """Where a sandbox comes from. Without a parent its line begins with itself."""

    parent_id: str | None = None
    lineage: str | None = None
    depth: int = 0
    forked_at_unix: float | None = None


@dataclass(frozen=True)
class Origin:
    """Of the children of one spawn. Without files the template is the only way."""

    tag: SnapshotTag  # on disk: what they share with it is not theirs
    frozen: Frozen | None
    template: Template | None
    made_of: Mapping[str, str]
    ancestry: Ancestry = Ancestry()
    pause_s: float = 0.0  # of a sandbox that was captured for this spawn
    network: Network = NO_NETWORK  # of those that ask for none themselves


@dataclass
class Branch:
    """A sandbox that was frozen where it was, on its way to the disk. With a template it can be forked at once."""

    tag: SnapshotTag
    source_tag: SnapshotTag  # what its sandbox was forked from
    made_of: Mapping[str, str]
    ancestry: Ancestry  # of its children
    pause_s: float
    begun: float  # when it was asked for, on the monotonic clock
    checkpoint: str | None = None
    auto: bool = False
    parent_tag: SnapshotTag | None = None
    template: Template | None = None
    progress: str = "writing"
    task: asyncio.Task[None] | None = None
    error: ForkdError | None = None
    first_child_s: float | None = None  # from the call on
    has_child: asyncio.Event = field(default_factory=asyncio.Event)
    network: Network = NO_NETWORK

    def origin(self) -> Origin:
        return Origin(self.tag, None, self.template, self.made_of, self.ancestry, network=self.network)
