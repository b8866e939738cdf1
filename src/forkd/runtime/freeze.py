"""Making a snapshot: boot a parent, warm it up, freeze it, store it under its tag."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from forkd.engines.base import BootSpec, Engine, Frozen
from forkd.guest.calls import Agent
from forkd.host.faults import reach
from forkd.host.threads import in_thread, offloaded
from forkd.image import Image, Progress
from forkd.model.machine import MachineSpec
from forkd.model.names import SnapshotTag
from forkd.runtime.warmup import Warmup, booted, warm_up
from forkd.store.manifest import Manifest
from forkd.store.snapshots import Snapshot, SnapshotStore


async def create_snapshot(
    engine: Engine,
    store: SnapshotStore,
    image: Image,
    tag: SnapshotTag,
    machine: MachineSpec,
    warmup: Warmup,
    directory: Path,
    *,
    replace: bool = False,
    progress: Progress,
    fill: Callable[[Agent], Awaitable[None]] | None = None,
) -> Snapshot:
    """`fill` puts into the parent, before its warm-up, what is not in its image."""
    boot = boot_spec(image, machine)
    async with offloaded(store.created(tag, replace_existing=replace)) as (staging, seal):
        progress.stage("booting the parent")
        async with booted(engine, boot, directory / "parent", staging) as (vm, agent):
            reach("snapshot.booted")
            if fill is not None:
                progress.stage("filling the parent")
                await fill(agent)
            progress.stage("warming up")
            await warm_up(agent, warmup)
            progress.stage("freezing")
            await agent.prepare_freeze()
            platform = await engine.freeze(vm, staging)
        reach("snapshot.frozen")
        progress.stage("writing and checksumming")
        manifest = Manifest(
            tag=tag,
            created_at_unix=int(time.time()),
            engine=engine.name,
            image_id=image.id,
            machine=machine,
            warm=warmup.describe(),
            platform=platform,
            files={},
            rehearsal=warmup.rehearsal,
        )
        await in_thread(lambda: seal(manifest))
        reach("snapshot.sealed")
    reach("snapshot.published")
    return store.get(tag)


def boot_spec(image: Image, machine: MachineSpec) -> BootSpec:
    return BootSpec(machine, image.kernel, image.initrd, image.root)


def frozen_of(snapshot: Snapshot, image: Image) -> Frozen:
    """A stored snapshot as its engine sees it."""
    manifest = snapshot.manifest
    return Frozen(snapshot.directory, boot_spec(image, manifest.machine), manifest.platform, manifest.rehearsal)
