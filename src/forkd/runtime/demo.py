"""One warmed parent, n children: the measurement behind `forkd demo` and the benchmark."""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.base import Engine, Frozen
from forkd.errors import ContractBroken, ForkdError
from forkd.guest.agent import Agent
from forkd.host.files import scratch_directory
from forkd.host.system import cpu_seconds, memory_use
from forkd.image import Image, Progress
from forkd.model.machine import MachineSpec
from forkd.model.names import parse_tag
from forkd.runtime.child import Child
from forkd.runtime.fork import fork_children, fork_one, kill_all, new_identities
from forkd.runtime.freeze import Warmup, boot_spec, booted, create_snapshot, frozen_of, warm_up
from forkd.runtime.origin import Template
from forkd.runtime.templates import Templates
from forkd.store.snapshots import Snapshot, SnapshotStore

TAG = parse_tag("demo")
MACHINE = MachineSpec(memory_mib=512, vcpus=1)
CODE = "numpy.zeros(5).tolist()"
EXPECTED = [0.0] * 5
IDLE_S = 5.0

# What a child computes about itself, with a nonce only it was given: all of it must differ between any two children.
_SELF = """
import hashlib, os, random, socket
_name = socket.gethostname()
_entropy = os.urandom(16).hex()
_token = hashlib.sha256(("%s" + _name + _entropy).encode()).hexdigest()
[_name, _entropy, _token, random.getrandbits(128), numpy.random.bytes(16).hex(), open("/etc/machine-id").read()]
"""

# All that a child will be asked: what it does for the first time alone costs it 18 MiB, which a thousand do not have.
WARMUP = Warmup(code="import numpy", rehearsal=f"{_SELF % 'rehearsal'}{CODE}")


@dataclass(frozen=True)
class Result:
    """Every figure of one run. Times end when the child's first evaluation has been answered."""

    engine: str
    isolation: str
    n: int
    ok: int
    distinct: int
    cold_boot_s: float
    fork_one_s: float
    fork_all_s: float
    per_child_ms: dict[str, float]
    unique_mib_per_child: float
    idle_cpu_percent_per_child: float
    way: str  # how the children were made
    template_s: float | None  # what had to be there before: the template, where they were forked from one
    template_mib: float | None
    kill_all_s: float


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


async def ensure_snapshot(
    engine: Engine, store: SnapshotStore, image: Image, directory: Path, progress: Progress
) -> Snapshot:
    """The demo's parent: the stored one when it is whole and fits this host and image, else a new one."""
    if store.has(TAG):
        try:
            with store.held(TAG) as snapshot:
                engine.check(frozen_of(snapshot, image))
                manifest = snapshot.manifest
                made_of = (manifest.image_id, manifest.engine, manifest.rehearsal)
                if made_of == (image.id, engine.name, WARMUP.rehearsal):
                    return snapshot
        except ForkdError as error:
            progress.stage(f"making the parent again: {error.message}")
    return await create_snapshot(engine, store, image, TAG, MACHINE, WARMUP, directory, replace=True, progress=progress)


async def cold_boot(engine: Engine, image: Image, directory: Path, scratch_in: Path) -> float:
    """Seconds from nothing to the same answer, without a snapshot: boot, import numpy, evaluate."""
    with scratch_directory(scratch_in) as scratch:
        begun = time.monotonic()
        async with booted(engine, boot_spec(image, MACHINE), directory / "cold", scratch) as (_, agent):
            await warm_up(agent, WARMUP)
            await _evaluate(agent, "The cold VM")
            return time.monotonic() - begun


async def run_demo(
    engine: Engine, store: SnapshotStore, image: Image, n: int, directory: Path, progress: Progress
) -> Result:
    await ensure_snapshot(engine, store, image, directory, progress)
    progress.stage("cold-booting one VM for comparison")
    cold_s = await cold_boot(engine, image, directory, store.root)
    with store.held(TAG) as snapshot:
        frozen = frozen_of(snapshot, image)
        templates = Templates(engine, directory)
        try:
            if templates.why_none() is None:
                progress.stage("making the template")
                try:
                    await templates.warm(frozen, TAG)
                except ForkdError as error:
                    progress.stage(f"starting a VMM for each child: {error.message}")
            return await _run_forks(engine, frozen, templates.find(frozen), n, directory, progress, cold_s)
        finally:
            await templates.close()


async def _run_forks(
    engine: Engine,
    frozen: Frozen,
    template: Template | None,
    n: int,
    directory: Path,
    progress: Progress,
    cold_s: float,
) -> Result:
    progress.stage("forking 1")
    begun = time.monotonic()
    alone = await fork_one(engine, frozen, new_identities(1)[0], directory, template=template)
    try:
        await _evaluate(alone.agent, alone.id)
        fork_one_s = time.monotonic() - begun
    finally:
        await alone.kill()

    ready_ms: list[float] = []

    async def evaluate(child: Child) -> None:
        await _evaluate(child.agent, child.id)
        ready_ms.append((time.monotonic() - child.machine.phases.begun) * 1000)
        progress.line(f"{len(ready_ms)} ready")

    progress.stage(f"forking {n}")
    begun = time.monotonic()
    forked = await fork_children(engine, frozen, new_identities(n), directory, template=template, after=evaluate)
    fork_all_s = time.monotonic() - begun
    children = forked.sandboxes
    try:
        unique = [memory_use(child.machine.pid).unique_bytes for child in children]
        progress.stage("watching them idle")
        idle_percent = await idle_cpu_percent(children)
        progress.stage("proving that they differ")
        distinct = await count_distinct(children)
        ways = sorted({child.machine.phases.way.value for child in children})
    finally:
        progress.stage("cleaning up")
        begun = time.monotonic()
        await kill_all(children)
    return Result(
        engine=engine.name,
        isolation=engine.isolation,
        n=n,
        ok=len(ready_ms),
        distinct=distinct,
        cold_boot_s=round(cold_s, 3),
        fork_one_s=round(fork_one_s, 3),
        fork_all_s=round(fork_all_s, 3),
        per_child_ms={"p50": round(percentile(ready_ms, 0.5), 1), "p99": round(percentile(ready_ms, 0.99), 1)},
        unique_mib_per_child=round(statistics.mean(unique) / 2**20, 2),
        idle_cpu_percent_per_child=round(idle_percent, 3),
        way=" and ".join(ways),
        template_s=round(template.made_in_s, 3) if template else None,
        template_mib=round(template.memory_bytes / 2**20, 1) if template else None,
        kill_all_s=round(time.monotonic() - begun, 3),
    )


async def idle_cpu_percent(children: list[Child]) -> float:
    """Mean share of one core that a child uses while it has no request."""
    before = [cpu_seconds(child.machine.pid) for child in children]
    await asyncio.sleep(IDLE_S)
    after = [cpu_seconds(child.machine.pid) for child in children]
    return statistics.mean(b - a for a, b in zip(before, after, strict=True)) / IDLE_S * 100


async def count_distinct(children: list[Child]) -> int:
    """How many children share nothing with any other. Raises when a child's own account of itself is wrong."""
    accounts = [await _account(child) for child in children]
    shared = {value for column in zip(*accounts, strict=True) for value in column if column.count(value) > 1}
    return sum(1 for account in accounts if not shared.intersection(account))


async def _account(child: Child) -> list[object]:
    nonce = secrets.token_hex(16)
    result = await child.agent.eval(_SELF % nonce)
    account = result.value
    if not isinstance(account, list) or len(account) != 6:
        details = result.error.traceback if result.error else None
        raise ContractBroken(f"{child.id} could not say who it is", details=details)
    hostname, entropy, token = account[:3]
    expected = hashlib.sha256(f"{nonce}{hostname}{entropy}".encode()).hexdigest()
    if token != expected or hostname != child.identity.hostname:
        raise ContractBroken(f"{child.id} is not who it was told to be")
    return account


async def _evaluate(agent: Agent, who: str) -> None:
    result = await agent.eval(CODE)
    if result.value != EXPECTED:
        details = result.error.traceback if result.error else None
        raise ContractBroken(f"{who} answered {result.repr} instead of {EXPECTED}", details=details)
