"""The lab machine: booted once, filled, warmed up, and frozen as a snapshot that every run is a fork of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from forkd.engines.qemu.binary import Binary
from forkd.engines.qemu.engine import QemuEngine
from forkd.errors import Conflict, ForkdError
from forkd.guest.calls import Agent
from forkd.image import Progress
from forkd.image.pieces import collect_pieces
from forkd.model.names import SnapshotTag
from forkd.runtime.freeze import create_snapshot, frozen_of
from forkd.runtime.warmup import Warmup
from forkd.store.snapshots import SnapshotStore
from lab.design import MACHINE, Design
from lab.inside import MODULES
from lab.transfer import check_run, upload

Warm = Callable[[Agent], Awaitable[None]]


@dataclass(frozen=True)
class LabMachine:
    """Emulated also where the host has KVM: so it is the same everywhere."""

    design: Design
    store: SnapshotStore
    engine: QemuEngine
    tag: SnapshotTag

    @classmethod
    def open(cls, design: Design, snapshots: Path, emulator: Binary) -> LabMachine:
        engine = QemuEngine("tcg", binary=emulator)
        return cls(design, SnapshotStore(snapshots), engine, design.tag(emulator.version))

    def is_frozen(self, progress: Progress) -> bool:
        if not self.store.has(self.tag):
            return False
        try:
            with self.store.held(self.tag) as snapshot:
                self.engine.check(frozen_of(snapshot, self.design.image))
        except ForkdError as error:
            progress.stage(f"making the lab machine again: {error.message}")
            return False
        return True

    async def freeze(self, directory: Path, warm: Warm, progress: Progress) -> None:
        """`warm` is the last that runs in it."""

        async def fill(agent: Agent) -> None:
            await self._fill(agent)
            progress.stage("warming up the lab machine")
            await warm(agent)

        await create_snapshot(
            self.engine,
            self.store,
            self.design.image,
            self.tag,
            MACHINE,
            Warmup(),
            directory,
            replace=True,
            progress=progress,
            fill=fill,
        )

    def remove_others(self, packs: Path) -> None:
        """They are large. The caller sees to it that nobody makes another now."""
        listing = self.store.list()
        tags = {*(one.manifest.tag for one in listing.snapshots), *(one.tag for one in listing.unusable)}
        for tag in tags - {self.tag}:
            with suppress(Conflict):  # a run of another tree; the next one removes it
                self.store.remove(tag)
        collect_pieces(packs, {pack.piece.name for pack in self.design.packs})

    async def _fill(self, agent: Agent) -> None:
        for name, data in self.design.modules:
            await agent.write_file(f"{MODULES}/{name}.ko", data, parents=True)
        order = "".join(f"{name}\n" for name, _ in self.design.modules)
        await agent.write_file(f"{MODULES}/order", order.encode())
        for pack in self.design.packs:
            await upload(agent, pack.name, pack.file)
        await check_run(agent, self.design.prepare, "Preparing the lab machine")
